"""Repeated passes over all operators, until two of them agree on each.

What disturbs a machine for a second or two (another process, another virtual machine) lengthens
whatever is measured meanwhile, and never shortens it. So an operator is not measured once for long
but in passes over all operators, seconds apart, and

    its time      is the lowest of its passes
    its spread    is how far above that the next pass is: what confirms it
    it is settled where the spread is small

A pass that was held up throughout (`cpu_timer`) may lower a time but confirms none; until one does,
the spread is the time itself. What is not settled after two passes is measured again, the least
certain first, for a while. What is uncertain even then is reported. What has its passes is not
measured again: a second profile of the same model measures nothing.

Complexity: two passes over what is new, and at most half of their time again.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from dataclasses import replace
from typing import Final, TypeVar

from baechi.costs.cpu_timer import Clock
from baechi.costs.profile_cache import Measured

# Passes over an undisturbed machine mostly differ by less than a tenth.
TOLERANCE: Final = 0.2
# Less than this is not worth measuring again.
_TRIFLE_NS: Final = 1_000
_PASSES: Final = 2
# What may be spent on the unsettled: a share of what the passes took. A few small operators may
# take longer, since a disturbance may be longer than all of their passes.
_MORE_SHARE: Final = 0.5
_MORE_NS: Final = 300_000_000

K = TypeVar("K", bound=Hashable)


def is_settled(measured: Measured) -> bool:
    """True if two passes agree on its forward, and two on its backward."""
    rows = (
        (measured.forward_ns, measured.forward_spread_ns),
        (measured.backward_ns, measured.backward_spread_ns),
    )
    return all(spread <= max(TOLERANCE * ns, _TRIFLE_NS) for ns, spread in rows)


def with_pass(before: Measured | None, found: Measured) -> Measured:
    """The measurement with one more pass.

    Args:
        before: The costs known so far; its sizes and its remark stay.
        found: The pass. Its spreads are the times themselves where it was held up, and else 0.
    """
    if before is None:
        return replace(
            found, forward_spread_ns=found.forward_ns, backward_spread_ns=found.backward_ns
        )
    forward_ns, forward_spread_ns = _lowest(
        (before.forward_ns, before.forward_spread_ns), (found.forward_ns, found.forward_spread_ns)
    )
    backward_ns, backward_spread_ns = _lowest(
        (before.backward_ns, before.backward_spread_ns),
        (found.backward_ns, found.backward_spread_ns),
    )
    return replace(
        before,
        forward_ns=forward_ns,
        forward_spread_ns=forward_spread_ns,
        backward_ns=backward_ns,
        backward_spread_ns=backward_spread_ns,
        passes=before.passes + 1,
    )


def _lowest(before: tuple[int, int], found: tuple[int, int]) -> tuple[int, int]:
    """The lower time, and how far the next is above it as far as that is known."""
    (ns, spread_ns), (next_ns, held_up) = before, found
    if held_up:
        return found if next_ns < ns else before
    if next_ns < ns:
        return next_ns, ns - next_ns
    return ns, min(spread_ns, next_ns - ns)


def measure_all(
    keys: Iterable[K],
    costs: MutableMapping[K, Measured],
    measure: Callable[[K, Measured | None], Measured],
    tracked: Callable[[list[K], int], Iterator[K]],
    wall: Clock = time.perf_counter_ns,
) -> None:
    """Measures until two passes agree on everything, or the time for that is spent.

    Args:
        keys: The keys of the operators to measure.
        costs: What was measured before; what had its passes then is not measured again. What is
            measured now is put here after each pass, so that an interrupt loses nothing.
        measure: Makes one more pass over one of them, given what is known of it.
        tracked: Given what a pass goes over, and which pass it is, yields the same and reports
            progress.
        wall: Nanoseconds that go by.
    """
    order = [key for key in keys if key not in costs or costs[key].passes < _PASSES]
    begin = wall()
    for count in range(_PASSES):
        due = [key for key in order if key not in costs or costs[key].passes <= count]
        for key in tracked(due, count):
            costs[key] = measure(key, costs.get(key))
    now = wall()
    end = now + max(round(_MORE_SHARE * (now - begin)), _MORE_NS)
    count = _PASSES
    while left := [key for key in order if not is_settled(costs[key])]:
        left.sort(key=lambda key: -_uncertain_ns(costs[key]))
        for key in tracked(left, count):
            if wall() >= end:
                return
            costs[key] = measure(key, costs[key])
        count += 1


def _uncertain_ns(measured: Measured) -> int:
    return measured.forward_spread_ns + measured.backward_spread_ns
