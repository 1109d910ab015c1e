"""A traced family at other sizes, and beside a trace without symbols."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, Final

import torch
from torch import fx

from baechi.torch_support.symbolic_sizes import is_unbacked
from baechi.torch_support.tracer_internals import HigherOrderOperator, OpOverload
from baechi.traced.traced_model import Traced
from baechi.tracing.calling_convention import Call
from baechi.tracing.fx_nodes import (
    END,
    chosen_by_values,
    node_arguments,
    nodes_inside,
    target_name,
)
from baechi.tracing.lowering import Lowering, TracedModule, lower
from baechi.tracing.node_facts import Facts, Value
from baechi.tracing.partition import Partition, attribute, living
from baechi.tracing.pytrees import tensors_in

_FEW: Final = 64  # numbers of which Python makes a tensor


def resized(traced: Traced, values: Sequence[int]) -> Traced:
    """A traced family where its symbols have these values; for graphs, not for a profile.

    Keys, by which costs are known, are those of the trace.
    """
    module: TracedModule = traced.module
    assert module.family is not None
    facts = module.family.facts(values)
    parts = Partition(module.graph_module, facts)
    lowering = Lowering(module.model, module.graph_module, facts, parts, module.call)
    rows = lowering.tensors()
    inside = lowering.saved_inside({s: i for i, (_, s) in enumerate(rows) if s is not None})
    owned, _ = lowering.ownership(rows)
    ops = (
        replace(op, saved_bytes=saved, frozen_bytes=own.frozen)
        for op, saved, own in zip(traced.ops, inside, owned, strict=True)
    )
    module = replace(module, facts=facts)
    return replace(traced, ops=tuple(ops), tensors=tuple(row for row, _ in rows), module=module)


def sized(traced: Traced, values: Sequence[int]) -> Traced:
    """A traced family where its symbols have these values: an ordinary trace, to be profiled.

    The example has those sizes, too, filled with what it holds, again and again.
    """
    module: TracedModule = traced.module
    assert module.family is not None
    if tuple(values) == module.family.traced_at:
        return traced
    facts, call = module.family.facts(values), module.family.call_at(values)
    ops, tensors, found = lower(
        *(module.model, module.graph_module, facts, call),
        *(module.family.returned(values), module.attributes),
        ordered=True,
    )
    found = replace(found, gradients=module.gradients)
    return replace(traced, ops=ops, tensors=tensors, module=found)


def is_same(traced: Traced, other: Traced) -> bool | None:
    """True if a traced family runs, at the sizes of a trace without symbols, what that does.

    None if that is not of the family.
    """
    one: TracedModule = traced.module
    two: TracedModule = other.module
    values = None if one.family is None else one.family.joined(two.call)
    if one.family is None or values is None:
        return None
    carried = one.family.carrying(two.call).tensors[len(two.call.tensors) :]
    return _is_equal(one, values, two, carried, exact=False)


def same_beyond(traced: Traced, other: Traced) -> Call | None:
    """The call of another trace if a family runs at its sizes what that does; else None.

    The guards of the family do not count, nor strides of what has no gradient. The other trace is
    without symbols, or a family with the same numbers. The call carries these.
    """
    one: TracedModule = traced.module
    two: TracedModule = other.module
    family, asks = one.family, two.questions.needs_arguments()
    if family is None or asks or one.gradients != two.gradients:
        return None
    if two.family is not None:
        call = two.call if two.family.numbers == family.numbers else None
    else:
        call = family.carrying(two.call) if family.carries(two.call) else None
    values = None if call is None else family.beyond(call)
    if call is None or values is None:
        return None
    carried = call.tensors[len(call.tensors) - len(family.numbers) :]
    try:
        return call if _is_equal(one, values, two, carried, exact=True) else None
    except (ArithmeticError, ValueError):  # sizes that the family cannot have
        return None


def _is_equal(
    one: TracedModule,
    values: Sequence[int],
    two: TracedModule,
    carried: Sequence[torch.Tensor],
    *,
    exact: bool,
) -> bool:
    """True if they run the same; `carried` has the numbers of the other's call."""
    assert one.family is not None
    given = len(one.call.tensors) - len(carried)
    mine = _program(one.graph_module, one.family.facts(values), given, carried, exact)
    theirs = _program(two.graph_module, two.facts, given, carried, exact)
    if len(mine) != len(theirs) or not all(map(_same_row, mine, theirs)):
        return False
    returned = one.family.returned(values)
    if exact and returned.form != two.returned.form:
        return False
    return repr(returned.constants) == repr(two.returned.constants)


