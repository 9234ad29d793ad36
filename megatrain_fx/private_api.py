"""The few private parts of PyTorch that are used, each behind a thin wrapper. Tested with 2.11 to 2.13."""
# ruff: noqa: SLF001

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.symbol import SymT, symbol_is_type


class DispatchMode(TorchDispatchMode):
    """Sees every ATen operation of a region; PyTorch documents the class, though its module is named as private."""


# Raised when an operation on fake tensors needs values that only real tensors have.
DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def new_fake_mode() -> FakeTensorMode:
    """A mode that makes fake tensors: the only way to give a model of any device to `torch.export` unallocated."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def writes_first_argument(target: object) -> bool:
    """Whether a graph node's target is an ATen operator that writes its first argument and returns it.

    Only the schema of an operator tells, and schemas are not public.
    """
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.arguments:
        return False
    alias = target._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def is_fake(value: object) -> bool:
    """Whether `value` is a fake tensor; there is no public test."""
    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def without_fake_mode() -> Iterator[None]:
    """Run real operations while a fake mode is active: a unit's one real run happens amid a fake one."""
    with unset_fake_temporarily():
        yield


@contextlib.contextmanager
def as_in_eager_mode() -> Iterator[None]:
    """Let `torch.compiler.is_compiling` and `is_exporting` be false meanwhile for all code but PyTorch's own.

    Models branch on them: Hugging Face models build explicit masks when they are exported, which select other attention
    kernels. Here the captured graph is run eagerly, so the path that is taken must be the eager one. PyTorch itself
    must know that it is traced, or `torch.func.vmap` and `torch.cond` are not.
    """
    questions = torch.compiler.is_compiling, torch.compiler.is_exporting
    torch.compiler.is_compiling, torch.compiler.is_exporting = map(_asked_by_torch, questions)
    try:
        yield
    finally:
        torch.compiler.is_compiling, torch.compiler.is_exporting = questions


