"""CPU optimizer kernels: torch.optim bit for bit, and the same on every instruction set and number of threads."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatrain_fx import _runtime

INSTRUCTION_SETS = _runtime.instruction_sets()
# ATen's vector kernels multiply and add in one rounding only where the processor can.
ATEN_FUSES_MULTIPLY_ADD = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
needs_aten_fma = pytest.mark.skipif(not ATEN_FUSES_MULTIPLY_ADD, reason="ATen runs without fused multiply-add")
SIZE = 4096  # whole vectors for ATen, whose last, incomplete vector is computed with other roundings
PRECISIONS = ("float32", "bfloat16", "bfloat16-split")
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False}
LION = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Seeds, and keeps ATen from dividing a tensor into ranges that end inside a vector."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pool() -> _runtime.WorkerPool:
    return _runtime.WorkerPool(2)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 upper half of float32 numbers, rounded half up, and the int16 remainder."""
    bits = master.view(torch.int32).to(torch.int64)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of split's result."""
    bits = (param.view(torch.int16).to(torch.int64) << 16) + remainder.to(torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


class Memory:
    """Parameters, gradients and state of one region, in one precision."""

    def __init__(self, master: Tensor, precision: str) -> None:
        self.precision = precision
        self.remainder: Tensor | None = None
        if precision == "float32":
            self.param = master.clone()
        elif precision == "bfloat16":
            self.param = master.bfloat16()
        else:
            self.param, self.remainder = split(master)
        self.grad = torch.zeros_like(self.param)
        self.first = torch.zeros(master.numel())
        self.second = torch.zeros(master.numel())

    @property
    def master(self) -> Tensor:
        return self.param.float() if self.remainder is None else join(self.param, self.remainder)

    def set_grad(self, grad: Tensor) -> None:
        self.grad.copy_(grad)

    def adamw(self, pool: _runtime.WorkerPool, step: int, **options: object) -> None:
        arguments = (pool, self.param, self.grad, self.first, self.second, self.remainder)
        _runtime.adamw_step(*arguments, step=step, **(ADAMW | options))

    def sgd(self, pool: _runtime.WorkerPool, step: int, **options: object) -> None:
        _runtime.sgd_step(pool, self.param, self.grad, self.first, self.remainder, step=step, **(SGD | options))

    def lion(self, pool: _runtime.WorkerPool, step: int, **options: object) -> None:
        _runtime.lion_step(pool, self.param, self.grad, self.first, self.remainder, step=step, **(LION | options))


def torch_adam(param: Tensor, decoupled: bool = True, **options: float) -> torch.optim.Optimizer:
    given = ADAMW | options
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    betas = (given["beta1"], given["beta2"])
    return kind([param], lr=given["lr"], betas=betas, eps=given["eps"], weight_decay=given["weight_decay"], fused=True)


@needs_aten_fma
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}, {"beta1": 0.3, "beta2": 0.6, "eps": 1e-3}])
def test_adamw_float32_is_torch_fused(
    pool: _runtime.WorkerPool, instruction_set: str, decoupled: bool, options: dict[str, float]
) -> None:
    memory = Memory(torch.randn(SIZE), "float32")
    eager = torch.nn.Parameter(memory.param.clone())
    optimizer = torch_adam(eager, decoupled, **options)
    for step in range(1, 101):
        eager.grad = torch.randn(SIZE)
        memory.set_grad(eager.grad)
        optimizer.step()
        memory.adamw(pool, step, decoupled=decoupled, instruction_set=instruction_set, **options)
        assert equal_bits(memory.param, eager.data), step
    assert equal_bits(memory.first, optimizer.state[eager]["exp_avg"])
    assert equal_bits(memory.second, optimizer.state[eager]["exp_avg_sq"])


@needs_aten_fma
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_adamw_split_follows_a_float32_master(pool: _runtime.WorkerPool, instruction_set: str) -> None:
    memory = Memory(0.02 * torch.randn(SIZE), "bfloat16-split")
    eager = torch.nn.Parameter(memory.master)
    optimizer = torch_adam(eager, lr=1e-5)
    for step in range(1, 101):
        memory.set_grad(torch.randn(SIZE))
        eager.grad = memory.grad.float()
        optimizer.step()
        memory.adamw(pool, step, lr=1e-5, instruction_set=instruction_set)
        assert equal_bits(memory.master, eager.data), step
    assert equal_bits(memory.param, split(eager.data)[0])