def _program(
    module: fx.GraphModule,
    facts: Facts,
    inputs: int,
    carried: Sequence[torch.Tensor],
    exact: bool,
) -> list[tuple[Any, ...]]:
    """Every node that yields or does more than a number, with its arguments and effects.

    Of the arguments the first that are given; the others carry numbers. Strides do not count:
    operators choose them when they run, and with symbols torch may take another memory format for
    a pooled map of 1 x 1. What follows from them counts: other operators, or other storages. A
    slice of all is an alias, and it is what it is of, unless gradients are added up there.

    Two traces of one call agree in more than is compared. If `exact`, so do those of two calls:
    what the graph holds counts by its value, or, as a function, by its identity; graphs inside of
    it node by node; and strides where there is a gradient. Sizes that values of tensors decide do
    not count. What `torch.tensor` makes of numbers counts by its values: a graph holds it, unless
    one is a symbol.
    """
    # A trace without symbols has no inputs that carry numbers.
    carriers = dict(zip(module.graph.find_nodes(op="placeholder")[inputs:], carried, strict=False))
    names: dict[fx.Node, str] = {}
    constants: dict[fx.Node, torch.Tensor] = {}
    storages: dict[int, int] = {}  # numbered as they appear
    rows: list[tuple[Any, ...]] = []
    alive = set(living(module.graph, facts))
    numbers: dict[fx.Node, Any] = {}  # floats that are carried, and what is made of them

    def show(node: fx.Node) -> Any:
        if node in names:
            return names[node]
        if node in numbers:
            return numbers[node]
        structure = facts.nodes[node].structure
        if structure is None or is_unbacked(node.meta.get("val")):
            return None
        return structure.constants[0]

    for node in module.graph.nodes:
        if node.op == "output":
            rows.append(("output", fx.node.map_arg(node.args, show)))
            continue
        made = _made(module, node, constants, show)
        if made is not None:
            constants[node], names[node] = made, repr((made.dtype, made.tolist()))
            continue
        fact = facts.nodes[node]
        number = not (fact.values or fact.acts) and node.op not in ("placeholder", "get_attr")
        if number and node.op == "call_function":
            _note_number(node, carriers, numbers)
        if number or node not in alive or node in carriers:
            continue
        is_alias = _is_alias(node, facts)
        if is_alias and not (fact.values[0].requires_grad and _has_other_readers(node, facts)):
            names[node] = show(node.args[0])
            continue
        given = node.args[:1] if is_alias else _arguments(node, facts)
        arguments = fx.node.map_arg(given, show)
        values = tuple(
            (
                *(storages.setdefault(value.storage, len(storages)), value.dtype, shape),
                stride if exact and value.requires_grad else None,
            )
            for value, (shape, stride) in zip(fact.values, _known(node, fact.values), strict=True)
        )
        writes = sorted(storages.setdefault(s, len(storages)) for s in fact.writes)
        target = "" if node.op == "placeholder" or is_alias else target_name(node)
        if exact and (node.op == "get_attr" or isinstance(node.target, FunctionType)):
            target = _held(module, node)
        graphs = [inner for inner in nodes_inside(node) if isinstance(inner.target, OpOverload)]
        names_inside = map(target_name, graphs)
        inside = [name for name in names_inside if not name.startswith("aten.sym_")]
        rows.append((node.op, target, arguments, values, writes, fact.random, fact.checks, inside))
        names[node] = f"%{len(rows)}"
    return rows


def _note_number(
    node: fx.Node, carried: Mapping[fx.Node, torch.Tensor], numbers: dict[fx.Node, Any]
) -> None:
    """Note the float that a node reads from a tensor which carries it, or makes of such floats."""
    inputs, function = node.all_input_nodes, node.target
    if function is torch.ops.aten.item.default and inputs[0] in carried:
        numbers[node] = carried[inputs[0]].item()
    elif inputs and callable(function) and all(each in numbers for each in inputs):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        numbers[node] = function(*args, **kwargs)


