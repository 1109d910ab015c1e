"""How many cases a test makes: a part by default, all in a nightly run."""

from collections.abc import Collection, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def seeds(nightly: int) -> range:
    """The seeds 0, 1, ... of a run: `nightly` of them, or a tenth where the run is not nightly."""
    from hypothesis import settings  # not on a machine that is there for its GPU alone

    nightly_run = settings().max_examples >= settings.get_profile("nightly").max_examples
    return range(nightly if nightly_run else max(1, nightly // 10))


def some(names: Collection[Any], of: int, first: int = 0) -> list[Any]:
    """Names for `parametrize`: by default one `of` so many, from `first` on; all of them at night.

    The whole Inception is for the night alone: `branches` has its blocks.
    """
    chosen = [
        name for index, name in enumerate(names) if index % of == first and name != "inception"
    ]
    return [
        pytest.param(name, marks=() if name in chosen else (pytest.mark.slow,)) for name in names
    ]


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Rows for `parametrize` with a value of each axis: at night their whole product.

    By default as few as a greedy choice needs: of two axes each value once, of more axes each pair
    of values of two of them.
    """
    strength = 1 if len(axes) == 2 else 2
    rows = list(product(*(range(len(axis)) for axis in axes)))
    covers = {row: set(combinations(enumerate(row), strength)) for row in rows}
    left = set().union(*covers.values())
    chosen = set()
    while left:
        best = max(rows, key=lambda row: len(covers[row] & left))
        left -= covers[best]
        chosen.add(best)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, row, strict=True)),
            marks=() if row in chosen else (pytest.mark.slow,),
        )
        for row in rows
    ]
