"""The portfolio: run the candidates in the one simulator and keep the best.

Candidates in their order, which breaks ties: every single device, then each placer on the coarse
graph (`coarsening.py`) and on the graph itself, then the packings. So the result is never worse
than the best single device that fits. Efforts: `"fast"` looks at the coarse graph alone, as long as
anything fits there; `"balanced"` at the graph itself, too, up to `_BALANCED_OPS` ops; `"thorough"`
always at both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, final

from baechi.coarsening import coarsen
from baechi.errors import InputError
from baechi.placement import Placement
from baechi.placers.base import Placer, placement_of
from baechi.placers.baselines import SingleDevice
from baechi.placers.etf import METF
from baechi.placers.packing import Packing
from baechi.placers.sct import MSCT
from baechi.placers.topo import MTopo
from baechi.problem import Problem
from baechi.simulation import fits_memory, replay
from baechi.values import FrozenDict

EFFORTS: Final = ("fast", "balanced", "thorough")
# The graph itself is placed within about a second up to here.
_BALANCED_OPS: Final = 20_000


@final
@dataclass(frozen=True, slots=True)
class Auto(Placer):
    """The best of several placers, and of every single device.

    Attributes:
        placers: The candidates after the single devices.
        effort: `"fast"`, `"balanced"` or `"thorough"`.
    """

    name: ClassVar[str] = "auto"
    placers: tuple[Placer, ...] = (MTopo(), METF(), MSCT(), Packing())
    effort: str = "balanced"

    def __post_init__(self) -> None:
        check_effort(self.effort)

    def place(self, problem: Problem) -> Placement | None:
        """As the module says; `stats` has the makespan of every candidate."""
        candidates = list(_singles(problem))
        candidates += portfolio(problem, self.placers, self.effort)
        return best(candidates, self.name)


def check_effort(effort: str) -> None:
    """Passes the known efforts.

    Raises:
        InputError: Any other.
    """
    if effort not in EFFORTS:
        raise InputError(f"effort is {effort!r}; it must be one of {', '.join(EFFORTS)}.")


def portfolio(
    problem: Problem, placers: tuple[Placer, ...], effort: str
) -> list[tuple[str, Placement | None]]:
    """Label and placement of every placer on every grain that the effort asks for."""
    coarse = coarsen(problem.graph, problem.usable, problem.colors.tolist())
    smaller = len(coarse.members) < len(problem.graph.ops)
    candidates: list[tuple[str, Placement | None]] = []
    if smaller:
        coarse_problem = problem.lumped(coarse.graph, coarse.members)
        for placer in placers:
            placement = placer.place(coarse_problem)
            if placement is not None:
                placement = _expanded(problem, coarse.expand(placement))
            candidates.append((f"{placer.name}/coarse", placement))
    fits = any(placement is not None for _, placement in candidates)
    if (
        not fits
        or effort == "thorough"
        or (effort == "balanced" and len(problem.graph.ops) <= _BALANCED_OPS)
    ):
        candidates += [(f"{placer.name}/fine", placer.place(problem)) for placer in placers]
    return candidates


def best(candidates: list[tuple[str, Placement | None]], name: str) -> Placement | None:
    """The first with the shortest step, with the makespan of all of them in its stats."""
    fitting = [(label, placement) for label, placement in candidates if placement is not None]
    if not fitting:
        return None
    label, chosen = min(fitting, key=lambda candidate: candidate[1].stats["makespan_ns"])
    table = {
        label: "does not fit" if placement is None else placement.stats["makespan_ns"]
        for label, placement in candidates
    }
    stats = FrozenDict({**chosen.stats, **table, "chosen": label})
    return replace(chosen, placer=name, stats=stats)


def _singles(problem: Problem) -> Iterator[tuple[str, Placement | None]]:
    for index in problem.free_devices:
        name = problem.cluster.devices[index].name
        yield f"single/{name}", SingleDevice(index).place(problem)


def _expanded(problem: Problem, placement: Placement) -> Placement | None:
    """The placement with the makespan that it has on the graph itself, if it fits there."""
    timeline = replay(problem, placement.devices, placement.order)
    if not fits_memory(problem, timeline):
        return None
    stats = {key: value for key, value in placement.stats.items() if key != "makespan_ns"}
    return placement_of(problem, timeline, placement.placer, stats)