def _made(
    module: fx.GraphModule,
    node: fx.Node,
    made: Mapping[fx.Node, torch.Tensor],
    show: Callable[[fx.Node], Any],
) -> torch.Tensor | None:
    """What `torch.tensor` made of a few numbers, by the nodes that do so; None of another node."""
    aten = torch.ops.aten
    if node.op == "get_attr" and all(n.target is aten.lift_fresh_copy.default for n in node.users):
        held = attribute(module, str(node.target))
        few = isinstance(held, torch.Tensor) and not held.is_meta and held.numel() <= _FEW
        return held if few else None
    if node.target is aten.lift_fresh_copy.default:
        return made.get(node.all_input_nodes[0])
    if node.target is aten.scalar_tensor.default:
        number: Any = fx.node.map_arg(node.args[0], show)
        dtype: Any = node.kwargs["dtype"]
        return None if number is None else torch.tensor(number, dtype=dtype)
    if node.target is aten.stack.default and len(node.args) == 1:
        rows: Any = node.args[0]
        return torch.stack([made[row] for row in rows]) if made.keys() >= {*rows} else None
    return None


def _known(node: fx.Node, values: Sequence[Value]) -> list[tuple[Any, Any]]:
    """The shapes and strides of what a node yields, `None` for what values of tensors decide."""
    noted = list(tensors_in(node.meta.get("val")))
    # A submodule that stays whole has none; of an LSTM with projections torch 2.11 has others.
    if [tensor.dim() for tensor in noted] != [len(value.shape) for value in values]:
        return [(value.shape, value.stride) for value in values]

    def known(sizes: Sequence[int], terms: Sequence[Any]) -> tuple[int | None, ...]:
        pairs = zip(sizes, terms, strict=True)
        return tuple(None if is_unbacked(term) else size for size, term in pairs)

    pairs = zip(values, noted, strict=True)
    return [(known(v.shape, t.shape), known(v.stride, t.stride())) for v, t in pairs]


def _has_other_readers(alias: fx.Node, facts: Facts) -> bool:
    """True if more than the alias reads what it is of."""
    readers = (reader for reader in alias.all_input_nodes[0].users if reader is not alias)
    return any(reader.op == "output" or facts.nodes[reader].values for reader in readers)


def _is_alias(node: fx.Node, facts: Facts) -> bool:
    """True of `x[:len(x)]`, which torch takes for an alias or for nothing if it knows the sizes."""
    if node.target is torch.ops.aten.slice.Tensor and not chosen_by_values(node):
        (before,), (value,) = (facts.nodes[n].values for n in (node.all_input_nodes[0], node))
        return before.shape == value.shape
    return node.target is torch.ops.aten.alias.default


def _arguments(node: fx.Node, facts: Facts) -> Any:
    """The arguments of a node; `x[:n]` begins at 0, or has no beginning, and `x[n:]` no end.

    A graph that it runs gets, of symbolic sizes, some by name, and returns some beside its tensors.
    """
    if node.target is torch.ops.aten.slice.Tensor:
        given = node_arguments(node)
        end = END if given["end"] is None else given["end"]
        return {**given, "start": given["start"] or 0, "end": end}
    if isinstance(node.target, HigherOrderOperator):
        return [
            arg
            for arg in node.args
            if not isinstance(arg, fx.Node) or arg.op == "get_attr" or facts.nodes[arg].values
        ]
    if node.target is operator.getitem:
        (made,), index = node.all_input_nodes, node.args[1]
        if isinstance(made.target, HigherOrderOperator):
            return made, len(list(tensors_in(made.meta["val"][:index])))
    return node.args, dict(node.kwargs)


def _same_row(one: Any, other: Any) -> bool:
    mine, theirs = one[1], other[1]
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        try:
            alike = mine.dtype == theirs.dtype and not mine.requires_grad
            if mine is not theirs and not (alike and torch.equal(mine, theirs)):
                return False
        except RuntimeError:  # on meta, or elsewhere
            return False
        one, other = ((row[0], *row[2:]) for row in (one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def _held(module: fx.GraphModule, node: fx.Node) -> Any:
    """A tensor; of a graph its nodes; of anything else its identity."""
    found = attribute(module, str(node.target)) if node.op == "get_attr" else node.target
    if isinstance(found, fx.GraphModule):
        names = {inner: f"%{i}" for i, inner in enumerate(found.graph.nodes)}
        return [_shown(found, inner, names) for inner in names]
    return found if isinstance(found, torch.Tensor) else id(found)


def _shown(module: fx.GraphModule, node: fx.Node, names: Mapping[fx.Node, str]) -> Any:
    """A node of an inner graph; a tensor in there is no other graph's."""
    target: Any = "" if node.op in ("placeholder", "output") else target_name(node)
    if node.op == "get_attr" or isinstance(node.target, FunctionType):
        target = _held(module, node)
        target = id(target) if isinstance(target, torch.Tensor) else target
    return node.op, target, fx.node.map_arg((node.args, dict(node.kwargs)), names.__getitem__)
