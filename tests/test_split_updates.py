"""Updates in two parts: rows of a tied matrix that a batch does not look up, and the others."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megatrain_fx as megatrain
from megatrain_fx.extension import runtime as native
from megatrain_fx.facts import UpdateMode, Updates
from megatrain_fx.ir import Op
from megatrain_fx.schedule import Schedule
from optimizer_training import assert_equal, one_torch_thread  # noqa: F401  a fixture
from schedule_edits import changed, dependency_deletions, find, moved, removed

optim = megatrain.optim
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]
VOCABULARY, WIDTH = 96, 16


class Tied(nn.Module):
    """Tokens [batch, length] -> logits, or hidden states for those who do not want the head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden), hidden


def compiled(dtype: torch.dtype = torch.float32, device: Any = "cpu", **options: Any) -> nn.Module:
    return megatrain.compile(Tied(dtype), device=device, stage_bytes=0, **options)


def tokens(step: int, length: int = 5) -> Tensor:
    return torch.randint(0, VOCABULARY // 2, (2, length), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int, part: str = "logits", device: Any = "cpu", length: int = 5) -> Tensor:
    given = tokens(step, length + step % 2).to(device)
    logits, hidden = model(given)
    if part == "hidden":
        return hidden.float().square().sum()
    return functional.cross_entropy(logits.float().flatten(0, 1), given.flatten())


def schedule(model: nn.Module, **options: Any) -> Schedule:
    program = megatrain.trace(model, tokens(0))
    updates = Updates(UpdateMode.DURING_BACKWARD, tuple(range(len(program.facts.regions))))
    return program.lower(updates=updates, **options).schedule


def texts(found: Schedule, *ops: Op) -> list[str]:
    return [f"{o.op} {', '.join(o.reads)} -> {', '.join(o.writes)}" for o in found if o.op in ops]


def test_the_rows_that_are_not_looked_up_are_updated_before_the_layers() -> None:
    found = schedule(compiled())
    assert texts(found, Op.SELECT, Op.UPDATE) == [
        "select input.0 -> rows.0",
        "update gradients.0.rest, rows.0 -> weights.0.rest",
        "update gradients.2 -> weights.2",
        "update gradients.1 -> weights.1",
        "update gradients.0.rows, rows.0 -> weights.0.rows",
    ]
    assert Schedule.parse(str(found)) == found


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


class Scaled(Tied):
    """The matrix is also used whole, where it is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Weighted(VOCABULARY, WIDTH)
        self.head.weight = self.embedding.weight


class Weighted(nn.Embedding):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given) * self.weight.mean()


class Shifted(Tied):
    """Row numbers are computed within the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Next(VOCABULARY, WIDTH)
        self.head.weight = self.embedding.weight


class Next(nn.Embedding):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given + 1)


class DenseGradient(torch.autograd.Function):
    """A lookup whose own gradient reaches every row."""

    @staticmethod
    def forward(context: Any, weight: Tensor, given: Tensor) -> Tensor:
        context.shape = weight.shape
        return functional.embedding(given, weight)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.sum((0, 1)).expand(context.shape), None


