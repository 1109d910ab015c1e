"""The portfolio: run the candidates in the one simulator, search from the best, keep the best.

Candidates in their order, which breaks ties: every single device, the placers, and what local
search makes of them (`search.py`). So the result is never worse than the best single device that
fits, nor than any placer. Efforts, with their cost on two cores:

- `"fast"`, for schedulers that ask often: m-ETF and HEFT on the graph itself, and a short search;
  under 0.1 s for 2,000 ops on 8 devices.
- `"balanced"`: all placers, m-ETF and m-SCT on the coarse graph, too (`coarsening.py`), and a
  search from eight starts; under 2 s.
- `"thorough"`: all placers on both grains, and a search from two dozen starts; under a minute.

Above `_BALANCED_OPS` ops placers see the coarse graph alone unless the effort is thorough, and
searches of large graphs end when their evaluations are used up, long before they are done.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, final

from baechi.coarsening import coarsen
from baechi.errors import InputError
from baechi.placement import Placement
from baechi.placers.base import Placer, placement_of
from baechi.placers.baselines import SingleDevice
from baechi.placers.choices import device_kinds
from baechi.placers.contiguous import Contiguous
from baechi.placers.etf import METF
from baechi.placers.heft import HEFT
from baechi.placers.mincut import Metis
from baechi.placers.packing import Packing
from baechi.placers.peft import PEFT
from baechi.placers.sct import MSCT
from baechi.placers.search import BALANCED, FAST, THOROUGH, improved
from baechi.placers.topo import MTopo
from baechi.problem import Problem
from baechi.simulation import fits_memory, replay
from baechi.values import FrozenDict

EFFORTS: Final = ("fast", "balanced", "thorough")
# The graph itself is placed within about a second up to here.
_BALANCED_OPS: Final = 20_000
# Up to here a fast solve that finds nothing searches like a balanced one: within 0.1 s.
_SMALL_OPS: Final = 32
# What sees the coarse graph in a balanced solve; all but m-SCT are what a fast one asks.
_GREEDY: Final = (METF, HEFT, MSCT)


@final
@dataclass(frozen=True, slots=True)
class Auto(Placer):
    """The best of several placers, and of every single device.

    Attributes:
        placers: The candidates after the single devices.
        effort: `"fast"`, `"balanced"` or `"thorough"`.
    """

    name: ClassVar[str] = "auto"
    placers: tuple[Placer, ...] = (
        METF(),
        HEFT(),
        MSCT(),
        MTopo(),
        PEFT(),
        Contiguous(),
        Metis(),
        Packing(),
    )
    effort: str = "balanced"

    def __post_init__(self) -> None:
        check_effort(self.effort)

    def place(self, problem: Problem) -> Placement | None:
        """As the module says; `stats` has the makespan of every candidate."""
        candidates = list(_singles(problem))
        candidates += self._placed(problem)
        fitting = [placement for _, placement in candidates if placement is not None]
        budget = {"fast": FAST, "balanced": BALANCED, "thorough": THOROUGH}[self.effort]
        better = improved(problem, fitting, budget)
        if not fitting and better is None:
            if self.effort != "fast":
                # Less may be enough where more leads astray; so what fast finds is always found.
                return replace(self, effort="fast").place(problem)
            if len(problem.graph.ops) <= _SMALL_OPS:
                better = improved(problem, fitting, BALANCED)
        if better is not None:
            candidates.append((better.placer, better))
        return best(candidates, self.name)

    def _placed(self, problem: Problem) -> list[tuple[str, Placement | None]]:
        placers = tuple(p for p in self.placers if not isinstance(p, Metis) or p.available())
        few = tuple(p for p in placers if isinstance(p, _GREEDY))
        if self.effort == "fast":
            few = tuple(p for p in few if not isinstance(p, MSCT))
            return portfolio(problem, few, "fast", coarsely=few if _is_large(problem) else ())
        coarsely = placers if self.effort == "thorough" or _is_large(problem) else few
        return portfolio(problem, placers, self.effort, coarsely=coarsely)


def check_effort(effort: str) -> None:
    """Passes the known efforts.

    Raises:
        InputError: Any other.
    """
    if effort not in EFFORTS:
        raise InputError(f"effort is {effort!r}; it must be one of {', '.join(EFFORTS)}.")


def portfolio(
    problem: Problem,
    placers: tuple[Placer, ...],
    effort: str,
    *,
    coarsely: tuple[Placer, ...] | None = None,
) -> list[tuple[str, Placement | None]]:
    """Label and placement of placers on the grains that the effort asks for.

    Args:
        problem: What to place.
        placers: The placers.
        effort: See the module.
        coarsely: Those that see the coarse graph, too; `None` is all of them. Where there are any
            and the graph is large or the effort fast, the others come only if none of these fits.
    """
    few = placers if coarsely is None else coarsely
    candidates: list[tuple[str, Placement | None]] = []
    coarse = coarsen(problem) if few else None
    if coarse is not None and len(coarse.members) < len(problem.graph.ops):
        coarse_problem = problem.lumped(coarse.graph, coarse.members)
        for placer in few:
            placement = placer.place(coarse_problem)
            if placement is not None:
                placement = _expanded(problem, coarse.expand(placement))
            candidates.append((f"{placer.name}/coarse", placement))
    fits = any(placement is not None for _, placement in candidates)
    if not fits or effort == "thorough" or (effort == "balanced" and not _is_large(problem)):
        candidates += [(f"{placer.name}/fine", placer.place(problem)) for placer in placers]
    return candidates


def _is_large(problem: Problem) -> bool:
    return len(problem.graph.ops) > _BALANCED_OPS


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
    kinds = device_kinds(problem)
    for index in problem.free_devices:
        if kinds[index] == index:
            name = problem.cluster.devices[index].name
            yield f"single/{name}", SingleDevice(index).place(problem)


def _expanded(problem: Problem, placement: Placement) -> Placement | None:
    """The placement with the makespan that it has on the graph itself, if it fits there."""
    timeline = replay(problem, placement.devices, placement.order)
    if not fits_memory(problem, timeline):
        return None
    stats = {key: value for key, value in placement.stats.items() if key != "makespan_ns"}
    return placement_of(problem, timeline, placement.placer, stats)
