"""Wishes and claims of a scheduler, and sharing of devices; in integers, which add up exactly.

docs/embedding.md has the ways of sharing. An instance of NVIDIA's Multi-Instance GPU is a device of
its own, named `gpu/3g@4`: profile 3g at memory slice 4.
"""

from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, final

from baechi.errors import InputError
from baechi.placers.auto import check_effort
from baechi.records.cluster import LEVELS, Constraints, Device
from baechi.units import parse_bytes
from baechi.validation import check_count, check_is, check_name, check_positive

SHARINGS: Final = ("fractional", "whole", "mig")
WHOLE_MILLI: Final = 1000
_COMPUTE_SLICES: Final = 7
_MEMORY_SLICES: Final = 8


class Profile(NamedTuple):
    """A kind of MIG instance: its slices of compute and memory, and where it may start."""

    compute: int
    memory: int
    starts: tuple[int, ...]

    @property
    def share_milli(self) -> int:
        """Its share of the compute, in thousandths, rounded down."""
        return WHOLE_MILLI * self.compute // _COMPUTE_SLICES

    def mask(self, start: int) -> int:
        """The memory slices that it takes, as bits."""
        return ((1 << self.memory) - 1) << start


# The largest first, as `nvidia-smi mig -lgipp` prints them for the A100 and the H100; on 80 GB they
# are called 7g.80gb, 4g.40gb, 3g.40gb, 2g.20gb, 1g.20gb (`1g.wide`) and 1g.10gb.
PROFILES: Final[dict[str, Profile]] = {
    "7g": Profile(7, 8, (0,)),
    "4g": Profile(4, 4, (0,)),
    "3g": Profile(3, 4, (0, 4)),
    "2g": Profile(2, 2, (0, 2, 4)),
    "1g.wide": Profile(1, 2, (0, 2, 4, 6)),
    "1g": Profile(1, 1, (0, 1, 2, 3, 4, 5, 6)),
}


@final
@dataclass(frozen=True, slots=True)
class Claim:
    """The part of one device that a job takes.

    Attributes:
        device: Its name; of a MIG device `gpu/3g@4`, or `gpu/3g` for any free place.
        memory_bytes: Memory; a string such as `"10GiB"` is read at construction.
        share_milli: Thousandths of the device's compute, 1 to 1000.
        exclusive: No other job may use the device meanwhile.

    Raises:
        InputError: An empty name, or memory or a share out of range.
    """

    device: str
    memory_bytes: int
    share_milli: int = WHOLE_MILLI
    exclusive: bool = False

    def __post_init__(self) -> None:
        check_name(self.device, "device of a claim")
        nbytes = parse_bytes(self.memory_bytes, what=f"memory claimed on {self.device!r}")
        object.__setattr__(self, "memory_bytes", nbytes)
        object.__setattr__(self, "share_milli", check_share(self.share_milli, self.device))
        if not isinstance(self.exclusive, bool):
            raise InputError(f"exclusive is {self.exclusive!r}; it must be true or false.")


def check_share(value: object, device: str) -> int:
    """A share of compute in thousandths, if it is one from 1 to 1000."""
    return check_positive(value, f"share_milli of {device!r}, thousandths of it,", WHOLE_MILLI)


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


class Use(NamedTuple):
    """The part of a device that is taken: memory, compute, memory slices of its instances."""

    memory_bytes: int = 0
    share_milli: int = 0
    slices: int = 0


UNUSED: Final = Use()


class Room(NamedTuple):
    """The free part of a device, as a device to solve with, and the compute that a claim takes."""

    place: int
    device: Device
    share_milli: int


def instances(place: int, device: Device, slices: int, share_milli: int | None) -> list[Room]:
    """The largest free instances of a MIG device; for a share, the smallest that have it."""
    profiles = list(PROFILES.items())
    if share_milli is not None:
        enough = [item for item in profiles if item[1].share_milli >= share_milli]
        least = min(item[1].compute for item in enough)
        profiles = [item for item in reversed(enough) if item[1].compute == least]
    found = []
    for name, profile in profiles:
        for start in profile.starts:
            if not slices & profile.mask(start):
                slices |= profile.mask(start)
                nbytes = device.memory_bytes * profile.memory // _MEMORY_SLICES
                speed = device.speed * profile.compute / _COMPUTE_SLICES
                label = f"{device.name}/{name}@{start}"
                row = replace(device, name=label, memory_bytes=nbytes, speed=speed)
                found.append((start, Room(place, row, profile.share_milli)))
    return [room for _, room in sorted(found, key=lambda item: item[0])]


def split_name(name: str) -> tuple[str, str, int | None]:
    """Device, profile and start of an instance's name: `gpu/3g@4`, or `gpu/3g` without a start."""
    device, _, rest = name.rpartition("/")
    label, at, start = rest.partition("@")
    profile = PROFILES.get(label)
    if not device or profile is None:
        raise InputError(
            f"{name!r} names no MIG instance; write the device, a profile of "
            f"{', '.join(PROFILES)}, and if it matters a start: 'gpu/3g' or 'gpu/3g@4'."
        )
    if not at:
        return device, label, None
    if start not in map(str, profile.starts):
        raise InputError(
            f"{name!r} starts at {start!r}; profile {label} starts at "
            f"{', '.join(map(str, profile.starts))}."
        )
    return device, label, int(start)
