"""Types of the C++ runtime (runtime_ext/): lanes, gates, host tasks, instructions and their executor."""

from collections.abc import Callable, Sequence
from typing import ClassVar, final

import torch

built_for_torch: str
"""`torch.__version__` of the PyTorch that the runtime was compiled against."""

@final
class Lane:
    """An ordered queue of operations."""

    compute: ClassVar[Lane]
    """Runs on the thread that calls `Executor.run`; on an accelerator, on that thread's current stream."""
    h2d: ClassVar[Lane]
    """Copies to the device: one thread and, on an accelerator, one stream."""
    d2h: ClassVar[Lane]
    """Copies to the host: one thread and, on an accelerator, one stream."""
    host: ClassVar[Lane]
    """CPU work: one thread."""
    __members__: ClassVar[dict[str, Lane]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

@final
class Gate:
    """A host-side condition that later runs wait for (e.g. 'these weights are up to date').

    It counts closings, and is open at zero. A failure lasts until the gate is next closed from zero, or reset.
    """

    def __init__(self) -> None: ...
    def close(self) -> None:
        """Adds one closing."""
    def open(self) -> None:
        """Undoes one closing; without effect on an open gate."""
    def fail(self, message: str) -> None:
        """Undoes one closing and makes every `wait` raise `message`; of several failures the first is kept."""
    def reset(self) -> None:
        """Opens the gate, whatever its count, and forgets a failure."""
    def wait(self) -> None:
        """Blocks, without the GIL, until the gate is open.

        Raises:
            RuntimeError: the gate failed.
        """
    @property
    def is_open(self) -> bool:
        """Whether `wait` would return at once; False for a failed gate."""

class Task:
    """Work in C++ that an instruction runs on its lane without the GIL. Its subclasses are made in C++."""

@final
class AccumulateTask(Task):
    """Moves one stage's gradients from a pinned slab into the host store's gradient region."""

    def __init__(self, slab: torch.Tensor, gradient: torch.Tensor, pool: WorkerPool | None = None) -> None:
        """Keeps both byte regions: uint8, shape (bytes,), contiguous, on the CPU.

        Args:
            slab, gradient: the regions.
            pool: the threads that add selected rows; the one that runs the task by default.

        Raises:
            ValueError: a tensor is none of that.
        """
    def set_segments(
        self, segments: Sequence[tuple[int, int, torch.dtype, int]], rows: torch.Tensor | None = None
    ) -> None:
        """Says what the next run of this task does, in order.

        Not synchronised with a run in progress: call it before the instruction is issued, or in an operation that
        the instruction waits for.

        Args:
            segments: (byte offset in both regions, number of elements, their dtype, mode). Mode 0 skips, 1 copies
                the slab over the gradient, 2 adds it with the rounding of `torch.Tensor.add_` of that dtype.
            rows: uint8, one for each row of the only segment, which is added or skipped. The slab then holds, from the
                segment's offset, only the rows for which it is not zero when the task runs, one after the other. All
                rows by default.

        Raises:
            ValueError: a segment is misaligned or outside a region, a mode is unknown, or rows do not fit the segment.
        """
    def run(self) -> None:
        """Does it now, on the calling thread."""

@final
class HostMapping:
    """Anonymous memory of whole pages, zero at first: it lives as long as this object or any tensor made of it."""

    def __init__(self, bytes: int) -> None:  # noqa: A002  the name in C++
        """Maps memory, for huge pages where it is large enough.

        Raises:
            MemoryError: the system has no more.
            ValueError: `bytes` is negative.
        """
    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements at `offset` bytes, shape (count,), with a storage of their own.

        Raises:
            ValueError: they are misaligned or reach outside.
        """
    def set_inherited(self, inherited: bool) -> None:
        """Keeps the memory out of processes that are forked from now on, or lets them have a copy again."""
    def before_unmap(self, release: Callable[[], object]) -> None:
        """`release` is called once, before unmapping; not in a forked process, nor while the interpreter ends."""
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int:
        """Size of all its pages."""

def return_freed_memory() -> None:
    """Returns to the system what malloc keeps of freed memory."""

@final
class Staging:
    """Two pinned buffers through which one lane copies unregistered host memory, by chunks of a buffer's size."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor, device: torch.device, threads: int = 1) -> None:
        """Keeps the buffers.

        Args:
            first, second: uint8, shape (bytes,), on the CPU, pinned if `device` is an accelerator.
            device: the other end of the copies.
            threads: how many threads copy on the host, the lane's included.

        Raises:
            ValueError: a buffer is none of that, is empty, or the two differ in size.
        """
    @property
    def chunk_bytes(self) -> int:
        """Size of one buffer."""

@final
class Destination:
    """Where deliveries go."""

    target: torch.Tensor
    """A CPU tensor shaped like the source. Not synchronised with a run in progress: set it as for `AccumulateTask`."""

    count: int | None
    """Leading elements of source and target that travel; all by default."""

    def __init__(self, target: torch.Tensor) -> None: ...

@final
class Instruction:
    """One operation of a lowered schedule.

    Arguments common to all kinds:
        name: printed text of the operation, for errors and profiles.
        lane: where it runs.
        waits: positions, in the executor's list, of earlier instructions that must be complete first.
        poison: contiguous tensors whose bytes become 0xFF (NaN) after the operation, on its lane, in chaos mode only.
        gates: waited for before the operation. A failed gate fails it.
        opens: opened when the operation is done (on the device too), failed when it fails or is cancelled.
    """

    @staticmethod
    def copy(
        name: str,
        lane: Lane,
        source: torch.Tensor,
        target: torch.Tensor,
        waits: Sequence[int],
        *,
        poison: Sequence[torch.Tensor] = ...,
        gates: Sequence[Gate] = ...,
        opens: Sequence[Gate] = ...,
    ) -> Instruction:
        """Copies `source` to `target`, of equal shape. Invisible to autograd: no history, no version counted."""
    @staticmethod
    def follow(
        name: str,
        lane: Lane,
        source: torch.Tensor,
        target: torch.Tensor,
        gate: Gate,
        waits: Sequence[int],
        *,
        poison: Sequence[torch.Tensor] = ...,
        gates: Sequence[Gate] = ...,
        opens: Sequence[Gate] = ...,
    ) -> Instruction:
        """Copies bytes (uint8, 1-D) while the update that closed `gate` is still at work further on."""
    @staticmethod
    def deliver(
        name: str,
        lane: Lane,
        source: torch.Tensor,
        destination: Destination,
        waits: Sequence[int],
        *,
        poison: Sequence[torch.Tensor] = ...,
        gates: Sequence[Gate] = ...,
        opens: Sequence[Gate] = ...,
    ) -> Instruction:
        """Copies `source` to wherever `destination` points when the instruction is reached."""
    @staticmethod
    def staged_copy(
        name: str,
        lane: Lane,
        source: torch.Tensor,
        target: torch.Tensor,
        staging: Staging,
        waits: Sequence[int],
        *,
        poison: Sequence[torch.Tensor] = ...,
        gates: Sequence[Gate] = ...,
        opens: Sequence[Gate] = ...,
    ) -> Instruction:
        """Copies host memory to the device through staging buffers of the lane; both are uint8, shape (bytes,)."""
    @staticmethod
    def staged_deliver(
        name: str,
        lane: Lane,
        source: torch.Tensor,
        destination: Destination,
        staging: Staging,
        waits: Sequence[int],
        *,
        poison: Sequence[torch.Tensor] = ...,
        gates: Sequence[Gate] = ...,
        opens: Sequence[Gate] = ...,
    ) -> Instruction:
        """Copies device memory to wherever `destination` points, through staging buffers; tensors as `staged_copy`."""
    @staticmethod
    def call(
        name: str,
        lane: Lane,
        function: Callable[..., object],
        waits: Sequence[int],
        *,
        poison: Sequence[torch.Tensor] = ...,
        gates: Sequence[Gate] = ...,
        opens: Sequence[Gate] = ...,
    ) -> Instruction:
        """Calls `function(context)` with the run's context; what it returns is dropped."""
    @staticmethod
    def task(
        name: str,
        lane: Lane,
        task: Task,
        waits: Sequence[int],
        *,
        poison: Sequence[torch.Tensor] = ...,
        gates: Sequence[Gate] = ...,
        opens: Sequence[Gate] = ...,
    ) -> Instruction:
        """Runs a C++ task without the GIL."""
    @staticmethod
    def mark(
        name: str,
        lane: Lane,
        waits: Sequence[int],
        *,
        poison: Sequence[torch.Tensor] = ...,
        gates: Sequence[Gate] = ...,
        opens: Sequence[Gate] = ...,
    ) -> Instruction:
        """Does nothing: a point in the lane's order."""
    @property
    def name(self) -> str: ...
    @property
    def lane(self) -> Lane: ...
    @property
    def waits(self) -> list[int]: ...

@final
class Runtime:
    """The lanes of one device: their threads and streams, made once and shared by executors."""

    def __init__(self, device: torch.device, chaos_seed: int | None = None, chaos_delay_us: int = 2000) -> None:
        """Starts the lanes.

        Args:
            device: where schedules compute; an accelerator without an index is the current one.
            chaos_seed: switches chaos mode on: random delays, poison, and lanes that are given their operations
                before compute starts, so that nothing but declared dependencies orders them.
            chaos_delay_us: longest delay before an operation, in microseconds.

        Raises:
            ValueError: `chaos_delay_us` is negative.
        """
    def synchronize(self) -> None:
        """Blocks, without the GIL, until every lane is idle, and on an accelerator also the work of earlier runs.

        Raises:
            RuntimeError: called inside an operation, or after `close`.
        """
    def close(self) -> None:
        """Ends the lanes' threads; a second call does nothing. Runs are refused afterwards."""
    @property
    def device(self) -> torch.device: ...
    @property
    def chaos(self) -> bool: ...

@final
class Executor:
    """Runs the instructions of one lowered schedule on a runtime's lanes."""

    def __init__(self, runtime: Runtime, instructions: Sequence[Instruction]) -> None:
        """Copies the instructions.

        Raises:
            ValueError: an instruction waits for itself, a later or an unknown one, or poisons a device tensor on
                the host lane.
        """
    def run(self, begin: int, end: int, context: object) -> None:
        """Runs instructions [begin, end): compute ones on this thread, each other on its lane.

        `begin == 0` starts a new generation, ordered after everything issued before. A later range goes on in it,
        on any thread and stream, and may be run again. On return every copy and every host operation of the range
        is complete; on an accelerator, compute may still be in flight on the current stream.

        After an error nothing more of the range starts, every lane is idle, gates of operations that did not
        finish have failed, and the executor can run again.

        Raises:
            ValueError: the range is not one, or waits for instructions that have not run since instruction 0.
            RuntimeError: an operation failed in C++, a gate failed, or the runtime is closed or running already on
                this thread.
            BaseException: what a Python function raised, with a note that names its operation. An interrupt that
                arrives while this thread waits is raised likewise.
        """
    def __len__(self) -> int: ...

@final
class WorkerPool:
    """A fixed set of threads for CPU optimizer steps, the calling one included."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

def instruction_sets() -> list[str]:
    """Instruction sets that have kernels on this processor, best first."""

def adamw_step(
    pool: WorkerPool,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    remainder: torch.Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    stochastic_seed: int | None = None,
    decoupled: bool = True,
    instruction_set: str = "auto",
) -> None:
    """One AdamW step (Adam if not `decoupled`) of a flat region, in place.

    All tensors are contiguous CPU tensors of shape (n,): param and grad float32 or bfloat16, moments float32,
    remainder int16 or None. Raises TypeError for other dtypes and ValueError for other shapes.
    """

def sgd_step(
    pool: WorkerPool,
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    remainder: torch.Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    step: int,
    grad_scale: float = 1.0,
    stochastic_seed: int | None = None,
    instruction_set: str = "auto",
) -> None:
    """One step of gradient descent, with or without momentum, of a flat region, in place; tensors as `adamw_step`."""

def lion_step(
    pool: WorkerPool,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    remainder: torch.Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    stochastic_seed: int | None = None,
    instruction_set: str = "auto",
) -> None:
    """One Lion step of a flat region, in place; tensors as `adamw_step`."""

def squared_norm(pool: WorkerPool, grad: torch.Tensor, instruction_set: str = "auto") -> float:
    """The sum of the squares of a flat gradient, accumulated in float64 in an order that no thread count changes."""

class Update:
    """One step of one optimizer, for one group of parameters."""

def adamw_update(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    stochastic_seed: int | None = None,
) -> Update:
    """A step of AdamW, with two states: exp_avg and exp_avg_sq; `step` is 1 for the first.

    Gradients are multiplied by `grad_scale` first, rounded to their own type. A `stochastic_seed` rounds bfloat16
    parameters without remainder stochastically, by bits that depend on the seed, the step and the element alone.
    Raises ValueError for a step below 1. The same holds for the other updates.
    """

def sgd_update(
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    step: int,
    grad_scale: float = 1.0,
    stochastic_seed: int | None = None,
) -> Update:
    """A step of gradient descent, with the state momentum_buffer unless `momentum` is 0."""

def lion_update(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    stochastic_seed: int | None = None,
) -> Update:
    """A step of Lion, with the state exp_avg."""

@final
class UpdateTask(Task):
    """The optimizer's step of one region of the host store."""

    def __init__(
        self,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        states: Sequence[torch.Tensor],
        remainder: torch.Tensor | None,
        pool: WorkerPool,
    ) -> None:
        """Keeps the memory.

        Args:
            weights, gradients: 1-D uint8.
            states: 1-D float32, at most two, of one size.
            remainder: 1-D int16 of that size: bfloat16 parameters are the upper half of an exact float32 master.
            pool: the threads that work.

        Raises:
            ValueError: a tensor is none of that.
        """
    def set(
        self,
        segments: Sequence[tuple[int, int, int, torch.dtype, int]],
        updates: Sequence[Update],
        rows: torch.Tensor | None = None,
        chosen: bool = True,
    ) -> None:
        """Says what the next runs do; blocks, without the GIL, while a run is in progress.

        Args:
            segments: (byte offset in weights and gradients, element offset in the state, number of elements, their
                dtype, position in `updates`).
            updates: one for each group of parameters.
            rows: uint8, one for each row of the only segment, read when the task runs. All rows by default.
            chosen: update the rows for which it is not zero, or the others.

        Raises:
            ValueError: a segment is misaligned, outside, of another type than float32 and bfloat16, or lacks the state
                that its update needs; or rows do not fit the segment.
        """
    def run(self) -> None:
        """Does it now, on the calling thread and the pool."""
    @property
    def runs(self) -> int:
        """How many runs have ended."""

@final
class NormTask(Task):
    """The sum of the squares of one region's gradients."""

    def __init__(self, gradients: torch.Tensor, pool: WorkerPool) -> None:
        """Keeps the gradients: 1-D uint8. Raises ValueError for another tensor."""
    def set_segments(self, segments: Sequence[tuple[int, int, torch.dtype]]) -> None:
        """Says what the next runs measure: (byte offset, number of elements, their dtype).

        Blocks, without the GIL, while a run is in progress. Raises ValueError for a segment that is misaligned,
        outside, or of another type than float32 and bfloat16.
        """
    def run(self) -> None:
        """Does it now, on the calling thread and the pool."""
    @property
    def value(self) -> float:
        """What the last run found; 0 before any."""
    @property
    def runs(self) -> int:
        """How many runs have ended."""

@final
class UpdateQueue:
    """Runs updates one at a time on a thread of its own, the most urgent first."""

    def __init__(self, threads: int) -> None:
        """Starts a thread, and a pool of `threads` threads, it among them. Raises ValueError for a bad number."""
    def submit(self, priority: int, task: Task, gate: Gate, name: str = "an update") -> None:
        """Adds one closing to the gate and returns; the task runs when no pending one has a lower priority number.

        Then the gate opens, or fails with "<name> failed: <reason>" if the task does.

        Raises:
            RuntimeError: the queue is closed, or belongs to another process.
        """
    def wait(self) -> None:
        """Blocks, without the GIL, until nothing is pending.

        Raises:
            RuntimeError: the first failure since the last call.
        """
    def close(self) -> None:
        """Runs what is pending and ends the thread; a second call does nothing."""
    @property
    def pending(self) -> int:
        """Tasks that were submitted and have not ended."""
    @property
    def pool(self) -> WorkerPool: ...

@final
class SubmitTask(Task):
    """Hands a task to a queue when an instruction runs it."""

    def __init__(self, queue: UpdateQueue, priority: int, task: Task, gate: Gate, name: str = "an update") -> None: ...
    def run(self) -> None:
        """Submits the task, as `UpdateQueue.submit` does."""
