"""How a step is made: region by region, during a backward pass or after it."""

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatrain_fx.errors import ConfigError, ExecutionError, OptimizerError
from megatrain_fx.extension import runtime as native
from megatrain_fx.optim.gradient_norm import GradientNorm, clip_coefficient
from megatrain_fx.optim.region_memory import RegionMemory
from megatrain_fx.optim.region_states import RegionStates
from megatrain_fx.optim.stage_options import CheckedOptions
from megatrain_fx.optim.step_record import StepRecord
from megatrain_fx.optim.trained_parameters import TrainedParameters
from megatrain_fx.row_selection import RowSelection
from megatrain_fx.store import HostStore

logger = logging.getLogger(__name__)


class Formula(Protocol):
    """What an optimizer computes, and from what."""

    param_groups: list[dict[str, Any]]
    state: Any

    def make_update(self, group: Mapping[str, Any], **step: Any) -> native.Update:
        """The C++ update of a parameter group's parameters."""

    def states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the float32 state that the parameters of a group have."""


@dataclass
class Armed:
    """A region whose task is set for the backward pass that runs.

    Attributes:
        candidates: parameters that the pass may give gradients to.
        names: those of them that the task works on.
        runs: how often the task had run before.
        begun: those of them whose rows that the pass does not look up are updated apart, before the others.
    """

    candidates: list[str]
    names: list[str]
    runs: int
    begun: list[str] = field(default_factory=list)


class RegionSteps:
    """Runs the updates of all regions.

    Invariant: while an update is pending, the gate of its region is closed, and nothing here changes what it works on.

    Attributes:
        queue: runs the updates.
        states: where the state lives.
        grad_norm: total norm of the last step's gradients before clipping; None if it was never needed.
        skipped: steps that were skipped since the norm was infinite or NaN.
        record: what was done since the last step.
    """

    def __init__(self, trained: TrainedParameters, options: CheckedOptions, state_names: Sequence[str]) -> None:
        self.queue = native.UpdateQueue(options.threads)
        self.states = RegionStates(trained, state_names, self.queue.pool)
        self.grad_norm: float | None = None
        self.skipped = 0
        self.record = StepRecord()
        self._trained = trained
        self._max_norm = options.max_grad_norm
        self._norm = GradientNorm()
        self._armed: dict[int, Armed] = {}

    def synchronize(self) -> None:
        """Wait until no update is pending.

        Raises:
            ExecutionError: one failed.
        """
        try:
            self.queue.wait()
        except RuntimeError as error:
            raise ExecutionError(str(error)) from error

    def arm(self, formula: Formula, store: HostStore, names: Iterable[str]) -> None:
        """Set the tasks of all regions with these parameters, for a backward pass that is about to begin."""
        self.synchronize()
        for region, members in self._trained.by_region(store.layout, names).items():
            self._norm.forget(region)
            self._prepare(formula, store, region, members)
            if self._max_norm is None:
                self.states.note_update(members)
            self._armed[region] = Armed(members, members, self._runs(store, region))

    def narrow(
        self, formula: Formula, store: HostStore, region: int, names: Collection[str], selection: RowSelection | None
    ) -> None:
        """Leave alone, in an armed region, parameters that have no gradient: neither are they named nor from before.

        Of a region that is updated in two parts, the first part is told first. A parameter that had no gradient then is
        left to the second as a whole.
        """
        armed = self._armed.get(region)
        if armed is None:
            return
        kept = [n for n in armed.candidates if n in names or self._trained.by_name[n].grad is not None]
        memory = self.states.memory(store, region)
        if selection is None:
            if kept != armed.names:
                self._prepare(formula, store, region, kept)
        elif selection.chosen:
            rows = selection if armed.begun else None
            self._prepare_update(formula, memory, memory.lookup_update, kept, selection=rows)
        else:
            self._prepare_update(formula, memory, memory.update, kept, selection=selection)
            armed.begun = kept
        armed.names = kept

    def disarm(self, formula: Formula, store: HostStore, names: Collection[str]) -> None:
        """Account for the tasks that were submitted during a backward pass, which is over and gave these gradients.

        A region whose parameters received none was not on its way, and so nothing of it was submitted.
        """
        for region, armed in self._pop_armed().items():
            if self._max_norm is not None:
                if self._runs(store, region) > armed.runs:
                    self._norm.note(store, region, self.states.memory(store, region), armed.names)
                continue
            if any(name in names for name in armed.candidates):
                self._commit(formula, armed.names)
                self.record.add(store, armed.names)
            self._forget_unused(formula, store, region, armed)

    def settle(self, formula: Formula, store: HostStore) -> None:
        """Account for an earlier backward pass that failed: some regions may have been updated."""
        regions = self._pop_armed()
        if not regions or self._max_norm is not None:
            return
        self.synchronize()
        updated = {r: armed for r, armed in regions.items() if self._runs(store, r) > armed.runs}
        for armed in updated.values():
            self._commit(formula, armed.names)
            self.record.add(store, armed.names)
        for region, armed in regions.items():
            self._forget_unused(formula, store, region, armed)
        if updated:
            logger.warning("a backward pass failed after %d of %d regions had been updated", len(updated), len(regions))

    def update(self, formula: Formula, store: HostStore, due: Collection[str]) -> None:
        """Start updating parameters with the gradients that they have, or skip the step."""
        self.synchronize()
        store.reclaim()
        regions = self._trained.by_region(store.layout, due)
        for region, names in regions.items():
            _take_gradients(store, region, names)
        grad_scale = self._clip(store, regions)
        if grad_scale is None:
            self.skipped += 1
            return
        for region, names in regions.items():
            memory = self.states.memory(store, region)
            self._prepare_update(formula, memory, memory.update, names, grad_scale)
        self.states.note_update(due)
        for region in regions:
            task, gate = self.states.memory(store, region).update, store.gate(region)
            self.queue.submit(region, task, gate, f"the update of weights.{region}")
        self._commit(formula, due)

    def _clip(self, store: HostStore, regions: Mapping[int, Sequence[str]]) -> float | None:
        """What gradients must be multiplied by; None if their norm is no number."""
        if self._max_norm is None:
            return 1.0
        self.grad_norm = self._norm.total(store, regions, lambda region: self.states.memory(store, region))
        return clip_coefficient(self.grad_norm, self._max_norm) if math.isfinite(self.grad_norm) else None

    def _prepare(self, formula: Formula, store: HostStore, region: int, names: Sequence[str]) -> None:
        memory = self.states.memory(store, region)
        if self._max_norm is None:
            self._prepare_update(formula, memory, memory.update, names)
        else:
            memory.set_norm(names)

    def _prepare_update(
        self,
        formula: Formula,
        memory: RegionMemory,
        task: native.UpdateTask,
        names: Sequence[str],
        grad_scale: float = 1.0,
        selection: RowSelection | None = None,
    ) -> None:
        """Parameters of one group that have made as many steps get the same update."""
        keys: dict[str, tuple[int, int]] = {}
        for name in names:
            self._adopt(formula, memory, name)
            keys[name] = self._trained.group_of[name], formula.state[self._trained.by_name[name]]["step"] + 1

        def make_update(key: tuple[int, int]) -> native.Update:
            group = formula.param_groups[key[0]]
            seed = None if group["stochastic_seed"] is None else group["stochastic_seed"] + memory.region
            return formula.make_update(group, step=key[1], grad_scale=grad_scale, stochastic_seed=seed)

        memory.set_updates(task, keys, make_update, selection)

    def take_over(self, formula: Formula, store: HostStore | None) -> None:
        """Keep state that was loaded, in the regions as far as these exist.

        Raises:
            ConfigError: a tensor has another shape than its parameter.
        """
        self.states.trust()
        for name, parameter in self._trained.by_name.items():
            for key, value in formula.state.get(parameter, {}).items():
                if torch.is_tensor(value) and value.shape != parameter.shape:
                    raise ConfigError(
                        f"the loaded {key} of parameter {name} has shape {list(value.shape)}, the parameter has "
                        f"{list(parameter.shape)}: load the state of a model of the same sizes"
                    )
        loaded = [name for name, parameter in self._trained.by_name.items() if parameter in formula.state]
        for region, names in self._trained.by_region(store.layout, loaded).items() if store is not None else ():
            assert store is not None
            if store.gradient_bytes(region):
                for name in names:
                    self._adopt(formula, self.states.memory(store, region), name)

    def _adopt(self, formula: Formula, memory: RegionMemory, name: str) -> None:
        state, group = formula.state[self._trained.by_name[name]], formula.param_groups[self._trained.group_of[name]]
        self.states.adopt(memory, name, state, formula.states_of(group))

    def _commit(self, formula: Formula, names: Iterable[str]) -> None:
        """Count a step of parameters that are being updated."""
        for name in names:
            formula.state[self._trained.by_name[name]]["step"] += 1

    def _forget_unused(self, formula: Formula, store: HostStore, region: int, armed: Armed) -> None:
        """Drop state that was made for the pass and not updated, as parameters without gradient have none."""
        for name in armed.candidates:
            parameter = self._trained.by_name[name]
            if formula.state.get(parameter, {}).get("step") == 0:
                del formula.state[parameter]
                self.states.memory(store, region).forget(name)

    def _runs(self, store: HostStore, region: int) -> int:
        memory = self.states.memory(store, region)
        return memory.update.runs if self._max_norm is None else memory.norm.runs

    def _pop_armed(self) -> dict[int, Armed]:
        armed, self._armed = self._armed, {}
        return armed


def _take_gradients(store: HostStore, region: int, names: Sequence[str]) -> None:
    """Make the store hold the gradients that parameters have, wherever these were.

    Raises:
        OptimizerError: a parameter was frozen when the model was last called.
    """
    needed, held = store.layout.regions[region].gradient_bytes(names), store.gradient_bytes(region)
    if held == 0:
        store.reserve_gradients(region, needed)
    elif held < needed:
        raise OptimizerError(
            f"{names[-1]} has a gradient, but was frozen when the model was last called, and its stage has no room for "
            f"it: call the model after requires_grad_()"
        )
    for name in names:
        store.adopt_gradient(name)
