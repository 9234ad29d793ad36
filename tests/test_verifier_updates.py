"""The verifier's rules for the optimizer's step, each broken in a legal schedule, within a step and across two."""

from __future__ import annotations

import pytest

from broken_rules import Edit, refusal
from megatrain_fx.facts import UpdateMode, Updates
from megatrain_fx.ir import Lane, Op, Operation
from megatrain_fx.schedule import Schedule
from schedule_edits import changed, dependency_deletions, find, inserted, moved, removed
from synthetic_facts import chain_schedule

REGIONS = (0, 1, 2)
DURING_BACKWARD = chain_schedule(3, updates=Updates(UpdateMode.DURING_BACKWARD, REGIONS))
AFTER_CLIP = chain_schedule(3, updates=Updates(UpdateMode.AFTER_CLIP, REGIONS))
FIRST = find(DURING_BACKWARD, Op.UPDATE)
CLIP = find(AFTER_CLIP, Op.CLIP)


def without_waits(schedule: Schedule, op: Op, nth: int = 0) -> Schedule:
    """One operation that waits neither for this step nor for the previous one."""
    return changed(schedule, find(schedule, op, nth=nth), after=(), after_previous=())


RULES: dict[str, tuple[Schedule, Edit, str]] = {
    "updated before its gradients are complete": (
        DURING_BACKWARD,
        lambda schedule: moved(without_waits(schedule, Op.UPDATE), FIRST, FIRST - 1),
        "gradients.2 is not complete yet: %23 still adds to it",
    ),
    "measured before its gradients are complete": (
        AFTER_CLIP,
        lambda schedule: moved(schedule, find(schedule, Op.NORM), 0),
        "gradients.2 is not complete yet: %23 still adds to it",
    ),
    "a norm that clip does not read": (
        AFTER_CLIP,
        lambda schedule: changed(schedule, CLIP, reads=("norm.2", "norm.1")),
        "clip must read every norm, once and in order; missing: norm.0",
    ),
    "norms in another order": (
        AFTER_CLIP,
        lambda schedule: changed(schedule, CLIP, reads=("norm.0", "norm.1", "norm.2")),
        "clip must read every norm, once and in order; missing: none",
    ),
    "updated with the gradients of another region": (
        DURING_BACKWARD,
        lambda schedule: changed(schedule, FIRST, writes=("weights.1",)),
        "weights.1 cannot be updated with gradients.2",
    ),
    "updated before its last use": (
        DURING_BACKWARD,
        lambda schedule: inserted(
            inserted(
                schedule, len(schedule), Operation(Op.PREFETCH, Lane.H2D, reads=("weights.2",), writes=("slot.0",))
            ),
            len(schedule) + 1,
            Operation(Op.RELEASE, Lane.H2D, reads=("slot.0",)),
        ),
        "weights.2 is updated before its last use in this step, the prefetch %43",
    ),
    "updated twice": (
        DURING_BACKWARD,
        lambda schedule: inserted(
            schedule,
            FIRST + 1,
            Operation(Op.UPDATE, Lane.OPTIMIZER, reads=("gradients.2",), writes=("weights.2",), after=(FIRST,)),
        ),
        "weights.2 is updated twice in one step",
    ),
    "an update on another lane": (
        DURING_BACKWARD,
        lambda schedule: changed(schedule, FIRST, lane=Lane.HOST),
        "update runs in lane optimizer, not host",
    ),
    "a race with the gradients": (
        DURING_BACKWARD,
        lambda schedule: without_waits(schedule, Op.UPDATE),
        "race on gradients.2: %22 (accumulate) need not be complete when %23 (update) starts; add 'after %22'",
    ),
    "a race with the update of the previous step": (
        AFTER_CLIP,
        lambda schedule: without_waits(schedule, Op.PREFETCH),
        "race on weights.0: prev %44 (update) need not be complete when %0 (prefetch) starts; add 'after prev %44'",
    ),
    "a wait for what the previous step did not have": (
        AFTER_CLIP,
        lambda schedule: changed(schedule, 0, after_previous=(len(schedule),)),
        "it waits for prev %47, which does not exist",
    ),
    "an update without its scale": (
        AFTER_CLIP,
        lambda schedule: removed(schedule, CLIP),
        "scale is read, but holds nothing here: it was not written, or was released before",
    ),
    "an update that ignores the clipping": (
        AFTER_CLIP,
        lambda schedule: changed(schedule, CLIP + 1, reads=("gradients.0",)),
        "weights.0 is updated with gradients that are not clipped, but this step clips: read scale",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_named_and_marked(rule: str) -> None:
    legal, edit, reason = RULES[rule]
    assert refusal(edit(legal))[1] == reason


@pytest.mark.parametrize("schedule", [DURING_BACKWARD, AFTER_CLIP], ids=["during backward", "after clip"])
def test_no_dependency_can_be_deleted(schedule: Schedule) -> None:
    mutants = list(dependency_deletions(schedule))
    assert any("prev" in str(mutant) for mutant in mutants)
    for mutant in mutants:
        refusal(mutant.schedule)


def test_the_text_parses_back() -> None:
    for schedule in (DURING_BACKWARD, AFTER_CLIP):
        assert "prev %" in str(schedule)
        assert Schedule.parse(str(schedule)) == schedule
