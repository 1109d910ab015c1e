"""Turns by tickets of users, and a price of fast GPUs: Gandiva_fair.

The rule (Chaudhary et al., "Balancing Efficiency and Fairness in Heterogeneous GPU Clusters for
Deep Learning", EuroSys'20, section 3): stride scheduling of gangs. A user's tickets are split among
its jobs; a job's pass grows by its GPUs over its tickets in every quantum in which it runs, and
those of the least pass go first. Who finds no room is passed over and, as its pass stays, goes
first later. A new job begins at the least pass of the others. Between kinds of GPU users trade: who
gains most from a fast GPU gets it, and pays with time on slow ones at the second price, so that
nobody is worse off than with an equal part of each kind.

Where we leave it: all users have the same tickets. The paper trades once in a while between pairs
of users; here each quantum fills the fastest kind with those of the chosen jobs that gain most, and
the price of a GPU, in time on the slowest kind, is the largest gain among the chosen who did not
get one (of those who did, the least, where all did). Central and local schedulers are one here, and
its balancing of load between servers by moving jobs is the scheme's.
"""

from collections import Counter
from collections.abc import Sequence
from typing import final

from baechi.cluster_simulation.jobs import WHOLE, JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy


@final
class GandivaFair(RoundPolicy):
    """The least pass first, on kinds by gain, in quanta."""

    name = "gandiva-fair"
    round_ticks = 60

    def __init__(self) -> None:
        super().__init__()
        self._pass: dict[int, int] = {}
        self._price: dict[int, int] = {}  # thousandths per tick, of those who run in this quantum
        self._last = 0

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The jobs of the least pass that fit, each on the kind that it gains most from."""
        self._charge(view)
        left = [len(gpus) for gpus in view.kinds.values()]
        total = sum(left)
        chosen: list[JobRun] = []
        for run in sorted(view.runs, key=lambda run: (self._pass[run.index], run.index)):
            needs = max(view.needs(run, kind) for kind in view.kinds) or view.needs(run)
            if needs <= total:
                total -= needs
                chosen.append(run)
        answer = []
        gains = {run.index: self._gains(view, run) for run in chosen}
        fastest = [
            max((row[kind] for row in gains.values()), default=0) for kind in range(len(left))
        ]
        by_speed = sorted(range(len(left)), key=lambda kind: (-fastest[kind], kind))
        placed: set[int] = set()
        self._price = {}
        for kind in by_speed:
            name = list(view.kinds)[kind]
            wanting = [r for r in chosen if r.index not in placed and gains[r.index][kind]]
            wanting.sort(key=lambda r: (-gains[r.index][kind], self._pass[r.index], r.index))
            got: list[JobRun] = []
            for run in wanting:
                if (needs := view.needs(run, name)) <= left[kind]:
                    left[kind] -= needs
                    got.append(run)
                    answer.append(Allocation(run, among=view.kinds[name]))
            without = [gains[r.index][kind] for r in wanting if r not in got]
            price = max(without, default=min((gains[r.index][kind] for r in got), default=0))
            for run in got:
                self._price[run.index] = max(WHOLE, price) * view.needs(run, name)
            placed.update(run.index for run in got)
        rest = [run for run in view.runs if run.index not in placed]
        return [*answer, *view.on_best_kinds(rest, left)]

    def _charge(self, view: ClusterView) -> None:
        """Passes of the quantum that has ended, and of new jobs."""
        jobs = Counter(run.job.owner for run in view.runs)
        for run in view.runs:
            if run.running and run.index in self._pass:
                price = self._price.get(run.index, WHOLE * len(run.grant.gpus))
                ticks = view.now - self._last
                self._pass[run.index] += price * ticks * jobs[run.job.owner]
        self._last = view.now
        here = [self._pass[run.index] for run in view.runs if run.index in self._pass]
        for run in view.runs:
            self._pass.setdefault(run.index, min(here, default=0))

    def _gains(self, view: ClusterView, run: JobRun) -> list[int]:
        """Its rate on every kind, in thousandths of that on the slowest where it has room."""
        rates = view.rates_on_kinds(run)
        slowest = min((rate for rate in rates if rate), default=1)
        return [WHOLE * rate // slowest for rate in rates]
