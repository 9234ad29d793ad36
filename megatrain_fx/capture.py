"""Capture: a model's forward as an fx graph in which units are single nodes and only the glue is ATen."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from megatrain_fx.capture_failure import explain
from megatrain_fx.captured_graph import build_captured_graph
from megatrain_fx.errors import CaptureError
from megatrain_fx.host_randomness import HostRandomState
from megatrain_fx.huggingface import unpacked_sequences
from megatrain_fx.model_state import all_tensors, observed_assignments, preserved, replace_tensors
from megatrain_fx.private_api import as_in_eager_mode, custom_functions, new_fake_mode, size_symbols
from megatrain_fx.signature import InputSignature, ModelFlags, Structure, Value, flatten_inputs
from megatrain_fx.symbolic_signature import SymbolicSignature
from megatrain_fx.tree import leaf_names
from megatrain_fx.unit_call import UnitCall, flatten_outputs
from megatrain_fx.unit_recording import UnitRecorder, active_recorder
from megatrain_fx.unit_trial import Originals
from megatrain_fx.units import find_units

_PREFIX = "model."
logger = logging.getLogger(__name__)
# Tracing exchanges methods of classes for the whole process, so threads capture one after the other.
_tracing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class OutputTree:
    """What the model returns: a tree with constants in it, and tensors."""

    structure: Structure

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's output, given the tensors that the captured graph returns."""
        return self.structure.rebuild(tensors)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A model's forward for one input signature.

    Attributes:
        graph_module: its placeholders are the distinct input tensors in flatten order; it returns a tuple of the
            output tensors, in order. Parameters, buffers and constants are `get_attr` nodes (the model's own tensor
            objects, by their first names; constants `_constant_<i>`), and each call of a unit is one `call_module` node
            on a `UnitCall` named `unit_call_<k>`, with `getitem` nodes for its results. Glue that the model runs under
            other modes calls `execution_modes.run_region`. `node.meta` has `val` (fake) and `stack_trace`.
        unit_calls: in the order of the calls.
        output_tree: rebuilds what the model returns.
        signature: of the call that was captured.
        symbolic: which other sizes the graph is right for; None if captured for these sizes only.
    """

    graph_module: fx.GraphModule
    unit_calls: tuple[UnitCall, ...]
    output_tree: OutputTree
    signature: InputSignature
    symbolic: SymbolicSignature | None

    def accepts(self, signature: InputSignature) -> bool:
        """Whether the graph is right for calls of this signature."""
        return signature == self.signature or (self.symbolic is not None and self.symbolic.accepts(signature))


def capture(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    device: torch.device,
    dynamic: bool = False,
    forward_class: type[nn.Module] | None = None,
) -> Captured:
    """Capture `model.forward(*args, **kwargs)` as it runs on `device`; nothing real is run, allocated or changed.

    The hooks of `model` itself are left out, since they run around its forward; all others are captured. What the glue
    reads of Python attributes is a constant of the graph, which a later change of the attribute does not reach.

    Args:
        model: its parameters may be anywhere, also on the meta device.
        args: positional arguments of the forward; tensors are where the forward is to find them.
        kwargs: keyword arguments of the forward.
        device: where the forward is to compute.
        dynamic: make every input size above 1 symbolic, unless the model forces a value upon it.
        forward_class: the class whose forward is meant, if the class of the model was exchanged.

    Raises:
        UnsupportedInputError, OutputTreeError, DataDependentGlueError, CaptureError: as their texts say.
    """
    randomness = HostRandomState.read()
    tensors, structure = flatten_inputs(model, args, kwargs)
    signature = ModelFlags(model).signature(tensors, structure)
    dims = [{dim for dim, size in enumerate(tensor.shape) if dynamic and size > 1} for tensor in tensors]
    recorder = UnitRecorder(Originals(model), device)
    program = _export(_Entry(model, structure, recorder), tensors, dims, device, forward_class)
    retried = _dims_to_retry(program, dims)
    if recorder.specialising and retried is not None:
        recorder = UnitRecorder(Originals(model), device, frozenset(recorder.specialising))
        program = _export(_Entry(model, structure, recorder), tensors, retried, device, forward_class)
    names = _input_names(_forward_of(model, forward_class), structure)
    graph_module, unit_calls = build_captured_graph(program, model, _PREFIX, recorder, names)
    assert recorder.returned is not None
    _check_side_effects(model, recorder, randomness)
    symbolic = SymbolicSignature.read(graph_module, signature) if dynamic else None
    return Captured(graph_module, unit_calls, OutputTree(recorder.returned), signature, symbolic)


def _check_side_effects(model: nn.Module, recorder: UnitRecorder, randomness: HostRandomState) -> None:
    """Refuse what would go wrong silently, and tell of what is left out."""
    name = type(model).__name__
    if HostRandomState.read().advanced_since(randomness):
        randomness.restore()
        raise CaptureError(
            f"{name} draws random numbers from Python's random or from NumPy outside every unit, and a captured graph "
            "would repeat the outcome. Draw with torch and choose with torch.where, or move it into a unit."
        )
    if recorder.assignments.attributes:
        names = ", ".join(recorder.assignments.attributes)
        logger.warning("%s assigns to %s outside every unit; a captured graph does not repeat that", name, names)


class _Entry(nn.Module):
    """Gives `torch.export` a forward from tensors to tensors, whatever the model takes and returns."""

    def __init__(self, model: nn.Module, structure: Structure, recorder: UnitRecorder) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.structure = structure
        self.name = type(model).__name__
        self.recorder = recorder

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.structure.rebuild(tensors)
        with observed_assignments(self.model) as assignments, as_in_eager_mode(), self.recorder.functions_opaque():
            results, self.recorder.returned = flatten_outputs(self.model.forward(*args, **kwargs), self.name)
        if functions := custom_functions(results):
            raise CaptureError(
                f"{self.name} applies {', '.join(sorted(functions))} outside every unit by a saved reference to its "
                "apply, so its backward would be lost. Call it as Function.apply(...), or move it into a module that "
                "owns parameters."
            )
        self.recorder.assignments = assignments
        return (*results, *assignments.buffers.values())


def _export(
    entry: _Entry,
    tensors: Sequence[torch.Tensor],
    dims: Sequence[set[int]],
    device: torch.device,
    forward_class: type[nn.Module] | None,
) -> ExportedProgram:
    model, recorder, mode = entry.model, entry.recorder, new_fake_mode()
    sizes = (tuple(dict.fromkeys(own, Dim.AUTO) for own in dims),) if any(dims) else None
    token = active_recorder.set(recorder)
    try:
        names = _input_names(_forward_of(model, forward_class), entry.structure)
        with _tracing, preserved(model), unpacked_sequences(names):
            if forward_class is not None:
                model.__class__ = forward_class
            with mode:
                replace_tensors(model, {tensor: _stand_in(tensor, device) for tensor in all_tensors(model)})
                inputs = tuple(_stand_in(tensor, tensor.device) for tensor in tensors)
            for unit in find_units(model):
                recorder.make_opaque(unit)
            return torch.export.export(entry, inputs, dynamic_shapes=sizes, strict=False)
    except Exception as error:
        raise explain(error, model, recorder.failure) from (recorder.failure[1] if recorder.failure else error)
    finally:
        active_recorder.reset(token)


def _forward_of(model: nn.Module, forward_class: type[nn.Module] | None) -> Callable[..., Any]:
    return model.forward if forward_class is None else functools.partial(forward_class.forward, model)


def _dims_to_retry(program: ExportedProgram, dims: Sequence[set[int]]) -> list[set[int]] | None:
    """The input dimensions to make symbolic in a second attempt; None if there is nothing to be gained.

    A unit may have forced a value upon a size for no better reason than looping over it. Only batch and sequence, the
    first two dimensions, are worth a second attempt, with those that stayed symbolic.
    """
    specs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
    shapes = [node.meta["val"].shape for node, spec in specs if spec.kind is InputKind.USER_INPUT]
    symbolic = [{dim for dim in own if size_symbols(shape[dim])} for own, shape in zip(dims, shapes, strict=True)]
    retried = [kept | (own & {0, 1}) for own, kept in zip(dims, symbolic, strict=True)]
    return None if retried == symbolic else retried


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the active fake mode that is like `tensor`, on `device`."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _input_names(forward: Callable[..., Any], structure: Structure) -> list[str]:
    """A Python name for each distinct input tensor: of the argument, and the way to the tensor in it."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [name for name, parameter in inspect.signature(forward).parameters.items() if parameter.kind in kinds]
    names: dict[int, str] = {}
    for path, leaf in zip(leaf_names(structure.tree), structure.leaves, strict=True):
        words = re.findall(r"\w+", path)[1:]
        if path.startswith("[0]"):
            index = int(words[0])
            words[0] = positional[index] if index < len(positional) else f"args_{index}"
        if isinstance(leaf, Value):
            names.setdefault(leaf.number, "_".join(words))
    return [names[number] for number in sorted(names)]
