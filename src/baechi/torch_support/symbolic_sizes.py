"""Symbolic sizes of torch: their values in the example, their terms, and what was decided by them.

Everything private of `torch.fx.experimental` that Baechi uses stands here, seen with torch 2.13.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, final
from unittest.mock import patch

import sympy
import torch
from sympy.core.expr import Expr
from torch.utils._sympy.functions import FloorDiv, Mod
from torch.utils._sympy.printers import PythonPrinter

SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)

_SCOPE: Final = {
    **{"math": math, "torch": torch, "min": min, "max": max, "abs": abs, "round": round},
    "__builtins__": {},
}


def hint(size: Any) -> Any:
    """The value that a size has in the example, without a guard; sizes that are ints as they are.

    Raises:
        ValueError: It depends on values of tensors.
    """
    if not isinstance(size, SYMBOLIC):
        return size
    environment = size.node.shape_env
    value = environment.replace(size.node.expr).xreplace(_examples(environment))
    if value.free_symbols:
        raise ValueError(f"the size {size} depends on values of tensors")
    return _plain(size, value)


def has_symbols(tensor: torch.Tensor) -> bool:
    """True if a size of a tensor is symbolic."""
    return any(isinstance(size, SYMBOLIC) for size in tensor.shape)


def term_of(size: Any) -> Any:
    """A number that can be compared without a conclusion for symbolic sizes."""
    return size.node.expr if isinstance(size, SYMBOLIC) else size


def _plain(size: Any, value: Any) -> Any:
    """The value of a symbolic number as Python's own."""
    if isinstance(size, torch.SymBool):
        return bool(value)
    return float(value) if isinstance(size, torch.SymFloat) else int(value)


def _examples(environment: Any) -> Any:
    """The values of symbols in the example."""
    known = getattr(environment, "backed_var_to_val", None)
    return environment.var_to_val if known is None else known


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


@contextmanager
def short_terms() -> Iterator[None]:
    """Spare sympy most of its work with the terms of sizes, while a model is traced.

    torch does not see that ``x + (q - x % q) % q``, a size padded to a multiple of q, is one, so
    the terms behind each view of its windows grow. Here the padding is a term that makes the sum
    ``(x + q - 1) // q * q``, of which torch sees it. And each term is asked only once whether it
    is a number.
    """
    rest_of: Any = Mod.eval
    is_number = property(lru_cache(maxsize=None)(Expr.is_number.fget))

    def evaluated(_: type[Mod], number: Any, modulus: Any) -> Any:
        rest = modulus - number
        if modulus.is_Integer and isinstance(rest, Mod) and rest.args[1] == modulus:
            size = rest.args[0]
            return modulus * FloorDiv(size + modulus - 1, modulus) - size
        return rest_of(number, modulus)

    evaluating = patch.object(Mod, "eval", classmethod(evaluated))
    with evaluating, patch.object(Expr, "is_number", is_number):
        yield


@final
class Symbols:
    """The symbols of one trace.

    Args:
        inputs: Its fake inputs.
        expected: Terms for symbols that depend on values of tensors.
    """

    def __init__(self, inputs: Sequence[Any], expected: Mapping[Any, Any] | None = None) -> None:
        self._environment: Any = inputs[0].fake_mode.shape_env
        self.expected = dict(expected or {})

    def term(self, size: Any) -> Any:
        """A size as an int, or as a term in the symbols that are left."""
        if not isinstance(size, SYMBOLIC):
            return size
        found = self._environment.replace(size.node.expr).xreplace(self.expected)
        return _plain(size, found) if found.is_number else found

    def hint(self, size: Any) -> Any:
        """The value that a size has in the example.

        Raises:
            ValueError: It depends on values of tensors, and nothing is expected of it.
        """
        if not self.is_expected(size):
            return hint(size)
        value = self.term(size)
        examples = _examples(self._environment)
        return _plain(size, value.xreplace(examples) if isinstance(value, sympy.Basic) else value)

    def is_expected(self, size: Any) -> bool:
        """True if values of tensors may make it another one."""
        if not isinstance(size, SYMBOLIC):
            return False
        return bool(self._environment.replace(size.node.expr).free_symbols & self.expected.keys())

    def expect(
        self, number: Any, example: Any, among: Sequence[Any] = (), count: int | None = None
    ) -> None:
        """Expect of what depends on values alone what it is in the example.

        Args:
            number: It; anything else is left as it is.
            example: What it is in the example.
            among: Of a size, the sizes of the tensor whose elements are chosen from.
            count: The number of these in the example. Its part of them is expected.
        """
        symbol = number.node.expr if isinstance(number, SYMBOLIC) else None
        if symbol is None or not symbol.is_Symbol or not is_unbacked(number):
            return
        if not math.isfinite(example):
            return
        whole = math.prod(map(self.term, among))
        if example == count:
            term = whole
        elif count is None or example < 2 or not getattr(whole, "free_symbols", ()):
            term = example
        else:
            term = FloorDiv(example * whole + count - 1, count)
        self.expected.setdefault(symbol, sympy.sympify(term))

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
        # Those of sizes that values decide are operators of the trace, too.
        if environment.deferred_runtime_asserts and not self.expected:
            raise ValueError("assertions of the trace depend on values of tensors")
        found = [environment.replace(guard.expr) for guard in environment.guards]
        found = [condition.xreplace(self.expected) for condition in found]
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
