"""Hypothesis strategies for the facts of made-up models: chains, skips, shared, frozen and uneven regions."""

from __future__ import annotations

from hypothesis import strategies as st

from megatrain_fx.facts import RegionFacts, ScheduleFacts, StageFacts, UpdateMode, Updates
from megatrain_fx.ir import View

Draw = st.DrawFn


@st.composite
def schedule_facts(draw: Draw, most_stages: int = 6) -> ScheduleFacts:
    """Facts of a model with any flow of values forward, and any use of regions."""
    regions = draw(st.lists(_regions(), min_size=1, max_size=5))
    differentiable = {f"input.{k}" for k in range(2) if draw(st.booleans())}
    values = ["input.0", "input.1"]
    stages = []
    for number in range(draw(st.integers(1, most_stages))):
        stage = _stage(draw, number, regions, values, differentiable)
        differentiable.update(stage.differentiable_outputs)
        values += stage.outputs
        stages.append(stage)
    outputs = (stages[-1].outputs[0], *draw(st.lists(st.sampled_from(values), max_size=2)))
    wanted = tuple(name for name in outputs if name in differentiable)
    training = bool(wanted) and draw(st.booleans())
    return ScheduleFacts(
        stages=tuple(stages),
        regions=tuple(regions),
        outputs=outputs,
        differentiable_outputs=wanted if training else (),
        slots=draw(st.integers(1, 4)),
        slabs=draw(st.integers(1, 3)),
        training=training,
        resume=training and draw(st.booleans()),
        updates=_updates(draw, regions) if training else Updates(),
    )


@st.composite
def chain_of_equals(draw: Draw) -> ScheduleFacts:
    """Facts of a chain in which every stage has a region of its own, all of one size."""
    count = draw(st.integers(1, 7))
    stages = []
    for number in range(count):
        source, result = (f"h{number - 1}.0" if number else "input.0",), (f"h{number}.0",)
        trained = source if number else ()
        stages.append(StageFacts(0, (number,), (number,), _views(number, 1), source, result, trained, result))
    last = (f"h{count - 1}.0",)
    numbers = (draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    return ScheduleFacts(tuple(stages), (RegionFacts(64, 64),) * count, last, last, *numbers)


@st.composite
def _regions(draw: Draw) -> RegionFacts:
    """A region of 1 to 64 parameters of 16 bytes; all, some or none of them are trained."""
    parameters = draw(st.integers(1, 64))
    trained = draw(st.one_of(st.just(0), st.just(parameters), st.integers(0, parameters)))
    return RegionFacts(16 * parameters, 16 * trained)


def _updates(draw: Draw, regions: list[RegionFacts]) -> Updates:
    """An optimizer of some of the trained regions."""
    trained = [number for number, region in enumerate(regions) if region.gradient_bytes]
    chosen = draw(st.sets(st.sampled_from(trained))) if trained else set()
    return Updates(draw(st.sampled_from(UpdateMode)), tuple(sorted(chosen)))


def _stage(
    draw: Draw, number: int, regions: list[RegionFacts], values: list[str], differentiable: set[str]
) -> StageFacts:
    used = tuple(sorted(draw(st.sets(st.sampled_from(range(len(regions))), max_size=3))))
    trained = tuple(region for region in used if regions[region].gradient_bytes)
    others = draw(st.lists(st.sampled_from(values), max_size=2))
    inputs = tuple(dict.fromkeys((values[-1], *others)))
    arriving = tuple(name for name in inputs if name in differentiable)
    outputs = tuple(f"h{number}.{position}" for position in range(draw(st.integers(1, 2))))
    learns = bool(trained or arriving)
    return StageFacts(
        template=number,
        regions=used,
        trainable_regions=trained,
        views=tuple(view for region in used for view in _views(region, draw(st.integers(1, 2)))),
        inputs=inputs,
        outputs=outputs,
        differentiable_inputs=arriving,
        differentiable_outputs=tuple(name for name in outputs if learns and draw(st.booleans())),
    )


def _views(region: int, parameters: int) -> tuple[tuple[str, View], ...]:
    """Parameters of 16 bytes at the start of a region, where every region has room for them."""
    return tuple(
        (f"{region}.parameter{k}", View(f"weights.{region}", 0, (4,) if k == 0 else (2, 2), "float32"))
        for k in range(parameters)
    )
