"""Updates in the background: what tasks do to a region, in which order the queue runs them, and how they fail."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain_fx.extension import runtime as cpp

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parent.parent
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SGD = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}


@pytest.fixture
def queue() -> cpp.UpdateQueue:
    return cpp.UpdateQueue(2)


def sgd(lr: float, **options: float) -> cpp.Update:
    return cpp.sgd_update(lr=lr, step=1, **(SGD | options))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def sgd_task(weights: Tensor, gradients: Tensor, update: cpp.Update, pool: cpp.WorkerPool) -> cpp.UpdateTask:
    task = cpp.UpdateTask(as_bytes(weights), as_bytes(gradients), [], None, pool)
    task.set([(0, 0, weights.numel(), weights.dtype, 0)], [update])
    return task


def failing_task() -> cpp.Task:
    """A task that always throws: it submits to a queue that is closed."""
    closed = cpp.UpdateQueue(1)
    closed.close()
    return cpp.SubmitTask(closed, 0, cpp.NormTask(as_bytes(torch.zeros(1)), closed.pool), cpp.Gate())


def test_segments_are_updated_as_by_the_kernels(queue: cpp.UpdateQueue) -> None:
    master, gradient = torch.randn(3000), torch.randn(3000)
    states = [torch.rand(3000), torch.rand(3000)]
    expected, expected_states = master.clone(), [state.clone() for state in states]
    task = cpp.UpdateTask(as_bytes(master), as_bytes(gradient), states, None, queue.pool)
    updates = [cpp.adamw_update(step=3, **ADAMW), cpp.adamw_update(step=7, grad_scale=0.5, **ADAMW)]
    task.set([(0, 64, 1000, torch.float32, 1), (8000, 2000, 500, torch.float32, 0)], updates)
    task.run()
    first, second = slice(0, 1000), slice(2000, 2500)
    for where, state, step, scale in ((first, slice(64, 1064), 7, 0.5), (second, slice(2000, 2500), 3, 1.0)):
        memory = (expected[where], gradient[where], *(each[state] for each in expected_states))
        cpp.adamw_step(queue.pool, *memory, None, step=step, grad_scale=scale, **ADAMW)
    assert torch.equal(master, expected)
    assert all(torch.equal(*pair) for pair in zip(states, expected_states, strict=True))
    assert task.runs == 1


def test_mixed_types_in_one_region(queue: cpp.UpdateQueue) -> None:
    weights, gradients = torch.zeros(1024, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    remainder = torch.zeros(192, dtype=torch.int16)
    low, full = weights[:256].view(torch.bfloat16), weights[256:768].view(torch.float32)
    low.fill_(1.0)
    full.fill_(1.0)
    gradients[:256].view(torch.bfloat16).fill_(1.0)
    gradients[256:768].view(torch.float32).fill_(1.0)
    task = cpp.UpdateTask(weights, gradients, [], remainder, queue.pool)
    task.set([(0, 0, 64, torch.bfloat16, 0), (256, 64, 128, torch.float32, 0)], [sgd(2.0**-12)])
    task.run()
    assert set(full.tolist()) == {1 - 2.0**-12}
    assert set(low[:64].tolist()) == {1.0}  # the step is too small for bfloat16 and lies in the remainder
    assert set(remainder[:64].tolist()) == {-(2**12)}  # in units of float32's last place below 1
    assert not remainder[64:].any()


def test_random_roundings_of_segments_differ(queue: cpp.UpdateQueue) -> None:
    weights, gradients = torch.ones(8192, dtype=torch.bfloat16), torch.ones(8192, dtype=torch.bfloat16)
    task = cpp.UpdateTask(as_bytes(weights), as_bytes(gradients), [torch.zeros(8192)], None, queue.pool)
    update = cpp.sgd_update(lr=2.0**-9, step=1, stochastic_seed=3, **SGD)
    task.set([(0, 0, 4096, torch.bfloat16, 0), (8192, 4096, 4096, torch.bfloat16, 0)], [update])
    task.run()
    first, second = weights.chunk(2)
    assert 0.3 < (first != 1).float().mean() < 0.7
    assert 0.4 < (first != second).float().mean() < 0.6


def test_norm(queue: cpp.UpdateQueue) -> None:
    gradients = torch.zeros(4096, dtype=torch.uint8)
    gradients[:1024].view(torch.float32).copy_(torch.randn(256))
    gradients[2048:2560].view(torch.bfloat16).copy_(torch.randn(256))
    task = cpp.NormTask(gradients, queue.pool)
    assert task.value == 0
    task.set_segments([(0, 256, torch.float32), (2048, 256, torch.bfloat16)])
    task.run()
    parts = gradients[:1024].view(torch.float32), gradients[2048:2560].view(torch.bfloat16)
    expected = sum(float(part.double().square().sum()) for part in parts)
    assert task.value == pytest.approx(expected, rel=1e-13)
    gradients[4:8].view(torch.float32).fill_(float("inf"))
    task.run()
    assert task.value == float("inf")
    assert task.runs == 2


def test_the_most_urgent_runs_first(queue: cpp.UpdateQueue) -> None:
    """A long task keeps the thread while others pile up; these do not commute, so that the result tells their order."""
    large = torch.zeros(2**24)
    long = sgd_task(large, large.clone(), sgd(0.1), queue.pool)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        weights = torch.ones(64)
        tasks = [sgd_task(weights, torch.ones(64), sgd(0.5, weight_decay=k), queue.pool) for k in range(3)]
        queue.submit(-1, long, cpp.Gate())
        for number in order:
            queue.submit(number, tasks[number], cpp.Gate())
        assert queue.pending == 4, "the long task ended before the others were submitted"
        queue.wait()
        value = 1.0
        for decay in range(3):
            value -= 0.5 * (1 + decay * value)
        assert set(weights.tolist()) == {value}


def test_gates_are_closed_until_the_update_is_done(queue: cpp.UpdateQueue) -> None:
    weights, gate = torch.zeros(2**23), cpp.Gate()
    task = sgd_task(weights, torch.ones(2**23), sgd(1.0), queue.pool)
    long = cpp.NormTask(torch.zeros(2**24).view(torch.uint8), queue.pool)
    long.set_segments([(0, 2**24, torch.float32)] * 40)
    queue.submit(-1, long, cpp.Gate())
    queue.submit(0, task, gate)
    assert not gate.is_open
    gate.wait()
    assert weights[-1] == -1
    cpp.SubmitTask(queue, 0, task, gate).run()
    gate.wait()
    assert weights[-1] == -2
    assert gate.is_open


def test_a_failure_fails_its_gate_and_is_raised_once(queue: cpp.UpdateQueue) -> None:
    weights, gates = torch.zeros(8), [cpp.Gate(), cpp.Gate()]
    queue.submit(0, failing_task(), gates[0], "the update of weights.3")
    queue.submit(1, sgd_task(weights, torch.ones(8), sgd(1.0), queue.pool), gates[1])
    with pytest.raises(RuntimeError, match=r"the update of weights\.3 failed: .*queue is closed"):
        queue.wait()
    queue.wait()
    assert gates[1].is_open
    assert weights[0] == -1, "the next task ran"
    with pytest.raises(RuntimeError, match=r"the update of weights\.3 failed"):
        gates[0].wait()


def test_closing_runs_what_is_pending_and_refuses_more(queue: cpp.UpdateQueue) -> None:
    weights, gate = torch.zeros(2**22), cpp.Gate()
    task = sgd_task(weights, torch.ones(2**22), sgd(1.0), queue.pool)
    queue.submit(0, task, gate)
    queue.submit(0, task, gate)
    queue.close()
    queue.close()
    assert weights[0] == -2
    assert gate.is_open
    with pytest.raises(RuntimeError, match="the update queue is closed"):
        queue.submit(0, task, gate)
    assert gate.is_open


def test_a_forgotten_queue_finishes_and_lets_its_memory_go() -> None:
    queue, weights, gate = cpp.UpdateQueue(2), torch.zeros(2**22), cpp.Gate()
    gradients = torch.frombuffer(bytearray(2**24), dtype=torch.float32)  # its last reference needs Python's lock
    gradients.fill_(1.0)
    queue.submit(0, sgd_task(weights, gradients, sgd(1.0), queue.pool), gate)
    del queue, gradients
    gc.collect()
    assert gate.is_open
    assert weights[-1] == -1


def test_a_task_in_progress_is_not_modified(queue: cpp.UpdateQueue) -> None:
    weights, gradients = torch.zeros(2**23), torch.ones(2**23)
    task = sgd_task(weights, gradients, sgd(1.0), queue.pool)
    runner = threading.Thread(target=task.run)
    runner.start()
    while not weights[0]:
        pass
    task.set([], [])
    runs = task.runs
    runner.join()
    assert runs == 1, "set waits for the run"
    assert bool((weights == -1).all())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_refused_and_ends() -> None:
    script = """
