"""The simulation: a policy chooses jobs, a scheme chooses GPUs, and time is in integer ticks.

The clock goes from event to event: an arrival, an end, or a time that the policy has set
(`Policy.wake`). At each, in this order: jobs end, jobs arrive, the policy orders, GPUs are given.
With preemption the order is of all jobs, as if the cluster were empty, but a job keeps its GPUs
where nothing more urgent needs them.

A job has `duration * WORK` units of work and does `JobRun.rate` of them per tick; where jobs share
a GPU, rates change as they come and go, and the ends with them (an old end in the heap is stale). A
tick that is not filled by the last work counts whole, so times stay integers.

Cost of an event: O(changes log jobs) under `fifo` and `shortest` where GPUs are only counted, else
O(waiting or runnable jobs), times O(GPUs) for the jobs that a scheme places. Memory is
linear in jobs plus events.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial

from baechi.cluster_simulation.contention import Exclusive, Sharing
from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.free_devices import DeviceCounter, DeviceStates, FreeDevices, Grant
from baechi.cluster_simulation.jobs import WHOLE, Job, Refusal
from baechi.cluster_simulation.placement_schemes import Scheme
from baechi.cluster_simulation.policies.policy import Offer, Policy
from baechi.cluster_simulation.results import SimulationResult
from baechi.cluster_simulation.running_job import JobRun, StallDetector
from baechi.errors import InputError
from baechi.units import format_bytes
from baechi.validation import check_count


def simulate_cluster(
    jobs: Sequence[Job],
    fleet: Fleet,
    policy: Policy,
    scheme: Scheme | None = None,
    *,
    sharing: Sharing | None = None,
    preempt_cost: int = 0,
    restart_cost: int = 0,
    seed: int = 0,
    memo: dict[object, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Runs jobs on a cluster until all have ended; the same input gives the same result.

    Args:
        jobs: In any order; those of one time arrive in the order given.
        fleet: The cluster.
        policy: Chooses the jobs that hold GPUs; the value given is not changed.
        scheme: Chooses the GPUs; `None` only counts them, as the published simulators' `count`.
        sharing: The model of several jobs on a GPU; whole GPUs if absent.
        preempt_cost: Ticks of work that a job loses when it is preempted.
        restart_cost: Ticks of work that a restart costs.
        seed: For schemes that draw.
        memo: A cache of placements of the jobs' graphs; given again to a simulation of jobs with
            the same graphs, it saves their computation and changes nothing.
        progress: Called with the jobs that are done and all jobs, after events.

    Raises:
        InputError: Two jobs of one name, or GPUs that are shared, slices or of another speed where
            they are only counted, or a policy under which nothing starts or ends any more.
    """
    check_count(preempt_cost, "preempt_cost")
    check_count(restart_cost, "restart_cost")
    names: set[str] = set()
    for job in jobs:
        if job.name in names:
            raise InputError(f"two jobs are named {job.name!r}; names must be unique.")
        names.add(job.name)
    sharing = sharing if sharing is not None else Exclusive()
    scheme = policy.scheme(scheme)
    whole = all(gpu.share == gpu.speed == WHOLE for gpu in fleet.gpus)
    if scheme is None and (sharing.most > 1 or not whole):
        raise InputError(
            "counting tells no GPU from another and takes each for a whole one of speed 1, so jobs "
            "cannot share one, and none may be a slice: give a scheme, such as least-loaded."
        )
    devices = partial(_empty, fleet, sharing, scheme, seed, {} if memo is None else memo)
    simulation = _Simulation(fleet, copy.deepcopy(policy), devices, preempt_cost + restart_cost)
    return simulation.run(jobs, progress)


def _empty(
    fleet: Fleet, sharing: Sharing, scheme: Scheme | None, seed: int, memo: dict[object, object]
) -> FreeDevices:
    return (
        DeviceStates(fleet, sharing, scheme.place, seed, memo) if scheme else DeviceCounter(fleet)
    )


