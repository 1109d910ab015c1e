"""Sizes and kinds of GPU by a price, a matching and trades: after Heet.

The rule (Mo et al., "Heet: Accelerating Elastic Training in Heterogeneous Deep Learning Clusters",
ASPLOS'24): a price balances how well a job scales on GPUs of a kind against how soon it ends there.
By it jobs are matched to GPUs, by a full bipartite matching of minimum weight; then they trade
where that helps them.

Where we leave it: we had its abstract, which names these three, and not the price. Ours is that of
markets (`priced_matching.py`): it rises until no more GPUs of a kind are wanted than there are, by
jobs that weigh the time to their end against the price of their GPU-time. The matching is of jobs
to kinds, with as many GPUs as weigh least. What is left of a kind then goes GPU by GPU to whom it
helps most. A trade exchanges the kinds of two jobs of one size. Another kind must be a tenth better
than the one that a job is on. All is decided every 300 ticks, for at most 256 jobs: those that run,
then the oldest. Speeds are predicted rates, where Heet completes a table of measured ones. A job
that no single kind has room for gets any GPUs when it is the oldest.
"""

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from baechi.cluster_simulation.jobs import WORK, JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy
from baechi.cluster_simulation.policy_support.priced_matching import (
    Floats,
    Place,
    matched,
    prices,
    traded,
    weights,
)

_STAYS: Final = 1.1  # how much better another kind must be
_MOST: Final = 256  # jobs of one matching


@final
class Heet(RoundPolicy):
    """A matching at prices, more GPUs, and trades, in rounds."""

    name = "heet"
    round_ticks = 300

    def __init__(self) -> None:
        super().__init__()
        self._rates: dict[int, Floats] = {}  # by kinds and GPUs, of jobs that are alike

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The places of a round."""
        runs = [run for run in view.runs if any(view.rates_on_kinds(run))]
        oldest = view.runs[:1]
        if runs[:1] != oldest:  # it has no room on a single kind
            running = oldest[0].running
            return [*view.kept(), *self.fill(view)] if running else [Allocation(oldest[0])]
        if not runs:
            return []
        runs = sorted(runs, key=lambda run: not run.running)[:_MOST]
        kinds = list(view.kinds.values())
        gpus = [len(of_kind) for of_kind in kinds]
        times = self._times(view, runs)
        weight = weights(times, prices(times, gpus))
        places = matched(weight, gpus)
        for kind, many in enumerate(gpus):
            _grow(view, runs, places, kind, many, times[:, kind])
        here = [(run, at) for run, at in zip(runs, traded(weight, places), strict=True) if at]
        return [Allocation(run, size, kinds[kind]) for run, (kind, size) in here]

    def _times(self, view: ClusterView, runs: Sequence[JobRun]) -> Floats:
        """What each job still takes on every kind, on 1, 2, ... GPUs: a tenth more if it moves."""
        times = np.full((len(runs), len(view.kinds), max(map(view.most, runs))), np.inf)
        for row, run in enumerate(runs):
            if (alike := view.alike(run)) not in self._rates:
                sizes = range(view.least(run), view.most(run) + 1)
                rates = np.zeros((len(view.kinds), view.most(run)))
                for kind, name in enumerate(view.kinds):
                    rates[kind, sizes.start - 1 :] = [view.rate(run, n, name) for n in sizes]
                self._rates[alike] = rates / WORK
            rates = self._rates[alike]
            with np.errstate(divide="ignore"):  # no rate is no room
                times[row, :, : rates.shape[1]] = max(1, run.remaining(view.now)) / rates
            if run.running:
                kind = list(view.kinds).index(view.devices.fleet.gpus[run.grant.gpus[0]].kind)
                times[row] *= _STAYS
                times[row, kind] /= _STAYS
        return times


def _grow(
    view: ClusterView,
    runs: Sequence[JobRun],
    places: list[Place | None],
    kind: int,
    many: int,
    time: Floats,
) -> None:
    """Gives what is left of a kind, GPU by GPU, to whom one more shortens most."""
    rows = {run.index: row for row, run in enumerate(runs)}
    on = [(run.index, at[1]) for run, at in zip(runs, places, strict=True) if at and at[0] == kind]

    def gain(run: JobRun, size: int) -> float:
        return float(time[rows[run.index], size - 1] - time[rows[run.index], size])

    for index, size in view.grow(dict(on), many - sum(size for _, size in on), gain).items():
        places[rows[index]] = kind, size
