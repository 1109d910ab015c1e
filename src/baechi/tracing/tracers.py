"""The rungs of the ladder of tracers, tried in this order.

    torch.export, non-strict     takes nearly everything; ATen operators, in-place ones kept
    the same, export branches    where the branches of an eager run cannot be traced
    module granularity           torch.fx: torch.nn modules are leaves, and so is, opaque, every
                                 submodule that cannot be traced
    torch.export, truth values   those of the example's tensors, each with a check

Strict export is no rung: it was needed for none of 229 architectures (`docs/tracing.md`). Each rung
traces the same flat function (`calling_convention.flat_model`).
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch import fx, nn

from baechi.errors import TraceError
from baechi.torch_support.storages import distinct_storages
from baechi.torch_support.tracer_internals import TorchDispatchMode
from baechi.tracing.alias_analysis import Facts, copy_of, named_state, propagate
from baechi.tracing.calling_convention import Call, flat_model
from baechi.tracing.export_branches import EagerBranches
from baechi.tracing.faithfulness import refuse_new_leaves, watched
from baechi.tracing.fx_nodes import schema_arguments
from baechi.tracing.graph_rewrites import without_effectless
from baechi.tracing.guards import Autocast, GradientMode, TruthValue, TruthValues
from baechi.tracing.pytrees import Structure, tensors_in
from baechi.tracing.side_effects import (
    OutsideTensors,
    buffers_in_place,
    fakes_removed,
    refuse_hidden_parameters,
)
from baechi.tracing.subgraph import opaque_leaves
from baechi.tracing.workarounds import RECURRENT


@final
@dataclass(frozen=True)
class Capture:
    """The result of a rung: a flat graph, and the structure around its outputs."""

    module: fx.GraphModule
    returned: Structure
    replaced: tuple[str, ...] = ()  # buffers


def _non_strict(
    mode: GradientMode,
    branches: EagerBranches,
    model: nn.Module,
    call: Call,
    truth_values: list[TruthValue] | None = None,
) -> Capture:
    replaced: list[str] = []
    outside = OutsideTensors()

    @contextmanager
    def around(model: nn.Module) -> Iterator[None]:
        with buffers_in_place(model, replaced=replaced), branches.taken(), ExitStack() as stack:
            if truth_values is not None:
                stack.enter_context(TruthValues(truth_values))
            if not branches.nested:
                stack.enter_context(outside)
            yield

    flat, returned = flat_model(model, call, around, partial(refuse_new_leaves, call))
    with watched(model, mode) as functions, closing(outside):
        program = torch.export.export(flat, call.tensors, strict=False)
    module = program.module()
    functions.restore(module)
    for node in module.graph.nodes:
        if call.autocast.dtypes and str(node.target) in RECURRENT:
            raise TypeError(
                f"{node.target} gives other dtypes with {call.autocast} than its fake tensors"
            )
    return Capture(without_effectless(module), returned[-1], tuple(replaced))


def _truth_values(
    mode: GradientMode, branches: EagerBranches, model: nn.Module, call: Call
) -> Capture:
    """Trace with the truth values of a real run of the example."""
    flat, _ = flat_model(model, call)
    state = named_state(flat)
    copies = {name: copy_of(tensor) for name, tensor in state.items()}
    inputs = tuple(map(copy_of, call.tensors))
    gpus = sorted({t.device.index for t in state.values() if t.device.type == "cuda"})
    with torch.random.fork_rng(gpus), TruthValues() as values:
        torch.func.functional_call(flat, copies, inputs)
    if not values.recorded:
        raise RuntimeError("forward asks no tensor for a truth value")
    return _non_strict(mode, branches, model, call, values.recorded)


@final
class _ModuleTracer(fx.Tracer):
    """fx's tracer, with buffers as nodes and with chosen submodules as opaque leaves."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, opaque: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._own = own_modules(model)
        self._opaque = opaque
        self._modes = _modes()
        self.path: list[str] = []

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node with the model's own line, as nodes of `torch.export` have it."""
        if _modes() != self._modes:
            raise RuntimeError("forward switches gradients or autocast, which fx would lose")
        if target in _AUTOGRAD:
            raise RuntimeError("forward looks at autograd's graph, which a trace does not have")
        node = super().create_node(kind, target, *args, **kwargs)
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") not in self._own:
            frame = frame.f_back
        if frame is not None and node.op not in ("placeholder", "output"):
            code = frame.f_code
            row = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)
            node.stack_trace = "".join(traceback.format_list([row]))
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._opaque or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):  # what fails here is the code around the leaf
            return super().call_module(m, forward, args, kwargs)
        self.path.append(path)
        result = super().call_module(m, forward, args, kwargs)
        self.path.pop()  # not in a `finally`: after an error the path is that of the error
        return result