class _Simulation:
    """The state of one simulation."""

    def __init__(
        self, fleet: Fleet, policy: Policy, devices: Callable[[], FreeDevices], restart_cost: int
    ) -> None:
        self._policy = policy
        self._make_devices = devices
        self._devices = self._make_devices()
        self._gpus = len(fleet.gpus)
        self._memory_bytes = sum(gpu.free_bytes or 0 for gpu in fleet.gpus)
        self._byte_ticks = 0
        self._restart_cost = restart_cost
        self._shared = isinstance(self._devices, DeviceStates) and self._devices.sharing.most > 1
        self._makes_offers = type(policy).accepts is not Policy.accepts
        self._queue: list[JobRun] = []  # waiting jobs; with preemption all that have not ended
        self._running: dict[int, JobRun] = {}
        self._wake: int | None = None
        self._selects = False
        self._waiting = 0
        self._done: list[JobRun] = []
        self._stalls = StallDetector()
        self._hopeless: set[object] = set()  # shapes that found no room since a job last left

    def run(
        self, jobs: Sequence[Job], progress: Callable[[int, int], None] | None
    ) -> SimulationResult:
        """Runs until no job waits, runs or is still to arrive."""
        refused, admitted = _admission(jobs, self._make_devices(), self._gpus)
        runs = self._runs = [JobRun(job, index) for index, job in enumerate(admitted)]
        self._policy.begin(self._gpus)
        # Decided once: a policy that selects keeps its own queue from the first event on.
        if isinstance(self._devices, DeviceCounter) and not self._restart_cost:
            chosen = copy.deepcopy(self._policy).select(0, (), (), self._gpus)
            self._selects = chosen is not None
        rows: list[tuple[int, ...]] = []
        self._events = self._policy.events(admitted, [row.job for row in refused])
        now = self._events.arrival or 0
        place = 0
        while (moment := self._next()) is not None:
            self._byte_ticks += self._devices.held_bytes * max(0, moment - now)
            before, now = now, max(now, moment)
            first = place
            while place < len(runs) and runs[place].job.submit_time <= now:
                place += 1
            arrived = runs[first:place]
            ended = self._events.take(now)
            self._end(ended, now, before)
            self._waiting += len(arrived)
            self._decide(now, arrived, ended)
            if self._waiting and not self._running and place == len(runs) and self._wake is None:
                raise InputError(
                    f"policy {self._policy.name!r} leaves {self._waiting} jobs waiting on an idle "
                    "cluster for ever."
                )
            moves = bool(ended or arrived or place < len(runs))
            if self._stalls.is_stalled(runs, now, moves=moves):
                raise InputError(
                    f"under policy {self._policy.name!r} jobs lose by preemptions what they get "
                    "done, and would never end; lower what preempting and restarting cost."
                )
            counted = (self._waiting, len(self._running), len(self._done))
            rows.append((now, *self._devices.row(), *counted))
            if progress is not None and (ended or arrived):
                progress(len(self._done), len(runs))
        outcomes = tuple(run.outcome(resumes=self._policy.preemptive) for run in self._done)
        return SimulationResult(
            *(self._policy.name, self._gpus, outcomes, tuple(refused), tuple(rows)),
            memory_bytes=self._memory_bytes,
            byte_ticks=self._byte_ticks,
        )

    def _next(self) -> int | None:
        """The time of the next event."""
        moment = self._events.next(len(self._running))
        if self._wake is None or not (self._running or self._waiting):
            return moment
        return self._wake if moment is None else min(moment, self._wake)

    def _end(self, ended: list[JobRun], now: int, before: int) -> None:
        """Ends jobs; one that waits has waited until the event before, as published."""
        for run in ended:
            if run.running:
                self._release(run, now)
            else:
                run.settle(before)
                self._waiting -= 1
            run.done = True
            run.end_time = now
        for run in ended:
            self._refresh(run, now)
        self._done += ended
        if ended and self._policy.preemptive and not self._selects:
            self._queue = [run for run in self._queue if not run.done]

    def _decide(self, now: int, arrived: list[JobRun], ended: list[JobRun]) -> None:
        policy = self._policy
        if self._selects and isinstance(self._devices, DeviceCounter):
            chosen = policy.select(now, arrived, ended, self._devices.free)
            stops, starts = chosen if chosen is not None else ([], [])
            for run in stops:
                self._stop(run, now)
            for run in starts:
                self._start(run, Grant((), ()), now)
            return
        self._queue += arrived
        self._queue = policy.order(self._queue, now)
        if not policy.preemptive:
            self._fill_up(now)
        elif isinstance(self._devices, DeviceCounter):
            self._count_out(now)
        else:
            self._deal_out(now)
        wake = policy.wake(self._queue, now)
        self._wake = None if wake is None else max(now + 1, wake)

    def _count_out(self, now: int) -> None:
        """With preemption, where GPUs are counted: stops jobs, then starts others."""
        free = self._gpus
        stops, starts = [], []
        for run in self._queue:
            if run.job.gpus <= free:
                free -= run.job.gpus
                if not run.running:
                    starts.append(run)
            elif run.running:
                stops.append(run)
        for run in stops:
            self._stop(run, now)
        for run in starts:
            self._start(run, Grant((), ()), now)

    def _fill_up(self, now: int) -> None:
        """Without preemption: starts waiting jobs while there is room."""
        started = 0
        free = self._devices.row()[3]
        for run in self._policy.walk(self._queue):
            if not free and not self._shared:
                break
            if self._begin(run, now):
                started += 1
                free = self._devices.row()[3]
            elif self._policy.blocking:
                break
        if all(run.running for run in self._queue[:started]):
            del self._queue[:started]
        else:
            self._queue = [run for run in self._queue if not run.running]

    def _deal_out(self, now: int) -> None:
        """With preemption, GPU by GPU: a job displaces less urgent ones where it must."""
        hopeless: set[object] = set()
        for rank, run in enumerate(self._queue):
            if run.running or self._begin(run, now):
                continue
            shape = run.job.shape
            behind = [other for other in self._queue[rank + 1 :] if other.running]
            if behind and shape not in hopeless and not self._displace(run, behind, now):
                hopeless.add(shape)

    def _displace(self, run: JobRun, behind: list[JobRun], now: int) -> bool:
        """Starts a job on GPUs of less urgent ones, if these are enough.

        The least urgent are displaced first, and as few as necessary, found by doubling and
        halving: the scheme is called O(log behind) times. Who still fits then keeps its GPUs.
        """
        few, away, grant = 0, 0, None
        while grant is None and away < len(behind):
            few, enough = away, min(2 * away + 1, len(behind))
            away = self._clear(behind, away, enough)
            grant = self._devices.place(run.job)
        if grant is not None:
            enough = away
            while enough - few > 1:
                middle = (few + enough) // 2
                away = self._clear(behind, away, middle)
                if self._devices.place(run.job) is None:
                    few = middle
                else:
                    enough = middle
            away = self._clear(behind, away, enough)
            grant = self._devices.place(run.job)
        if grant is not None:
            self._devices.take(run.index, run.job, grant)
        lost = []
        for other in behind[len(behind) - away :]:
            held = other.held
            if self._devices.place_again(held):
                self._devices.take(other.index, other.job, held)
            else:
                lost.append(other)
        for other in lost:
            self._mark_stopped(other, now)
        for other in lost:
            self._refresh(other, now)
        if grant is not None:
            self._mark_started(run, grant, now)
        return grant is not None

    def _clear(self, behind: list[JobRun], away: int, wanted: int) -> int:
        """Takes jobs off or puts them back, so that the last `wanted` are off their GPUs."""
        for place in range(len(behind) - wanted, len(behind) - away):
            self._devices.give(behind[place].index, behind[place].job, behind[place].held)
        for place in range(len(behind) - away, len(behind) - wanted):
            self._devices.take(behind[place].index, behind[place].job, behind[place].held)
        return wanted

    def _begin(self, run: JobRun, now: int) -> bool:
        """Starts a job if there is room and the policy takes it."""
        shape = run.job.shape
        if shape in self._hopeless:
            return False
        grant = self._devices.place(run.job)
        if grant is None:
            self._hopeless.add(shape)
        if grant is None or not self._accepts(run, grant, now):
            return False
        self._start(run, grant, now)
        return True

    def _accepts(self, run: JobRun, grant: Grant, now: int) -> bool:
        if not self._makes_offers:
            return True
        rate = self._devices.rate(grant, joins=True)
        return self._policy.accepts(
            Offer(run, grant, rate, now, self._running.values(), self._devices)
        )

    def _start(self, run: JobRun, grant: Grant, now: int) -> None:
        self._devices.take(run.index, run.job, grant)
        self._mark_started(run, grant, now)

    def _mark_started(self, run: JobRun, grant: Grant, now: int) -> None:
        run.settle(now)
        if run.start_time < 0:
            run.start_time = now
        elif self._restart_cost:
            run.add_overhead(self._restart_cost)
        run.running = True
        run.grant = grant
        run.resume += 1
        run.rate = 0
        self._running[run.index] = run
        self._waiting -= 1
        self._pace(run, now)
        self._refresh(run, now)

    def _stop(self, run: JobRun, now: int) -> None:
        self._devices.give(run.index, run.job, run.held)
        self._mark_stopped(run, now)
        self._refresh(run, now)

    def _mark_stopped(self, run: JobRun, now: int) -> None:
        run.settle(now)
        run.running = False
        run.version += 1
        run.preempt += 1
        del self._running[run.index]
        self._hopeless.clear()
        self._waiting += 1

    def _release(self, run: JobRun, now: int) -> None:
        """Frees the GPUs of a job that has ended."""
        run.settle(now)
        run.running = False
        run.version += 1
        del self._running[run.index]
        self._hopeless.clear()
        self._devices.give(run.index, run.job, run.held)

    def _refresh(self, run: JobRun, now: int) -> None:
        """Updates the rates of jobs that share a GPU with one that came or went."""
        if self._shared:
            for index in sorted(self._devices.neighbors(run.held)):
                neighbor = self._runs[index]
                if neighbor.running:
                    self._pace(neighbor, now)

    def _pace(self, run: JobRun, now: int) -> None:
        """The rate of a running job, and its end with it."""
        rate = self._devices.rate(run.held)
        if rate != run.rate:
            run.settle(now)
            run.rate = rate
            run.version += 1
            self._events.add(run)


def _admission(
    jobs: Sequence[Job], empty: FreeDevices, gpus: int
) -> tuple[list[Refusal], list[Job]]:
    """The jobs that do not fit the empty cluster, and those that do, by arrival."""
    refused: list[Refusal] = []
    admitted: list[Job] = []
    known: dict[object, bool] = {}
    for job in sorted(jobs, key=lambda job: job.submit_time):
        shape = job.shape
        if shape not in known:
            known[shape] = empty.place(job) is not None
        if known[shape]:
            admitted.append(job)
        else:
            refused.append(Refusal(job, _reason_for(job, gpus)))
    return refused, admitted


def _reason_for(job: Job, gpus: int) -> str:
    """The reason why a job does not fit an empty cluster of so many GPUs."""
    if job.gpus > gpus:
        return f"asks for {job.gpus} GPUs of {gpus}"
    what = "its operator graph" if job.graph else f"{format_bytes(job.memory_bytes)} on each"
    return (
        f"asks for {job.gpus} GPUs with room for {what}; under this scheme not even the empty "
        "cluster has that"
    )
