"""Predicted rates of jobs on the cluster, for the policies that allocate."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from baechi.cluster_simulation.fleet import DeviceStates
from baechi.cluster_simulation.jobs import WHOLE, WORK, JobRun


@final
class Rates:
    """Predicted rates on the empty cluster, by the simulation's scheme; computed once each."""

    def __init__(self, devices: DeviceStates) -> None:
        self.empty = devices.emptied()
        self._known: dict[tuple[int, int, str | None], tuple[int, int]] = {}
        self._taken: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self._numbers: dict[object, int] = {}  # of jobs that are alike
        self._number: dict[int, int] = {}  # of a job, by its index
        gpus = devices.fleet.gpus
        self.least_bytes = min((gpu.free_bytes for gpu in gpus if gpu.free_bytes), default=0)
        kinds = dict.fromkeys(gpu.kind for gpu in gpus)
        self.kinds = {
            kind: tuple(index for index, gpu in enumerate(gpus) if gpu.kind == kind)
            for kind in kinds
        }

    def of(self, run: JobRun, size: int, kind: str | None) -> tuple[int, int]:
        """Work per tick, and the GPUs that it takes; zeros if there is no room."""
        asked = self.alike(run), size, kind
        if asked not in self._known:
            among = None if kind is None else self.kinds[kind]
            grant = self.empty.place(run.job, size, among)
            rate = 0 if grant is None else self.empty.rate(grant, joins=True)
            self._known[asked] = rate, 0 if grant is None else len(grant.gpus)
        return self._known[asked]

    def taken(self, run: JobRun, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """Those of some GPUs that it takes; none if there is no room on them."""
        asked = self.alike(run), gpus
        if asked not in self._taken:
            grant = self.empty.place(run.job, 0, gpus) if gpus else None
            self._taken[asked] = () if grant is None else grant.gpus
        return self._taken[asked]

    def alike(self, run: JobRun) -> int:
        """A number that jobs have in common for which all answers are the same."""
        if run.index not in self._number:
            job = run.job
            asked = job.shape, job.kinds, job.curve, job.across
            self._number[run.index] = self._numbers.setdefault(asked, len(self._numbers))
        return self._number[run.index]


@final
class Trial:
    """The empty cluster, given out job by job."""

    def __init__(self, empty: DeviceStates) -> None:
        self._devices = empty
        self._free = list(range(len(empty.owners)))

    def takes(self, run: JobRun) -> bool:
        """Gives a job GPUs, if it finds room: GPUs that nobody else is offered."""
        if run.job.gpus > len(self._free) and run.job.graph is None:
            return False
        grant = self._devices.choose(run.job, self._free) if self._free else None
        if grant is None:
            return False
        for gpu in reversed(grant.gpus):
            del self._free[bisect_left(self._free, gpu)]
        return True


@dataclass(frozen=True)
class Predictions:
    """What jobs would do on the GPUs of a cluster.

    Attributes:
        now: The time.
        runs: The jobs that have arrived and not ended, by arrival.
        devices: What is on every GPU; not to be changed.
    """

    now: int
    runs: Sequence[JobRun]
    devices: DeviceStates
    _rates: Rates = field(repr=False)

    @property
    def total(self) -> int:
        """All GPUs."""
        return len(self.devices.owners)

    @property
    def kinds(self) -> dict[str, tuple[int, ...]]:
        """The GPUs of every kind."""
        return self._rates.kinds

    def trial(self) -> Trial:
        """The empty cluster, to be given out."""
        return Trial(self._rates.empty)

    def rate(self, run: JobRun, gpus: int = 0, kind: str | None = None) -> int:
        """Predicted work per tick on the empty cluster; 0 if there is no room for the job.

        `WORK` is the rate that its duration was measured at. A job with a graph under the scheme
        `baechi` has the rate of its placement.
        """
        return self._rates.of(run, gpus, kind)[0]

    def needs(self, run: JobRun, kind: str | None = None) -> int:
        """The GPUs that a job takes: fewer than it asks for where its graph fits on fewer."""
        return self._rates.of(run, 0, kind)[1]

    def most(self, run: JobRun) -> int:
        """The most GPUs that a policy may give it."""
        job = run.job
        widest = len(job.curve) or job.gpus
        if job.graph is not None:
            widest = job.most_gpus or job.gpus
        return min(widest, self.total)

    def least(self, run: JobRun) -> int:
        """The fewest GPUs that it runs on; 0 if it has no room on as many as there are."""
        if not run.job.curve and run.job.graph is None:
            return run.job.gpus if run.job.gpus <= self.total else 0
        sizes = range(1, self.most(run) + 1)
        return next((size for size in sizes if self.rate(run, size)), 0)

    def time_left(self, run: JobRun, gpus: int = 0, kind: str | None = None) -> float:
        """Predicted ticks to its end; infinite where it has no room."""
        rate = self.rate(run, gpus, kind)
        return run.remaining(self.now) * WORK / rate if rate else float("inf")

    def alike(self, run: JobRun) -> int:
        """A number that jobs have in common that do the same wherever they are."""
        return self._rates.alike(run)

    def rates_on_kinds(self, run: JobRun) -> list[int]:
        """Predicted work per tick on every kind."""
        return [self.rate(run, kind=kind) for kind in self.kinds]

    def has_memory(self, run: JobRun, gpu: int) -> bool:
        """True if a GPU without jobs has room for a part of it; a graph may have a small one."""
        device = self.devices.fleet.gpus[gpu]
        if self.devices.sharing.wants_whole and device.held_bytes:
            return False
        free = device.free_bytes
        return free is None or run.job.graph is not None or run.job.memory_bytes <= free

    def fits(self, run: JobRun, gpus: tuple[int, ...]) -> bool:
        """True if the job has room on some GPUs without jobs."""
        return bool(self.taken(run, gpus))

    def taken(self, run: JobRun, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """Those of some GPUs without jobs that the scheme takes; none if there is no room."""
        return self._rates.taken(run, gpus)

    def may_share(self, runs: Sequence[JobRun]) -> bool:
        """True if the sharing lets all be on one GPU, memory included where it is modeled."""
        parts = [run.job.part for run in runs]
        sharing = self.devices.sharing
        room = self._rates.least_bytes
        fits = not room or sum(part.memory_bytes for part in parts) <= room
        whole = all(run.job.graph is None for run in runs)
        return (
            fits
            and whole
            and all(sharing.admits(parts[:place], part) for place, part in enumerate(parts))
        )

    def slowed_together(self, runs: Sequence[JobRun]) -> list[float]:
        """The part of its rate that each of some jobs keeps where all are on the same GPUs."""
        parts = [run.job.part for run in runs]
        rate = self.devices.sharing.rate
        return [rate(parts, part, WHOLE) / rate([part], part, WHOLE) for part in parts]
