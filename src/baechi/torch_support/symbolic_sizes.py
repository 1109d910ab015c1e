"""Symbolic sizes of torch: their values in the example, their terms, and what was decided by them.

Everything private of `torch.fx.experimental` that Baechi uses stands here, seen with torch 2.13.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)

_SCOPE: Final = {"math": math, "min": min, "max": max, "torch": torch, "__builtins__": {}}


def hint(size: Any) -> Any:
    """The value that a size has in the example, without a guard; sizes that are ints as they are.

    Raises:
        ValueError: It depends on values of tensors.
    """
    if not isinstance(size, SYMBOLIC):
        return size
    environment = size.node.shape_env
    known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    value = environment.replace(size.node.expr).xreplace(known)
    if value.free_symbols:
        raise ValueError(f"the size {size} depends on values of tensors")
    return bool(value) if isinstance(size, torch.SymBool) else int(value)


def is_backed(size: Any) -> bool:
    """True if it is a size, symbolic or not, that the shapes of the inputs determine."""
    return type(size) is int or (isinstance(size, torch.SymInt) and not is_unbacked(size))


def is_unbacked(size: Any) -> bool:
    """True if it depends on values of tensors."""
    try:
        hint(size)
    except ValueError:
        return True
    return False


def is_equality(condition: torch.SymBool) -> bool:
    """True if a condition says that two sizes are equal."""
    return isinstance(condition.node.expr, sympy.Eq)


def compiled(symbols: Sequence[Any], terms: Iterable[Any]) -> Callable[..., tuple[Any, ...]]:
    """A function from the values of symbols to those of terms.

    Raises:
        ValueError: A term has other symbols, or cannot be written in Python.
    """
    printer, known = PythonPrinter(), set(symbols)
    rows = []
    for term in terms:
        if getattr(term, "free_symbols", set()) - known:
            raise ValueError(f"the size {term} depends on values of tensors")
        rows.append(printer.doprint(term) if isinstance(term, sympy.Basic) else repr(term))
    names = ", ".join(map(str, symbols))
    text = f"lambda {names}: ({''.join(f'{row}, ' for row in rows)})"
    try:
        function: Callable[..., tuple[Any, ...]] = eval(text, dict(_SCOPE))
    except SyntaxError as error:
        raise ValueError(f"sizes cannot be written in Python: {error}") from error
    return function


@final
class Symbols:
    """The symbols of one trace.

    Args:
        sizes: Sizes of its inputs, at least one of which is symbolic.
    """

    def __init__(self, sizes: Iterable[Any]) -> None:
        rows = [size for size in sizes if isinstance(size, torch.SymInt)]
        self._environment = rows[0].node.shape_env

    def term(self, size: Any) -> Any:
        """A size as an int, or as a term in the symbols that are left."""
        if not isinstance(size, SYMBOLIC):
            return size
        found = self._environment.replace(size.node.expr)
        return int(found) if found.is_Integer else found

    @contextmanager
    def recording(self) -> Iterator[Any]:
        """Run fake tensors of these sizes inside; what is decided by them is noted, too.

        Yields:
            The environment of the symbols.
        """
        frozen = self._environment.frozen
        self._environment.frozen = False
        try:
            yield self._environment
        finally:
            self._environment.frozen = frozen

    def conditions(self, known: Iterable[Any]) -> list[Any]:
        """What was decided by sizes, as terms that must be true; and ranges of known symbols."""
        environment = self._environment
        if environment.deferred_runtime_asserts:
            raise ValueError("assertions of the trace depend on values of tensors")
        found = [environment.replace(guard.expr) for guard in environment.guards]
        for symbol, among in environment.var_to_range.items():
            term = environment.replace(symbol)
            if term.free_symbols - set(known):
                continue
            for bound, relation in ((among.lower, sympy.Ge), (among.upper, sympy.Le)):
                if bound.is_Integer:  # the others are infinite
                    found.append(relation(term, bound))
        rows = dict.fromkeys(row for row in found if row not in (True, sympy.true))
        return list(rows)


def solved(term: Any, unknown: Any) -> tuple[int, int] | None:
    """(a, b) of a term `a * unknown + b`; None if it is another."""
    if not isinstance(term, sympy.Basic) or term.free_symbols != {unknown}:
        return None
    a = term.coeff(unknown)
    b = sympy.expand(term - a * unknown)
    if a.is_Integer and b.is_Integer and a != 0:
        return int(a), int(b)
    return None


def symbols_in(terms: Iterable[Any]) -> list[Any]:
    """The symbols of terms, by name."""
    found = {s for term in terms for s in getattr(term, "free_symbols", ())}
    return sorted(found, key=str)
