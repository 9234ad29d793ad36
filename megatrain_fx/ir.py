"""The vocabulary of schedules: lanes, ops, and the record of one operation."""

import enum
from dataclasses import dataclass, field


class Lane(enum.Enum):
    """An ordered queue of operations. The value is the printed token."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    OPTIMIZER = "optimizer"

    @property
    def in_order(self) -> bool:
        """Whether its operations run one after another; the optimizer takes what the next forward needs first."""
        return self is not Lane.OPTIMIZER

    def __str__(self) -> str:
        return self.value


class Op(enum.Enum):
    """What an operation does. The value is the printed token."""

    PREFETCH = "prefetch"
    LOAD = "load"
    CHECKPOINT = "checkpoint"
    FORWARD = "forward"
    SELECT = "select"
    YIELD = "yield"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    EVACUATE = "evacuate"
    ACCUMULATE = "accumulate"
    NORM = "norm"
    CLIP = "clip"
    UPDATE = "update"
    RELEASE = "release"

    def __str__(self) -> str:
        return self.value


class BufferKind(enum.Enum):
    """What a named piece of memory is. The value is the prefix of its printed name."""

    INPUT = "input"
    VALUE = "h"
    GRADIENT_VALUE = "grad"
    CHECKPOINT = "checkpoint"
    TAPE = "tape"
    SLOT = "slot"
    SLAB = "slab"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    NORM = "norm"
    ROWS = "rows"
    SCALE = "scale"
    PARAMETER = "parameter"


class Rows(enum.Enum):
    """Which rows of a region a name stands for. The value is what follows the region in its printed name.

    A region of which one stage only looks up rows (a tied embedding) may be named in two parts, ``weights.0.rows`` and
    ``weights.0.rest``: the rows that this step looks up, and the others. They are disjoint.
    """

    ALL = ""
    CHOSEN = ".rows"
    REST = ".rest"


_PREFIXES = {kind.value: kind for kind in BufferKind if kind is not BufferKind.VALUE}


def kind_of(name: str) -> BufferKind:
    """The kind of a buffer from its name: ``slot.1``, ``slab.0.host``, ``h2.0``, ``grad.h2.0``, ``weights.3`` ...

    A name in angle brackets, ``<layers.0.weight>``, is the view of one parameter that a ``load`` makes.
    """
    if name.startswith("<"):
        return BufferKind.PARAMETER
    return _PREFIXES.get(name.partition(".")[0], BufferKind.VALUE)


def number_of(name: str) -> int:
    """The number of a slot, slab or host region: 3 for ``weights.3`` and for ``slab.3.host``."""
    return int(name.split(".")[1])


def is_hosted(name: str) -> bool:
    """Whether a name stands for a host region's weights or gradients, or a part of them."""
    return kind_of(name) in (BufferKind.WEIGHTS, BufferKind.GRADIENTS)


def whole(name: str) -> str:
    """The name of all of a host region: ``weights.0`` for ``weights.0.rows``; any other name as it is."""
    return ".".join(name.split(".")[:2]) if is_hosted(name) else name


def rows_of(name: str) -> Rows:
    """The rows that the name of a host region stands for.

    Raises:
        ValueError: there is no such part.
    """
    return Rows(name[len(whole(name)) :])


def value_name(stage: int, position: int) -> str:
    """The name of output ``position`` of stage ``stage``."""
    return f"h{stage}.{position}"


def gradient_name(value: str) -> str:
    """The name of the gradient of a value."""
    return f"grad.{value}"


@dataclass(frozen=True)
class View:
    """Where one parameter lies in a region: what a ``load`` makes visible.

    Attributes:
        region: the host region, ``weights.<k>``.
        offset: bytes from the start of the region (and so from the start of the slot).
        shape: sizes of the parameter.
        dtype: its element type as printed, for example ``float32``.
    """

    region: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.region}+{self.offset} {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Operation:
    """One op of a schedule: one line of its text, one node of its graph.

    Attributes:
        op: what is done.
        lane: the queue it runs in.
        stage: the stage it belongs to, if any.
        template: the number of the template that a forward or recompute runs, if any.
        reads: names of the buffers it reads; for ``release``, of the buffers it frees.
        writes: names of the buffers it writes.
        after: indices of operations on other lanes that must be complete first.
        after_previous: indices of operations of the previous step that must be complete first (a training loop is a
        cycle).
        view: for ``load``, where the parameter lies.
    """

    op: Op
    lane: Lane
    stage: int | None = None
    template: int | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()
    view: View | None = field(default=None)

    @property
    def freed(self) -> tuple[str, ...]:
        """Names of the buffers that become free with this operation."""
        return self.reads if self.op is Op.RELEASE else ()

    @property
    def read(self) -> tuple[str, ...]:
        """Names of the buffers whose contents this operation uses."""
        return () if self.op is Op.RELEASE else self.reads