@needs_aten_fma
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_adamw_bfloat16_rounds_a_float32_step(pool: _runtime.WorkerPool, instruction_set: str) -> None:
    memory = Memory(torch.randn(SIZE), "bfloat16")
    eager = torch.nn.Parameter(memory.param.float())
    optimizer = torch_adam(eager)
    for step in range(1, 21):
        memory.set_grad(torch.randn(SIZE))
        eager.grad = memory.grad.float()
        optimizer.step()
        eager.data.copy_(eager.data.bfloat16())
        memory.adamw(pool, step, instruction_set=instruction_set)
        assert equal_bits(memory.param, eager.data.bfloat16()), step


@needs_aten_fma
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16-split"])
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True}, {"dampening": 0.2}, {"weight_decay": 0.0}, {"momentum": 0.0}],
    ids=lambda options: next(iter(options), "momentum"),
)
def test_sgd_is_torch_sgd(
    pool: _runtime.WorkerPool, instruction_set: str, precision: str, options: dict[str, float]
) -> None:
    memory = Memory(torch.randn(SIZE), precision)
    memory.first.fill_(math.nan)  # the first step must not read it
    eager = torch.nn.Parameter(memory.master)
    optimizer = torch.optim.SGD([eager], foreach=False, **(SGD | options))
    for step in range(1, 51):
        memory.set_grad(torch.randn(SIZE))
        eager.grad = memory.grad.float()
        optimizer.step()
        memory.sgd(pool, step, instruction_set=instruction_set, **options)
        assert equal_bits(memory.master, eager.data), step


def eager_lion(param: Tensor, grad: Tensor, exp_avg: Tensor) -> None:
    """Program 1 of the Lion paper, in place."""
    direction = exp_avg.mul(LION["beta1"]).add_(grad, alpha=1 - LION["beta1"]).sign_()
    param.mul_(1 - LION["lr"] * LION["weight_decay"]).add_(direction, alpha=-LION["lr"])
    exp_avg.mul_(LION["beta2"]).add_(grad, alpha=1 - LION["beta2"])


