"""What-if answers without side effects: alternatives, missing memory, gain from waiting."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, final

from baechi.errors import InfeasibleError, ReservationError
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import Wish
from baechi.scheduling.decision import Decision, choose, explain, explore
from baechi.scheduling.snapshot import Snapshot
from baechi.validation import check_count, check_row

# The curve's sets of devices, at most: every size up to 64, and a few more.
_CURVE: Final = 16


@final
@dataclass(frozen=True, slots=True)
class Shortage:
    """The reason why nothing fits, and the smallest extra memory with which something does.

    Attributes:
        message: Text for people.
        subject: The op or group that found no room; empty where no device is free at all.
        needed_bytes: Its memory on one device.
        extra_bytes: Additional memory of `extra_device` that suffices; `None` where none helps.
        extra_device: A device's name, or "every device"; empty where no memory helps.
    """

    message: str
    subject: str = ""
    needed_bytes: int = 0
    extra_bytes: int | None = None
    extra_device: str = ""


@final
@dataclass(frozen=True, slots=True)
class Point:
    """A point of the step-time curve: the step with at most `devices` devices.

    `step_ns` is `None` where these do not suffice.
    """

    devices: int
    step_ns: int | None


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """The decision after the end of a job, all else as it is now.

    Attributes:
        job: The job that ends.
        decision: The decision then; `None` where still nothing fits.
        gain_ns: By how much a step is shorter then; `None` where nothing fits now or then.
    """

    job: str
    decision: Decision | None
    gain_ns: int | None

    def worth_after(self, wait_ns: int) -> int | None:
        """The number of steps from which waiting so long ends sooner; `None` where it never does.

        0 where nothing fits now.
        """
        check_count(wait_ns, "wait_ns")
        if self.decision is None:
            return None
        if self.gain_ns is None:
            return 0
        return wait_ns // self.gain_ns + 1 if self.gain_ns > 0 else None


@final
@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answers of `whatif`.

    Attributes:
        version: That of the snapshot.
        alternatives: From the fewest devices to the shortest step; see `decision.explore`.
        shortage: The missing memory, where there are no alternatives.
        waiting: For every job of `after`.
        curve: The speed-up function for elastic schedulers: the step by number of devices, never
            longer with more of them. More effort may find a steeper one.
    """

    version: int
    alternatives: tuple[Decision, ...]
    shortage: Shortage | None
    waiting: tuple[Waiting, ...]
    curve: tuple[Point, ...]


def whatif(
    graph: OpGraph,
    snapshot: Snapshot,
    wish: Wish | None = None,
    *,
    after: Iterable[str] = (),
    up_to: int = 0,
) -> WhatIf:
    """The decisions that are possible now and after the end of jobs; nothing is reserved.

    For each job of `after` the decision after its end is made. The curve goes up to `up_to`
    devices; 0 is no curve.

    Raises:
        ReservationError: A job of `after` has no reservation.
        InputError: The wish names what does not exist, or contradicts itself.
    """
    wish = Wish() if wish is None else wish
    after = check_row(after, "jobs of after")
    found = explore(graph, snapshot, wish)
    shortage = None if found else _shortage(graph, snapshot, wish)
    if shortage is not None and shortage.extra_bytes == 0:
        # It does fit, by a denser packing, which only more effort tries.
        found = explore(graph, snapshot, replace(wish, effort="balanced"))
        shortage = None if found else replace(shortage, extra_bytes=None, extra_device="")
    now = choose(found, wish.slack_milli).step_ns if found else None
    waits = tuple(_waiting(graph, snapshot, wish, job, now) for job in after)
    return WhatIf(snapshot.version, found, shortage, waits, _curve(graph, snapshot, wish, up_to))


def _shortage(graph: OpGraph, snapshot: Snapshot, wish: Wish) -> Shortage:
    try:
        explain(graph, snapshot, wish)
    except ReservationError as error:
        return Shortage(str(error))
    except InfeasibleError as error:
        extra = error.extra_bytes if error.extra_device else None
        return Shortage(str(error), error.subject, error.needed_bytes, extra, error.extra_device)


def _waiting(graph: OpGraph, snapshot: Snapshot, wish: Wish, job: str, now: int | None) -> Waiting:
    found = explore(graph, snapshot.without(job), wish)
    if not found:
        return Waiting(job, None, None)
    then = choose(found, wish.slack_milli)
    return Waiting(job, then, None if now is None else now - then.step_ns)


def _curve(graph: OpGraph, snapshot: Snapshot, wish: Wish, up_to: int) -> tuple[Point, ...]:
    if check_count(up_to, "up_to") == 0:
        return ()
    limit = wish.constraints.max_devices
    most = up_to if limit is None else min(limit, up_to)
    wide = replace(wish, constraints=replace(wish.constraints, max_devices=most))
    found = explore(graph, snapshot, wide, tried=_CURVE)
    points = []
    for devices in range(1, most + 1):
        steps = [row.step_ns for row in found if len(row.devices) <= devices]
        points.append(Point(devices, min(steps, default=None)))
    return tuple(points)
