"""Portfolio of placers: simulate all candidates, search from the best, and keep the best.

Candidates in order, which breaks ties: every single device, the placers, the result with less
effort, and that of local search from them. So the result is never worse than any of these.
`docs/solver.md` has the efforts with their cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, final

import numpy as np

from baechi.placers.baselines import MTopo, SingleDevice
from baechi.placers.contiguous import Contiguous
from baechi.placers.device_choice import device_kinds, used_devices
from baechi.placers.list_schedulers import HEFT, METF, PEFT
from baechi.placers.local_search import BALANCED, FAST, THOROUGH, Budget, improved
from baechi.placers.memory_packing import Packing
from baechi.placers.metis import Metis
from baechi.placers.placer import Placer, placed_in, timed
from baechi.placers.sct import MSCT
from baechi.problem.coarsening import coarsen
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import FrozenDict, check_choice, check_is, check_row

BUDGETS: Final[Mapping[str, Budget]] = FrozenDict(
    {"fast": FAST, "balanced": BALANCED, "thorough": THOROUGH}
)
EFFORTS: Final = tuple(BUDGETS)
# The graph itself is placed within about a second up to here.
_BALANCED_OPS: Final = 20_000
# With more devices than this, only those that m-ETF or HEFT uses are considered further.
_MANY_DEVICES: Final = 32
# Up to the first number of ops, a fast solve runs the full contiguous split, in some 20 ms; up to
# the second a quick one, in as long for 2,000 ops; above, none.
_SMALL_OPS: Final = 700
_HASTY_OPS: Final = 4_000
_HASTY: Final = Contiguous(work=2**16, headrooms=(0.0, 1 / 8), reordered=1)
# Packings take a tenth of a second up to here, and are seldom the best.
_PACKED_OPS: Final = 2_000


@final
@dataclass(frozen=True, slots=True)
class Auto(Placer):
    """The best of several placers and of every single device.

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
        for placer in check_row(self.placers, "placers"):
            check_is(placer, Placer, "one of the placers")  # type: ignore[type-abstract]
        object.__setattr__(self, "placers", tuple(self.placers))

    def place(self, problem: Problem) -> Placement | None:
        """The best candidate; `stats` has the makespan of every candidate."""
        return self._place(problem, rescue=True)

    def _place(self, problem: Problem, *, rescue: bool) -> Placement | None:
        """As `place`; without `rescue` a fast search that finds nothing ends."""
        n = len(problem.cluster.devices)
        usable = np.flatnonzero(problem.allowed.any(axis=1)).tolist()
        if 0 < len(usable) < n:
            return self._place_on(problem, usable, rescue=rescue)
        kinds, devices = device_kinds(problem), problem.cluster.devices
        candidates = [
            (f"single/{devices[device].name}", SingleDevice(device).place(problem))
            for device in problem.free_devices
            if kinds[device] == device
        ]
        if n > _MANY_DEVICES:
            candidates += portfolio(problem, (METF(), HEFT()), "fast", coarsely=False)
            found = [placement for _, placement in candidates if placement is not None]
            used = used_devices(problem, found)
            if 0 < len(used) < n:
                candidates.append(("auto/used", self._place_on(problem, used, rescue=rescue)))
                return best(candidates, self.name)
        alone = _one_lane_each(problem)
        if 1 < len(alone) < n:
            candidates.append(("auto/one lane", self._place_on(problem, alone, rescue=False)))
        candidates += self._placed(problem)
        if self.effort != "fast":
            less = EFFORTS[EFFORTS.index(self.effort) - 1]
            # Where nothing fits, the search below is the fast one's rescue.
            fits = any(placement is not None for _, placement in candidates)
            cheaper = replace(self, effort=less)._place(problem, rescue=fits)
            candidates.append((f"auto/{less}", cheaper))
        fitting = [placement for _, placement in candidates if placement is not None]
        better = improved(problem, fitting, BUDGETS[self.effort])
        if better is None and not fitting and self.effort == "fast" and rescue:
            # Finding a placement matters more than speed.
            better = improved(problem, (), BALANCED)
        elif better is not None and not fitting:
            # It took the search to find something that fits.
            better = improved(problem, [better], BUDGETS[self.effort]) or better
        if better is not None:
            candidates.append((better.placer, better))
        return best(candidates, self.name)

    def _place_on(self, problem: Problem, devices: list[int], *, rescue: bool) -> Placement | None:
        """The result of `_place` on some of the devices."""
        placement = self._place(problem.on(devices), rescue=rescue)
        if placement is None:
            return None
        return replace(placement, devices=tuple(devices[device] for device in placement.devices))

    def _placed(self, problem: Problem) -> list[tuple[str, Placement | None]]:
        placers = tuple(p for p in self.placers if not isinstance(p, Metis) or p.available())
        if self.effort == "fast":
            n = problem.arrays.ops
            kinds = (METF, HEFT, Contiguous) if n <= _HASTY_OPS else (METF, HEFT)
            fast = tuple(p for p in placers if isinstance(p, kinds))
            if n > _SMALL_OPS:
                fast = tuple(_HASTY if isinstance(p, Contiguous) else p for p in fast)
            return portfolio(problem, fast, "fast", coarsely=n > _BALANCED_OPS)
        if problem.arrays.ops > _PACKED_OPS:
            # `solve` packs where nothing else fits.
            placers = tuple(p for p in placers if not isinstance(p, Packing))
        return portfolio(problem, placers, self.effort)


def _one_lane_each(problem: Problem) -> list[int]:
    """The devices with one lane of every GPU; all where that leaves some op none."""
    devices = range(len(problem.lanes))
    names = [
        problem.cluster.devices[device].lane_of if problem.lanes[device] > 1 else device
        for device in devices
    ]
    alone = [names.index(name) for name in dict.fromkeys(names)]
    return alone if problem.allowed[alone].any(axis=0).all() else list(devices)


def check_effort(effort: str) -> None:
    """Nothing, if the effort is known; an `InputError` else."""
    check_choice(effort, EFFORTS, "effort")


def portfolio(
    problem: Problem, placers: tuple[Placer, ...], effort: str, *, coarsely: bool = True
) -> list[tuple[str, Placement | None]]:
    """Labels and placements of the placers on the graph and, if `coarsely`, on the coarse graph.

    If the graph is large or the effort fast, they get the graph itself only where nothing else
    fits.
    """
    candidates: list[tuple[str, Placement | None]] = []
    coarse = coarsen(problem) if coarsely else None
    if coarse is not None and coarse.arrays.ops < problem.arrays.ops:
        lumped = coarse.lumped()
        for placer in placers:
            placement = placer.place(lumped)
            if placement is not None:
                stats = {**placement.stats}
                stats.pop("makespan_ns", None)
                fine = coarse.expand(placement)
                placement = placed_in(problem, *fine, placement.placer, stats)
            candidates.append((f"{placer.name}/coarse", placement))
    fits = any(placement is not None for _, placement in candidates)
    few = problem.arrays.ops <= _BALANCED_OPS
    if not fits or effort == "thorough" or (effort == "balanced" and few):
        candidates += [
            (f"{placer.name}/fine", timed(problem, placer.place(problem))) for placer in placers
        ]
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