@needs_aten_fma
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16-split"])
def test_lion_is_eager_lion(pool: _runtime.WorkerPool, instruction_set: str, precision: str) -> None:
    memory = Memory(torch.randn(SIZE), precision)
    param, exp_avg = memory.master.clone(), torch.zeros(SIZE)
    for step in range(1, 51):
        memory.set_grad(torch.randn(SIZE) * (torch.rand(SIZE) > 0.1))  # some gradients are exactly zero
        eager_lion(param, memory.grad.float(), exp_avg)
        memory.lion(pool, step, instruction_set=instruction_set)
        assert equal_bits(memory.master, param), step
        assert equal_bits(memory.first, exp_avg), step


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("precision", [*PRECISIONS, "stochastic"])
@pytest.mark.parametrize("size", [0, 1, 15, 17, 33, 5_003, 70_001])
def test_instruction_sets_and_threads_agree(optimizer: str, precision: str, size: int) -> None:
    options = {"stochastic_seed": 7} if precision == "stochastic" else {}
    master, grads = torch.randn(size), torch.randn(3, size)
    results = []
    for instruction_set in INSTRUCTION_SETS:
        for threads in (1, 3):
            memory = Memory(master, "bfloat16" if options else precision)
            workers = _runtime.WorkerPool(threads)
            for step, grad in enumerate(grads, 1):
                memory.set_grad(grad)
                update: Callable[..., None] = getattr(memory, optimizer)
                update(workers, step, grad_scale=0.37, instruction_set=instruction_set, **options)
            results.append((memory.master, memory.first, memory.second))
    for result in results[1:]:
        assert all(equal_bits(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("size", [1, 13, 5_003])
def test_adamw_of_any_size_is_close_to_torch(pool: _runtime.WorkerPool, size: int) -> None:
    memory = Memory(torch.randn(size), "float32")
    eager = torch.nn.Parameter(memory.param.clone())
    optimizer = torch_adam(eager)
    for step in range(1, 11):
        eager.grad = torch.randn(size)
        memory.set_grad(eager.grad)
        optimizer.step()
        memory.adamw(pool, step)
    torch.testing.assert_close(memory.param, eager.data, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_split_keeps_every_master(pool: _runtime.WorkerPool, instruction_set: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (SIZE,)).to(torch.int32)
    bits[:8] = torch.tensor([0, -(2**31), 1, 0x7F7FFFFF, 0x7F800000, 0x00007FFF, 0x00008000, 0x7F7F8000])
    master = bits.view(torch.float32)
    master = torch.where(master.isnan(), torch.tensor(1.0), master)
    memory = Memory(master, "bfloat16-split")
    memory.sgd(pool, 1, lr=0.0, momentum=0.0, weight_decay=0.0, instruction_set=instruction_set)
    assert equal_bits(memory.master, master)
    assert equal_bits(memory.param, split(master)[0])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_grad_scale_is_scaling_in_place(pool: _runtime.WorkerPool, instruction_set: str, precision: str) -> None:
    scaled, clipped = (Memory(torch.ones(SIZE), precision) for _ in range(2))
    for step in range(1, 4):
        scaled.set_grad(100 * torch.randn(SIZE))
        eager = torch.nn.Parameter(torch.ones(SIZE, dtype=scaled.grad.dtype))
        eager.grad = scaled.grad.clone()
        total = torch.nn.utils.clip_grad_norm_([eager], 1.0)
        coefficient = (1.0 / (total + 1e-6)).clamp(max=1.0).item()
        clipped.set_grad(eager.grad)
        scaled.adamw(pool, step, grad_scale=coefficient, instruction_set=instruction_set)
        clipped.adamw(pool, step, instruction_set=instruction_set)
        assert not torch.equal(scaled.grad, clipped.grad)
        assert equal_bits(scaled.master, clipped.master)
        assert equal_bits(scaled.second, clipped.second)


def stochastic_step(pool: _runtime.WorkerPool, master: Tensor, seed: int, step: int = 1) -> Tensor:
    """bfloat16 numbers that one step of gradient descent from zero rounds to: master, stochastically."""
    param = torch.zeros(master.numel(), dtype=torch.bfloat16)
    grad = torch.full_like(param, -1.0)
    options = SGD | {"lr": master[0].item(), "momentum": 0.0, "stochastic_seed": seed}
    _runtime.sgd_step(pool, param, grad, None, None, step=step, **options)
    return param


def test_stochastic_rounding_is_unbiased(pool: _runtime.WorkerPool) -> None:
    size, number = 1 << 18, 1.0 + 0.3 / 128  # three tenths of the way between two neighbours
    rounded = stochastic_step(pool, torch.full((size,), number), seed=1).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    up = (rounded > 1.0).float()
    deviation = math.sqrt(0.3 * 0.7 / size)
    assert abs(up.mean().item() - 0.3) < 5 * deviation
    for lag in (1, 2, 8, 16, 2048):
        correlation = ((up[lag:] - 0.3) * (up[:-lag] - 0.3)).mean().item() / (0.3 * 0.7)
        assert abs(correlation) < 5 / math.sqrt(size), lag


def test_stochastic_rounding_keeps_bfloat16_numbers(pool: _runtime.WorkerPool) -> None:
    assert torch.equal(stochastic_step(pool, torch.full((SIZE,), 1.5), seed=1), torch.full((SIZE,), 1.5).bfloat16())


def test_stochastic_rounding_depends_on_seed_and_step(pool: _runtime.WorkerPool) -> None:
    master = torch.full((1 << 16,), 1.0 + 0.5 / 128)
    first = stochastic_step(pool, master, seed=1)
    assert torch.equal(first, stochastic_step(pool, master, seed=1))
    for seed, step in ((2, 1), (1, 2), (2**63, 1)):
        agreeing = (first == stochastic_step(pool, master, seed, step)).float().mean().item()
        assert abs(agreeing - 0.5) < 5 * 0.5 / math.sqrt(master.numel()), (seed, step)


def test_stochastic_rounding_keeps_small_updates(pool: _runtime.WorkerPool) -> None:
    nearest, stochastic = (Memory(torch.ones(1 << 16), "bfloat16") for _ in range(2))
    for step in range(1, 101):
        for memory, seed in ((nearest, None), (stochastic, 3)):
            memory.set_grad(torch.ones(1 << 16))
            memory.sgd(pool, step, lr=1e-5, momentum=0.0, weight_decay=0.0, stochastic_seed=seed)
    assert torch.equal(nearest.param, torch.ones(1 << 16).bfloat16())
    assert abs(stochastic.param.float().mean().item() - (1 - 1e-3)) < 1e-4


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_gradients_make_nan_and_touch_no_neighbour(
    pool: _runtime.WorkerPool, instruction_set: str, precision: str, bad: float
) -> None:
    memory = Memory(torch.ones(64), precision)
    memory.set_grad(torch.where(torch.arange(64) == 5, bad, 1.0))
    memory.adamw(pool, 1, instruction_set=instruction_set)
    assert memory.param.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 1000, 65_536, 300_007])
def test_squared_norm_is_exact_and_always_the_same(dtype: torch.dtype, size: int) -> None:
    grad = (torch.randn(size) * 10.0 ** torch.randint(-10, 10, (size,))).to(dtype)
    results = {
        _runtime.squared_norm(_runtime.WorkerPool(threads), grad, instruction_set=instruction_set)
        for instruction_set in INSTRUCTION_SETS
        for threads in (1, 2, 5)
    }
    assert len(results) == 1
    assert math.isclose(results.pop(), math.fsum(grad.double().square().tolist()), rel_tol=1e-12)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 17, 1002])
