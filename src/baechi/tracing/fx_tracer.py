"""Module granularity: `torch.fx` traces a model, and what it cannot trace stays whole.

Modules of torch.nn are leaves, and so is, opaque, every submodule that cannot be traced. Tensors
that forward makes without its arguments, fx makes once for all calls: where that would show, it is
refused.
"""

import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Final, final
from unittest.mock import patch

import numpy as np
import torch
from torch import fx, nn

from baechi.errors import TraceError
from baechi.torch_support.storages import distinct_storages
from baechi.torch_support.torch_internals import state_of
from baechi.torch_support.tracer_internals import FakeTensor, TorchDispatchMode
from baechi.tracing.alias_analysis import propagate
from baechi.tracing.calling_convention import Call, flat_model
from baechi.tracing.faithfulness import checkpoints_watched, reads_noted, watched
from baechi.tracing.fake_tensors import fakes_removed
from baechi.tracing.fx_nodes import schema_arguments
from baechi.tracing.guards import Autocast, GradientMode
from baechi.tracing.model_code import NUMBERS, own_modules, seen_by
from baechi.tracing.model_notes import Notes, undone_if_it_fails
from baechi.tracing.node_facts import Facts
from baechi.tracing.partition import attribute
from baechi.tracing.pytrees import Structure, is_plain, tensors_in
from baechi.tracing.side_effects import refuse_hidden_parameters, state_kept
from baechi.tracing.subgraph import opaque_leaves
from baechi.tracing.whole_parts import sets_noted, untold

# Modules whose functions know no proxies: a call of these is one node.
_WRAPPED: Final = ("math", "einops")
_PARTS: Final = (getattr, operator.getitem)


@final
class _ModuleTracer(fx.Tracer):
    """fx's tracer, with buffers as nodes and with chosen submodules as opaque leaves."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, opaque: frozenset[str] = frozenset()) -> None:
        wrapped: Any = tuple(sys.modules[name] for name in _WRAPPED if name in sys.modules)
        super().__init__(autowrap_modules=wrapped)
        self._own = own_modules(model)
        self.opaque = opaque
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

    def create_arg(self, a: Any) -> Any:
        """What a graph holds of an argument: of numpy's numbers Python's."""
        return super().create_arg(a.item() if isinstance(a, np.generic) else a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            path = self.path_of_module(m)
        except NameError:
            if any(True for _ in chain(m.parameters(), m.buffers())):
                raise
            return forward(*args, **kwargs)  # forward made it, as it makes losses
        if self.is_leaf_module(m, path):  # what fails here is the code around the leaf
            return super().call_module(m, forward, args, kwargs)
        self.path.append(path)
        with state_kept(m):
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
def _nothing_kept(model: nn.Module, _: Sequence[Any]) -> Iterator[None]:
    """Run the model's Python for a tracer that loses what it replaces and remembers."""
    with fakes_removed(model), state_kept(model):
        yield


def symbolic_trace(
    mode: GradientMode, model: nn.Module, call: Call
) -> tuple[fx.GraphModule, Structure]:
    """The flat graph, and the structure around its outputs.

    Ever more submodules are opaque: the innermost that fails each time.
    """
    flat, returned = flat_model(model, call, _nothing_kept)
    opaque: frozenset[str] = frozenset()
    while True:
        tracer = _ModuleTracer(model, opaque)
        try:
            with undone_if_it_fails(Notes(model)):
                module = _symbolic_module(model, flat, tracer, mode, call)
            return module, returned[-1]
        except TraceError:
            raise
        except Exception:  # whatever a submodule's code raises; the outermost one's is the reason
            inner = tracer.path[-1] if tracer.path else "model"
            if inner == "model" or inner in opaque:
                raise
            opaque |= {inner}


