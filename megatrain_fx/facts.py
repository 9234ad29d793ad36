"""What the schedule passes may know of a model: its stages, its host regions, and the limits they must keep."""

import enum
from dataclasses import dataclass

from megatrain_fx.ir import View


class UpdateMode(enum.Enum):
    """When the optimizer's step is part of the schedule."""

    NONE = "none"
    DURING_BACKWARD = "during backward"
    AFTER_CLIP = "after clip"


@dataclass(frozen=True)
class Updates:
    """What an optimizer does within a schedule: when, and to which regions."""

    mode: UpdateMode = UpdateMode.NONE
    regions: tuple[int, ...] = ()


@dataclass(frozen=True)
class RegionFacts:
    """One host region: bytes of its parameters, and of the gradients of those that are trained."""

    bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Lookup:
    """A region that holds one matrix, of which a stage only looks up rows.

    Attributes:
        region: its number.
        indices: name of the stage's input that holds the numbers of the rows.
    """

    region: int
    indices: str


@dataclass(frozen=True)
class StageFacts:
    """One stage of the captured graph.

    Attributes:
        template: number of its template.
        regions: host regions that hold its parameters.
        trainable_regions: those of them that receive gradients from this stage.
        views: printed name and place of every parameter it uses.
        inputs: names of the values it reads.
        outputs: names of the values it computes that are used later.
        differentiable_inputs: inputs whose gradients it must deliver.
        differentiable_outputs: outputs that may receive a gradient.
        lookups: trainable regions of which it only looks up rows.
    """

    template: int
    regions: tuple[int, ...]
    trainable_regions: tuple[int, ...]
    views: tuple[tuple[str, View], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable_inputs: tuple[str, ...] = ()
    differentiable_outputs: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass has anything to do here."""
        return bool(self.differentiable_outputs) and bool(self.trainable_regions or self.differentiable_inputs)


@dataclass(frozen=True)
class ScheduleFacts:
    """The model as the passes see it.

    Attributes:
        stages: in execution order.
        regions: host regions, by number.
        outputs: names of the values that the model returns, in order.
        differentiable_outputs: those that may receive a gradient from the caller.
        slots: stages whose weights are on the device at one time.
        slabs: stages whose gradients are on their way home at one time.
        training: whether a backward pass follows.
        resume: only the backward pass, from checkpoints alone (a second backward, or after another call came between).
        updates: what the optimizer does within the schedule.
    """

    stages: tuple[StageFacts, ...]
    regions: tuple[RegionFacts, ...]
    outputs: tuple[str, ...]
    differentiable_outputs: tuple[str, ...] = ()
    slots: int = 3
    slabs: int = 2
    training: bool = True
    resume: bool = False
    updates: Updates = Updates()
