"""GPUs and clocks to whom they shorten most for their energy, within a budget: PowerFlow.

The rule (Gu et al., "Energy-Efficient GPU Clusters Scheduling for Deep Learning", 2023, arXiv
2304.06381): the mean completion time is to be small under a budget of energy. From models of the
throughput and the energy of a job on so many GPUs at such a clock, each gets both, and more of them
where they help most for the energy that they cost. Numbers of GPUs are powers of two, so that
buddies are left free, and jobs lie on few nodes.

Where we leave it: the budget is in watts, and what is not drawn early, idle GPUs included, may be
drawn later: at no time has more been used than that since the first arrival. A job's throughput is
the predicted rate, of which the part in which it keeps the GPU busy (`Job.compute`) grows with the
clock; what it draws grows with the cube of the clock (`jobs.draw`). The paper fits both to what it
measures. In order of arrival jobs get the least GPUs, at half the clock. Then step by step the one
whose remaining time falls most, for the energy that it needs more until then, gets twice the GPUs
or a tenth more of the clock. Without a budget all clocks are full. Kinds of GPU are not told apart,
and each is taken to draw what the hungriest does. All is decided every 300 ticks; in between, jobs
start on idle GPUs with the least. Nodes are the scheme's matter.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, final

from baechi.cluster_simulation.jobs import WHOLE, WORK, JobRun, clocked, draw
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy
from baechi.errors import InputError
from baechi.validation import check_positive

_LOWEST: Final = WHOLE // 2
_STEP: Final = WHOLE // 10
_NOTHING: Final = 1e-3  # a step of less energy, in parts of what is needed, is taken to cost that
Setting = tuple[int, int]  # how many GPUs, and their clock in thousandths


@final
class PowerFlow(RoundPolicy):
    """The largest fall of remaining time for a watt.

    Args:
        budget_w: What all GPUs together may draw in the mean of the time until now, in watts; no
            limit if absent.

    Raises:
        InputError: The budget is not positive; or, of a simulation, GPUs draw nothing, or all of it
            when they are idle.
    """

    name = "powerflow"
    round_ticks = 300

    def __init__(self, budget_w: int | None = None) -> None:
        super().__init__()
        self._budget_w = None if budget_w is None else check_positive(budget_w, "a budget in watts")
        self._watts = 0
        self._since: int | None = None

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The least for all, then step by step."""
        idle = view.devices.fleet.idle_milliwatts
        settings, free, left = self._least(view, view.runs, view.total, idle)
        here = [run for run in view.runs if run.index in settings]
        steps: list[tuple[float, int, Setting, Setting]] = []

        def offer(run: JobRun) -> None:
            size, clock = before = settings[run.index]
            time = _time(view, run, before)
            energy = time * self._milliwatts(run, before)
            for after in ((min(2 * size, view.most(run)), clock), (size, clock + _STEP)):
                sooner = _time(view, run, after)
                if after[1] <= WHOLE and sooner < time:
                    more = sooner * self._milliwatts(run, after) - energy
                    gain = (time - sooner) / max(more, _NOTHING * energy)
                    heappush(steps, (-gain, run.index, before, after))

        by_index = {run.index: run for run in here}
        for run in here:
            offer(run)
        while steps:
            _, index, before, after = heappop(steps)
            more = self._milliwatts(by_index[index], after)
            more -= self._milliwatts(by_index[index], before)
            wider = after[0] - before[0]
            if settings[index] == before and wider <= free and more <= left:
                settings[index] = after
                free, left = free - wider, left - more
                offer(by_index[index])
        return [_allocation(run, settings[run.index]) for run in here]

    def fill(self, view: ClusterView) -> Sequence[Allocation]:
        """In the middle of a round those that fit start with the least."""
        drawn = view.devices.milliwatts
        settings, _, _ = self._least(view, view.waiting, len(view.idle), drawn)
        here = [run for run in view.waiting if run.index in settings]
        return [_allocation(run, settings[run.index]) for run in here]

    def _least(
        self, view: ClusterView, runs: Iterable[JobRun], free: int, drawn: int
    ) -> tuple[dict[int, Setting], int, int]:
        """The least settings of the first that find room, and the GPUs and milliwatts left."""
        fleet = view.devices.fleet
        hungriest = max(gpu.watts[1] for gpu in fleet.gpus)
        self._watts = hungriest or 1
        self._since = view.now if self._since is None else self._since
        lowest, left = WHOLE, 10**18
        if self._budget_w is not None:
            if not hungriest or fleet.idle_milliwatts >= WHOLE * self._budget_w:
                raise InputError(
                    f"the budget is {self._budget_w} W; idle GPUs draw "
                    f"{fleet.idle_milliwatts // WHOLE} W, and a busy one {hungriest} W more. Give "
                    "GPUs their watts, and a budget above what they draw idle."
                )
            saved = WHOLE * self._budget_w * (view.now - self._since)
            saved -= view.devices.milliwatt_ticks
            lowest, left = _LOWEST, WHOLE * self._budget_w - drawn + saved // self.round_ticks
        settings = {}
        for run in runs:
            setting = view.least(run), lowest
            needs = self._milliwatts(run, setting)
            if 0 < setting[0] <= free and needs <= left:
                settings[run.index] = setting
                free, left = free - setting[0], left - needs
        return settings, free, left

    def _milliwatts(self, run: JobRun, setting: Setting) -> int:
        """What it draws at most; as if a watt were a GPU where power is not modeled."""
        size, clock = setting
        return size * self._watts * max(1, draw(run.job.compute, clock))


def _allocation(run: JobRun, setting: Setting) -> Allocation:
    return Allocation(run, setting[0], clock=setting[1])


def _time(view: ClusterView, run: JobRun, setting: Setting) -> float:
    """Predicted ticks to its end."""
    rate = clocked(view.rate(run, setting[0]), run.job.compute, setting[1])
    return run.remaining(view.now) * WORK / rate if rate else float("inf")