_AUTOGRAD = (
    *(torch.autograd.grad, torch.autograd.backward),
    *("backward", "register_hook", "requires_grad_", "retain_grad"),
)


def _modes() -> tuple[bool, Autocast]:
    return torch.is_grad_enabled(), Autocast.current()


@contextmanager
def _nothing_kept(model: nn.Module) -> Iterator[None]:
    """Run the model's Python for a tracer that loses what it replaces and remembers."""
    with fakes_removed(model), buffers_in_place(model, keep=False):
        yield


def _opaque(mode: GradientMode, model: nn.Module, call: Call) -> Capture:
    """Trace with fx, and with ever more submodules opaque: the innermost that fails each time."""
    flat, returned = flat_model(model, call, _nothing_kept)
    opaque: frozenset[str] = frozenset()
    while True:
        tracer = _ModuleTracer(model, opaque)
        try:
            module = _symbolic_module(model, flat, tracer, mode, call)
            return Capture(module, returned[-1])
        except TraceError:
            raise
        except Exception:  # whatever a submodule's code raises; the outermost one's is the reason
            inner = tracer.path[-1] if tracer.path else "model"
            if inner == "model":
                raise
            opaque |= {inner}


def _symbolic_module(
    model: nn.Module, flat: nn.Module, tracer: _ModuleTracer, mode: GradientMode, call: Call
) -> fx.GraphModule:
    with watched(model, mode), _NothingLost(), _types_unasked(model):
        graph = tracer.trace(flat)
    module = fx.GraphModule(flat, graph)
    facts = propagate(module, call.tensors)
    _refuse_frozen(module, facts)
    refuse_hidden_parameters(model, opaque_leaves(module, module.graph.nodes).values())
    return module


@contextmanager
def _types_unasked(model: nn.Module) -> Iterator[None]:
    """Refuse `isinstance` in the model's code on what fx sees as a proxy."""

    def ask(value: Any, kinds: Any) -> bool:
        if isinstance(value, fx.Proxy):
            raise RuntimeError(f"forward asks for the type of {value.node}, which fx cannot tell")
        return isinstance(value, kinds)

    scopes = [vars(sys.modules[name]) for name in own_modules(model) if name in sys.modules]
    scopes = [scope for scope in scopes if "isinstance" not in scope]
    for scope in scopes:
        scope["isinstance"] = ask
    try:
        with patch.object(torch, "is_tensor", lambda value: ask(value, torch.Tensor)):
            yield
    finally:
        for scope in scopes:
            del scope["isinstance"]


_MADE: Final = "_tensor_constant"  # how the names begin of tensors that forward makes


@final
class _NothingLost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A check that nothing fx cannot see draws or writes, since a trace would freeze that."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError("forward draws random numbers, which fx would freeze")
        if func._schema.is_mutable:
            named = schema_arguments(func, args, kwargs)
            infos = {row.name: row.alias_info for row in func._schema.arguments}
            written = [
                value for name, value in named.items() if infos[name] and infos[name].is_write
            ]
            if _storages(written).keys() - self._made:
                raise RuntimeError("forward writes into a tensor of before, which fx would lose")
        before = _storages((args, kwargs)) if func is not torch.ops.aten.lift_fresh.default else {}
        result = func(*args, **kwargs)
        self._made |= {key: t for key, t in _storages(result).items() if key not in before}
        return result


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    return distinct_storages([t for t in tensors_in(value) if t.layout is torch.strided])


def _refuse_frozen(module: fx.GraphModule, facts: Facts) -> None:
    """Refuse a tensor that forward makes and writes into or returns: fx makes it once for all."""
    for node in module.graph.find_nodes(op="get_attr"):
        if str(node.target).startswith(_MADE):
            if any(value.storage in facts.written for value in facts.nodes[node].values):
                raise RuntimeError("forward writes into a tensor that it makes: fx would freeze it")
            if any(user.op == "output" for user in node.users):
                raise RuntimeError("forward returns a tensor that it makes: fx would freeze it")


def ladder(mode: GradientMode) -> Iterator[tuple[str, Callable[[nn.Module, Call], Capture]]]:
    """The rungs, in the order in which they are tried."""
    branches = EagerBranches()
    yield "torch.export (non-strict)", partial(_non_strict, mode, branches)
    while branches.give_way():
        yield f"torch.export (non-strict){branches}", partial(_non_strict, mode, branches)
    yield "module granularity, opaque leaves", partial(_opaque, mode)
    values = partial(_truth_values, mode, EagerBranches())
    yield "torch.export (non-strict), truth values of the example", values


def own_modules(model: nn.Module) -> set[str]:
    """The Python modules of the model's classes, without torch's."""
    names = {type(part).__module__ for part in model.modules()}
    return {name for name in names if not name.startswith("torch.")}