def _symbolic_module(
    model: nn.Module, flat: nn.Module, tracer: _ModuleTracer, mode: GradientMode, call: Call
) -> fx.GraphModule:
    lost = _NothingLost()
    parts = {path.removeprefix("model."): flat.get_submodule(path) for path in tracer.opaque}
    told = untold(parts)
    with watched(model, mode), lost, _types_unasked(model), told, reads_noted(model) as reads:
        graph = tracer.trace(flat)
    module = fx.GraphModule(flat, graph)
    with checkpoints_watched(model), sets_noted() as found:  # by what stays whole
        facts = propagate(module, call.tensors)
    rows = ((vars(part), names) for part in model.modules() for names in state_of(part))
    state = {(id(own), name) for own, names in rows for name in names}
    for name in sorted(name for _, name in (reads & found) - state):
        raise RuntimeError(f"forward reads {name!r} that a submodule sets which stays whole")
    _refuse_objects(facts, tracer)
    _refuse_frozen(module, facts, lost)
    refuse_hidden_parameters(model, opaque_leaves(module, module.graph.nodes).values())
    return module


@contextmanager
def _types_unasked(model: nn.Module) -> Iterator[None]:
    """Refuse `isinstance` and `type` in the model's code on what fx sees as a proxy."""

    def ask(value: Any, kinds: Any) -> bool:
        _refuse_proxy(value)
        return isinstance(value, kinds)

    is_tensor = patch.object(torch, "is_tensor", lambda value: ask(value, torch.Tensor))
    with seen_by(model, "isinstance", ask), seen_by(model, "type", _Type), is_tensor:
        yield


def _refuse_proxy(value: Any) -> None:
    if isinstance(value, fx.Proxy):
        raise RuntimeError(f"forward asks for the type of {value.node}, which fx cannot tell")


def types_told(model: nn.Module) -> AbstractContextManager[None]:
    """Let `type(tensor) is torch.Tensor` hold in the model's code, which gets fake tensors."""
    return seen_by(model, "type", _Type)


class _Asked(type):
    """What asking for a type does."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if len(args) == 1 else None
        _refuse_proxy(value)
        if isinstance(value, FakeTensor):
            return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
        return NUMBERS.get(type(value)) or type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type)


@final
class _Type(type, metaclass=_Asked):
    """`type` in the model's code."""


_MADE: Final = "_tensor_constant"  # how the names begin of tensors that forward makes


@final
class _NothingLost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A check that nothing fx cannot see draws or writes, since a trace would freeze that.

    Attributes:
        read: The memory of tensors of before, such as plain attributes, that forward computes with.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: dict[int, torch.UntypedStorage] = {}
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
        self.read |= {key: t for key, t in before.items() if key not in self._made}
        self._made |= {key: t for key, t in _storages(result).items() if key not in before}
        return result


def _refuse_objects(facts: Facts, tracer: _ModuleTracer) -> None:
    """Refuse an object of a leaf's that forward reads: tensors in it would lose their gradients.

    One that is only handed to the caller, such as a cache of keys and values, may have any.
    """
    for node, known in facts.nodes.items():
        constants = known.structure.constants if known.structure else ()
        odd = [value for value in constants if callable(value) or not is_plain(value)]
        leaf = node
        while leaf.target in _PARTS and isinstance(leaf.args[0], fx.Node):
            leaf = leaf.args[0]
        readers = (user for user in node.users if user.op != "output" and user.target not in _PARTS)
        if odd and leaf.op == "call_module" and any(readers):
            path = str(leaf.target)
            tracer.path.append(path.rpartition(".")[0])  # its caller, as a rule
            raise RuntimeError(
                f"{path.removeprefix('model.')} stays whole and returns a {type(odd[0]).__name__}, "
                "whose tensors a trace does not see; let a submodule call it and return tensors"
            )


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    return distinct_storages([t for t in tensors_in(value) if t.layout is torch.strided])


def _refuse_frozen(module: fx.GraphModule, facts: Facts, lost: _NothingLost) -> None:
    """Refuse a tensor that forward makes and writes into or returns: fx makes it once for all.

    So it computes once for all with a tensor of before, into which forward must not write.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        known = _storages(attribute(module, str(node.target))).keys() & lost.read
        if known and any(value.storage in facts.written for value in facts.nodes[node].values):
            raise RuntimeError(
                f"forward computes with {node.target}, into which it writes: fx would freeze it"
            )
        if str(node.target).startswith(_MADE):
            if any(value.storage in facts.written for value in facts.nodes[node].values):
                raise RuntimeError("forward writes into a tensor that it makes: fx would freeze it")
            if any(user.op == "output" for user in node.users):
                raise RuntimeError("forward returns a tensor that it makes: fx would freeze it")
