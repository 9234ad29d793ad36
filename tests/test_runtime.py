"""Lanes, waits, poison and continuation of the C++ runtime, on the CPU and on CUDA."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from megatrain_fx.extension import runtime as cpp

Instruction, Lane = cpp.Instruction, cpp.Lane
MakeRuntime = Callable[..., cpp.Runtime]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def make_runtime(device: torch.device) -> Iterator[MakeRuntime]:
    """Give a function that starts runtimes on the test's device; they are closed after the test."""
    runtimes = []

    def make(**chaos: int) -> cpp.Runtime:
        runtimes.append(cpp.Runtime(device, **chaos))
        return runtimes[-1]

    yield make
    for runtime in runtimes:
        runtime.close()


def host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor in memory from which the device can copy asynchronously."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def test_a_copy_is_in_flight_while_compute_runs(make_runtime: MakeRuntime, device: torch.device) -> None:
    weights, slot = host(torch.ones(1000), device), torch.zeros(1000, device=device)
    compute_started, seen = threading.Event(), []

    def compute(_: object) -> None:
        seen.append(slot.sum().item())
        compute_started.set()

    executor = cpp.Executor(
        make_runtime(),
        [
            Instruction.call("hold", Lane.h2d, lambda _: seen.append(compute_started.wait(60)), []),
            Instruction.copy("prefetch", Lane.h2d, weights, slot, []),
            Instruction.call("other", Lane.compute, compute, []),
            Instruction.call("forward", Lane.compute, lambda _: seen.append(slot.sum().item()), [1]),
        ],
    )
    executor.run(0, 4, None)
    assert seen == [0.0, True, 1000.0]


STAGES, SLOTS, SIZE = 6, 2, 512


class Streamed:
    """Six stages streamed through two slots and one slab: y = 0.5 y + w, and gradient += 2 w."""

    def __init__(self, runtime: cpp.Runtime, device: torch.device, without: tuple[str, str] | None = None) -> None:
        self.weights = [host(torch.randn(SIZE), device) for _ in range(STAGES)]
        self.slots = [torch.zeros(SIZE, device=device) for _ in range(SLOTS)]
        self.slab_on_device = torch.zeros(SIZE, device=device)
        self.slab = host(torch.zeros(SIZE), device)
        self.gradients = [torch.zeros(SIZE) for _ in range(STAGES)]
        self.result = torch.zeros(SIZE, device=device)
        self.without = without
        self.positions: dict[str, int] = {}
        self.instructions: list[cpp.Instruction] = []
        for stage in range(STAGES):
            self.add_stage(stage)
        self.executor = cpp.Executor(runtime, self.instructions)

    def waits(self, name: str, *dependencies: str) -> list[int]:
        """Positions of the dependencies that exist, less the one that this program is to lack."""
        self.positions[name] = len(self.positions)
        kinds = [(name.split()[0], dependency.split()[0]) for dependency in dependencies]
        kept = [d for d, kind in zip(dependencies, kinds, strict=True) if kind != self.without]
        return [self.positions[dependency] for dependency in kept if dependency in self.positions]

    def add_stage(self, stage: int) -> None:
        slot = self.slots[stage % SLOTS]
        task = cpp.AccumulateTask(self.slab.view(torch.uint8), self.gradients[stage].view(torch.uint8))
        task.set_segments([(0, SIZE, torch.float32, 2)])

        def forward(_: object) -> None:
            self.result.mul_(0.5).add_(slot)
            torch.mul(slot, 2, out=self.slab_on_device)

        prefetch, compute = f"prefetch {stage}", f"forward {stage}"
        evacuate, accumulate = f"evacuate {stage}", f"accumulate {stage}"
        waits = self.waits(prefetch, f"forward {stage - SLOTS}")
        self.instructions.append(Instruction.copy(prefetch, Lane.h2d, self.weights[stage], slot, waits))
        waits = self.waits(compute, prefetch, f"evacuate {stage - 1}")
        self.instructions.append(Instruction.call(compute, Lane.compute, forward, waits, poison=[slot]))
        waits = self.waits(evacuate, compute, f"accumulate {stage - 1}")
        self.instructions.append(Instruction.copy(evacuate, Lane.d2h, self.slab_on_device, self.slab, waits))
        waits = self.waits(accumulate, evacuate)
        self.instructions.append(Instruction.task(accumulate, Lane.host, task, waits, poison=[self.slab]))

    def is_exact(self, runs: int) -> bool:
        """Runs the program and compares every number with the same arithmetic done in order."""
        result, gradients = torch.zeros_like(self.result), [torch.zeros(SIZE) for _ in range(STAGES)]
        for _ in range(runs):
            self.executor.run(0, len(self.instructions), None)
            for weights, gradient in zip(self.weights, gradients, strict=True):
                result.mul_(0.5).add_(weights.to(result.device))
                gradient.add_(weights * 2)
        same = [torch.equal(mine, theirs) for mine, theirs in zip(self.gradients, gradients, strict=True)]
        return all(same) and torch.equal(self.result, result)


