"""Modes that forward switches, `torch.no_grad` and autocast, told by the nodes that run in them.

torch.export makes each block in such a mode one node, that runs a graph: a backbone in a block
could not be split. Of blocks inside of blocks it loses some (2.13). So its trace is taken before it
does (`tracer_internals.switches_kept`), with a node for each switch. Here these go, and each
operator runs in its mode:

    torch.no_grad    it reads others' tensors without their graph, so no gradient comes to them
    autocast         it reads what autocast would give it: the casts are nodes, too

What autocast does to an operator is seen by running it on fake tensors. Where it does more than to
cast what is read, as inside of `einsum`, the operator runs under it (`modes.Under`).
"""

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from baechi.torch_support.storages import key_of
from baechi.torch_support.symbolic_sizes import term_of
from baechi.torch_support.tracer_internals import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SET_GRADIENTS,
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
    is_composite,
)
from baechi.tracing.fx_nodes import memory_in_trace, written_into
from baechi.tracing.guards import Autocast
from baechi.tracing.modes import Modes, Under
from baechi.tracing.observers import Observer
from baechi.tracing.pytrees import tensors_in
from baechi.tracing.shared_casts import AUTOCASTING, is_cast_once

_ATEN: Final = torch.ops.aten
_SWITCHES: Final = (SET_GRADIENTS, ENTER_AUTOCAST, EXIT_AUTOCAST)


def without_switches(module: fx.GraphModule, around: Autocast) -> fx.GraphModule:
    """The module, changed in place: no node switches a mode.

    Args:
        module: The module, of a program that torch.export made.
        around: The autocast around the call.

    Raises:
        RuntimeError: A submodule stays whole in a mode that forward switched.
    """
    switches = [node for node in module.graph.nodes if node.target in _SWITCHES]
    if switches:
        _Switched(module, around).run()
        for node in reversed(switches):
            module.graph.erase_node(node)
        module.recompile()
    return module


