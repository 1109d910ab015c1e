"""Activation checkpointing: units of a model whose forward runs again before their backwards.

A unit is the operators of one submodule. docs/runtime.md, "What runs forward again", has a picture.

Source: Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174), for given
units; `checkpointing` chooses them.

Complexity: O(units * (ops + tensors) of each unit's stretch of the program).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import final

from baechi.errors import InputError
from baechi.records.op_costs import OpCost
from baechi.traced.operators import TracedOperators


@final
@dataclass(frozen=True, slots=True)
class Unit:
    """Operators that run forward twice.

    Attributes:
        name: The path of their submodule, with a number where the submodule is several units.
        ops: Forward operators, ascending.
    """

    name: str
    ops: tuple[int, ...]


def module_paths(traced: TracedOperators) -> tuple[str, ...]:
    """The submodules that have operators, and those around them, in program order."""
    return tuple(dict.fromkeys(path for op in traced.ops for path in op.modules))


def named_units(traced: TracedOperators, patterns: str | Iterable[str]) -> tuple[Unit, ...]:
    """The units of the submodules that match some patterns, such as `"h.0"` and `"h.*"`.

    docs/runtime.md, "What runs forward again", has the rules.
    """
    if not isinstance(patterns, Iterable):
        raise InputError(
            f"checkpoint is {patterns!r}; what fits a limit of memory depends on the devices. Give "
            "names of submodules here, or find them with baechi.choose_checkpoint; baechi.place "
            "takes a limit."
        )
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    paths = module_paths(traced)
    found: set[str] = set()
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise InputError(
                f"checkpoint names {pattern!r}, a {type(pattern).__name__}; give paths of "
                'submodules such as "h.0", or patterns such as "h.*".'
            )
        matches = {path for path in paths if fnmatchcase(path, pattern)}
        if not matches:
            close = get_close_matches(pattern, paths, n=3, cutoff=0.3) or list(paths[:3])
            hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            raise InputError(
                f"checkpoint {pattern!r} names no submodule of {traced.name} that runs an "
                f"operator.{hint}"
            )
        if not units_of(traced, matches):
            raise InputError(
                f"checkpoint {pattern!r} names only operators of {traced.name} that no gradient "
                "reaches: there is nothing to keep for their backward. Leave it out."
            )
        found |= matches
    return units_of(traced, found)


def units_of(traced: TracedOperators, modules: set[str]) -> tuple[Unit, ...]:
    """The units of the outermost of some submodules, in the order of their first operators."""
    members: dict[str, list[int]] = {}
    for op, row in enumerate(traced.ops):
        path = next((path for path in row.modules if path in modules), None)
        if path is not None:
            members.setdefault(path, []).append(op)
    units = []
    for path, ops in members.items():
        parts = _convex(traced, _that_run_again(traced, ops))
        for number, part in enumerate(parts, start=1):
            again = _that_run_again(traced, part)
            if again:
                units.append(Unit(path if len(parts) == 1 else f"{path}#{number}", tuple(again)))
    return tuple(sorted(units, key=lambda unit: unit.ops[0]))


def _that_run_again(traced: TracedOperators, ops: Sequence[int]) -> list[int]:
    """Operators with a backward and those that they need, except ones whose outputs stay anyway."""
    again: set[int] = set()
    for op in reversed(ops):
        made = traced.made[op]
        read = any(not again.isdisjoint(tensor.consumers) for tensor in made)
        if op in traced.differentiated or (read and not all(tensor.kept for tensor in made)):
            again.add(op)
    return sorted(again)


def _convex(traced: TracedOperators, ops: Sequence[int]) -> list[list[int]]:
    """The operators, split where an outside operator depends on some and others depend on it."""
    inside = set(ops)
    level: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    for op in range(ops[0], ops[-1] + 1) if ops else ():
        if op in inside:
            parts.setdefault(level.setdefault(op, 0), []).append(op)
        if op not in level:
            continue
        for consumer in (c for tensor in traced.made[op] for c in tensor.consumers):
            left = op in inside and consumer not in inside
            level[consumer] = max(level.get(consumer, 0), level[op] + left)
    return [parts[number] for number in sorted(parts)]


def backward_sequence(traced: TracedOperators, units: Sequence[Unit]) -> list[int]:
    """The order of the backward half: operators stand for their backward, `~k` for unit k again.

    A unit runs again after all gradients that enter it and before its backward ops; otherwise
    the last forward operator comes first.
    """
    if not units:
        return list(traced.backward_ops)
    import networkx

    unit_of = unit_of_ops(units)
    before: dict[int, set[int]] = {~k: set() for k in range(len(units))}
    for op in traced.backward_ops:
        before[op] = {~unit_of[op]} if op in unit_of else set()
    for tensor in traced.tensors:
        maker = tensor.producer
        if not tensor.differentiable or maker not in before:
            continue
        for reader in traced.differentiated.intersection(tensor.consumers):
            before[maker].add(reader)
            if maker in unit_of and unit_of.get(reader) != unit_of[maker]:
                before[~unit_of[maker]].add(reader)
    steps = networkx.DiGraph(before).reverse(copy=False)

    def turn(row: int) -> tuple[int, int]:
        return (-row, 1) if row >= 0 else (-units[~row].ops[-1], 0)

    try:
        return list(networkx.lexicographical_topological_sort(steps, turn))
    except networkx.NetworkXUnfeasible:
        circle = {unit_of[op] for op, _ in networkx.find_cycle(steps) if op in unit_of}
        names = ", ".join(repr(units[k].name) for k in sorted(circle))
        raise InputError(
            f"checkpoint: {names} need each other's gradients before their own, so none can run "
            "again first. Name a submodule around them, or only one of them."
        ) from None


def unit_of_ops(units: Sequence[Unit]) -> dict[int, int]:
    """The unit of every operator that is in one."""
    return {op: k for k, unit in enumerate(units) for op in unit.ops}


def groups_of(traced: TracedOperators, units: Sequence[Unit]) -> dict[int, str]:
    """New groups of the operators whose group changes because a unit is on one device.

    Units that share a group, as the users of one parameter do, become one group.
    """
    import networkx

    unit_of = unit_of_ops(units)
    joined: networkx.Graph[int | str] = networkx.Graph()  # units with the groups of their operators
    joined.add_nodes_from(range(len(units)))
    joined.add_edges_from(
        (k, group) for op, k in unit_of.items() if (group := traced.ops[op].group) is not None
    )
    names: dict[int | str | None, str] = {}
    for members in networkx.connected_components(joined):
        first = min(k for k in members if isinstance(k, int))
        names |= dict.fromkeys(members, f"checkpoint:{units[first].name}")
    keys = ((op, unit_of.get(op, row.group)) for op, row in enumerate(traced.ops))
    return {op: names[key] for op, key in keys if key in names}


def workspace_bytes(traced: TracedOperators, unit: Sequence[int], costs: Sequence[OpCost]) -> int:
    """Scratch memory of a unit that runs again, beyond the tensors it makes for its backward ops.

    A temporary tensor is held from its producer to its last reader inside. Saved tensors count from
    the beginning, so those not yet made leave room for the others.
    """
    graded = traced.differentiated.intersection(unit)
    kept = {t for op in graded for t in traced.ops[op].saves}
    later = {op: costs[op].saved_bytes if op in graded else 0 for op in unit}
    made = dict.fromkeys(unit, 0)
    ended = dict.fromkeys(unit, 0)
    for index, tensor in enumerate(traced.tensors):
        if tensor.producer not in made:
            continue
        if index in kept:
            later[tensor.producer] += tensor.nbytes
            continue
        made[tensor.producer] += tensor.nbytes
        last = max((c for c in tensor.consumers if c in made), default=tensor.producer)
        ended[last] += tensor.nbytes
    left, live, most = sum(later.values()), 0, 0
    for op in unit:
        left -= later[op]
        live += made[op]
        most = max(most, live + costs[op].workspace_bytes - left)
        live -= ended[op]
    return most
