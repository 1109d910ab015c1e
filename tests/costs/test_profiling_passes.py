"""A disturbance of a second or two changes no figure, and what stays uncertain is known to be."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi.costs.profile_cache import Measured
from baechi.costs.profiling import is_settled, measure_all, with_pass

SECOND = 10**9
TAKE_NS = SECOND // 10
TRUTH = {f"op {i}": Measured((i + 1) * 10_000, (i + 1) * 20_000, 7) for i in range(20)}
PASS_NS = TAKE_NS * len(TRUTH)


class Machine:
    """Every pass over an operator takes a tenth of a second; some while, all takes longer."""

    def __init__(self, begin_ns: int = 0, end_ns: int = 0, *, seen: bool = False) -> None:
        self.now_ns = 0
        self.order: list[str] = []
        self._begin_ns, self._end_ns, self._seen = begin_ns, end_ns, seen

    def wall(self) -> int:
        return self.now_ns

    def measure(self, key: str, before: Measured | None) -> Measured:
        disturbed = self._begin_ns - TAKE_NS < self.now_ns < self._end_ns
        # Never by the same factor: two processes do not disturb by appointment.
        factor = 2 + len(self.order) if disturbed else 1
        self.now_ns += TAKE_NS
        self.order.append(key)
        forward, backward = TRUTH[key].forward_ns * factor, TRUTH[key].backward_ns * factor
        held_up = disturbed and self._seen
        spreads = (forward, backward) if held_up else (0, 0)
        return with_pass(before, Measured(forward, backward, 7, 0, 0, 0, *spreads))

    def costs(self, known: dict[str, Measured] | None = None) -> dict[str, Measured]:
        costs = dict(known or {})
        measure_all(TRUTH, costs, self.measure, untold, self.wall)
        return costs


def untold(keys: list[str], _: int) -> Iterator[str]:
    yield from keys


def times(costs: dict[str, Measured]) -> dict[str, tuple[int, int]]:
    return {key: (cost.forward_ns, cost.backward_ns) for key, cost in costs.items()}


def test_an_undisturbed_machine_needs_two_passes_over_everything() -> None:
    machine = Machine()
    costs = machine.costs()
    assert machine.order == [*TRUTH, *TRUTH]
    assert costs == {key: replace(cost, passes=2) for key, cost in TRUTH.items()}  # no spread
    assert all(map(is_settled, costs.values()))


@given(st.integers(-PASS_NS, 3 * PASS_NS), st.integers(0, PASS_NS - TAKE_NS), st.booleans())
def test_a_disturbance_no_longer_than_a_pass_changes_no_figure(begin, length, seen) -> None:
    machine = Machine(begin, begin + length, seen=seen)
    costs = machine.costs()
    assert times(costs) == times(TRUTH)
    assert all(map(is_settled, costs.values()))
    assert max(map(machine.order.count, TRUTH)) <= 3


def test_a_disturbance_that_never_ends_is_found_out_and_costs_half_as_long_again() -> None:
    machine = Machine(0, 10**18)
    costs = machine.costs()
    assert not any(is_settled(cost) for cost in costs.values())
    assert machine.now_ns <= 2 * PASS_NS * 1.5 + TAKE_NS
    # The first pass was the least disturbed, and the largest got the further ones.
    assert machine.order[2 * len(TRUTH)] == "op 19"


def test_readings_that_were_held_up_confirm_nothing_even_where_they_agree() -> None:
    held_up = Measured(50_000, 0, forward_spread_ns=50_000)
    known = with_pass(with_pass(None, held_up), held_up)
    assert known.forward_ns == 50_000
    assert not is_settled(known)
    assert is_settled(with_pass(known, Measured(49_000)))


@pytest.mark.parametrize(
    ("passes", "ns", "spread_ns"),
    [
        ([100], 100, 100),
        ([100, 103], 100, 3),
        ([103, 100], 100, 3),
        ([300, 100], 100, 200),
        ([300, 100, 500], 100, 200),
        ([300, 100, 101], 100, 1),
        ([100, 101, 50], 50, 50),  # what two agreed on was too long
        ([100, 101, -500], 100, 1),  # below 0: held up
        ([300, -100], 100, 100),
        ([-100, 101], 100, 1),
        ([0], 0, 0),
    ],
)
def test_the_lowest_counts_and_the_next_confirms_it(passes, ns, spread_ns) -> None:
    known = None
    for one in passes:
        found = Measured(abs(one), forward_spread_ns=abs(one) if one < 0 else 0, saved_bytes=9)
        known = with_pass(known, found)
    expected = Measured(ns, forward_spread_ns=spread_ns, saved_bytes=9, passes=len(passes))
    assert known == expected


def test_of_launches_the_lowest_counts() -> None:
    passes = [(900, 50), (700, 80), (800, 40)]
    known = None
    for forward, backward in passes:
        known = with_pass(
            known, Measured(1, 1, forward_launch_ns=forward, backward_launch_ns=backward)
        )
    assert (known.forward_launch_ns, known.backward_launch_ns) == (700, 40)


def test_forward_and_backward_are_settled_apart() -> None:
    known = with_pass(with_pass(None, Measured(10_000, 60_000)), Measured(10_100, 20_000))
    assert (known.forward_spread_ns, known.backward_spread_ns) == (100, 40_000)
    assert not is_settled(known)
    known = with_pass(known, Measured(90_000, 20_200))
    assert (known.forward_spread_ns, known.backward_spread_ns) == (100, 200)
    assert is_settled(known)


def test_what_has_its_passes_is_not_measured_again_and_what_lacks_one_gets_it() -> None:
    done = {key: replace(cost, passes=2) for key, cost in TRUTH.items()}
    uncertain = Measured(30_000, 20_000, 7, forward_spread_ns=30_000, passes=2)
    known = {**done, "op 0": uncertain, "op 1": replace(TRUTH["op 1"], passes=1)}
    machine = Machine()
    costs = machine.costs(known)
    assert costs["op 0"] == uncertain
    assert machine.order == ["op 1"]
    assert costs["op 1"].passes == 2
