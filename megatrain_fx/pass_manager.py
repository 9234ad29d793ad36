"""Runs passes in order, checks what each of them requires and ensures, and keeps every intermediate schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from megatrain_fx.contracts import CHECKS, Property
from megatrain_fx.errors import MegatrainError, PassError
from megatrain_fx.graph import facts_of, new_module, relink, schedule_of
from megatrain_fx.schedule import Schedule

GraphTransform = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True)
class SchedulePass:
    """A transformation of schedule graphs with its contract.

    Attributes:
        run: takes a graph module and returns it, or a new one that carries the same facts.
        requires: properties that the graph must already have.
        ensures: properties that it has afterwards; they are checked, and must then hold after every later pass too.
        replaces: properties that hold no longer, because this pass puts a later form in their place.
    """

    run: GraphTransform
    requires: frozenset[Property] = frozenset()
    ensures: frozenset[Property] = frozenset()
    replaces: frozenset[Property] = frozenset()

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.run, "__name__", type(self.run).__name__)


@dataclass(frozen=True)
class PassResult:
    """The final graph and the schedule after every pass."""

    module: fx.GraphModule
    history: tuple[tuple[str, Schedule], ...]

    @property
    def schedule(self) -> Schedule:
        """The schedule after the last pass."""
        return self.history[-1][1]


def run_passes(module: fx.GraphModule, passes: Sequence[SchedulePass]) -> PassResult:
    """Run passes in order.

    Raises:
        PassError: a requirement does not hold, a pass broke its promise or lost the facts, or the pass itself failed.
    """
    holds: set[Property] = set()
    history: list[tuple[str, Schedule]] = []
    for schedule_pass in passes:
        before = [name for name, _ in history]
        _check_requirements(schedule_pass, holds, before)
        module, schedule = _apply(schedule_pass, module, before)
        holds = (holds - schedule_pass.replaces) | schedule_pass.ensures
        _check_properties(schedule_pass, module, holds, before)
        history.append((schedule_pass.name, schedule))
    return PassResult(module, tuple(history))


def _check_requirements(schedule_pass: SchedulePass, holds: set[Property], before: list[str]) -> None:
    missing = sorted(each.value for each in schedule_pass.requires - holds)
    if missing:
        raise PassError(
            f"pass {schedule_pass.name} requires a graph in which {missing[0]}; passes run before it: {_listed(before)}"
        )


def _apply(schedule_pass: SchedulePass, module: fx.GraphModule, before: list[str]) -> tuple[fx.GraphModule, Schedule]:
    try:
        facts = facts_of(module)
        result = schedule_pass.run(module)
        if not isinstance(result, fx.GraphModule):
            raise PassError(f"it returned {type(result).__name__}, not a torch.fx.GraphModule")
        if facts_of(result) != facts:
            raise PassError("it changed the facts of the model, but passes may change only operations")
        relink(result)
        return result, schedule_of(result)
    except Exception as error:
        kind = "" if isinstance(error, MegatrainError) else f"{type(error).__name__}: "
        raise PassError(
            f"pass {schedule_pass.name} failed: {kind}{error}; passes run before it: {_listed(before)}"
        ) from error


def _check_properties(
    schedule_pass: SchedulePass, module: fx.GraphModule, holds: set[Property], before: list[str]
) -> None:
    for each in sorted(holds, key=lambda member: member.name):
        try:
            CHECKS[each](module)
        except MegatrainError as error:
            raise PassError(
                f"after pass {schedule_pass.name} it does not hold that {each.value}: {error}\n"
                f"passes run before it: {_listed(before)}"
            ) from error


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A separate graph module with the same operations and facts."""
    return new_module(facts_of(module), schedule_of(module).operations)