class Regularized(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Dense(VOCABULARY, WIDTH)
        self.head.weight = self.embedding.weight


class Dense(nn.Embedding):
    def forward(self, given: Tensor) -> Tensor:
        return DenseGradient.apply(self.weight, given)


class Frozen(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.weight.requires_grad_(False)


@pytest.mark.parametrize("kind", [Untied, Scaled, Shifted, Regularized, Frozen])
def test_other_uses_are_updated_whole(kind: type[Tied]) -> None:
    model = megatrain.compile(kind(), device="cpu", stage_bytes=0)
    program = megatrain.trace(model, tokens(0))
    trained = tuple(
        region.index for region in program.layout.regions if program.facts.regions[region.index].gradient_bytes
    )
    found = program.lower(updates=Updates(UpdateMode.DURING_BACKWARD, trained)).schedule
    assert not texts(found, Op.SELECT)
    assert all(".re" not in text and ".rows" not in text for text in texts(found, Op.UPDATE))


class Contested(Tied):
    """Layers as large as the matrix take its slot in between."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, 80), nn.Tanh(), nn.Linear(80, WIDTH)) for _ in range(4))
        self.layers = nn.ModuleList(blocks)


def test_a_matrix_that_is_fetched_again_is_updated_whole() -> None:
    """Its rows must not change before the last fetch, which comes when the layers have gone backward."""
    found = schedule(megatrain.compile(Contested(), device="cpu", stage_bytes=0, slots=1))
    fetches = [text for text in texts(found, Op.PREFETCH) if text.startswith("prefetch weights.0 ")]
    assert len(fetches) == 3
    assert not texts(found, Op.SELECT)


def test_a_clipped_or_resumed_step_is_not_split() -> None:
    model = compiled()
    assert not texts(schedule(model, resume=True), Op.SELECT)
    program = megatrain.trace(model, tokens(0))
    assert not texts(program.lower(updates=Updates(UpdateMode.AFTER_CLIP, (0, 1, 2))).schedule, Op.SELECT)


def test_no_dependency_can_be_deleted() -> None:
    found = schedule(compiled(slots=2))
    mutants = list(dependency_deletions(found))
    assert mutants
    for mutant in mutants:
        with pytest.raises(megatrain.ScheduleError):
            mutant.schedule.verify()


SPLIT = schedule(compiled())
LAST = find(SPLIT, Op.UPDATE, nth=3)
BROKEN: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    "a part and the whole": (
        lambda s: changed(s, find(s, Op.PREFETCH), reads=("weights.0",)),
        "weights.0 overlaps weights.0.rows and weights.0.rest",
    ),
    "a part fetched alone": (
        lambda s: changed(s, find(s, Op.PREFETCH), reads=("weights.0.rows",)),
        "prefetch cannot take weights.0.rows at once, nor a part of a region that it needs whole",
    ),
    "an unknown part": (
        lambda s: changed(s, find(s, Op.PREFETCH), reads=("weights.0.some",)),
        "weights.0.some is no part of weights.0",
    ),
    "rows of another region": (
        lambda s: changed(s, LAST, reads=("gradients.0.rows", "rows.1")),
        "update of gradients.0.rows reads rows.1",
    ),
    "gradients of other rows": (
        lambda s: changed(s, LAST, reads=("gradients.0.rest", "rows.0")),
        "weights.0.rows cannot be updated with gradients.0.rest",
    ),
    "parts without a select": (lambda s: removed(s, find(s, Op.SELECT)), "no select writes rows.0"),
    "a select of another stage": (
        lambda s: changed(s, find(s, Op.SELECT), stage=1),
        "stage.1 loads nothing from weights.0, so it looks up no rows of it",
    ),
    "the head's gradients by rows": (
        lambda s: changed(
            s,
            find(s, Op.ACCUMULATE),
            reads=(*s.operations[find(s, Op.ACCUMULATE)].reads, "rows.0"),
            writes=("gradients.0.rows",),
        ),
        "trains all rows of gradients.0, not only those that another stage looks up",
    ),
    "the rest before the head's gradients": (
        lambda s: moved(changed(s, find(s, Op.UPDATE), after=()), find(s, Op.UPDATE), find(s, Op.ACCUMULATE)),
        "gradients.0.rest is not complete yet",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule: str) -> None:
    edit, reason = BROKEN[rule]
    with pytest.raises(megatrain.ScheduleError, match=re.escape(reason)):
        edit(SPLIT).verify()


@pytest.mark.parametrize("width", [1, 3, 64, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parts_of_a_kernel_are_the_whole(width: int, dtype: torch.dtype) -> None:
    """Rows that end inside vectors, blocks and parts."""
    count = 997 if width < 5000 else 8000  # more elements than an update does at a time
    rows = (torch.rand(count) < 0.3).to(torch.uint8)
    queue = native.UpdateQueue(2)
    weights, gradients = torch.randn(count * width).to(dtype), torch.randn(count * width).to(dtype)
    results = []
    for parts in ((None,), (True, False)):
        values, states = weights.clone(), [torch.zeros(count * width) for _ in range(2)]
        task = native.UpdateTask(values.view(torch.uint8), gradients.view(torch.uint8), states, None, queue.pool)
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 1}
        for chosen in parts:
            selection = () if chosen is None else (rows, chosen)
            task.set([(0, 0, count * width, dtype, 0)], [native.adamw_update(**options)], *selection)
            task.run()
        results.append([values, *states])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    with pytest.raises(ValueError, match="divide evenly"):
        task.set(
            [(0, 0, count * width, dtype, 0)],
            [native.adamw_update(**options)],
            torch.zeros(count + 1, dtype=torch.uint8),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("pooled", [False, True])
def test_selected_rows_are_added(dtype: torch.dtype, pooled: bool) -> None:
    rows = (torch.rand(1000) < 0.3).to(torch.uint8)
    gradient, added = torch.randn(1000, 7).to(dtype), torch.randn(int(rows.sum()), 7).to(dtype)
    slab = torch.full((1000, 7), torch.nan, dtype=dtype)
    slab[: len(added)] = added
    expected = gradient.clone()
    expected[rows.bool()] += added
    pool = native.UpdateQueue(3).pool if pooled else None
    task = native.AccumulateTask(slab.flatten().view(torch.uint8), gradient.flatten().view(torch.uint8), pool)
    task.set_segments([(0, 7000, dtype, 2)], rows)
    task.run()
    assert torch.equal(gradient, expected)
    with pytest.raises(ValueError, match="divide evenly"):
        task.set_segments([(0, 7000, dtype, 1)], rows)


KINDS = [
    (optim.AdamW, "fp32", {}),
    (optim.AdamW, "bf16-split", {}),
    (optim.AdamW, "bf16", {"stochastic_rounding": True}),
    (optim.SGD, "fp32", {"momentum": 0.9}),
    (optim.Lion, "bf16-split", {}),
]


@pytest.mark.parametrize(
    ("kind", "precision", "options", "pin"), [*((*kind, "none") for kind in KINDS), (*KINDS[1], "staging")]
)
def test_the_numbers_are_those_of_whole_updates(
    kind: Any, precision: str, options: dict[str, Any], pin: str, device: torch.device
) -> None:
    torch.use_deterministic_algorithms(True)
    optimizers = []
    for whole in (False, True):
        torch.manual_seed(1)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        model = compiled(dtype, device, precision=precision, chaos=3, pin=pin)
        optimizer = kind(model, lr=1e-2, **options, **({"during_backward": False} if whole else {}))
        for step in range(5):
            loss_of(model, step, device=device).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        optimizers.append(optimizer)
    assert_equal(*optimizers)


def test_micro_batches_and_gradients_are_those_of_whole_updates() -> None:
    optimizers, gradients = [], []
    for whole in (False, True):
        model = compiled()
        given = {"during_backward": False} if whole else {}
        optimizer = optim.AdamW(model, lr=0.01, accumulation_steps=2, **given)
        for step in range(4):
            loss_of(model, 2 * step).backward()
            loss_of(model, 2 * step + 1).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_equal(*optimizers)
    for one, other in zip(gradients[:4], gradients[4:], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_head_without_gradient_leaves_all_rows_to_the_lookup(accumulated: bool) -> None:
    """Then nothing is home when the first part is due, or only what an earlier pass brought."""
    optimizers = []
    for whole in (False, True):
        model = compiled()
        given = {"during_backward": False} if whole else {}
        optimizer = optim.AdamW(model, lr=0.01, accumulation_steps=1 + accumulated, **given)
        for step in range(4):
            if accumulated:
                loss_of(model, step + 10).backward()
            loss_of(model, step, "hidden" if step != 1 else "logits").backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_equal(*optimizers)


@pytest.mark.parametrize("length", [5, VOCABULARY], ids=["few tokens", "more tokens than rows"])
def test_gradients_equal_those_of_eager(length: int) -> None:
    model, eager = compiled(), Tied()
    optimizer = optim.SGD(model, lr=0.1)
    for step in range(3):
        loss_of(model, step, length=length).backward()
        loss_of(eager, step, length=length).backward()
        for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-7), name
        optimizer.step()
        optimizer.zero_grad()
        eager.zero_grad()
        optimizer.synchronize()
        eager.load_state_dict(model.state_dict())


def test_a_pass_that_fails_between_the_parts_leaves_the_model_usable() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            if failing:
                time.sleep(0.3)  # the first part has begun by then
                raise ArithmeticError("as planned")
            return gradient

    class Layer(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            return Failing.apply(super().forward(given))

    network = Tied()
    network.layers[0] = Layer(WIDTH, WIDTH)
    model = megatrain.compile(network, device="cpu", stage_bytes=0)
    optimizer = optim.AdamW(model, lr=0.01)
    failing = False
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    before = model.embedding.weight.detach().clone()
    loss = loss_of(model, 1)
    failing = True
    with pytest.raises(Exception, match="as planned"):
        loss.backward()
    failing = False
    optimizer.step()
    optimizer.synchronize()
    looked_up = tokens(1, 6).unique()
    rest = [row for row in range(VOCABULARY) if row not in looked_up]
    after = model.embedding.weight.detach().clone()
    assert torch.equal(before[looked_up], after[looked_up])
    assert not (before[rest] == after[rest]).all(1).any()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    optimizer.synchronize()
    assert not (after == model.embedding.weight.detach()).all(1).any()