def test_squared_norm_passes_on_bad_numbers(
    pool: _runtime.WorkerPool, instruction_set: str, dtype: torch.dtype, position: int
) -> None:
    grad = torch.full((1003,), 3e38, dtype=dtype)
    assert math.isfinite(_runtime.squared_norm(pool, grad, instruction_set=instruction_set))
    grad[position] = -math.inf
    assert _runtime.squared_norm(pool, grad, instruction_set=instruction_set) == math.inf
    grad[position] = math.nan
    assert math.isnan(_runtime.squared_norm(pool, grad, instruction_set=instruction_set))


def test_step_is_seen_by_autograd(pool: _runtime.WorkerPool) -> None:
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    _runtime.sgd_step(pool, weight.detach(), torch.ones(4), None, None, **(SGD | {"momentum": 0.0}), step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("replaced", "error", "message"),
    [
        ({"param": torch.zeros(8, dtype=torch.float16)}, TypeError, r"param is Half\[8\] on cpu; its dtype"),
        ({"param": torch.zeros(2, 4)}, ValueError, r"param is Float\[2, 4\] on cpu; give a contiguous 1-D"),
        ({"param": torch.zeros(8, device="meta")}, ValueError, r"param is Float\[8\] on meta; give a dense CPU"),
        ({"grad": torch.zeros(8, dtype=torch.bfloat16)}, TypeError, r"grad is BFloat16\[8\].*must be Float"),
        ({"grad": torch.zeros(16)[::2]}, ValueError, r"grad is Float\[8\] on cpu; give a contiguous 1-D"),
        ({"exp_avg": torch.zeros(7)}, ValueError, r"exp_avg is Float\[7\].*as many elements as param, 8"),
        ({"exp_avg_sq": torch.zeros(8).double()}, TypeError, r"exp_avg_sq is Double\[8\].*must be Float"),
        ({"remainder": torch.zeros(8, dtype=torch.int16)}, TypeError, r"only a BFloat16 parameter has one"),
        ({"stochastic_seed": 1}, ValueError, r"nothing is rounded here"),
        ({"step": 0}, ValueError, r"step is 0; the first step is 1"),
        ({"instruction_set": "mmx"}, ValueError, r'instruction_set is "mmx"; this processor\'s are "auto"'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(
    pool: _runtime.WorkerPool, replaced: dict[str, object], error: type[Exception], message: str
) -> None:
    tensors: dict[str, object] = {name: torch.zeros(8) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    arguments = tensors | {"remainder": None, "step": 1} | ADAMW | replaced
    with pytest.raises(error, match=message):
        _runtime.adamw_step(pool, **arguments)


def test_momentum_needs_a_buffer(pool: _runtime.WorkerPool) -> None:
    with pytest.raises(ValueError, match="momentum_buffer is None"):
        _runtime.sgd_step(pool, torch.zeros(8), torch.zeros(8), None, None, **SGD, step=1)


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_pool_refuses_bad_thread_counts(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {threads}; give a number from 1 to"):
        _runtime.WorkerPool(threads)


def test_pool_serves_several_callers() -> None:
    workers = _runtime.WorkerPool(3)
    grad = torch.randn(300_000)
    expected = _runtime.squared_norm(workers, grad)
    wrong: list[float] = []

    def call() -> None:
        wrong.extend(norm for norm in (_runtime.squared_norm(workers, grad) for _ in range(50)) if norm != expected)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_pool_in_a_forked_process_is_refused_and_does_not_hang() -> None:
    workers = [_runtime.WorkerPool(3)]
    grad = torch.ones(300_000)
    _runtime.squared_norm(workers[0], grad)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _runtime.squared_norm(workers[0], grad)
        except RuntimeError as error:
            status = 0 if "make a pool in the child" in str(error) else 2
        workers.clear()  # destroys the pool
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
