"""The claims, each with its number: `checks(rows)`."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.placement_quality.rows import EXACT, Row

BEST_EFFORT = "auto/thorough"


@dataclass(frozen=True)
class Check:
    """A claim, whether it holds (`None` where there is nothing to look at), and what was seen."""

    claim: str
    holds: bool | None
    figure: str


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Case to placer to row."""
    table: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        table[row.case][row.placer] = row
    return dict(table)


def best_ns(case: dict[str, Row]) -> int | None:
    """The shortest step that is known of a case."""
    known = [row.makespan_ns for row in case.values() if row.makespan_ns is not None]
    known += [row.optimum_ns for row in case.values() if row.optimum_ns is not None]
    return min(known, default=None)


def geometric_mean(values: Sequence[float]) -> float:
    """Not a number where there are none."""
    if not values:
        return math.nan
    return math.exp(sum(math.log(value) for value in values) / len(values))


def ratios(
    table: dict[str, dict[str, Row]], over: str, under: str, memory: str = ""
) -> list[float]:
    """`over`'s makespan by `under`'s, on the cases where both found a placement."""
    found = []
    for case in table.values():
        a, b = case.get(over), case.get(under)
        if a and b and a.makespan_ns and b.makespan_ns and memory in ("", a.memory):
            found.append(a.makespan_ns / b.makespan_ns)
    return found


def checks(rows: Sequence[Row]) -> list[Check]:
    """All claims, for the dearest effort of `auto` that has rows."""
    table = by_case(rows)
    efforts = [row.placer for row in rows if row.placer.startswith("auto/")]
    auto = BEST_EFFORT if BEST_EFFORT in efforts or not efforts else efforts[-1]
    found = [_never_worse(table, auto, lambda row: row.placer != EXACT, "any other row")]
    found.append(_never_worse(table, auto, lambda row: row.placer == "single", "one device"))
    for other, limit in (("heft", 0.7), ("m-etf", 0.6), ("metis", 1.0), ("contiguous", 1.0)):
        found.append(_shorter(table, auto, other, limit))
    found.append(_near(table, auto, "small", 0.01, 0.05))
    found.append(_near(table, auto, "planted", 0.03, math.inf))
    found.append(_finds(table, auto))
    return found


def _never_worse(
    table: dict[str, dict[str, Row]], auto: str, other: Callable[[Row], bool], what: str
) -> Check:
    worst, where = 0.0, ""
    compared = 0
    for name, case in table.items():
        mine = case.get(auto)
        for row in case.values():
            if not mine or not row.makespan_ns or not other(row) or row.placer.startswith("auto/"):
                continue
            compared += 1
            ratio = mine.makespan_ns / row.makespan_ns if mine.makespan_ns else math.inf
            if ratio > worst:
                worst, where = ratio, f"{row.placer} on {name}"
    claim = f"{auto} is never worse than {what}"
    if not compared:
        return Check(claim, None, "no rows")
    figure = f"at most {worst:.4f} of its step ({where}), {compared} comparisons"
    return Check(claim, worst <= 1, figure)


def _shorter(table: dict[str, dict[str, Row]], auto: str, other: str, limit: float) -> Check:
    """Where memory is capped: the instance's own number of devices, or the fewest."""
    found = ratios(table, auto, other, "capped") + ratios(table, auto, other, "tight")
    claim = f"capped memory: {auto} takes at most {limit:g} of {other}'s step (geometric mean)"
    if limit == 1.0:
        claim = f"capped memory: {auto}'s step is shorter than {other}'s (geometric mean)"
    if not found:
        return Check(claim, None, "no rows")
    mean = geometric_mean(found)
    holds = mean < limit if limit == 1.0 else mean <= limit
    return Check(claim, holds, f"{mean:.3f} over {len(found)} cases")


def _near(
    table: dict[str, dict[str, Row]], auto: str, source: str, mean_limit: float, worst_limit: float
) -> Check:
    """Above the known optimum: CP-SAT's where it is proven, the planted one."""
    above = []
    missed = 0
    for case in table.values():
        mine = case.get(auto)
        if not mine or mine.source != source:
            continue
        exact = case.get(EXACT)
        optimum = exact.makespan_ns if exact and exact.proven else mine.optimum_ns
        if optimum and mine.makespan_ns is None:
            missed += 1
        elif optimum and mine.makespan_ns is not None:
            above.append(mine.makespan_ns / optimum - 1)
    worst = "" if math.isinf(worst_limit) else f" and {worst_limit:.0%} at worst"
    claim = f"{source}: {auto} is within {mean_limit:.0%} of the optimum on average{worst}"
    if not above:
        return Check(claim, None, "no case with a known optimum")
    mean = sum(above) / len(above)
    holds = mean <= mean_limit and max(above) <= worst_limit and not missed
    figure = f"{mean:.2%} on average, {max(above):.2%} at worst, {len(above)} cases"
    return Check(claim, holds, figure + (f", none found on {missed}" if missed else ""))


def _finds(table: dict[str, dict[str, Row]], auto: str) -> Check:
    feasible, missed = 0, []
    for name, case in table.items():
        if best_ns(case) is None or auto not in case:
            continue
        feasible += 1
        if case[auto].makespan_ns is None:
            missed.append(name)
    claim = f"{auto} finds a placement wherever one is known"
    if not feasible:
        return Check(claim, None, "no rows")
    figure = f"{feasible - len(missed)} of {feasible}"
    return Check(
        claim, not missed, figure + (f"; not on {', '.join(missed[:5])}" if missed else "")
    )
