"""How many random cases a test makes: a tenth by default, all in a nightly run."""

from collections.abc import Collection
from typing import Any

import pytest


def seeds(nightly: int) -> range:
    """The seeds 0, 1, ... of a run: `nightly` of them, or a tenth where the run is not nightly."""
    from hypothesis import settings  # not on a machine that is there for its GPU alone

    nightly_run = settings().max_examples >= settings.get_profile("nightly").max_examples
    return range(nightly if nightly_run else max(1, nightly // 10))


def some(names: Collection[str], of: int, first: int = 0) -> list[Any]:
    """Names for `parametrize`: by default one `of` so many, from `first` on; all of them at night.

    The whole Inception is for the night alone: `branches` has its blocks.
    """
    chosen = [
        name for index, name in enumerate(names) if index % of == first and name != "inception"
    ]
    return [
        pytest.param(name, marks=() if name in chosen else (pytest.mark.slow,)) for name in names
    ]