@pytest.mark.parametrize("seed", range(5))
def test_waits_hold_under_chaos(make_runtime: MakeRuntime, device: torch.device, seed: int) -> None:
    assert Streamed(make_runtime(chaos_seed=seed), device).is_exact(runs=3)


def test_waits_hold_without_chaos(make_runtime: MakeRuntime, device: torch.device) -> None:
    assert Streamed(make_runtime(), device).is_exact(runs=20)


@pytest.mark.parametrize(
    "without",
    [
        ("prefetch", "forward"),
        ("forward", "prefetch"),
        ("forward", "evacuate"),
        ("evacuate", "forward"),
        ("evacuate", "accumulate"),
        ("accumulate", "evacuate"),
    ],
)
def test_chaos_reveals_a_missing_dependency(without: tuple[str, str]) -> None:
    cpu = torch.device("cpu")
    for seed in range(20):
        runtime = cpp.Runtime(cpu, chaos_seed=seed)
        exact = Streamed(runtime, cpu, without).is_exact(runs=2)
        runtime.close()
        if not exact:
            return
    pytest.fail("20 chaos runs gave the right numbers without the dependency")


def random_waits(chooser: random.Random, count: int) -> list[list[int]]:
    """For each of `count` operations, up to three earlier ones."""
    return [sorted({chooser.randrange(i) for _ in range(chooser.randint(0, 3) if i else 0)}) for i in range(count)]


def test_random_programs_keep_their_waits(make_runtime: MakeRuntime) -> None:
    chooser = random.Random(0)
    runtime = make_runtime(chaos_seed=7, chaos_delay_us=300)
    lanes = list(Lane.__members__.values())
    for _ in range(20):
        waits = random_waits(chooser, chooser.randint(1, 40))
        instructions = [
            Instruction.call(
                f"op {index}", chooser.choice(lanes), lambda order, index=index: order.append(index), needed
            )
            for index, needed in enumerate(waits)
        ]
        order: list[int] = []
        cpp.Executor(runtime, instructions).run(0, len(waits), order)
        when = {index: position for position, index in enumerate(order)}
        assert sorted(when) == list(range(len(waits)))
        assert all(when[needed] < when[index] for index in when for needed in waits[index])


def test_context_reaches_calls_on_every_lane(make_runtime: MakeRuntime) -> None:
    instructions = [
        Instruction.call(name, lane, lambda context, name=name: context.append(name), [])
        for name, lane in Lane.__members__.items()
    ]
    executor = cpp.Executor(make_runtime(), instructions)
    for _ in range(2):
        context: list[str] = []
        executor.run(0, len(instructions), context)
        assert sorted(context) == sorted(Lane.__members__)


