"""The simulation: a policy chooses jobs, a scheme chooses GPUs, and time is in integer ticks.

The clock goes from event to event: an arrival, an end, or a time that the policy has set
(`Policy.wake`). At each, in this order: jobs end, jobs arrive, the policy orders, GPUs are given.
With preemption the order is of all jobs, as if the cluster were empty, but a job keeps its GPUs
where nothing more urgent needs them. A tick that is not filled by the last work counts whole.

Cost of an event: docs/cluster.md, "Speed"; times O(GPUs) for the jobs that a scheme places.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Final

from baechi.cluster_simulation.fleet import DeviceCounter, DeviceStates, Fleet, FreeDevices
from baechi.cluster_simulation.jobs import (
    WHOLE,
    Events,
    Exclusive,
    Grant,
    Job,
    JobRun,
    Refusal,
    Sharing,
    clocked,
)
from baechi.cluster_simulation.links import Uplinks
from baechi.cluster_simulation.placement_schemes import FirstFit, Scheme
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policy_support.policy import Offer, Policy, SelectingPolicy
from baechi.cluster_simulation.policy_support.predictions import Rates
from baechi.cluster_simulation.results import SimulationResult
from baechi.errors import InputError
from baechi.units import format_bytes
from baechi.validation import check_count

# Events without an arrival or an end between two looks at the remaining work.
_STALL_EVENTS: Final = 10_000


def simulate_cluster(
    jobs: Sequence[Job],
    fleet: Fleet,
    policy: Policy,
    scheme: Scheme | None = None,
    *,
    sharing: Sharing | None = None,
    preempt_cost: int = 0,
    restart_cost: int = 0,
    interruption: Callable[[Sequence[Job]], int] | None = None,
    contention: bool = False,
    seed: int = 0,
    memo: dict[object, Grant | None] | None = None,
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
        interruption: Ticks that a running job loses between an event and the next, unless it ends
            there, by the jobs on its GPUs: `interleaving.interruption` is as in Muri's simulator.
        contention: Whether jobs slow each other down on the uplinks of nodes (`links.py`); else
            each has them for itself.
        seed: For schemes that draw.
        memo: A cache of placements of the jobs' graphs; given again to a simulation of jobs with
            the same graphs, it saves their computation and changes nothing.
        progress: Called with the jobs that are done and all jobs, after events.

    Raises:
        InputError: Two jobs of one name, or GPUs that are shared, slices or of another speed or
            power where they are only counted, or a policy under which nothing starts or ends any
            more.
    """
    check_count(preempt_cost, "preempt_cost")
    check_count(restart_cost, "restart_cost")
    names: set[str] = set()
    for job in jobs:
        if job.name in names:
            raise InputError(f"two jobs are named {job.name!r}; names must be unique.")
        names.add(job.name)
    shared = Exclusive() if sharing is None else sharing
    if scheme is None and isinstance(policy, AllocatingPolicy):
        scheme = FirstFit()  # as counting: any GPU will do, and the policy tells them apart
    chooses = None if scheme is None or policy.counts else scheme.place
    alike = len({gpu.watts for gpu in fleet.gpus}) == 1
    whole = alike and all(gpu.share == gpu.speed == WHOLE for gpu in fleet.gpus)
    if chooses is None and (shared.most > 1 or not whole or contention):
        raise InputError(
            "counting tells no GPU from another and takes each for a whole one of speed 1, so jobs "
            "cannot share one, and none may be a slice, draw other power or have links: give a "
            "scheme, such as least-loaded."
        )
    known: dict[object, Grant | None] = {} if memo is None else memo

    def empty() -> FreeDevices:
        if chooses is None:
            return DeviceCounter(fleet)
        return DeviceStates(fleet, shared, chooses, seed, known)

    gpus = len(fleet.gpus)
    refused, admitted = _admission(jobs, empty(), gpus)
    policy = copy.deepcopy(policy)
    policy.gpus = gpus
    events = policy.events(admitted, [row.job for row in refused])
    cost = preempt_cost + restart_cost
    devices = empty()
    links = Uplinks(fleet, policy) if contention else None
    simulation = _Simulation(policy, devices, admitted, events, cost, interruption, links)
    simulation.run(progress)
    outcomes = tuple(run.outcome(resumes=policy.preemptive) for run in simulation.done)
    memory_bytes = sum(gpu.free_bytes or 0 for gpu in fleet.gpus)
    drawn = devices.milliwatt_ticks if any(any(gpu.watts) for gpu in fleet.gpus) else None
    rows, ticks = tuple(simulation.rows), (simulation.byte_ticks, drawn)
    return SimulationResult(policy.name, gpus, outcomes, tuple(refused), rows, memory_bytes, *ticks)


