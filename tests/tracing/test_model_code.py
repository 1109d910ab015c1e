"""Builtins in a model's code that are others while it is traced."""

import dis
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from baechi import TraceError, trace
from baechi.tracing.model_code import called_by, codes_of, globals_read


def rounded(value: Any) -> int:
    def inner() -> Any:
        return [int(row) for row in [value]]

    return inner()[0] if isinstance(value, int | float) and int is not float else int(value, 16)


# A function that has more names than an instruction holds.
MANY = "\n    ".join(f"name{i}" for i in range(200))
scope: dict[str, Any] = {f"name{i}": i for i in range(200)} | {"__name__": __name__}
exec(f"def many(value):\n    {MANY}\n    return int(value)", scope)


class Rounds(nn.Module):
    @staticmethod
    def whole(value: Any) -> int:
        return int(value)

    @property
    def kind(self) -> Any:
        return torch.zeros(int(1.5), dtype=int).dtype  # type: ignore[call-overload]

    def forward(self, value: Any) -> Any:
        return self.whole(value), rounded(value), rounded("ff"), self.kind


def test_calls_alone_go_elsewhere_and_come_back() -> None:
    model, code = Rounds(), rounded.__code__
    given: list[Any] = []

    def integer(*args: Any) -> int:
        given.append(args)
        return int(*args)

    expected = (2, 2, 255, torch.int64)
    with called_by(model, {"int": integer}):
        assert model(2.5) == expected
        assert given == [(2.5,), (2.5,), ("ff", 16), (1.5,)]
    assert model(2.5) == expected
    assert len(given) == 4
    assert rounded.__code__ is code
    with pytest.raises(ZeroDivisionError), called_by(model, {"int": integer}):
        raise ZeroDivisionError
    assert rounded.__code__ is code


def test_what_functions_read_of_global_variables_is_what_dis_says() -> None:
    functions = [scope["many"], *vars(inspect).values(), *vars(nn.functional).values()]
    codes = [each.__code__ for each in functions if isinstance(each, FunctionType)]
    seen = 0
    for code in (code for each in codes for code in codes_of(each)):
        rows = [row for row in dis.get_instructions(code) if row.opname == "LOAD_GLOBAL"]
        expected = [(row.offset, row.argval, bool(row.arg and row.arg & 1)) for row in rows]
        assert list(globals_read(code)) == expected
        seen += len(expected)
    assert seen > 1000


class Lazily(nn.Module):
    """Makes a function in its first call, as transformers' models their hooks, and keeps it."""

    made: ClassVar[dict[str, Callable[[Any], int]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:

            def whole(value: Any) -> int:
                return int(value) if isinstance(value, float) else value

            self.made["whole"] = whole
        return x * self.made["whole"](2.5)


def test_a_function_that_is_made_in_a_trace_runs_afterwards() -> None:
    Lazily.made.clear()
    trace(Lazily(), (torch.ones(2),))
    assert Lazily.made["whole"](3.5) == 3


def test_a_name_of_the_module_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "int", lambda _: 7)
    with called_by(Rounds(), {"int": lambda _: 8}):
        assert Rounds.whole(2.5) == 7


def test_a_function_with_too_many_names_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    many = scope["many"]
    monkeypatch.setattr(Rounds, "many", staticmethod(many), raising=False)
    code = many.__code__
    with called_by(Rounds(), {"int": lambda _: 8}):
        assert many.__code__ is code
        assert many(2.5) == 2


class Uses(nn.Module):
    def __init__(self, use: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor, given: Tensor) -> Any:
        return self.use(self.linear(x), float(given.sum()))


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda y, n: y * len(f"{n}"), "forward writes a number of a tensor into a text"),
        (lambda y, n: (y, n), "forward returns a number that depends on values"),
        (lambda y, n: (y, n, y[y[:, 0] > n].shape), "forward returns a number that depends on"),
    ],
)
def test_numbers_of_tensors_that_are_more_than_symbols_are_refused(use: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        trace(Uses(use), (torch.randn(3, 4), torch.randn(2)))
