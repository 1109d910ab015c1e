"""What would be, without side effects: other choices, what is missing, and what waiting brings."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, final

from baechi.errors import InfeasibleError, ReservationError
from baechi.records.graph import OpGraph
from baechi.scheduling.decision import Decision, choose, explain, explore
from baechi.scheduling.request import Wish
from baechi.scheduling.snapshot import Snapshot
from baechi.validation import check_count, check_row

# The curve's sets of devices, at most: every size up to 64, and a few more.
_CURVE: Final = 16


@final
@dataclass(frozen=True, slots=True)
class Shortage:
    """Why nothing fits, and the smallest extra memory with which something does.

    Attributes:
        message: For people.
        subject: The op or group that found no room; empty where nothing is left at all.
        needed_bytes: What it needs on one device.
        extra_bytes: What would suffice in addition on `extra_device`; `None` where no memory helps.
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
    """What the decision would be once a job has ended, all else as it is now.

    Attributes:
        job: The job that ends.
        decision: What would be decided then; `None` where still nothing fits.
        gain_ns: How much shorter a step is then; `None` where nothing fits now or then.
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
    """Answers; nothing is reserved.

    Attributes:
        version: That of the snapshot.
        alternatives: From the fewest devices to the shortest step; see `decision.explore`.
        shortage: What is missing where there are none.
        waiting: For every job that was asked about.
        curve: The speed-up function that elastic schedulers ask for: the step by number of devices,
            never longer with more of them. A lower speed-up than possible, where the effort did not
            find a better placement.
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
    """What the graph could have.

    Args:
        graph: What to place.
        snapshot: What is left.
        wish: What the scheduler wants.
        after: Jobs; for each, what would be decided if that one had ended.
        up_to: The most devices of the curve; 0 is no curve.

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
