"""m-TOPO: devices filled one after another, in topological order, up to a balanced cap.

Source: Baechi (SoCC 2020; arXiv 2301.08695), section "m-TOPO": Cap = sum(d) / n + max(d), where d
is the memory of an op and n the number of devices. Complexity: O(ops * log ops + tensors).

Differences from the paper: d is that of a whole group, since its ops share a device; a device also
closes when an op does not fit there by the exact clock, so that the cap never exceeds the real
limit; on unequal devices the mean is divided in proportion to their memory; and after a dead end (a
backward op that no longer fits beside its forward op) the schedule is retried with lower caps and
increasing shares of every memory held back (`HEADROOMS`).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from baechi import _core
from baechi.placers.placer import HEADROOMS, Placer, placement_of
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import check_is


@final
@dataclass(frozen=True, slots=True)
class MTopo(Placer):
    """Fills devices in index order, with ops in index order.

    Attributes:
        capped: Whether a device closes at the balanced cap; else only when it is full.
    """

    name: ClassVar[str] = "m-topo"
    capped: bool = True

    def __post_init__(self) -> None:
        check_is(self.capped, bool, "capped")

    def place(self, problem: Problem) -> Placement | None:
        """Fill the devices; a closed device stays closed."""
        for headroom in HEADROOMS:
            timeline = problem.timeline(headroom)
            if self._fill(problem, timeline, headroom):
                return placement_of(problem, timeline, self.name)
        return None

    def _fill(self, problem: Problem, timeline: _core.Timeline, headroom: float) -> bool:
        """Commit every op; false at a dead end."""
        loads = problem.group_bytes
        caps = [int(cap * (1 - headroom)) for cap in self._caps(problem, loads)]
        filled = [0] * len(caps)
        device = 0

        def closed(op: int, load: int, device: int) -> bool:
            over = self.capped and filled[device] > 0 and filled[device] + load > caps[device]
            return over or not timeline.fits(op, device)

        for op, group in enumerate(problem.op_group):
            target = timeline.group_device(op)
            if target < 0:
                may = problem.allowed[:, group]
                while device < len(caps) and may[device] and closed(op, loads[group], device):
                    device += 1
                # A device that is not allowed for the group stays open for others.
                target = device
                while target < len(caps) and (
                    not may[target] or (target > device and closed(op, loads[group], target))
                ):
                    target += 1
                if target == len(caps):
                    return False
                filled[target] += loads[group]
            elif not timeline.fits(op, target):
                return False
            timeline.commit(op, target)
        return True

    def _caps(self, problem: Problem, loads: tuple[int, ...]) -> list[int]:
        memory = [
            problem.pool_memory[pool] * bool(problem.allowed[device].any())
            for device, pool in enumerate(problem.device_pool)
        ]
        total = max(1, sum(sorted(memory)[-(problem.max_devices or len(memory)) :]))
        return [-(-sum(loads) * m // total) + max(loads, default=0) for m in memory]
