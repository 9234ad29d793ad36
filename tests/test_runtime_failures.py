"""What the C++ runtime does when an operation fails, is interrupted or cannot be run: nothing hangs, all is usable."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from megatrain_fx.errors import RuntimeExtensionError
from megatrain_fx.extension import check_build
from megatrain_fx.extension import runtime as cpp

Instruction, Lane = cpp.Instruction, cpp.Lane

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=[None, 3], ids=["ordered", "chaos"])
def runtime(device: torch.device, request: pytest.FixtureRequest) -> Iterator[cpp.Runtime]:
    """Give a runtime with and without chaos mode."""
    runtime = cpp.Runtime(device, chaos_seed=request.param)
    yield runtime
    runtime.close()


def failing_task() -> cpp.AccumulateTask:
    """A task that fails: torch has no addition for this dtype."""
    task = cpp.AccumulateTask(torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))
    task.set_segments([(0, 4, torch.float8_e4m3fn, 2)])
    return task


def surrounded(failing: cpp.Instruction, ran: list[str], gate: cpp.Gate) -> list[cpp.Instruction]:
    """The failing instruction at position 0, then one on every lane that needs it; the last opens the gate."""
    after = [
        Instruction.call(f"after {name}", lane, lambda _, name=name: ran.append(name), [0])
        for name, lane in Lane.__members__.items()
    ]
    return [failing, *after, Instruction.mark("last", Lane.host, [len(after)], opens=[gate])]


@pytest.mark.parametrize("lane", list(Lane.__members__))
def test_a_python_exception_comes_back_as_it_is(runtime: cpp.Runtime, lane: str) -> None:
    error, ran, gate = LookupError("missing"), [], cpp.Gate()

    def fail(_: object) -> None:
        raise error

    instructions = surrounded(Instruction.call("%1 = forward", getattr(Lane, lane), fail, []), ran, gate)
    executor = cpp.Executor(runtime, instructions)
    gate.close()
    with pytest.raises(LookupError) as caught:
        executor.run(0, len(instructions), None)
    assert caught.value is error
    assert error.__notes__ == ["while running %1 = forward"]
    assert "fail" in [entry.name for entry in caught.traceback]
    assert ran == []
    with pytest.raises(RuntimeError, match=rf"operation %1 = forward failed on lane {lane}: LookupError: missing"):
        gate.wait()


@pytest.mark.parametrize(
    ("kind", "lane", "text"),
    [
        ("copy", Lane.h2d, r"cannot copy a tensor of shape \[3\] to one of shape \[4\]"),
        ("copy", Lane.compute, r"cannot copy a tensor of shape \[3\] to one of shape \[4\]"),
        ("task", Lane.host, r"not implemented for 'Float8_e4m3fn'"),
    ],
)
def test_a_failure_in_cpp_names_operation_and_lane(runtime: cpp.Runtime, kind: str, lane: cpp.Lane, text: str) -> None:
    if kind == "copy":
        failing = Instruction.copy("%5 = prefetch", lane, torch.zeros(3), torch.zeros(4), [])
    else:
        failing = Instruction.task("%5 = prefetch", lane, failing_task(), [])
    ran: list[str] = []
    instructions = surrounded(failing, ran, cpp.Gate())
    with pytest.raises(RuntimeError, match=f"operation %5 = prefetch failed on lane {lane.name}: .*{text}"):
        cpp.Executor(runtime, instructions).run(0, len(instructions), None)
    assert ran == []


def test_the_next_run_after_a_failure_is_whole(runtime: cpp.Runtime) -> None:
    ran: list[object] = []

    def fail_once(context: str) -> None:
        if context == "fail":
            raise ValueError(context)

    executor = cpp.Executor(
        runtime,
        [
            Instruction.call("a", Lane.h2d, ran.append, []),
            Instruction.call("b", Lane.compute, fail_once, [0]),
            Instruction.call("c", Lane.host, ran.append, [1]),
        ],
    )
    with pytest.raises(ValueError, match="fail"):
        executor.run(0, 3, "fail")
    executor.run(0, 3, "whole")
    assert ran == ["fail", "whole", "whole"]


def test_a_later_range_can_be_tried_again(runtime: cpp.Runtime) -> None:
    outcomes: list[object] = []

    def backward(context: str) -> None:
        outcomes.append(context)
        if context == "fail":
            raise ValueError(context)

    executor = cpp.Executor(
        runtime,
        [Instruction.mark("forward", Lane.h2d, []), Instruction.call("backward", Lane.compute, backward, [0])],
    )
    executor.run(0, 1, None)
    with pytest.raises(ValueError, match="fail"):
        executor.run(1, 2, "fail")
    executor.run(1, 2, "again")
    assert outcomes == ["fail", "again"]


def test_work_in_progress_ends_before_a_failure_is_raised(runtime: cpp.Runtime) -> None:
    started, ended = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        started.set()
        time.sleep(0.2)
        ended.set()

    def fail(_: object) -> None:
        assert started.wait(30)
        raise ValueError("while the host lane works")

    executor = cpp.Executor(
        runtime, [Instruction.call("slow", Lane.host, slow, []), Instruction.call("fail", Lane.compute, fail, [])]
    )
    with pytest.raises(ValueError, match="while the host lane works"):
        executor.run(0, 2, None)
    assert ended.is_set()


class Alarm(BaseException):
    """What the signal handler of a test raises."""


@pytest.mark.parametrize("where", ["an inline wait", "the end of the run"])
def test_a_signal_interrupts_a_blocked_run(runtime: cpp.Runtime, where: str) -> None:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise Alarm

    gate = cpp.Gate()
    gate.close()
    inline = [Instruction.mark("inline", Lane.compute, [0])] if where == "an inline wait" else []
    executor = cpp.Executor(runtime, [Instruction.mark("stuck", Lane.host, [], gates=[gate]), *inline])
    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Alarm):
            executor.run(0, 1 + len(inline), None)
    finally:
        signal.signal(signal.SIGALRM, previous)
    gate.open()
    executor.run(0, 1 + len(inline), None)


def test_waits_and_ranges_are_checked(runtime: cpp.Runtime) -> None:
    mark = Instruction.mark
    for waits in ([0], [1], [7]):
        with pytest.raises(ValueError, match=rf"operation 0 \(a\) waits for operation {waits[0]}"):
            cpp.Executor(runtime, [mark("a", Lane.h2d, waits), mark("b", Lane.host, [])])
    executor = cpp.Executor(runtime, [mark("a", Lane.h2d, []), mark("b", Lane.host, [0])])
    assert len(executor) == 2
    for begin, end in ((0, 3), (2, 1)):
        with pytest.raises(ValueError, match=rf"cannot run operations \[{begin}, {end}\) of 2"):
            executor.run(begin, end, None)
    with pytest.raises(ValueError, match="operation b waits for a, which has not run"):
        executor.run(1, 2, None)
    with pytest.raises(ValueError, match="contiguous"):
        mark("a", Lane.compute, [], poison=[torch.zeros(4, 4).t()])
    with pytest.raises(ValueError, match="chaos_delay_us"):
        cpp.Runtime(torch.device("cpu"), 0, -1)


@pytest.mark.parametrize("lane", list(Lane.__members__))
def test_a_run_inside_a_run_is_refused(runtime: cpp.Runtime, lane: str) -> None:
    inner = cpp.Executor(runtime, [Instruction.mark("inner", Lane.compute, [])])
    for nested in (lambda _: inner.run(0, 1, None), lambda _: runtime.synchronize(), lambda _: runtime.close()):
        outer = cpp.Executor(runtime, [Instruction.call("outer", getattr(Lane, lane), nested, [])])
        with pytest.raises(RuntimeError, match="from inside an operation"):
            outer.run(0, 1, None)
    inner.run(0, 1, None)


def test_threads_take_turns(runtime: cpp.Runtime) -> None:
    inside: list[int] = []

    def enter(thread: int) -> None:
        inside.append(thread)
        time.sleep(0.001)
        inside.append(thread)

    executor = cpp.Executor(runtime, [Instruction.call("enter", Lane.host, enter, [])])
    threads = [threading.Thread(target=lambda i=i: [executor.run(0, 1, i) for _ in range(10)]) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 60
    assert inside[::2] == inside[1::2]


def test_a_closed_runtime_refuses_to_run(runtime: cpp.Runtime) -> None:
    executor = cpp.Executor(runtime, [Instruction.mark("a", Lane.h2d, [])])
    runtime.synchronize()
    runtime.close()
    runtime.close()
    for use in (lambda: executor.run(0, 1, None), runtime.synchronize):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_cycles_through_functions_are_collected(runtime: cpp.Runtime) -> None:
    class Owner:
        def __init__(self) -> None:
            instruction = Instruction.call("forward", Lane.compute, self.forward, [])
            self.executor = cpp.Executor(runtime, [instruction, instruction])
            self.instruction = instruction

        def forward(self, _: object) -> None:
            """Refers to its owner, as a bound method."""

    owner = Owner()
    owner.executor.run(0, 2, None)
    gc.collect()
    alive = weakref.ref(owner)
    owner.executor.run(0, 2, None)
    del owner
    gc.collect()
    assert alive() is None


def test_a_forked_child_can_drop_the_runtime_but_not_use_it() -> None:
    program = """
import os, torch
from megatrain_fx.extension import runtime as cpp
runtime = cpp.Runtime(torch.device("cpu"))
child = os.fork()
if child == 0:
    try:
        runtime.synchronize()
    except RuntimeError as error:
        del runtime
        os._exit(7 if "forked" in str(error) else 8)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert result.stdout == "7\n", result.stderr


def test_a_runtime_built_for_another_pytorch_is_refused() -> None:
    check_build(cpp.built_for_torch, torch.__version__)
    with pytest.raises(RuntimeExtensionError, match=r"built for PyTorch 2\.1\.0\+cpu.*pip install"):
        check_build("2.1.0+cpu", torch.__version__)
