"""What m-ETF makes of fewer parts: `python3 -m benchmarks.placement_quality.coarseness`.

For every case its makespan where it decides about grains (coarse graphs) and where it decides about
clusters (of groups that share a device), over that on the graph itself: geometric means, by memory.
Where the best is kept, a level that does not fit counts as the graph itself. Dead ends are not met
again, so cases that m-ETF needs that for are left out.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from benchmarks.placement_quality.cases import Case, cases
from benchmarks.placement_quality.checks import geometric_mean
from benchmarks.placement_quality.instances import FOLDER
from rich.console import Console
from rich.table import Table

from baechi import _core
from baechi.problem.coarsening import Coarse, clusters, grains, regrouped
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory

_SOURCES = ("measured", "traced", "random")


def main(
    quick: Annotated[bool, typer.Option(help="A tenth of the cases.")] = False,
    instances: Annotated[Path, typer.Option(help="Folder of measured graphs.")] = FOLDER,
) -> None:
    """Prints the table."""
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases(instances, quick=quick):
        if case.source in _SOURCES:
            for column, ratio in _ratios(case):
                ratios[column][case.memory].append(ratio)
    memories = ("free", "capped", "tight")
    table = Table("m-ETF on", *memories, title="Step over m-ETF's on the graph (cases)")
    for column in sorted(ratios):
        row = (ratios[column][memory] for memory in memories)
        table.add_row(
            column, *(f"{geometric_mean(cell):.3f} ({len(cell)})" if cell else "" for cell in row)
        )
    Console().print(table)


def _ratios(case: Case) -> Iterator[tuple[str, float]]:
    problem = Problem(case.graph, case.cluster)
    fine = _etf(problem, problem.core, None)
    if fine is None:
        return
    levels = grains(problem)
    by_grain = [_etf(problem, level.core, level) for level in levels]
    by_cluster = [_etf(problem, regrouped(problem, level), None) for level in clusters(problem)[1:]]
    yield "graph and coarsen's grain, the best kept", _best(fine, by_grain[:1])
    yield "graph and all grains, the best kept", _best(fine, by_grain)
    yield "graph and all clusters, the best kept", _best(fine, by_cluster)
    for number, makespan in enumerate(by_grain):
        if makespan is not None:
            yield f"grain {number} alone", makespan / fine


def _best(fine: int, others: list[int | None]) -> float:
    return min([fine, *(makespan for makespan in others if makespan is not None)]) / fine


def _etf(problem: Problem, core: "_core.Problem", grain: Coarse | None) -> int | None:
    """What earliest task first takes, on the graph itself; `None` where it does not fit there."""
    timeline = _core.Timeline(core)
    if not timeline.list_schedule(np.empty(0, np.int32)):
        return None
    op, device, _, _ = timeline.span_columns()
    devices, order = np.empty(len(op), np.int32), np.asarray(op, np.int32)
    devices[op] = device
    if grain is not None:
        devices, order = grain.expand_arrays(devices, order)
    replayed = problem.timeline()
    replayed.fold(devices, order)
    return replayed.makespan() if fits_memory(problem, replayed) else None


if __name__ == "__main__":
    typer.run(main)
