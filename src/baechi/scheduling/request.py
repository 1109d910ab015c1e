"""Preferences of a scheduler for a decision."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from baechi.errors import InputError
from baechi.placers.auto import check_effort
from baechi.records.cluster import LEVELS, Constraints
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import PROFILES, Room, check_share
from baechi.scheduling.snapshot import Site
from baechi.validation import check_count, check_is

# What the names of a MIG device's instances end with.
_INSTANCES: Final = frozenset(
    f"{name}@{start}" for name, profile in PROFILES.items() for start in profile.starts
)


@final
@dataclass(frozen=True, slots=True)
class Wish:
    """The preferences of a scheduler.

    Attributes:
        same: `"node"` or `"switch"`: all devices must be of one; `""` is anywhere.
        slack_milli: A step so many thousandths longer than the shortest that was found is accepted
            for fewer devices. 0 is the shortest step; `None` the fewest devices, whatever it takes.
        share_milli: The compute that the job takes of every device, in thousandths; `None` is all
            that is left of each.
        effort: `"fast"` list-schedules and packs on a few choices of devices; `"balanced"` tries
            more of them, solves where nothing fits, and solves with effort fast on those that it
            returns; `"thorough"` does the same with effort balanced.
        constraints: As `baechi.solve` takes them, a limit on the number of devices among them.

    Raises:
        InputError: A level or an effort is unknown, or a number out of range.
    """

    same: str = ""
    slack_milli: int | None = 0
    share_milli: int | None = None
    effort: str = "fast"
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self) -> None:
        if self.same not in ("", *LEVELS):
            raise InputError(f"same is {self.same!r}; it must be one of {', '.join(LEVELS)} or ''.")
        if self.slack_milli is not None:
            object.__setattr__(self, "slack_milli", check_count(self.slack_milli, "slack_milli"))
        if self.share_milli is not None:
            object.__setattr__(self, "share_milli", check_share(self.share_milli, "a wish"))
        check_effort(self.effort)
        check_is(self.constraints, Constraints, "constraints")


def resolved(wish: Wish, graph: OpGraph, site: Site, rooms: Sequence[Room]) -> Wish:
    """The same wish, with constraints that hold on every set of rooms.

    A MIG device that is excluded or forbidden stands for its instances; a device that is forbidden
    to an op is forbidden to its group; a margin is that of all devices of its pool.

    Raises:
        InputError: The constraints name what is no op, group or device; or they pin to a MIG
            device, or give it a margin, instead of an instance.
    """
    limits = wish.constraints
    for name in sorted({*limits.pins, *limits.forbidden}):
        if name not in graph.op_index and name not in graph.groups:
            raise InputError(
                f"the constraints name {name!r}, but the graph has no op and no group of this name."
            )
    cut = {
        device.name
        for device, how in zip(site.base.devices, site.sharing, strict=True)
        if how == "mig"
    }
    single = {*limits.pins.values(), *limits.margins}
    named = {*single, *limits.excluded}.union(*limits.forbidden.values())
    for name in sorted(named - site.index.keys()):
        device, _, instance = name.rpartition("/")
        if device not in cut or instance not in _INSTANCES:
            raise InputError(f"the constraints name {name!r}, which is no device of the cluster.")
    for name in sorted(single & cut):
        raise InputError(
            f"the constraints pin to {name!r} or give it a margin, but it is cut into MIG "
            f"instances; name one of them, such as '{name}/3g@0'."
        )

    def instances(names: Sequence[str]) -> tuple[str, ...]:
        whole = cut.intersection(names)
        parts = (room.device.name for room in rooms if site.base.devices[room.place].name in whole)
        return (*(name for name in names if name not in whole), *(parts if whole else ()))

    banned: dict[str | tuple[str], set[str]] = {}
    for name, row in limits.forbidden.items():
        banned.setdefault(_group(graph, name), set()).update(instances(row))
    margins = dict(limits.margins)
    for place, pool in enumerate(site.pools if margins else ()):
        members = [site.base.devices[at].name for at in pool]
        most = max(limits.margins.get(name, 0) for name in members)
        if most:
            margins[site.base.devices[place].name] = most
    return replace(
        wish,
        constraints=Constraints(
            limits.pins,
            {name: tuple(banned[_group(graph, name)]) for name in sorted(limits.forbidden)},
            instances(limits.excluded),
            limits.max_devices,
            margins,
        ),
    )


def _group(graph: OpGraph, name: str) -> str | tuple[str]:
    """The group that a name of the constraints means; the op's, in a tuple, where it has none."""
    at = graph.op_index.get(name)
    group = name if at is None else graph.ops[at].group
    return (name,) if group is None else group