@final
class _Switched:
    """The nodes of a module up to one of them."""

    def __init__(self, module: fx.GraphModule, around: Autocast) -> None:
        self._module = module
        self._around = dict(around.dtypes)
        self._modes = Modes(True, self._around)
        self._shares = self._shared_around = around.cached  # whether readers share a weight's cast
        self._entered: list[tuple[Modes, bool]] = []
        self._plain: set[fx.Node] = set()  # those made without gradients
        self._written: set[int | None] = set()  # memory, with them
        self._same: dict[fx.Node, fx.Node] = {}  # by those that give back what they read
        self._cut: dict[fx.Node, fx.Node] = {}
        self._casts: dict[int, fx.Node] = {}  # of weights, by their ids

    def run(self) -> None:
        for node in list(self._module.graph.nodes):
            if node.target in _SWITCHES:
                self._switch(node)
            elif node.op not in ("placeholder", "get_attr"):
                with self._module.graph.inserting_before(node):
                    self._settle(node)

    def _switch(self, node: fx.Node) -> None:
        if node.target is SET_GRADIENTS:
            self._modes = replace(self._modes, gradients=bool(node.args[0]))
        elif node.target is EXIT_AUTOCAST:
            modes, self._shares = self._entered.pop()
            self._modes = replace(modes, gradients=self._modes.gradients)
        else:
            if not self._entered and not self._around:
                self._casts = {}
            self._entered.append((self._modes, self._shares))
            kind, dtype, enabled, cached = node.args
            dtypes: dict[Any, Any] = {**self._modes.autocast, kind: dtype if enabled else None}
            self._modes, self._shares = replace(self._modes, autocast=dtypes), bool(cached)

    def _settle(self, node: fx.Node) -> None:
        """Let a node run as in the modes of now."""
        dtypes, shares = self._modes.autocast, self._shares == self._shared_around
        switched = {
            kind: dtype
            for kind, dtype in dtypes.items()
            if dtype != self._around.get(kind) or not (dtype is None or shares)
        }
        modes = replace(self._modes, autocast=switched)
        if isinstance(node.target, Observer):
            node.target.modes = modes
            return
        if node.op == "call_module" and (switched or not modes.gradients):
            raise RuntimeError(
                f"{node.target} cannot stay whole where forward switches gradients or autocast"
            )
        graded = modes.gradients or node.op == "output"
        found = [self._original(one) if graded else one for one in _occurrences(node)]
        if switched and node.op != "output" and not _is_of_numbers(node):
            casts = self._dtypes_read(node, switched)
            if casts is None:
                node.target = Under(node.target, Modes(autocast=switched))  # type: ignore[arg-type]
            else:
                found = [
                    source if dtype is None else self._cast(source, dtype, node)
                    for source, dtype in zip(found, casts, strict=True)
                ]
        if graded:
            self._written.update(map(memory_in_trace, written_into(node)))
        elif node.target is _ATEN.contiguous.default and _given_back(node) is not None:
            node.target = Under(node.target, modes)  # a copy, where a kernel has another layout
            found = list(map(self._original, found))
        else:
            found = [self._without_graph(source, node) for source in found]
            self._plain.add(node)
            given = _given_back(node)
            if given is not None:
                self._same[node] = self._original(given)
        changed = iter(found)
        node.args = fx.node.map_arg(node.args, lambda _: next(changed))
        node.kwargs = fx.node.map_arg(node.kwargs, lambda _: next(changed))

    def _original(self, node: fx.Node) -> fx.Node:
        return self._same.get(node, node)

    def _without_graph(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """What a node without gradients reads: the tensor without its graph, if it may have one."""
        if source in self._plain and memory_in_trace(source) not in self._written:
            return source
        source = self._original(source)
        if not _may_have_graph(source):
            return source
        cut = self._cut.get(source)
        if cut is None:
            cut = self._new(_ATEN.detach.default, (source,), source.meta["val"], reader)
            self._plain.add(cut)
            self._same[cut] = source
        if source.op != "get_attr":  # each reader of a parameter has one of its own
            self._cut[source] = cut
        return cut

    def _dtypes_read(
        self, node: fx.Node, switched: Mapping[str, Any]
    ) -> list[torch.dtype | None] | None:
        """The dtypes to which autocast casts what a node reads; None if that is not all."""
        values = [one.meta.get("val") for one in _occurrences(node)]
        kinds = {tensor.device.type for tensor in tensors_in(values)}
        if not isinstance(node.target, OpOverload) or not kinds >= switched.keys():
            return None
        keys = [AUTOCASTING[kind] for kind in switched if kind in AUTOCASTING]
        listed = len(keys) < len(switched) or any(
            map(node.target.has_kernel_for_dispatch_key, keys)
        )
        if not listed and not is_composite(node.target):
            return [None] * len(values)
        with suppress(Exception):  # where sizes depend on values, and the like
            return _observed(node, values, self._around, self._modes.autocast, listed=listed)
        return None

    def _cast(self, source: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node:
        """The cast of what a node reads, which all readers of a weight may share."""
        value = source.meta["val"].to(dtype)
        if not self._modes.gradients:
            source = self._without_graph(source, reader)
            cast = self._new(_ATEN.to.dtype, (source, dtype), value, reader)
            self._plain.add(cast)
            return cast
        weight = attrgetter(str(source.target))(self._module) if source.op == "get_attr" else None
        shared = self._shares and dtype in self._modes.autocast.values() and is_cast_once(weight)
        if shared and id(weight) in self._casts:
            return self._casts[id(weight)]
        cast = self._new(_ATEN.to.dtype, (source, dtype), value, reader)
        if shared:
            self._casts[id(weight)] = cast
        return cast

    def _new(self, target: Any, args: tuple[Any, ...], value: Any, reader: fx.Node) -> fx.Node:
        made = self._module.graph.call_function(target, args)
        made.meta = {**reader.meta, "val": value}
        return made


def _occurrences(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, each as often as it is there."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _is_of_numbers(node: fx.Node) -> bool:
    """True if a node computes nothing of tensors, or takes one out of several."""
    return node.target is operator.getitem or not any(
        isinstance(one.meta.get("val"), torch.Tensor) for one in node.all_input_nodes
    )


def _given_back(node: fx.Node) -> fx.Node | None:
    """The node whose very tensor a node gives, in the trace.

    So do what writes in place, and `broadcast_tensors` with nothing to do.
    """
    maker = node.all_input_nodes[0] if node.target is operator.getitem else node
    given, made = maker.all_input_nodes, node.meta.get("val")
    if not isinstance(maker.target, OpOverload) or not isinstance(made, torch.Tensor):
        return None
    for written in written_into(maker):
        return written if memory_in_trace(written) == memory_in_trace(node) else None
    alike = [one for one in given if _form(one.meta.get("val")) == _form(made)]
    if not alike:
        return None
    with enable_python_dispatcher(), torch.no_grad():
        found = _called(maker, [one.meta.get("val") for one in _occurrences(maker)])
    found = found if maker is node else found[node.args[1]]
    return next((one for one in alike if one.meta["val"] is found), None)


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return object()
    sizes = (value.storage_offset(), *value.shape, *value.stride())
    return key_of(value.untyped_storage()), value.dtype, value.ndim, *map(term_of, sizes)


def _may_have_graph(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return node.op != "get_attr" or value.requires_grad


def _observed(
    node: fx.Node,
    values: Sequence[Any],
    around: Mapping[str, torch.dtype | None],
    wanted: Mapping[str, torch.dtype | None],
    *,
    listed: bool,
) -> list[torch.dtype | None] | None:
    """What is cast of what an operator reads, if autocast lists it; None if something else is."""
    found: list[torch.dtype | None] = [None] * len(values)
    cast, left = list(values), []
    with enable_python_dispatcher(), torch.no_grad():
        for row, source, dtype in _run(node, values, wanted):
            places = [i for i, v in enumerate(values) if v is source and found[i] is None]
            if dtype is None or not places or not listed:
                left.append(row)
            else:
                found[places[0]] = dtype
                cast[places[0]] = values[places[0]].to(dtype)
        again = [row for row, _, _ in _run(node, cast, {kind: around.get(kind) for kind in wanted})]
    return found if left == again else None


def _run(
    node: fx.Node, values: Sequence[Any], dtypes: Mapping[str, torch.dtype | None]
) -> list[tuple[Any, Any, torch.dtype | None]]:
    """What an operator on such values calls under autocast."""
    with _Noting() as noted:
        Modes(autocast=dtypes).around(_called)(node, values)
    rows: list[tuple[Any, Any, torch.dtype | None]] = noted.rows
    return rows


def _called(node: fx.Node, values: Sequence[Any]) -> Any:
    """What an operator gives of such values."""
    given = iter(values)
    target: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: next(given))
    return target(*args, **kwargs)


@final
class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators inside with the dtypes that they read, and of casts what, to which."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[tuple[Any, Any, torch.dtype | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)]
        named = [leaf for leaf in leaves if isinstance(leaf, torch.dtype)]
        made = kwargs.get("dtype") if func is _ATEN._to_copy.default else None
        if func.namespace != "prim":  # questions about tensors
            self.rows.append(((func, dtypes, named), args[0] if made else None, made))
        return func(*args, **kwargs)
