"""The CPU's clock, on a machine whose time is made."""

from typing import Any

import pytest

from baechi.costs.cpu_timer import CpuTimer, Reading, rounds, summary


class Machine:
    """A clock that moves when something runs, and one that stands still while others do."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.away_ns = 0
        self.timer = CpuTimer(lambda: self.now_ns, lambda: self.now_ns - self.away_ns)

    def reading(self, ns: int, *others_ns: int) -> Reading:
        """Of a run of `ns`, where others run for so long in the midst of it, round by round."""
        turns = [0, *others_ns]  # the first run warms up

        def run() -> None:
            other = turns.pop(0) if len(turns) > 1 else turns[0]
            self.now_ns += ns + other
            self.away_ns += other

        (reading,) = self.timer.time([lambda n: [run] * n])
        return reading


LONG_NS = 20_000_000  # so few rounds, of a run each


def test_a_reading_is_a_median_without_what_is_empty() -> None:
    assert summary([100, 1000, 120, 110, 130], 10, 2.0) == 10
    assert summary([5], 1, 10.0) == 0
    assert len(list(rounds((3, 7), budget_ns=0))) == 3
    assert len(list(rounds((3, 7), budget_ns=10**12))) == 7


def test_the_readings_of_several_preparations_take_turns() -> None:
    order: list[str] = []

    def prepare(name: str) -> Any:
        return lambda n: [lambda: order.append(name)] * n

    CpuTimer().time([prepare("a"), prepare("b")], single=True)
    assert "".join(order) == "ab" * (len(order) // 2)


@pytest.mark.parametrize("ns", [100, 5_000, LONG_NS])
def test_a_run_takes_what_it_takes(ns: int) -> None:
    assert Machine().reading(ns) == Reading(ns)


def test_rounds_in_which_something_else_ran_are_left_out() -> None:
    others = (4_000_000, 4_000_000, 0)
    assert Machine().reading(LONG_NS, *others) == Reading(LONG_NS)


def test_a_little_of_the_system_s_own_is_not_something_else() -> None:
    others = (LONG_NS // 100, 0, LONG_NS // 100)
    assert Machine().reading(LONG_NS, *others) == Reading(LONG_NS + LONG_NS // 100)


def test_where_something_else_ran_all_the_time_the_shortest_is_nearest_and_it_is_said() -> None:
    others = (9_000_000, 2_000_000, 4_000_000)
    assert Machine().reading(LONG_NS, *others) == Reading(LONG_NS + 2_000_000, held_up=True)


def test_short_runs_are_repeated_within_a_reading() -> None:
    machine = Machine()
    counts: list[int] = []

    def prepare(n: int) -> Any:
        counts.append(n)

        def run() -> None:
            machine.now_ns += 1_000

        return [run] * n

    machine.timer.time([prepare])
    assert set(counts[3:]) == {20}
    machine.timer.time([prepare], single=True)
    assert counts[-1] == 1
