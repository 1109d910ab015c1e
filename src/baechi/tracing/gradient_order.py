"""Gradients that an operator adds its own to: it reads a value several times.

Autograd adds gradients up one by one, from a value's last reader to its first. An operator that is
several of its nodes, such as `rms_norm`, attention or `cdist`, sends more than one:
`(later + one) + two`. Across tapes it would give back `one + two`, and the sum rounds otherwise. So
the gradients of later readers come to the backward of such an operator, and go on with its own.
What comes before the value needs them all anyway, so little waits for longer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import fx

from baechi.traced.operators import TracedTensor
from baechi.tracing.node_facts import Facts
from baechi.tracing.partition import Partition

Routes: TypeAlias = Mapping[fx.Node, Mapping[fx.Node, fx.Node]]  # of values: reader -> operator


def find_routes(facts: Facts, parts: Partition) -> Routes:
    """By value the readers whose gradients come to an earlier reader, with that."""
    several: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    reached = _reached(facts, parts)
    for node in filter(reached.__contains__, parts.op_of):
        for argument in facts.nodes[node].several:
            several[node.all_input_nodes[argument]].append(node)
    found: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
    for value, operators in several.items():
        home = _home(value, facts, parts)
        if home is None:
            continue
        readers: dict[int, list[fx.Node]] = defaultdict(list)
        for user in parts.users(value):
            if user in parts.op_of:
                readers[parts.op_of[user]].append(user)
        for op, nodes in readers.items():
            first = min(parts.position[node] for node in nodes)
            before = [n for n in operators if parts.position[n] < first]
            via = max(before, key=parts.position.__getitem__, default=None)
            if via is None or home in (op, parts.op_of[via]) or op < parts.op_of[via]:
                continue  # what depends on a reader cannot wait for its gradient
            if not _reads_more(parts.nodes_of_op[op], value, parts):
                found.setdefault(value, {}).update(dict.fromkeys(nodes, via))
        last = max(operators, key=parts.position.__getitem__)
        returned = value in parts.output.all_input_nodes
        if returned and home != parts.op_of[last] and not _reads_more([parts.output], value, parts):
            found.setdefault(value, {})[parts.output] = last
    return found


def routed(
    rows: Sequence[tuple[TracedTensor, int | None]], facts: Facts, parts: Partition, routes: Routes
) -> tuple[TracedTensor, ...]:
    """Tensors between operators, with the operators to which their gradients go."""
    via = {
        facts.nodes[value].values[0].storage: {
            parts.op_of.get(reader): parts.op_of[operator] for reader, operator in readers.items()
        }
        for value, readers in routes.items()
    }
    return tuple(
        tensor
        if storage not in via
        else replace(
            tensor,
            gradient_to=tuple(
                via[storage].get(op, tensor.producer) for op in (*tensor.consumers, None)
            ),
        )
        for tensor, storage in rows
    )


def _reached(facts: Facts, parts: Partition) -> set[fx.Node]:
    """The nodes that a gradient of the outputs may reach; what stays whole may be for nothing."""
    found = set(parts.output.all_input_nodes)
    for node in reversed(parts.program):
        if node in found or (facts.nodes[node].writes and node.op != "call_module"):
            found.update((node, *node.all_input_nodes))
    return found


def _home(value: fx.Node, facts: Facts, parts: Partition) -> int | None:
    """The operator that makes a value, one tensor, and its memory."""
    rows, op = facts.nodes[value].values, parts.op_of.get(value)
    if value.op in ("placeholder", "get_attr") or len(rows) != 1:
        return None
    return op if op == parts.home(rows[0].storage) else None


def _reads_more(nodes: Sequence[fx.Node], value: fx.Node, parts: Partition) -> bool:
    """True if nodes read a value through a view, too: they send one gradient for both."""
    (row,) = parts.values(value)
    read = {argument for node in nodes for argument in node.all_input_nodes} - {value, *nodes}
    return any(v.storage == row.storage for a in read for v in parts.values(a))