import os, sys, torch
from megatrain_fx.extension import runtime as cpp
queue = cpp.UpdateQueue(2)
child = os.fork()
if child == 0:
    try:
        queue.wait()
    except RuntimeError as error:
        sys.exit(7 if "forked" in str(error) else 8)
    sys.exit(9)
_, status = os.waitpid(child, 0)
queue.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 7


def test_a_process_may_end_with_updates_pending() -> None:
    script = """
import torch
from megatrain_fx.extension import runtime as cpp
queue = cpp.UpdateQueue(2)
weights = torch.frombuffer(bytearray(2**26), dtype=torch.float32).view(torch.uint8)
task = cpp.UpdateTask(weights, weights, [], None, queue.pool)
task.set([(0, 0, 2**24, torch.float32, 0)], [cpp.sgd_update(lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0,
    nesterov=False, step=1)])
for _ in range(20):
    queue.submit(0, task, cpp.Gate())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_wrong_segments_are_refused(queue: cpp.UpdateQueue) -> None:
    region = torch.zeros(256, dtype=torch.uint8)
    task = cpp.UpdateTask(region, region[:128], [torch.zeros(32)], None, queue.pool)
    update = sgd(1.0)
    for segment, text in (
        ((0, 0, 33, torch.float32, 0), "outside the gradients of 128 bytes"),
        ((2, 0, 1, torch.float32, 0), "misaligned or outside the weights"),
        ((-4, 0, 1, torch.float32, 0), "misaligned or outside"),
        ((0, 31, 2, torch.float32, 0), "outside the state of 32 elements"),
        ((0, -1, 2, torch.float32, 0), "outside the state"),
        ((0, 0, 8, torch.float64, 0), "must be torch.float32 or torch.bfloat16"),
        ((0, 0, 8, torch.float32, 1), "names update 1 of 1"),
    ):
        with pytest.raises(ValueError, match=text):
            task.set([segment], [update])
    with pytest.raises(ValueError, match="needs 2 state tensors; this task has 1"):
        task.set([(0, 0, 8, torch.float32, 0)], [cpp.adamw_update(step=1, **ADAMW)])
    norm = cpp.NormTask(region, queue.pool)
    with pytest.raises(ValueError, match="outside the gradients"):
        norm.set_segments([(0, 65, torch.float32)])
    with pytest.raises(ValueError, match=r"must be torch\.float32"):
        norm.set_segments([(0, 4, torch.int32)])


def test_wrong_memory_is_refused(queue: cpp.UpdateQueue) -> None:
    region, pool = torch.zeros(256, dtype=torch.uint8), queue.pool
    with pytest.raises(ValueError, match="the weights must be a contiguous one-dimensional uint8 CPU tensor"):
        cpp.UpdateTask(region.view(torch.float32), region, [], None, pool)
    with pytest.raises(ValueError, match="the gradients must be"):
        cpp.NormTask(region[::2], pool)
    with pytest.raises(ValueError, match="optimizer state must be"):
        cpp.UpdateTask(region, region, [torch.zeros(8), torch.zeros(9)], None, pool)
    with pytest.raises(ValueError, match="expected Short of 8"):
        cpp.UpdateTask(region, region, [torch.zeros(8)], torch.zeros(8), pool)
    with pytest.raises(ValueError, match="at most 2 state tensors, not 3"):
        cpp.UpdateTask(region, region, [torch.zeros(8)] * 3, None, pool)
    with pytest.raises(ValueError, match="step is 0"):
        cpp.sgd_update(lr=1.0, step=0, **SGD)
    with pytest.raises(ValueError, match="threads is 0"):
        cpp.UpdateQueue(0)


@pytest.mark.slow
def test_the_queue_under_the_thread_sanitizer(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    sanitize = [compiler, "-std=c++17", "-O1", "-fsanitize=thread", f"-I{ROOT / 'runtime_ext'}", "-pthread"]
    (tmp_path / "empty.cpp").write_text("int main() {}\n")
    probe = [*sanitize, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty")]
    if subprocess.run(probe, capture_output=True).returncode or subprocess.run(tmp_path / "empty").returncode:
        pytest.skip(f"{compiler} cannot build and run programs with -fsanitize=thread")
    sources = [ROOT / "tests" / "cpp" / "updates_stress.cpp"]
    sources += [ROOT / "runtime_ext" / f"{name}.cpp" for name in ("update_queue", "gate", "worker_pool")]
    subprocess.run([*sanitize, *map(str, sources), "-o", str(tmp_path / "updates_stress")], check=True)
    stress = subprocess.run([tmp_path / "updates_stress", "100", "1"], capture_output=True, text=True)
    assert stress.returncode == 0, stress.stderr
    assert stress.stdout == "100 rounds held\n"
