"""Links fitted to measured transfer times, with the smallest largest error.

    minimize over a >= 0, b >= 0:   max over i of |a + b * size_i - time_i| / time_i

Errors are relative, so that a message of a kilobyte weighs as much as one of a hundred megabytes.
It is a Chebyshev approximation by two functions, 1 and size, and so its solution errs equally, with
signs in turn, at three of the sizes; or at two where a or b is 0. The candidates are few: all
triples and pairs are tried (Cheney, Introduction to Approximation Theory, 1966, chapter 3).

Complexity: O(sizes**4), for a dozen sizes some milliseconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, final

from baechi.errors import InputError
from baechi.records.cluster import Link

# A link whose bytes cost nothing has this rate: 1 ns for each petabyte per second.
FREE_BYTES_PER_S: Final = 10**15
GOOD_ERROR: Final = 0.2


@final
@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link, and how well it predicts the times that it was fitted to.

    Attributes:
        link: Latency and rate.
        sizes: Bytes of the messages.
        times_ns: The measured time of each.
        worst_error: The largest |predicted - measured| / measured.
    """

    link: Link
    sizes: tuple[int, ...]
    times_ns: tuple[int, ...]
    worst_error: float

    @property
    def is_good(self) -> bool:
        """True if small and large messages are both predicted within 20 %."""
        return self.worst_error <= GOOD_ERROR

    @property
    def worst_bytes(self) -> int:
        """The size of the message whose time is predicted worst."""
        errors = _errors(self.link, self.sizes, self.times_ns)
        return self.sizes[errors.index(max(errors))]


def fit_link(sizes: Sequence[int], times_ns: Sequence[int]) -> LinkFit:
    """The link with the smallest largest relative error, and that error.

    Args:
        sizes: Bytes, at least two and all different.
        times_ns: The time of each, above 0.

    Raises:
        InputError: There are fewer than two sizes, two are equal, a time is not positive, or the
            lists differ in length.
    """
    if len(sizes) != len(times_ns) or len(set(sizes)) != len(sizes) or len(sizes) < 2:
        raise InputError(
            f"{len(sizes)} sizes ({len(set(sizes))} different) and {len(times_ns)} times; give a "
            "time for each of at least two different sizes."
        )
    if min(sizes) < 0 or min(times_ns) <= 0:
        raise InputError(
            f"the smallest size is {min(sizes)} bytes and the shortest time {min(times_ns)} ns; "
            "sizes must not be negative, and times must be above 0."
        )
    links = (_link(a, b) for a, b in _candidates(sizes, times_ns) if a >= 0 and b >= 0)
    best = min(links, key=lambda link: max(_errors(link, sizes, times_ns)))
    worst = max(_errors(best, sizes, times_ns))
    return LinkFit(best, tuple(sizes), tuple(times_ns), worst)


def _candidates(sizes: Sequence[int], times: Sequence[int]) -> Iterator[tuple[float, float]]:
    """(ns, ns per byte) of every line that may be the best."""
    rows = sorted(zip(sizes, times, strict=True))
    yield 2 / (1 / rows[0][1] + 1 / rows[-1][1]), 0.0
    for (_, s), (_, t) in combinations(rows, 2):
        yield 2 / (1 / s + 1 / t), 0.0  # no cost per byte
    rates = [size / time for size, time in rows]
    yield 0.0, 2 / (min(rates) + max(rates))  # no latency
    for (x, s), (y, t) in combinations(rows, 2):  # for two sizes alone: through both
        b = (t - s) / (y - x)
        yield s - b * x, b
    for (x, s), (y, t), (z, u) in combinations(rows, 3):
        # a + b x - s e = s,  a + b y + t e = t,  a + b z - u e = u: without a, then without e.
        left, right = (y - x, s + t, t - s), (z - y, -u - t, u - t)
        determinant = left[0] * right[1] - left[1] * right[0]
        if determinant:
            b = (left[2] * right[1] - left[1] * right[2]) / determinant
            e = (left[0] * right[2] - left[2] * right[0]) / determinant
            yield s + s * e - b * x, b


def _link(latency_ns: float, ns_per_byte: float) -> Link:
    rate = 10**9 / ns_per_byte if ns_per_byte * FREE_BYTES_PER_S > 10**9 else FREE_BYTES_PER_S
    return Link(round(latency_ns), max(int(rate), 1))


def _errors(link: Link, sizes: Sequence[int], times: Sequence[int]) -> list[float]:
    pairs = zip(sizes, times, strict=True)
    return [abs(link.transfer_ns(size) - time) / time for size, time in pairs]
