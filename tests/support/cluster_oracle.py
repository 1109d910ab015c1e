"""The published simulator's rules written down once more, as plainly as can be: nothing is shared.

Every event empties the cluster and gives it out again by walking over lists; the only structures
are lists, and the clock finds the next event by looking at all jobs. What `test_golden_results.py`
checks on the published results, the tests that use this check on traces of their own.
"""

import math
from dataclasses import dataclass, field

LIMITS = (3250, 7200)
COLUMNS = ("start", "end", "pending", "preempt", "resume", "promote")


@dataclass(eq=False)
class J:
    name: str
    gpus: int
    submit: int
    duration: int
    start: int = -1
    end: int = -1
    pending: int = 0
    preempt: int = 0
    resume: int = 0
    promote: int = 0
    running: bool = False
    seen: int = 0
    total: int = 0  # ticks run
    executed: int = 0  # ticks run since the last promotion
    last_pending: int = 0
    queue: int = 0
    rank: float = 0.0

    def row(self):
        return tuple(getattr(self, column) for column in COLUMNS)


@dataclass
class Oracle:
    jobs: list
    gpus: int
    index: object = None
    done: list = field(default_factory=list)

    def __post_init__(self):
        self.arrivals = sorted(self.jobs, key=lambda job: job.submit)

    def arriving(self, now):
        found = [job for job in self.arrivals if job.submit == now]
        self.arrivals = [job for job in self.arrivals if job.submit != now]
        return found

    def without_preemption(self, policy):
        waiting, running, free = [], [], self.gpus
        while self.arrivals or waiting or running:
            times = [job.end for job in running] + [job.submit for job in self.arrivals]
            now = min(times)
            for job in [job for job in running if job.end == now]:
                running.remove(job)
                free += job.gpus
                self.done.append(job)
            waiting += self.arriving(now)
            place = 0
            started = []
            while place < len(waiting):
                job = waiting[place]
                if job.gpus <= free:
                    free -= job.gpus
                    job.start, job.end = now, now + job.duration
                    job.pending = now - job.submit
                    running.append(job)
                    started.append(job)
                    if policy == "lpjf":  # the list shrinks under the walk
                        waiting.remove(job)
                elif policy != "fjf":
                    break
                place += 1
            waiting = [job for job in waiting if job not in started]
        return self.done

    def with_preemption(self, key):
        alive = []
        while self.arrivals or alive:
            now = self.next(alive, None)
            self.leave(alive, [job for job in alive if self.ends_at(job) == now], now)
            for job in self.arriving(now):
                job.seen = now
                alive.append(job)
            for job in alive:
                self.book(job, now)
            alive.sort(key=key)
            self.deal(alive, now)
        return self.done

    def in_queues(self, *, by_gpus, promote=0):
        alive, queues, jump, noted = [], [[], [], []], None, []
        while self.arrivals or alive:
            arrival = self.arrivals[0].submit if self.arrivals else None
            if arrival == min(map(self.ends_at, alive), default=math.inf):
                noted = [job for job in alive if self.ends_at(job) == arrival]
            now = self.next(alive, jump)
            gone = self.leave(alive, [job for job in alive if self.ends_at(job) == now], now)
            if now == arrival:  # ends noted with the arrival are not taken back
                gone = gone or self.leave(alive, noted, now)
                noted = []
            queues = [[job for job in queue if job not in gone] for queue in queues]
            for job in self.arriving(now):
                job.seen = now
                alive.append(job)
                queues[0].append(job)
            for job in alive:
                ran = self.book(job, now)
                service = job.executed * (job.gpus if by_gpus else 1)
                if job.running:
                    if job.queue < 2 and service >= LIMITS[job.queue]:
                        queues[job.queue].remove(job)
                        job.queue += 1
                        queues[job.queue].append(job)
                else:
                    if job.executed > 0:
                        job.last_pending += ran
                    if (
                        promote
                        and job.queue
                        and job.executed > 0
                        and (job.last_pending >= int(job.executed * promote))
                    ):
                        queues[job.queue].remove(job)
                        queues[0].append(job)
                        job.executed = job.last_pending = job.queue = 0
                        job.promote += 1
                        service = 0
                if self.index is not None:
                    job.rank = self.index(service)
            if self.index is not None:
                for queue in queues:
                    queue.sort(key=lambda job: (job.rank, -job.submit), reverse=True)
            self.deal([job for queue in queues for job in queue], now)
            queues = [
                [job for job in queue if job.running] + [job for job in queue if not job.running]
                for queue in queues
            ]
            jumps = []
            for job in alive:
                if job.running and job.queue < 2:
                    left = LIMITS[job.queue] - job.executed
                    jumps.append(now + (left // job.gpus if by_gpus else left))
                elif not job.running and promote and job.queue and job.executed > 0:
                    left = int(job.executed * promote - job.last_pending)
                    if left > 0:
                        jumps.append(now + left)
            jump = min(jumps, default=None)
        return self.done

    def next(self, alive, jump):
        times = [job.submit for job in self.arrivals]
        times += [self.ends_at(job) for job in alive]
        return min(*times, math.inf if jump is None else jump)

    def ends_at(self, job):
        return job.seen + job.duration - job.total if job.running else math.inf

    def leave(self, alive, gone, now):
        for job in gone:
            alive.remove(job)
            job.end = now
        self.done += gone
        return gone

    def book(self, job, now):
        passed, job.seen = now - job.seen, now
        if job.running:
            job.total += passed
            job.executed += passed
        else:
            job.pending += passed
        return passed

    def deal(self, order, now):
        free = self.gpus
        for job in order:
            runs = job.gpus <= free
            free -= job.gpus if runs else 0
            if runs and not job.running:
                job.resume += 1
                job.start = now if job.start < 0 else job.start
            elif job.running and not runs:
                job.preempt += 1
            job.running = runs


def expected(jobs, gpus, policy, index=None):
    """Name -> row, for the nine policies and those with promotion."""
    mine = [J(job.name, job.gpus, job.submit_time, job.duration) for job in jobs]
    oracle = Oracle(mine, gpus, index)
    keys = {
        "sjf": lambda job: job.gpus,
        "shortest": lambda job: job.duration - job.total,
        "shortest-gpu": lambda job: (job.duration - job.total) * job.gpus,
    }
    if policy in {"fifo", "fjf", "lpjf"}:
        done = oracle.without_preemption(policy)
    elif policy in keys:
        done = oracle.with_preemption(keys[policy])
    else:
        suffix = policy.rpartition("-")[2]
        promote = 0.5 if suffix == "05" else int(suffix) if suffix.isdigit() else 0
        done = oracle.in_queues(by_gpus=policy.startswith("dlas-gpu"), promote=promote)
    return {job.name: job.row() for job in done}