def _asked_by_torch(question: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.partition(".")[0] == "torch" and question()

    return answer


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """Let autograd record, and tensors count their versions, in the kernel of an operator.

    The dispatcher has left autograd behind when it calls the kernel, and no public way leads back.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    with guard, torch.enable_grad():
        yield


@dataclasses.dataclass(frozen=True)
class ModuleMethods:
    """The methods of all modules that a tracer exchanges while it records which module makes which node."""

    call: Callable[..., Any]
    get_attribute: Callable[..., Any]

    @classmethod
    def current(cls) -> ModuleMethods:
        """Those in force now."""
        return cls(nn.Module.__call__, nn.Module.__getattr__)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put these methods in force meanwhile: what runs inside a unit is none of the tracer's business.

        The tracer's own call loses track of where it is when a module raises, even if a caller catches the exception.
        """
        traced = ModuleMethods.current()
        self._install()
        try:
            yield
        finally:
            traced._install()

    def _install(self) -> None:
        nn.Module.__call__ = self.call  # type: ignore[method-assign]
        nn.Module.__getattr__ = self.get_attribute  # type: ignore[method-assign]


@contextlib.contextmanager
def replaced_apply(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace `torch.autograd.Function.apply` meanwhile by what `make` returns for it; it is given the class first.

    There is no public way to see that a custom autograd function is applied.
    """
    original = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(make(original.__func__))  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def custom_functions(tensors: Sequence[torch.Tensor]) -> set[str]:
    """Names of the user's own autograd functions in the graph that computed these tensors.

    The public `Node` does not tell the function whose backward it is.
    """
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(pending), set()
    while pending:
        node = pending.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None and not is_of_torch(function):
            found.add(function.__qualname__)
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        pending.extend(following)
    return found


def is_of_torch(function: type) -> bool:
    """Whether a class is one of PyTorch's own, such as the autograd functions that it makes for custom operators."""
    return function.__module__.partition(".")[0] == "torch"


def named_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own tables of parameters and buffers, to be replaced in place.

    The public `register_parameter` refuses plain tensors, which the real run of a unit needs.
    """
    return module._parameters, module._buffers


def child_table(module: nn.Module) -> dict[str, Any]:
    """The module's own table of child modules; the public `named_children` is too slow to be asked at every call."""
    return module._modules


def forward_hooks(module: nn.Module) -> tuple[int, ...]:
    """The numbers of the handles of the module's own forward hooks, unique in the process; the tables are private."""
    return (*module._forward_pre_hooks, *module._forward_hooks)


def gradient_hooks(parameter: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """Hooks of `Tensor.register_hook`, of which only autograd knows in public."""
    return parameter._backward_hooks or {}


def post_accumulation_hooks(parameter: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """Hooks of `Tensor.register_post_accumulate_grad_hook`, of which only autograd knows in public."""
    return parameter._post_accumulate_grad_hooks or {}


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make `module(...)` run `call` instead of hooks and forward, as `Module.compile` does."""
    module._compiled_call_impl = call


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook of the module's own runs around its forward or backward; the tables of hooks are not public."""
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(tables)


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run `module(...)`, hooks included, without what `replace_call` or `Module.compile` put in its place."""
    return module._call_impl(*args, **kwargs)


@contextlib.contextmanager
def ignoring_data_dependent_sizes() -> Iterator[None]:
    """Let sizes that depend on values come and go within a fake run, without their becoming outputs of the graph."""
    mode = active_fake_mode()
    if mode is None or mode.shape_env is None:
        yield
        return
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


def is_data_dependent_size(size: object) -> bool:
    """Whether a size, or another symbolic number, depends on the values of tensors."""
    return any(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)) for symbol in size_symbols(size))


def size_symbols(size: Any) -> tuple[Any, ...]:
    """The sympy symbols of a symbolic number, in a fixed order; none if it is a plain one."""
    symbolic = isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return tuple(sorted(size.node.expr.free_symbols, key=str)) if symbolic else ()


def size_at(size: Any, scaled: Mapping[Any, int] | Literal[False] | None = None) -> int:
    """The size for which a symbolic size was made, or with its symbols multiplied by the factors in `scaled`.

    Asking a symbolic size in public ways would specialise it.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    if not scaled:
        return int(size.node.hint)
    hints = size.node.shape_env.backed_var_to_val
    return int(size.node.expr.xreplace({symbol: hints[symbol] * scaled[symbol] for symbol in size_symbols(size)}))


@dataclasses.dataclass(frozen=True)
class SizeConditions:
    """What the sizes of the inputs of a symbolic graph must meet: sympy expressions over its symbols.

    `sizes` has an expression for each dimension of each input in turn; `guards` must be true, and each symbol must be
    within its range.
    """

    sizes: tuple[sympy.Expr, ...]
    guards: tuple[sympy.Basic, ...]
    ranges: tuple[tuple[sympy.Symbol, Any], ...]

    def hold(self, sizes: Sequence[int]) -> bool:
        """Whether the conditions hold for these sizes."""
        values = {
            expression: sympy.Integer(size)
            for expression, size in zip(self.sizes, sizes, strict=True)
            if expression.is_Symbol
        }
        if any(expression.xreplace(values) != size for expression, size in zip(self.sizes, sizes, strict=True)):
            return False
        if any(values[symbol] not in allowed for symbol, allowed in self.ranges if symbol in values):
            return False
        return all(guard.xreplace(values) == sympy.true for guard in self.guards)


def size_conditions(inputs: Sequence[torch.Tensor]) -> SizeConditions:
    """The conditions under which a graph that was traced from these fake inputs is right.

    `torch.export` gives ranges in public, but not the guards that tracing leaves in the shape environment.
    """
    sizes: list[Any] = [size for tensor in inputs for size in tensor.shape]
    expressions = tuple(size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in sizes)
    environments = [size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)]
    if not environments:
        return SizeConditions(expressions, (), ())
    environment = environments[0]
    guards = dict.fromkeys(environment.replace(guard.expr) for guard in environment.guards)
    guards.pop(sympy.true, None)
    symbols = {symbol for expression in expressions for symbol in expression.free_symbols}
    ranges = tuple((symbol, environment.var_to_range[symbol]) for symbol in sorted(symbols, key=str))
    return SizeConditions(expressions, tuple(guards), ranges)


def version_of(tensor: torch.Tensor) -> int:
    """How many times the tensor was modified in place; documented as `Tensor._version`, though named as private."""
    return int(tensor._version)


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors pairwise in as few kernels as possible; the public `copy_` takes one kernel each."""
    if targets:
        torch._foreach_copy_(targets, sources)


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Keep hooks of the user (`torch.utils.checkpoint`, `save_on_cpu`) from tensors that are not saved for the user.

    Only the innermost hooks are called, so hooks that do nothing are put inside; no public function tells whether any
    are set, and calling some for every saved tensor would be slow.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def release_pinned_cache() -> None:
    """Give back the page-locked host memory that PyTorch keeps for reuse; public since 2.12 as `empty_host_cache`."""
    release = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
    release()


def backward_reaches(node: Any) -> bool:
    """Whether the backward pass that runs now will run this node too: not if only others were asked for."""
    return bool(torch._C._will_engine_execute_node(node))


def backward_keeps_graph() -> bool:
    """Whether the backward pass that runs now was started with `retain_graph=True`; a node cannot ask in public."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
