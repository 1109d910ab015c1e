"""Checks in the model's code: truth values of which one answer makes it raise.

As `if not valid.all(): raise ValueError`, by which `torch.distributions` look at what they are
given. A trace that takes the other answer is right for every call that the model itself survives.
"""

import ast
import linecache
import sys
from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Final

# A line and a column, from one to another, as instructions have them (PEP 657).
_Range = tuple[int | None, int | None, int | None, int | None]
# By which a tensor's truth value goes to a mode.
_BETWEEN: Final = ("torch.overrides", "torch._tensor")


def answer_that_goes_on() -> bool | None:
    """The answer to what is asked for now with which the code goes on; None if both may.

    None, too, where there is no source, and where the function catches what is raised.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "baechi" and name not in _BETWEEN:
            code = frame.f_code
            place = next(islice(code.co_positions(), frame.f_lasti // 2, None), None)
            lines = linecache.getlines(code.co_filename, frame.f_globals)
            return _checks_in("".join(lines)).get(place) if place else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


@cache
def _checks_in(source: str) -> Mapping[_Range, bool]:
    """The expressions that decide alone whether a file's code raises, with what lets it go on."""
    try:
        left: list[ast.AST] = [ast.parse(source)]
    except SyntaxError:  # of a line that was typed, such as one of IPython's own
        return {}
    found = dict[_Range, bool]()
    while left:
        node = left.pop()
        if isinstance(node, ast.Try) and node.handlers:
            left += [*node.handlers, *node.orelse, *node.finalbody]
            continue
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Assert):
            answers = _answers(node.test, raising=False)
        elif isinstance(node, ast.If) and _raises(node.body):
            answers = _answers(node.test, raising=True)
        else:
            continue
        found |= {place: answer for place, answer in answers.items() if answer is not None}
        alike = {*answers.values()}
        if len(alike) == 1 and None not in alike:  # Python 3.11 asks in the whole statement's name
            found[_range(node)] = bool(alike.pop())
    return found


def _raises(body: list[ast.stmt]) -> bool:
    """True if statements raise after no more than making a message."""
    *before, last = body
    made = all(isinstance(row, ast.Assign | ast.AnnAssign | ast.Expr) for row in before)
    return made and isinstance(last, ast.Raise)


def _answers(test: ast.expr, *, raising: bool) -> dict[_Range, bool | None]:
    """Of each part of a condition the answer that goes on; None where it takes others to raise.

    Args:
        test: The condition.
        raising: The truth value of it that raises.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _answers(test.operand, raising=not raising)
    if isinstance(test, ast.BoolOp):
        *before, last = (_answers(value, raising=raising) for value in test.values)
        if isinstance(test.op, ast.Or) != raising:  # one that others come after decides nothing
            before = [dict.fromkeys(row) for row in before]
        return {place: row[place] for row in (*before, last) for place in row}
    several = isinstance(test, ast.IfExp) or (isinstance(test, ast.Compare) and len(test.ops) > 1)
    return {_range(test): None if several else not raising}


def _range(node: ast.stmt | ast.expr) -> _Range:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
