"""A schedule bound to memory and code: the flat list of instructions that the C++ executor runs."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from megatrain_fx.device_buffers import DeviceBuffers
from megatrain_fx.extension import runtime as native
from megatrain_fx.homecoming import Homecoming, Journey, find_journeys
from megatrain_fx.ir import BufferKind, Lane, Op, Operation, Rows, kind_of, number_of, rows_of
from megatrain_fx.program import Program
from megatrain_fx.region_updater import RegionUpdater
from megatrain_fx.row_selection import RowSelection, RowSelector
from megatrain_fx.run import Run
from megatrain_fx.schedule import Schedule
from megatrain_fx.stage_runner import StageRunner
from megatrain_fx.store import HostStore
from megatrain_fx.text import format_operation

_LANES = {
    Lane.COMPUTE: native.Lane.compute,
    Lane.H2D: native.Lane.h2d,
    Lane.D2H: native.Lane.d2h,
    Lane.HOST: native.Lane.host,
    Lane.OPTIMIZER: native.Lane.host,  # which only hands the update to the optimizer's own queue
}
_Call = Callable[[Run], None]
_Heading = tuple[str, native.Lane]


class BoundSchedule:
    """Executes one schedule of a program.

    Every operation becomes one C++ instruction. Copies and accumulation run without Python; checkpoint, forward,
    recompute, backward and the release of values call a :class:`StageRunner`.
    """

    def __init__(
        self,
        schedule: Schedule,
        program: Program,
        runners: Sequence[StageRunner],
        store: HostStore,
        buffers: DeviceBuffers,
        lanes: native.Runtime,
        optimizer: RegionUpdater | None = None,
    ) -> None:
        """Bind a schedule.

        Args:
            schedule: the program's schedule, or its resume schedule.
            program: what it is a schedule of.
            runners: one a stage.
            store: where parameters and gradients live.
            buffers: where slots and slabs come from.
            lanes: the C++ lanes that run it.
            optimizer: whose updates and norms are among the operations.
        """
        self._schedule = schedule
        self._program = program
        self._runners = runners
        self._store = store
        self._memory = buffers.bind(schedule.buffers)
        self._pin = buffers.pin
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)  # its user may drop it
        self._chaos = lanes.chaos
        self._device = lanes.device
        self._journeys = {journey.accumulate: journey for journey in find_journeys(schedule)}
        self._evacuations = {journey.evacuate: journey for journey in self._journeys.values()}
        self._selectors = {
            number_of(operation.writes[0]): self._selector(operation, number_of(operation.writes[0]))
            for operation in schedule
            if operation.op is Op.SELECT
        }
        self._homecomings: defaultdict[int, list[Homecoming]] = defaultdict(list)
        arrivals = {index: self._bind_journey(journey) for index, journey in self._journeys.items()}
        # what follows a clip is run by the caller's optimizer.step()
        self._end = next((i for i, operation in enumerate(schedule) if operation.op is Op.CLIP), len(schedule))
        self._yield = next(i for i, operation in enumerate(schedule) if operation.op is Op.YIELD)
        self._executor = native.Executor(lanes, list(self._instructions(arrivals)))

    def forward(self, run: Run) -> None:
        """Run everything up to the yield, or all of it if no backward pass follows."""
        self._executor.run(0, self._yield + 1 if self._program.training else self._end, run)

    def backward(self, run: Run) -> None:
        """Run everything after the yield; ``forward`` of this schedule must be the last thing that ran on its lanes."""
        self._executor.run(self._yield + 1, self._end, run)

    def resume(self, run: Run) -> None:
        """Run a schedule that has only a backward pass."""
        self._executor.run(0, self._end, run)

    def _bind_journey(self, journey: Journey) -> Homecoming:
        evacuate = self._schedule.operations[journey.evacuate]
        device, host = self._memory[evacuate.reads[0]], self._memory[evacuate.writes[0]]
        size = self._program.facts.regions[journey.region].gradient_bytes
        home = self._store.gradients(journey.region)[:size]
        optimizer = self._attached()
        task = native.AccumulateTask(host[:size], home, None if optimizer is None else optimizer.queue.pool)
        trainable = self._runners[self._stage(journey.backward)].trainable
        held = [place for place in self._program.layout.regions[journey.region].places if place.offset < size]
        places = {place.name: place for place in held if place.name in trainable}
        views = {name: place.view(device) for name, place in places.items()}
        destination = native.Destination(host[:size])
        selection = self._selection(journey)
        whole = len(places) == len(held)
        homecoming = Homecoming(
            journey.region, destination, task, host[:size], home, places, views, self._pin, whole, selection
        )
        self._homecomings[journey.backward].append(homecoming)
        return homecoming

    def _selector(self, operation: Operation, region: int) -> RowSelector:
        (place,) = self._program.layout.regions[region].places
        return RowSelector.of(region, operation.reads[0], place.shape[0], self._device)

    def _selection(self, journey: Journey) -> RowSelection | None:
        """The rows to be updated next once these gradients are home."""
        accumulated = {rows_of(name) for name in self._schedule.operations[journey.accumulate].writes}
        if Rows.ALL in accumulated:
            return None
        return self._selectors[journey.region].selection(chosen=Rows.REST not in accumulated)

    def _stage(self, index: int) -> int:
        stage = self._schedule.operations[index].stage
        assert stage is not None
        return stage

    def _instructions(self, arrivals: Mapping[int, Homecoming]) -> Iterator[native.Instruction]:
        """One instruction for each operation; what a slot holds is known from the prefetches before."""
        held: dict[str, int] = {}
        departures = {self._journeys[index].evacuate: homecoming for index, homecoming in arrivals.items()}
        for index, operation in enumerate(self._schedule.operations[: self._end]):
            heading = format_operation(index, operation), _LANES[operation.lane]
            waits = list(operation.after)
            if operation.op is Op.PREFETCH:
                region = number_of(operation.reads[0])
                held[operation.writes[0]] = region
                yield self._prefetch(heading, region, self._memory[operation.writes[0]], waits)
            elif operation.op is Op.EVACUATE:
                homecoming, journey = departures[index], self._evacuations[index]
                source = self._memory[operation.reads[0]][: homecoming.home.numel()]
                yield self._evacuate(heading, journey.region, source, homecoming.evacuation, waits)
            elif operation.op in (Op.ACCUMULATE, Op.NORM, Op.UPDATE):
                yield native.Instruction.task(*heading, self._task(index, operation, arrivals), waits)
            elif (call := self._call(index, operation, held)) is not None:
                yield native.Instruction.call(*heading, call, waits, poison=self._poison(operation))
            else:
                yield native.Instruction.mark(*heading, waits, poison=self._poison(operation))

    def _prefetch(self, heading: _Heading, region: int, slot: torch.Tensor, waits: list[int]) -> native.Instruction:
        source = self._store.weights(region)
        target, gate = slot[: source.numel()], self._store.gate(region)
        staging = self._store.inbound(region)
        if staging is None:
            return native.Instruction.follow(*heading, source, target, gate, waits)
        return native.Instruction.staged_copy(*heading, source, target, staging, waits, gates=[gate])

    def _evacuate(
        self, heading: _Heading, region: int, source: torch.Tensor, target: native.Destination, waits: list[int]
    ) -> native.Instruction:
        gates = [self._store.gate(region)]
        staging = self._store.outbound(region)
        if staging is None:
            return native.Instruction.deliver(*heading, source, target, waits, gates=gates)
        return native.Instruction.staged_deliver(*heading, source, target, staging, waits, gates=gates)

    def _task(self, index: int, operation: Operation, arrivals: Mapping[int, Homecoming]) -> native.Task:
        """The C++ work of an operation of the host's."""
        if operation.op is Op.ACCUMULATE:
            return arrivals[index].accumulation
        optimizer = self._attached()
        assert optimizer is not None
        region = number_of(operation.reads[0])
        if operation.op is Op.NORM:
            norm = optimizer.norm_task(region)
            assert norm is not None
            return norm
        update = optimizer.update_task(region, rows_of(operation.writes[0]))
        assert update is not None
        gate, priority = self._store.gate(region), optimizer.priority(region)
        return native.SubmitTask(optimizer.queue, priority, update, gate, f"the update of weights.{region}")

    def _attached(self) -> RegionUpdater | None:
        return None if self._optimizer is None else self._optimizer()

    def _poison(self, operation: Operation) -> list[torch.Tensor]:
        """Slots and slabs to spoil as they are released, in chaos mode."""
        return [self._memory[name] for name in operation.freed if self._chaos and name in self._memory]

    def _call(self, index: int, operation: Operation, held: Mapping[str, int]) -> _Call | None:
        """What Python does for an operation; None if nothing."""
        if operation.op is Op.RELEASE:
            names = tuple(name for name in operation.freed if name not in self._memory)
            return (lambda run: run.release(names, self._chaos)) if names else None
        if operation.op is Op.LOAD:
            return None
        if operation.op is Op.YIELD:
            return lambda run: run.hand_over(operation.reads)
        if operation.op is Op.SELECT:
            return self._selectors[number_of(operation.writes[0])].select
        runner = self._runners[self._stage(index)]
        if operation.op is Op.CHECKPOINT:
            return runner.checkpoint
        if operation.op is Op.BACKWARD:
            return self._backward_call(index, operation, runner)
        weights = self._views(operation, runner, held)
        if operation.op is Op.RECOMPUTE:
            return lambda run: runner.recompute(run, weights)
        records = any(kind_of(name) is BufferKind.TAPE for name in operation.writes)
        return lambda run: runner.forward_recording(run, weights) if records else runner.forward(run, weights)

    def _views(self, operation: Operation, runner: StageRunner, held: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The parameters of a stage as views of the slots that the operation reads, by name in the stage's module.

        Other slots may hold the same regions; nothing orders this operation after the copies into those.
        """
        places = self._program.layout.places
        slot_of = {held[name]: name for name in operation.reads if kind_of(name) is BufferKind.SLOT}
        return {
            local: places[name].view(self._memory[slot_of[places[name].region]])
            for local, name in runner.parameter_names.items()
        }

    def _backward_call(self, index: int, operation: Operation, runner: StageRunner) -> _Call:
        leaving = tuple(name for name in operation.writes if kind_of(name) is BufferKind.GRADIENT_VALUE)
        homecomings = tuple(self._homecomings[index])

        def backward(run: Run) -> None:
            gradients = runner.backward(run, leaving)
            run.trained.update(dict.fromkeys(gradients))
            # here, not after the pass: the device computes meanwhile
            run.published += self._store.publish_gradients(gradients)
            optimizer = self._attached()
            for homecoming in homecomings:
                homecoming.send(gradients, run)
                if optimizer is not None:
                    optimizer.narrow(homecoming.region, run.trained.keys(), homecoming.selection)

        return backward
