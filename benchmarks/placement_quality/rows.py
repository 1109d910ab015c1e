"""One row per case and placer: how long the step is, how good that is, how long it took to find."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.placement_quality.cases import Case

import baechi
from baechi import InfeasibleError, InputError, Placement
from baechi.placers.baselines import Pinned
from baechi.problem.bounds import lower_bound_ns
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows

EXPERT, SPLIT, EXACT = "expert", "split", "cp-sat"
# The order of the rows of a case. A placer that this version of `solve` does not know has no rows.
PLACERS = (
    "single",
    "heft",
    "peft",
    "m-topo",
    "m-etf",
    "m-sct",
    "contiguous",
    "metis",
)
EFFORTS = ("fast", "balanced", "thorough")


@dataclass(frozen=True)
class Row:
    """What one placer did on one case.

    Attributes:
        makespan_ns: `None` where it found no placement that fits.
        seconds: Of the call that placed, whether it found one or not.
        proven: Whether the makespan is known to be the optimum.
    """

    case: str
    source: str
    memory: str
    factor: float
    training: bool
    ops: int
    devices: int
    lower_bound_ns: int
    optimum_ns: int | None
    placer: str
    makespan_ns: int | None
    seconds: float
    proven: bool = False

    @property
    def gap(self) -> float | None:
        """How far above the bound: (makespan - bound) / bound."""
        if self.makespan_ns is None or not self.lower_bound_ns:
            return None
        return self.makespan_ns / self.lower_bound_ns - 1

    @property
    def family(self) -> tuple[str, str, float, bool]:
        """What the row is averaged with."""
        return self.source, self.memory, self.factor, self.training


def known_placers(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those that `solve` knows, and the others."""
    graph = baechi.OpGraph((baechi.Op("op", 1),))
    cluster = baechi.Cluster.uniform(1, 1, baechi.Link(0, 1))
    known: list[str] = []
    unknown: list[str] = []
    for name in names:
        try:
            baechi.solve(graph, cluster, name)
        except InputError as error:
            if "unknown" not in str(error):
                raise
            unknown.append(name)
        else:
            known.append(name)
    return known, unknown


def measure(
    case: Case, placers: Iterable[str], efforts: Iterable[str], exact_s: float
) -> Iterator[Row]:
    """The rows of a case.

    Args:
        case: The problem.
        placers: Names for `solve`.
        efforts: Of `"auto"`.
        exact_s: Limit for CP-SAT on a small case; 0 leaves it out.
    """
    bound = lower_bound_ns(Problem(case.graph, case.cluster))

    def row(name: str, placement: Placement | None, seconds: float, proven: bool = False) -> Row:
        makespan_ns = None if placement is None else _makespan_ns(case, placement)
        return Row(
            case.name, case.source, case.memory, case.factor, case.training, len(case.graph.ops),
            len(case.cluster.devices), bound, case.optimum_ns, name, makespan_ns, seconds, proven,
        )  # fmt: skip

    for name, devices in ((EXPERT, case.expert), (SPLIT, case.split)):
        if devices is not None:
            yield row(name, Pinned(devices).place(Problem(case.graph, case.cluster)), 0.0)
    for name in placers:
        yield row(name, *_timed(case, name, "balanced"))
    for effort in efforts:
        yield row(f"auto/{effort}", *_timed(case, "auto", effort))
    if case.source == "small" and exact_s:
        from benchmarks.placement_quality.exact import solve_exactly

        start = time.perf_counter()
        exact = solve_exactly(case.graph, case.cluster, seconds=exact_s, workers=2)
        seconds = time.perf_counter() - start
        yield row(EXACT, exact.placement, seconds, exact.proven)


def _timed(case: Case, placer: str, effort: str) -> tuple[Placement | None, float]:
    placement = None
    start = time.perf_counter()
    with contextlib.suppress(InfeasibleError):  # the row says so
        placement = baechi.solve(case.graph, case.cluster, placer, effort=effort)
    return placement, time.perf_counter() - start


def _makespan_ns(case: Case, placement: Placement) -> int:
    schedule = baechi.simulate(case.graph, case.cluster, placement)
    if overflows(schedule, case.cluster):
        raise AssertionError(f"{placement.placer} passes the memory on {case.name}")
    return schedule.makespan_ns