def test_a_run_goes_on_in_the_autograd_thread(make_runtime: MakeRuntime, device: torch.device) -> None:
    weights, slot = host(torch.full((4,), 3.0), device), torch.zeros(4, device=device)
    saved, gradient = torch.zeros(4, device=device), torch.zeros(4, device=device)
    home = host(torch.zeros(4), device)
    executor = cpp.Executor(
        make_runtime(chaos_seed=0),
        [
            Instruction.copy("prefetch", Lane.h2d, weights, slot, []),
            Instruction.call("forward", Lane.compute, lambda x: torch.mul(x, slot, out=saved), [0]),
            Instruction.call("backward", Lane.compute, lambda g: torch.mul(g, slot, out=gradient), [0, 1]),
            Instruction.copy("evacuate", Lane.d2h, gradient, home, [2]),
        ],
    )

    class Stream(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            executor.run(0, 2, x)
            return saved.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            executor.run(2, 4, grad)
            return gradient.clone()

    x = torch.arange(4.0, device=device, requires_grad=True)
    y = Stream.apply(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    reference = torch.arange(4.0, device=device, requires_grad=True)
    (reference * weights.to(device)).sum().backward()
    assert torch.equal(x.grad, 2 * reference.grad)
    assert torch.equal(home, reference.grad.cpu())


def test_a_new_generation_does_not_overwrite_slots_in_use(make_runtime: MakeRuntime, device: torch.device) -> None:
    sources = [host(torch.full((1 << 16,), float(value)), device) for value in range(8)]
    source, slot = host(torch.zeros(1 << 16), device), torch.zeros(1 << 16, device=device)
    busy, results = torch.randn(1024, 1024, device=device) / 32, []

    def compute(_: object) -> None:
        work = busy
        for _ in range(20 if device.type == "cuda" else 0):
            work = work @ busy
        results.append((slot + 0 * work[0, 0]).sum())

    executor = cpp.Executor(
        make_runtime(),
        [
            Instruction.copy("prefetch", Lane.h2d, source, slot, []),
            Instruction.call("forward", Lane.compute, compute, [0]),
        ],
    )
    for value in sources:
        source.copy_(value)
        executor.run(0, 2, None)
    assert [result.item() for result in results] == [value.sum().item() for value in sources]


@pytest.mark.cuda
def test_a_run_on_another_stream_follows_the_one_before() -> None:
    device = torch.device("cuda")
    runtime = cpp.Runtime(device)
    value, busy = torch.zeros(1 << 16, device=device), torch.randn(2048, 2048, device=device) / 64

    def slow_add(_: object) -> None:
        work = busy
        for _ in range(50):
            work = work @ busy
        value.add_(1 + 0 * work[0, 0])

    executor = cpp.Executor(
        runtime,
        [
            Instruction.call("forward", Lane.compute, slow_add, []),
            Instruction.call("backward", Lane.compute, lambda _: value.mul_(10), [0]),
        ],
    )
    torch.cuda.synchronize()
    executor.run(0, 1, None)
    with torch.cuda.stream(torch.cuda.Stream()):
        executor.run(1, 2, None)
        assert value.mean().item() == 10
    runtime.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_is_nan_in_chaos_mode_only(make_runtime: MakeRuntime, device: torch.device, dtype: torch.dtype) -> None:
    slot, flat = torch.ones(8, 2, dtype=dtype, device=device), torch.ones(16, dtype=torch.uint8, device=device)
    release = Instruction.mark("release", Lane.compute, [], poison=[slot, flat])
    cpp.Executor(make_runtime(), [release]).run(0, 1, None)
    assert torch.equal(slot, torch.ones_like(slot))
    cpp.Executor(make_runtime(chaos_seed=0, chaos_delay_us=0), [release]).run(0, 1, None)
    assert slot.isnan().all()
    assert flat.eq(255).all()
    assert flat.view(dtype).isnan().all()


def test_operations_are_labelled_in_profiles(make_runtime: MakeRuntime) -> None:
    executor = cpp.Executor(make_runtime(), [Instruction.mark("%7 = release compute slot.1", Lane.compute, [])])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        executor.run(0, 1, None)
    assert "%7 = release compute slot.1" in [event.name for event in profile.events()]
