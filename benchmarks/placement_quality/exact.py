"""The exact optimum of small graphs, by CP-SAT (OR-tools), to hold bounds and placers against.

`cp_sat` has the models. They are solved in a process of their own: ortools and highspy each bring a
`libhighs.so.1`, of different versions, and of those two packages whichever a process loads second
fails to import (https://github.com/google/or-tools/issues/5246; seen with ortools 9.15 and highspy
1.15). Once that is closed, `cp_sat` may be called directly.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import baechi

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Exact:
    """What is proved of a graph on a cluster.

    Attributes:
        optimum_ns: The makespan of the best valid schedule, where it is proved.
        bound_ns: No valid schedule is shorter. 0 where there is none at all.
        placement: The best that was found, and it is valid.
        makespan_ns: Its makespan, by `baechi.simulate`.
        proven: Whether `placement` is proved to be optimal, or that there is none.
    """

    optimum_ns: int | None
    bound_ns: int
    placement: baechi.Placement | None
    makespan_ns: int | None
    proven: bool


@dataclass(frozen=True)
class Fit:
    """Whether a graph has a place in a cluster; None where the time did not suffice to tell.

    Attributes:
        persistent: Whether the groups can be shared out so that their persistent bytes, and each
            running op's inputs, outputs and workspace beside them, fit.
        full: Whether there is a valid placement.
        placement: A valid one.
    """

    persistent: bool | None
    full: bool | None
    placement: baechi.Placement | None = None


def solve_exactly(
    graph: baechi.OpGraph,
    cluster: baechi.Cluster,
    *,
    seconds: float = 60.0,
    workers: int = 2,
    hint: baechi.Placement | None = None,
) -> Exact:
    """The best placement of a small graph, with a proof where the time suffices.

    Args:
        graph: Up to about 30 ops.
        cluster: Up to about 4 devices.
        seconds: When to stop; the result then depends on the machine.
        workers: Threads. With 1 and enough time the result is always the same.
        hint: A placement to begin with, if it is valid: nothing longer is looked for.
    """
    return solve_all([(graph, cluster, hint)], seconds=seconds, workers=workers)[0]


def solve_all(
    cases: Iterable[tuple[baechi.OpGraph, baechi.Cluster, baechi.Placement | None]],
    *,
    seconds: float = 60.0,
    workers: int = 2,
) -> list[Exact]:
    """`solve_exactly` for many (graph, cluster, hint), so many seconds each, in one process."""
    return _run([("solve", (graph, cluster, seconds, workers, h)) for graph, cluster, h in cases])


def fits_exactly(
    graph: baechi.OpGraph, cluster: baechi.Cluster, *, seconds: float = 60.0, workers: int = 2
) -> Fit:
    """Whether there is a placement: first as a packing, then with every instant of the step.

    That the packing has no answer proves that there is no placement. The packing alone scales to
    thousands of groups. Each of the two may take `seconds`.
    """
    return fit_all([(graph, cluster)], seconds=seconds, workers=workers)[0]


def fit_all(
    cases: Iterable[tuple[baechi.OpGraph, baechi.Cluster]],
    *,
    seconds: float = 60.0,
    workers: int = 2,
) -> list[Fit]:
    """`fits_exactly` for many graphs and clusters, in one process."""
    return _run([("fit", (graph, cluster, seconds, workers)) for graph, cluster in cases])


def _run(cases: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    command = [sys.executable, "-m", "benchmarks.placement_quality.cp_sat"]
    run = subprocess.run(
        command, cwd=ROOT, input=pickle.dumps(cases), capture_output=True, check=False
    )
    if run.returncode != 0:
        raise RuntimeError(f"the process of CP-SAT failed:\n{run.stderr.decode()}")
    return pickle.loads(run.stdout)
