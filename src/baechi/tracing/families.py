"""Families: the calls that one trace with symbolic sizes can run.

`docs/runtime.md`, "More than one shape of call", has the guards: relations and layouts of arguments
(`Family.values`), what was decided by sizes, lengths of 0 and 1 (`holds`), and questions about
values (`answers`). Nothing after the trace is symbolic: `facts` are ints, of the same nodes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

import torch

from baechi.errors import InputError
from baechi.torch_support.symbolic_sizes import (
    SYMBOLIC,
    Symbols,
    compiled,
    solved,
    symbols_in,
)
from baechi.tracing.calling_convention import Call, layout_of, shown
from baechi.tracing.node_facts import Facts
from baechi.tracing.pytrees import Structure
from baechi.tracing.questions import Questions

# (index of a tensor, dimension); or (-1, place among the constants) of an int or a float.
Place: TypeAlias = tuple[int, int]
_NUMBER: Final = -1
_MOST_KEPT: Final = 1024  # sizes that were asked about, by shapes of calls


def differing(one: Call, two: Call) -> frozenset[Place] | None:
    """The sizes and numbers in which two calls differ; None if in something else.

    Sizes and ints are above 1.
    """
    changes = _changes(one, two)
    if changes is None or not all(_is_any(n) for both in changes.values() for n in both):
        return None
    return frozenset(changes)


def _is_any(number: float) -> bool:
    """True of what may be a symbol: a size or an int above 1, and any float."""
    return isinstance(number, float) or number > 1


def _changes(one: Call, two: Call, *, layouts: bool = True) -> dict[Place, tuple[Any, Any]] | None:
    """The sizes and numbers in which two calls differ, with both; None if they differ otherwise.

    Whether tensors are contiguous counts with `layouts` alone.
    """
    forms = [(c.structure.form, c.structure.places, c.autocast, c.defaults) for c in (one, two)]
    if forms[0] != forms[1]:
        return None
    pairs = list(zip(one.tensors, two.tensors, strict=True))
    if not all(_alike(mine, theirs, layouts) for mine, theirs in pairs):
        return None
    found: dict[Place, tuple[Any, Any]] = {
        (index, dim): both
        for index, (mine, theirs) in enumerate(pairs)
        for dim, both in enumerate(zip(mine.shape, theirs.shape, strict=True))
        if both[0] != both[1]
    }
    constants = zip(one.structure.constants, two.structure.constants, strict=True)
    found |= {
        (_NUMBER, place): both
        for place, both in enumerate(constants)
        if type(both[0]) is not type(both[1]) or shown(both[0]) != shown(both[1])
    }
    kinds = [set(map(type, both)) for both in found.values()]
    return found if all(kind in ({int}, {float}) for kind in kinds) else None


def _alike(one: torch.Tensor, two: torch.Tensor, layouts: bool) -> bool:
    """True if two tensors differ in sizes and strides alone, and both are contiguous or neither."""
    kinds = ((t.dtype, t.dim(), t.layout, layouts and layout_of(t) is None) for t in (one, two))
    return len(set(kinds)) == 1


def known_places(before: Call, family: "Family | None", call: Call) -> frozenset[Place]:
    """What is known to change from call to call, from one that was traced before.

    What was 0 or 1 there, such as the length of a cache, counts if it has grown.
    """
    carrying, places = call, frozenset[Place]()
    if family is not None:
        if not family.carries(call):
            return frozenset()
        carrying, places = family.carrying(call), family.places
    changes = _changes(before, carrying, layouts=False)
    if changes is None:
        return frozenset()
    given = frozenset(place for place in changes if place[0] < len(call.tensors))
    return frozenset(place for place in places | given if _is_any(size_at(call, place)))


def size_at(call: Call, place: Place) -> Any:
    """The size, or the number, at a place."""
    index, at = place
    return call.structure.constants[at] if index == _NUMBER else call.tensors[index].shape[at]


def _signature(call: Call) -> Any:
    return tuple((tensor.shape, tensor.stride()) for tensor in call.tensors)


# By the name of an argument: dimension -> name, or (name, smallest, largest).
Dynamic: TypeAlias = bool | Mapping[str, Mapping[int, str | tuple[str, int, int]]]


def check_dynamic(dynamic: Any) -> Dynamic:
    """The option, checked.

    Raises:
        InputError: It is none.
    """
    if isinstance(dynamic, bool):
        return dynamic
    rows = dynamic.values() if isinstance(dynamic, Mapping) else [None]
    for row in rows:
        dims = row.items() if isinstance(row, Mapping) else [(None, None)]
        for dim, what in dims:
            span: Any = (what, 2, 2) if isinstance(what, str) else what
            good = isinstance(span, tuple) and len(span) == 3 and isinstance(span[0], str)
            if type(dim) is not int or not good or not 2 <= span[1] <= span[2]:
                raise InputError(
                    f"dynamic is {dynamic!r}; give True (sizes that change become symbols), False "
                    "(a plan per shape), or what changes, by argument: "
                    '{"input_ids": {0: "batch", 1: ("length", 2, 4096)}}, with sizes from 2.'
                )
    return {name: dict(row) for name, row in dynamic.items()}


def declared(call: Call, dynamic: Mapping[str, Any]) -> dict[Place, tuple[int, int]]:
    """The declared sizes of a call, with the smallest and the largest that are meant."""
    names, found = call.names, dict[Place, tuple[int, int]]()
    for name, row in dynamic.items():
        owned = [i for i, own in enumerate(names) if own == name or own.startswith(f"{name}.")]
        if not owned:
            raise InputError(
                f"dynamic has an argument {name!r}, which this call does not give as a tensor; it "
                f"gives {', '.join(names)}."
            )
        for dim, what in row.items():
            for index in owned:
                rank = call.tensors[index].dim()
                if not -rank <= dim < rank:
                    raise InputError(f"dynamic has dimension {dim} of {name!r}, which has {rank}.")
                size = call.tensors[index].shape[dim]
                _, least, largest = (what, 2, 2) if isinstance(what, str) else what
                found[index, dim % rank] = least, max(largest, size)
    return found


def dynamic_shapes(call: Call, places: frozenset[Place]) -> tuple[dict[int, Any], ...]:
    """What `torch.export` is told, for a call that carries its numbers."""
    first = len(call.tensors) - len(numbers_among(places))
    return tuple(
        {
            dim: torch.export.Dim.AUTO
            for dim in range(tensor.dim())
            if (index, dim) in places or (index >= first and dim == 0)
        }
        for index, tensor in enumerate(call.tensors)
    )


def numbers_among(places: Iterable[Place]) -> tuple[int, ...]:
    """The places among the constants of the numbers."""
    return tuple(sorted(place for index, place in places if index == _NUMBER))


def kinds_carried(call: Call, places: Iterable[Place]) -> list[type]:
    """The kinds of the numbers that the last tensors of a call carry."""
    carriers = call.tensors[len(call.tensors) - len(numbers_among(places)) :]
    return [int if carrier.dim() else float for carrier in carriers]


@final
@dataclass(frozen=True)
class _At:
    """A number by its place among those that are used, or a size by the places of its numbers."""

    places: int | tuple[int, ...]

    def among(self, numbers: Sequence[int]) -> Any:
        """The number, or the size."""
        if isinstance(self.places, int):
            return numbers[self.places]
        return torch.Size([numbers[place] for place in self.places])


def _changed(
    facts: Facts, size: Callable[[Any], int], structure: Callable[[Structure], Structure]
) -> Facts:
    """The facts with other sizes, and with other structures around values."""
    nodes = {}
    for node, fact in facts.nodes.items():
        values = tuple(
            replace(v, shape=tuple(map(size, v.shape)), stride=tuple(map(size, v.stride)))
            for v in fact.values
        )
        around = None if fact.structure is None else structure(fact.structure)
        nodes[node] = replace(fact, values=values, structure=around)
    storages = [replace(row, nbytes=size(row.nbytes)) for row in facts.storages]
    return Facts(nodes, storages, facts.real)


@final
class Family:
    """The calls that one trace can run.

    Args:
        call: The traced one, whose numbers that are symbols are carried by tensors.
        places: The sizes and numbers that were traced as symbols, in the call as it was given.
        inputs: The fake arguments of the trace.
        facts: Of the trace, with symbolic ints.
        returned: The structure of its results, with symbolic ints.
        questions: That eager branches asked.

    Raises:
        ValueError: A size depends on values, or on what no argument's size tells.
    """

    def __init__(
        self,
        call: Call,
        places: frozenset[Place],
        inputs: Sequence[torch.Tensor],
        facts: Facts,
        returned: Structure,
        questions: Questions,
    ) -> None:
        self.call = call
        self.places = places
        self.numbers = numbers_among(places)
        self._number_kinds = kinds_carried(call, places)
        self._symbols = Symbols(inputs, facts.expected)
        self._questions = questions
        self._asked_at: dict[tuple[torch.Size, ...], list[int]] = {}
        self._beyond: dict[Any, tuple[int, ...]] = {}  # values in calls beyond the guards
        self._terms: list[Any] = []  # numbers that are used, Python's or terms
        self._places: dict[Any, int] = {}  # of each its place, by type: 4 and 4.0 are two
        self._hints: list[int] = []
        self._facts = _changed(facts, self._place, self._with_places)  # places for sizes
        self._returned = self._with_places(returned)
        values = (value for fact in self._facts.nodes.values() for value in fact.values)
        lengths = {place for value in values for place in value.shape}
        self.returns_sizes = any(
            isinstance(c, (torch.SymInt, torch.Size)) for c in returned.constants
        )
        self._given = [
            (i, kind, dim, self._place(size))
            for i, value in enumerate(inputs)
            for kind, row in enumerate((value.shape, value.stride()))
            for dim, size in enumerate(row)
        ]
        self._asked = list(map(self._place, questions.sizes))
        terms = self._terms
        conditions = self._symbols.conditions(symbols_in(terms))
        self.symbols = symbols_in([*terms, *conditions])
        self._numbers_at = compiled(self.symbols, terms)
        self._hold = compiled(self.symbols, conditions)
        # Of every length that is symbolic: its place, and its value in the trace.
        self._lengths = [
            (i, self._hints[i]) for i in sorted(lengths) if not isinstance(terms[i], int)
        ]
        self._solutions = list(map(self._solution, self.symbols))
        found = self.values(call)
        if found is None or self._numbers_at(*found) != tuple(self._hints):
            raise ValueError("its sizes are not those of the call it was traced with")
        self.traced_at = found

    def _place(self, size: Any) -> int:
        """The place of a size among all that are used."""
        term = self._symbols.term(size)
        place = self._places.setdefault((type(term), term), len(self._terms))
        if place == len(self._terms):
            self._terms.append(term)
            self._hints.append(self._symbols.hint(size))
        return place

    def _with_places(self, structure: Structure) -> Structure:
        """A structure with places for the numbers that are symbolic."""

        def change(constant: Any) -> Any:
            if isinstance(constant, SYMBOLIC):
                return _At(self._place(constant))
            if isinstance(constant, torch.Size) and any(isinstance(n, SYMBOLIC) for n in constant):
                return _At(tuple(map(self._place, constant)))
            return constant

        return structure.mapped(change)

    def _solution(self, symbol: Any) -> tuple[int, int, int, int, int]:
        """The argument's size that tells a symbol: (tensor, kind, dimension, a, b)."""
        for i, kind, dim, place in self._given:
            found = solved(self._terms[place], symbol)
            if found is not None:
                return i, kind, dim, *found
        raise ValueError(f"no argument's size tells {symbol}")

    def carrying(self, call: Call) -> Call:
        """A call as it was given, with the numbers that are symbols carried by tensors."""
        return call.with_numbers(self.numbers)

    def joined(self, call: Call) -> tuple[int, ...] | None:
        """The values of the symbols in a call as it was given; None if it is of another family."""
        if not self.carries(call):
            return None
        carrying = self.carrying(call)
        known = bool(self._beyond) and _signature(carrying) in self._beyond
        alike = self._is_like(carrying, layouts=not known)
        values = self.values(carrying) if alike else None
        return values if values is not None and self.answers(carrying) else None

    def carries(self, call: Call) -> bool:
        """True if numbers that may be symbols are in a call where they are."""
        given, kinds = call.structure.constants, self._number_kinds
        return all(
            place < len(given) and type(given[place]) is kind and _is_any(given[place])
            for place, kind in zip(self.numbers, kinds, strict=True)
        )

    def values(self, call: Call) -> tuple[int, ...] | None:
        """The values of the symbols in a call that carries its numbers; None if it is no member."""
        if self._beyond and (known := self._beyond.get(_signature(call))) is not None:
            return known
        found = self._solved(call, strides=True)
        return found if found is not None and self.holds(found) else None

    def _solved(self, call: Call, *, strides: bool) -> tuple[int, ...] | None:
        """The values of the symbols by the sizes of a call; None if these have no such relations.

        Nor strides, if these count.
        """
        rows = [(t.shape, t.stride()) for t in call.tensors]
        found = []
        for i, kind, dim, a, b in self._solutions:
            value, rest = divmod(rows[i][kind][dim] - b, a)
            if rest:
                return None
            found.append(value)
        try:
            numbers = self._numbers_at(*found)
        except (ArithmeticError, ValueError):
            return None
        for i, kind, dim, place in self._given:
            counts = strides and rows[i][0][dim] != 1 if kind else True
            if counts and rows[i][kind][dim] != numbers[place]:
                return None
        return tuple(found)

    def beyond(self, call: Call) -> tuple[int, ...] | None:
        """The values of the symbols in a call that carries its numbers, whatever the guards say.

        None if it differs in more than sizes, strides and numbers, or if values of arguments count.
        """
        if self._questions.needs_arguments() or not self._is_like(call, layouts=False):
            return None
        return self._solved(call, strides=False)

    def _is_like(self, call: Call, *, layouts: bool) -> bool:
        """True if a call that carries its numbers differs in sizes alone: others are constants.

        Sizes below 2, and whether tensors are contiguous, count with `layouts` alone.
        """
        own = self.call
        changes = differing(own, call) if layouts else _changes(own, call, layouts=False)
        return changes is not None and all(index != _NUMBER for index, _ in changes)

    def extend(self, call: Call) -> None:
        """Take a call beyond the guards, whose own trace was seen to be this one at its sizes."""
        values = self.beyond(call)
        if values is not None:
            self._beyond[_signature(call)] = values

    def holds(self, values: Sequence[int]) -> bool:
        """True if the guards hold where the symbols have these values."""
        try:
            if not all(self._hold(*values)):
                return False
            numbers = self._numbers_at(*values)
        except (ArithmeticError, ValueError):
            return False
        for place, was in self._lengths:
            if numbers[place] != was and min(numbers[place], was) < 2:
                return False
        return self._questions.hold([numbers[place] for place in self._asked])

    def answers(self, call: Call) -> bool:
        """True if what forward asks the arguments of a call of the family has the same answers."""
        if not self._questions.needs_arguments():
            return True
        key = tuple(tensor.shape for tensor in call.tensors)
        if key not in self._asked_at:
            if len(self._asked_at) >= _MOST_KEPT:
                self._asked_at.clear()
            values = self.values(call)
            assert values is not None  # it is of the family
            numbers = self._numbers_at(*values)
            self._asked_at[key] = [numbers[place] for place in self._asked]
        return self._questions.hold(self._asked_at[key], call.tensors)

    def fixes(self, call: Call) -> str:
        """A size or int, for people, that differs in a call and got no symbol; empty if none.

        Sizes that were not to be symbols, such as a batch of one, are not meant.
        """
        if not self.carries(call) or _changes(self.call, self.carrying(call)) is None:
            return ""
        other, terms = self.carrying(call), self._terms
        for i, kind, dim, place in self._given:
            meant = (i, dim) in self.places or i >= len(call.tensors)
            fixed = kind == 0 and meant and isinstance(terms[place], int)
            if fixed and other.tensors[i].shape[dim] != terms[place]:
                return f"dimension {dim} of {self.call.names[i]}"
        return ""

    def maxima(self, sizes: Mapping[Place, int]) -> tuple[int, ...]:
        """The values of the symbols where some sizes are these, and all others as traced."""
        found = []
        for (i, kind, dim, a, b), own in zip(self._solutions, self.traced_at, strict=True):
            size = sizes.get((i, dim), 0) if kind == 0 else 0
            found.append(max(own, (size - b) // a))
        return tuple(found)

    def named(self, symbol: int) -> str:
        """A symbol, by its number, as people know it: `input_ids, dimension 1`."""
        i, kind, dim, *_ = self._solutions[symbol]
        return f"{self.call.names[i]}, {'stride' if kind else 'dimension'} {dim}"

    def size_of(self, symbol: int, value: int) -> int:
        """The size by which people know a symbol, where it has this value."""
        *_, a, b = self._solutions[symbol]
        return a * value + b

    def call_at(self, values: Sequence[int]) -> Call:
        """The traced call with tensors of other sizes, filled with what they hold."""
        numbers = self._numbers_at(*values)
        shapes: dict[int, list[int]] = {i: list(t.shape) for i, t in enumerate(self.call.tensors)}
        for i, kind, dim, place in self._given:
            if kind == 0:
                shapes[i][dim] = numbers[place]
        tensors = []
        for i, tensor in enumerate(self.call.tensors):
            filled = tensor.detach()
            for dim, size in enumerate(shapes[i]):
                if size != filled.shape[dim]:
                    index = torch.arange(size, device=filled.device) % filled.shape[dim]
                    filled = filled.index_select(dim, index)
            tensors.append(filled.requires_grad_(tensor.requires_grad))
        return replace(self.call, tensors=tuple(tensors))

    def sizes(self, values: Sequence[int]) -> tuple[int, ...]:
        """All sizes that are used, in the same order for all values of the symbols."""
        return self._numbers_at(*values)

    def returned(self, values: Sequence[int]) -> Structure:
        """The structure of the results."""
        return _filled(self._returned, self._numbers_at(*values))

    def facts(self, values: Sequence[int]) -> Facts:
        """The effects of every node."""
        numbers = self._numbers_at(*values)
        return _changed(self._facts, numbers.__getitem__, lambda each: _filled(each, numbers))


def _filled(structure: Structure, numbers: Sequence[int]) -> Structure:
    """A structure with numbers in their places."""
    return structure.mapped(lambda c: c.among(numbers) if isinstance(c, _At) else c)