def _admission(
    jobs: Sequence[Job], empty: FreeDevices, gpus: int
) -> tuple[list[Refusal], list[Job]]:
    """The jobs that do not fit the empty cluster, and those that do, by arrival."""
    refused: list[Refusal] = []
    admitted: list[Job] = []
    fits: dict[object, bool] = {}
    for job in sorted(jobs, key=lambda job: job.submit_time):
        shape = job.shape
        if shape not in fits:
            fits[shape] = empty.place(job) is not None
        if fits[shape]:
            admitted.append(job)
            continue
        reason = f"asks for {job.gpus} GPUs of {gpus}"
        if job.gpus <= gpus:
            each = f"{format_bytes(job.memory_bytes)} on each"
            what = "its operator graph" if job.graph else each
            reason = (
                f"asks for {job.gpus} GPUs with room for {what}; under this scheme not even the "
                "empty cluster has that"
            )
        refused.append(Refusal(job, reason))
    return refused, admitted


class _Simulation:
    """The state of one simulation."""

    def __init__(
        self,
        policy: Policy,
        devices: FreeDevices,
        jobs: Sequence[Job],
        events: Events,
        restart_cost: int,
        interruption: Callable[[Sequence[Job]], int] | None,
        links: Uplinks | None,
    ) -> None:
        self._links = links
        self._interruption = interruption
        self.done: list[JobRun] = []
        self.rows: list[tuple[int, ...]] = []
        self.byte_ticks = 0
        self._policy = policy
        self._devices = devices
        self._events = events
        self._restart_cost = restart_cost
        self._shared = (
            devices if isinstance(devices, DeviceStates) and devices.sharing.most > 1 else None
        )
        counts = isinstance(devices, DeviceCounter) and not restart_cost and not interruption
        self._selecting = policy if counts and isinstance(policy, SelectingPolicy) else None
        self._runs = [JobRun(job, index) for index, job in enumerate(jobs)]
        numbers: dict[object, int] = {}
        self._shapes = [numbers.setdefault(job.shape, len(numbers)) for job in jobs]  # by index
        self._queue: list[JobRun] = []  # waiting jobs; with preemption all that have not ended
        self._running: dict[int, JobRun] = {}
        self._wake: int | None = None
        self._waiting = 0
        self._rates: Rates | None = None
        self._hopeless: set[int] = set()  # shapes that found no room since a job last left
        self._still = 0  # events since the last arrival or end
        self._least: tuple[int, int] | None = None  # work, in all and of a job, in these events

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Runs until no job waits, runs or is still to arrive."""
        runs, name = self._runs, self._policy.name
        now = self._events.arrival or 0
        place = 0
        while (moment := self._next()) is not None:
            passed = max(0, moment - now)
            self.byte_ticks += self._devices.held_bytes * passed
            self._devices.milliwatt_ticks += self._devices.milliwatts * passed
            before, now = now, max(now, moment)
            first = place
            while place < len(runs) and runs[place].job.submit_time <= now:
                place += 1
            arrived = runs[first:place]
            ended = self._events.take(now)
            self._end(ended, now, before)
            self._waiting += len(arrived)
            if self._interruption is not None:
                self._interrupt(self._interruption, now, now - before)
            self._decide(now, arrived, ended)
            for run in self._links.share(self._running.values()) if self._links else ():
                self._pace(run, now)
            if self._waiting and not self._running and place == len(runs) and self._wake is None:
                raise InputError(
                    f"policy {name!r} leaves {self._waiting} jobs waiting on an idle "
                    "cluster for ever."
                )
            if ended or arrived or place < len(runs):
                self._still, self._least = 0, None
            elif self._is_stalled(now):
                raise InputError(
                    f"under policy {name!r} jobs lose by preemptions what they get "
                    "done, and would never end; lower what preempting and restarting cost."
                )
            counts = self._waiting, len(self._running), len(self.done)
            self.rows.append((now, *self._devices.row(), *counts))
            if progress is not None and (ended or arrived):
                progress(len(self.done), len(runs))

    def _is_stalled(self, now: int) -> bool:
        """True if for many events the remaining work has not fallen, in all or of one job."""
        self._still += 1
        if self._still % _STALL_EVENTS:
            return False
        left = [run.remaining(now) for run in self._runs if not run.done]
        here = sum(left), min(left, default=0)
        before = self._least or (here[0] + 1, here[1] + 1)
        self._least = min(before[0], here[0]), min(before[1], here[1])
        return self._least == before

    def _next(self) -> int | None:
        """The time of the next event."""
        moment = self._events.next()
        if self._wake is None or not (self._running or self._waiting):
            return moment
        return self._wake if moment is None else min(moment, self._wake)

    def _end(self, ended: list[JobRun], now: int, before: int) -> None:
        """Ends jobs; one that waits has waited until the event before, as published."""
        for run in ended:
            if run.running:
                self._devices.give(run)
                self._mark_off(run, now)
            else:
                run.settle(before)
                self._waiting -= 1
            run.done = True
            run.end_time = now
        for run in ended:
            self._refresh(run, now)
        self.done += ended
        whole = self._policy.preemptive or isinstance(self._policy, AllocatingPolicy)
        if ended and whole and self._selecting is None:
            self._queue = [run for run in self._queue if not run.done]

    def _interrupt(
        self, interruption: Callable[[Sequence[Job]], int], now: int, passed: int
    ) -> None:
        """Takes back a part of what running jobs did since the last event."""
        for run in self._running.values():
            together = [run.job]
            if isinstance(self._devices, DeviceStates):
                owners = self._devices.owners[run.grant.gpus[0]]
                together = [self._runs[owner].job for owner in owners]
            run.lose(now, min(passed, interruption(together)))
            self._events.add(run)

    def _decide(self, now: int, arrived: list[JobRun], ended: list[JobRun]) -> None:
        policy, devices = self._policy, self._devices
        if isinstance(policy, AllocatingPolicy):
            assert isinstance(devices, DeviceStates), "allocating policies are placed"
            self._queue += arrived
            self._rates = self._rates or Rates(devices)
            allocations = policy.allocate(ClusterView(now, self._queue, devices, self._rates))
            self._carry_out(allocations, devices, now)
            wake = policy.wake(self._queue, now)
            self._wake = None if wake is None else max(now + 1, wake)
            return
        if self._selecting is not None and isinstance(devices, DeviceCounter):
            self._exchange(*self._selecting.select(now, arrived, ended, devices.free), now)
            return
        self._queue += arrived
        self._queue = policy.order(self._queue, now)
        if not policy.preemptive:
            self._fill_up(now)
        elif isinstance(devices, DeviceStates):
            self._deal_out(devices, now)
        else:
            self._count_out(devices.total, now)
        wake = policy.wake(self._queue, now)
        self._wake = None if wake is None else max(now + 1, wake)

    def _count_out(self, free: int, now: int) -> None:
        """With preemption, where GPUs are counted: stops jobs, then starts others."""
        stops, starts = [], []
        for run in self._queue:
            if run.job.gpus <= free:
                free -= run.job.gpus
                if not run.running:
                    starts.append(run)
            elif run.running:
                stops.append(run)
        self._exchange(stops, starts, now)

    def _exchange(self, stops: list[JobRun], starts: list[JobRun], now: int) -> None:
        for run in stops:
            self._devices.give(run)
            self._mark_stopped(run, now)
        for run in starts:
            self._start(run, Grant(), now)

    def _fill_up(self, now: int) -> None:
        """Without preemption: starts waiting jobs while there is room."""
        started = 0
        free = self._devices.free
        for run in self._policy.walk(self._queue):
            if not free and self._shared is None:
                break
            too_large = run.job.gpus > free and run.job.graph is None and self._shared is None
            if not too_large and self._begin(run, now):
                started += 1
                free = self._devices.free
            elif self._policy.blocking:
                break
        if all(run.running for run in self._queue[:started]):
            del self._queue[:started]
        else:
            self._queue = [run for run in self._queue if not run.running]

    def _deal_out(self, devices: DeviceStates, now: int) -> None:
        """With preemption, GPU by GPU: a job displaces less urgent ones where it must."""
        hopeless: set[int] = set()
        for rank, run in enumerate(self._queue):
            if run.running or self._begin(run, now):
                continue
            shape = self._shapes[run.index]
            if shape in hopeless:
                continue
            behind = [other for other in self._queue[rank + 1 :] if other.running]
            if behind and not self._displace(devices, run, behind, now):
                hopeless.add(shape)

    def _displace(self, devices: DeviceStates, run: JobRun, behind: list[JobRun], now: int) -> bool:
        """Starts a job on GPUs of less urgent ones, if these are enough.

        The least urgent are displaced first, and as few as necessary, found by doubling and
        halving: the scheme is called O(log behind) times. Who still fits then keeps its GPUs.
        """
        away = 0

        def clear(wanted: int) -> Grant | None:
            """The place once just the last `wanted` are off their GPUs."""
            nonlocal away
            for other in behind[len(behind) - wanted : len(behind) - away]:
                devices.give(other)
            for other in behind[len(behind) - away : len(behind) - wanted]:
                devices.take(other, other.grant)
            away = wanted
            return devices.place(run.job)

        few, grant = 0, None
        while grant is None and away < len(behind):
            few = away
            grant = clear(min(2 * away + 1, len(behind)))
        if grant is not None:
            enough = away
            while enough - few > 1:
                middle = (few + enough) // 2
                if clear(middle) is None:
                    few = middle
                else:
                    enough = middle
            grant = clear(enough)
        if grant is not None:
            devices.take(run, grant)
        lost = []
        for other in behind[len(behind) - away :]:
            if devices.admits_all(other.grant):
                devices.take(other, other.grant)
            else:
                lost.append(other)
        for other in lost:
            self._mark_stopped(other, now)
        for other in lost:
            self._refresh(other, now)
        if grant is not None:
            self._mark_started(run, grant, now)
        return grant is not None

    def _carry_out(
        self, allocations: Sequence[Allocation], devices: DeviceStates, now: int
    ) -> None:
        """Stops whom no allocation names, leaves whom can stay, and places the others in order."""
        kept = self._keepers(allocations)
        away = [run for run in self._running.values() if run.index not in kept]
        for run in away:
            devices.give(run)
        placed: dict[int, tuple[JobRun, Grant]] = {}
        idle = sum(not owners for owners in devices.owners)
        for allocation in allocations:
            run, other = allocation.run, allocation.beside
            if run.index in kept:
                if run.clock != allocation.clock:
                    devices.set_clock(run, allocation.clock)
                    self._pace(run, now)
                continue
            grant = None
            if other is not None and (other.index in placed or other.index in kept):
                beside = placed[other.index][1] if other.index in placed else other.grant
                grant = devices.join(run.job, allocation.size, beside.gpus)
            elif other is None and idle:
                every = range(len(devices.owners)) if allocation.among is None else allocation.among
                free = [gpu for gpu in every if not devices.owners[gpu]]
                grant = devices.place(run.job, allocation.gpus, free) if free else None
                if grant is None and idle == len(devices.owners):  # else nobody would ever start
                    grant = devices.place(run.job, allocation.gpus)
                idle -= len(grant.gpus) if grant is not None else 0
            if grant is not None:
                placed[run.index] = run, grant
                run.clock = allocation.clock
                devices.take(run, grant)
                run.asked = allocation.size
        self._book(away, list(placed.values()), now)

    def _keepers(self, allocations: Sequence[Allocation]) -> set[int]:
        """The running jobs that have what is allocated to them, and no earlier one has it, too."""
        kept: set[int] = set()
        held: set[int] = set()
        names: set[int] = set()
        sets: dict[int, frozenset[int]] = {}  # of `among`, which many share
        for allocation in allocations:
            run, gpus, other = allocation.run, allocation.run.grant.gpus, allocation.beside
            if run.index in names or run.done:
                raise InputError(
                    f"policy {self._policy.name!r} names job {run.job.name!r} twice or too late."
                )
            names.add(run.index)
            if not run.running or run.asked != allocation.size:
                continue
            if other is None:
                stays = held.isdisjoint(gpus)
            else:
                stays = other.index in kept and gpus == other.grant.gpus
            among = allocation.among
            if stays and among is not None and among != gpus:
                if id(among) not in sets:
                    sets[id(among)] = frozenset(among)
                stays = sets[id(among)].issuperset(gpus)
            if stays:
                kept.add(run.index)
                held.update(gpus)
        return kept

    def _book(
        self, away: Sequence[JobRun], placed: Sequence[tuple[JobRun, Grant]], now: int
    ) -> None:
        """Books what was carried out; who was put back where it was has not been away."""
        same = {run.index for run, grant in placed if run.running and grant == run.grant}
        left = {gpu for run in away for gpu in run.grant.gpus}
        for run in away:
            if run.index not in same:
                self._mark_stopped(run, now)
        for run, grant in placed:
            if run.index not in same:
                self._mark_started(run, grant, now)
            else:
                self._pace(run, now)  # the clock may have changed
        if self._shared is not None:
            owners = self._shared.owners
            for index in sorted({owner for gpu in left for owner in owners[gpu]}):
                self._pace(self._runs[index], now)

    def _begin(self, run: JobRun, now: int) -> bool:
        """Starts a job if there is room and the policy takes it."""
        shape = self._shapes[run.index]
        if shape in self._hopeless:
            return False
        grant = self._devices.place(run.job)
        if grant is None:
            self._hopeless.add(shape)
            return False
        if not self._policy.accepts(Offer(run, grant, now, self._running.values(), self._devices)):
            return False
        self._start(run, grant, now)
        return True

    def _start(self, run: JobRun, grant: Grant, now: int) -> None:
        self._devices.take(run, grant)
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
        run.rate, run.slowed = 0, WHOLE
        self._running[run.index] = run
        self._waiting -= 1
        self._pace(run, now)
        self._refresh(run, now)

    def _mark_stopped(self, run: JobRun, now: int) -> None:
        self._mark_off(run, now)
        run.preempt += 1
        self._waiting += 1

    def _mark_off(self, run: JobRun, now: int) -> None:
        run.settle(now)
        run.running = False
        run.version += 1
        del self._running[run.index]
        self._hopeless.clear()

    def _refresh(self, run: JobRun, now: int) -> None:
        """Updates the rates of jobs that share a GPU with one that came or went."""
        if self._shared is not None:
            owners = self._shared.owners
            for index in sorted({owner for gpu in run.grant.gpus for owner in owners[gpu]}):
                neighbor = self._runs[index]
                if neighbor.running:
                    self._pace(neighbor, now)

    def _pace(self, run: JobRun, now: int) -> None:
        """The rate of a running job, and its end with it."""
        rate = self._devices.rate(run.grant)
        if run.clock != WHOLE:
            rate = max(1, clocked(rate, run.job.compute, run.clock))
        if run.slowed != WHOLE:
            rate = max(1, rate * run.slowed // WHOLE)
        if rate != run.rate:
            run.settle(now)
            run.rate = rate
            run.version += 1
            self._events.add(run)
