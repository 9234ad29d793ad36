"""Mutants of real schedules: the verifier refuses each, or running it in chaos mode gives what eager PyTorch gives."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator

import pytest
import torch

from megatrain_fx.ir import Lane, Op, Operation
from megatrain_fx.schedule import Schedule
from schedule_edits import Mutant, accepted, dependency_deletions, find, inserted, moved, neighbour_swaps, resized
from schedule_runner import ScheduleRunner, StepResult
from traced_examples import TracedExample, traced

EXAMPLES = ("mlp", "gpt", "gpt_tied", "encoder_decoder", "moe", "skip")
SLOTS = (1, 2, 3)
SAMPLE = 60  # of the swaps with one and three slots; with two, all are tried
DELAY_US = 200
TRAINING = pytest.mark.parametrize(("name", "slots"), list(itertools.product(EXAMPLES, SLOTS)))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are small, and threads that spin at barriers would take the processors from the lanes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@TRAINING
def test_no_dependency_can_be_deleted(name: str, slots: int) -> None:
    schedules = [traced(name).lowered(slots=slots, **options).schedule for options in ({}, {"resume": True})]
    mutants = [mutant for schedule in schedules for mutant in dependency_deletions(schedule)]
    assert mutants
    assert [str(mutant) for mutant in mutants if accepted(mutant.schedule)] == []


@functools.cache
def running(name: str) -> tuple[ScheduleRunner, StepResult]:
    """A runner of an example, and what it must give."""
    runner = ScheduleRunner(traced(name), DELAY_US)
    expected = runner.eager()
    assert runner.run(traced(name).program.schedule).equals(expected), f"{name} differs from eager without mutation"
    return runner, expected


def harmful(name: str, mutants: Iterable[Mutant]) -> list[str]:
    """Run mutants that were accepted; those that do not equal eager PyTorch bit for bit."""
    runner, expected = running(name)
    return [str(mutant) for mutant in mutants if not runner.run(mutant.schedule).equals(expected)]


def kinds(schedule: Schedule, mutant: Mutant) -> tuple[object, ...]:
    """What a swap exchanges: mutants of different kinds are run."""
    changes = (old.op for old, new in zip(schedule, mutant.schedule, strict=True) if old != new)
    return tuple(dict.fromkeys(changes))[:3]


@TRAINING
def test_swapped_neighbours_are_refused_or_harmless(name: str, slots: int) -> None:
    schedule = traced(name).lowered(slots=slots).schedule
    mutants = list(neighbour_swaps(schedule))
    random.Random(slots).shuffle(mutants)
    mutants = mutants if slots == 2 else mutants[:SAMPLE]
    legal = [mutant for mutant in mutants if accepted(mutant.schedule)]
    assert 0 < len(legal) < len(mutants)
    chosen = {kinds(schedule, mutant): mutant for mutant in legal}
    assert harmful(name, list(chosen.values())[:4]) == []


def wandering(schedule: Schedule, generator: random.Random, tries: int) -> Mutant:
    """A schedule many legal swaps away."""
    swaps = 0
    for _ in range(tries):
        later = generator.randrange(1, len(schedule))
        lane = schedule.operations[later].lane
        earlier = next((i for i in reversed(range(later)) if schedule.operations[i].lane is lane), None)
        if earlier is None:
            continue
        pair = (later, earlier) if generator.random() < 0.5 else (earlier, later)
        candidate = moved(schedule, *pair)
        if accepted(candidate):
            schedule, swaps = candidate, swaps + 1
    return Mutant(f"{swaps} swaps", schedule)


@pytest.mark.parametrize("name", EXAMPLES)
def test_many_accepted_swaps_together_are_harmless(name: str) -> None:
    schedule = traced(name).program.schedule
    mutant = wandering(schedule, random.Random(3), tries=60)
    assert mutant.schedule != schedule
    assert harmful(name, [mutant]) == []


def test_a_stage_computes_with_the_slots_that_it_reads() -> None:
    """A second copy of a region, still on its way, changes nothing."""
    schedule = traced("skip").program.schedule
    forward = find(schedule, Op.FORWARD)
    view = schedule.operations[find(schedule, Op.LOAD)].view
    assert view is not None
    doubled = resized(schedule, "slot.9", schedule.buffers[view.region])
    doubled = inserted(doubled, forward, Operation(Op.PREFETCH, Lane.H2D, reads=(view.region,), writes=("slot.9",)))
    doubled = inserted(doubled, forward + 1, Operation(Op.RELEASE, Lane.H2D, reads=("slot.9",)))
    doubled.verify()
    assert harmful("skip", [Mutant("doubled", doubled)] * 5) == []


def runnable_deletions(example: TracedExample) -> list[Mutant]:
    """Deletions that the runtime survives, of schedules with one and two slots.

    Gradients that start their way home before their backward would meet a task in C++ while Python still fills it in.
    """
    mutants = []
    for slots in (1, 2):
        schedule = example.lowered(slots=slots).schedule
        for mutant in dependency_deletions(schedule):
            pair = next((a, b) for a, b in zip(schedule, mutant.schedule, strict=True) if a != b)
            (deleted,) = set(pair[0].after) - set(pair[1].after)
            lanes = (schedule.operations[deleted].lane, pair[0].lane)
            if lanes not in ((Lane.COMPUTE, Lane.D2H), (Lane.D2H, Lane.HOST)):
                mutants.append(mutant)
    return mutants


def test_chaos_mode_finds_races() -> None:
    """A single run meets about a third of the races, so rounds are repeated until eight have given wrong numbers."""
    mutants = runnable_deletions(traced("skip"))
    assert len(mutants) > 50
    assert not any(accepted(mutant.schedule) for mutant in mutants)
    runner, expected = running("skip")
    wrong: set[str] = set()
    for _, mutant in itertools.product(range(4), random.Random(0).sample(mutants, len(mutants))):
        if not runner.run(mutant.schedule).equals(expected):
            wrong.add(str(mutant))
        if len(wrong) == 8:
            break
    assert len(wrong) == 8
    assert runner.run(traced("skip").program.schedule).equals(expected)
