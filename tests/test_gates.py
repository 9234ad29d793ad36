"""Gates: what a later run waits for, and how a failure reaches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megatrain_fx.extension import runtime as cpp

Instruction, Lane = cpp.Instruction, cpp.Lane

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def runtime(device: torch.device) -> Iterator[cpp.Runtime]:
    """Give a runtime on the test's device."""
    runtime = cpp.Runtime(device)
    yield runtime
    runtime.close()


def test_gates_hold_a_later_run_back(runtime: cpp.Runtime) -> None:
    gate, done, order = cpp.Gate(), cpp.Gate(), []
    executor = cpp.Executor(
        runtime,
        [Instruction.call("prefetch", Lane.h2d, lambda _: order.append("run"), [], gates=[gate], opens=[done])],
    )
    gate.close()
    gate.close()
    done.close()
    thread = threading.Thread(target=executor.run, args=(0, 1, None))
    thread.start()
    gate.open()
    time.sleep(0.05)
    assert not gate.is_open
    assert not done.is_open
    order.append("open")
    gate.open()
    done.wait()
    thread.join()
    assert order == ["open", "run"]
    assert done.is_open


def test_a_failed_gate_fails_what_waits_until_it_is_closed_again(runtime: cpp.Runtime) -> None:
    gate = cpp.Gate()
    executor = cpp.Executor(runtime, [Instruction.mark("prefetch", Lane.h2d, [], gates=[gate])])
    gate.close()
    gate.fail("the update of stage.3 failed")
    assert not gate.is_open
    with pytest.raises(RuntimeError, match=r"operation prefetch failed on lane h2d: the update of stage\.3 failed"):
        executor.run(0, 1, None)
    gate.close()
    gate.open()
    executor.run(0, 1, None)
    gate.fail("again")
    gate.reset()
    gate.wait()
    assert gate.is_open


def test_a_gate_counts_its_closings() -> None:
    gate = cpp.Gate()
    gate.open()
    assert gate.is_open
    gate.close()
    gate.close()
    gate.open()
    assert not gate.is_open
    gate.open()
    assert gate.is_open
    gate.wait()


def test_the_first_failure_of_a_gate_is_kept() -> None:
    gate = cpp.Gate()
    gate.close()
    gate.fail("cause")
    gate.fail("consequence")
    with pytest.raises(RuntimeError, match="^cause$"):
        gate.wait()


def test_a_copy_that_follows_waits_for_every_update_of_its_region(runtime: cpp.Runtime) -> None:
    """What a first update says of its progress is no word about a second one."""
    queue, gate = cpp.UpdateQueue(2), cpp.Gate()
    size = 2**16
    weights, gradients = torch.zeros(size), torch.ones(size)
    source, target = weights.view(torch.uint8), torch.zeros(size * 4, dtype=torch.uint8, device=runtime.device)
    update = cpp.UpdateTask(source, gradients.view(torch.uint8), [], None, queue.pool)
    step = cpp.sgd_update(lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, step=1)
    update.set([(0, 0, size, torch.float32, 0)], [step])
    long = cpp.NormTask(torch.zeros(2**24).view(torch.uint8), queue.pool)
    long.set_segments([(0, 2**24, torch.float32)] * 20)
    blocker = cpp.NormTask(torch.zeros(2**24).view(torch.uint8), queue.pool)
    blocker.set_segments([(0, 2**24, torch.float32)] * 4)
    queue.submit(-1, blocker, cpp.Gate())  # so that all are pending before the first update begins
    queue.submit(0, update, gate)
    queue.submit(1, long, cpp.Gate())
    queue.submit(2, update, gate)
    cpp.Executor(runtime, [Instruction.follow("prefetch", Lane.h2d, source, target, gate, [])]).run(0, 1, None)
    queue.wait()
    assert set(target.view(torch.float32).tolist()) == {-2.0}
