"""The free resources at one version of a ledger, as a value that other processes can read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import final

from baechi.errors import InputError, ReservationError
from baechi.records.cluster import Cluster, Topology
from baechi.records.placement import Placement
from baechi.scheduling.claims import (
    PROFILES,
    SHARINGS,
    UNUSED,
    WHOLE_MILLI,
    Claim,
    Room,
    Use,
    check_share,
    instances,
    split_name,
)
from baechi.units import format_bytes
from baechi.validation import FrozenDict, check_choice


@final
@dataclass(frozen=True)
class Site:
    """The devices of a ledger, as if nothing ran on them, and the sharing of each.

    Attributes:
        base: Devices and links; a `Topology` also knows nodes and switches.
        sharing: For every device one of `SHARINGS`.

    Raises:
        InputError: A sharing is unknown, or a device of a pool is not shared by fractions.
    """

    base: Cluster | Topology
    sharing: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.base, Cluster | Topology):
            raise InputError(
                f"a {type(self.base).__name__} stands where a baechi.Cluster or a "
                "baechi.Topology belongs."
            )
        for device, how in zip(self.base.devices, self.sharing, strict=True):
            check_choice(how, SHARINGS, f"the sharing of device {device.name!r}")
            if device.pool and how != "fractional":
                raise InputError(
                    f"device {device.name!r} of pool {device.pool!r} is shared by {how!r}; what "
                    "is in a pool can only be shared by fractions."
                )

    @staticmethod
    def of(base: Cluster | Topology, sharing: str | Mapping[str, str] = "fractional") -> "Site":
        """A site whose devices are all shared in one way, or by name, `"fractional"` where absent.

        Raises:
            InputError: Also where a name is no device's.
        """
        names = [device.name for device in getattr(base, "devices", ())]
        if isinstance(sharing, str):
            return Site(base, (sharing,) * len(names))
        if not isinstance(sharing, Mapping):
            raise InputError(f"sharing is {sharing!r}; give one for all, or a dict by device name.")
        unknown = sorted(set(sharing) - set(names))
        if unknown:
            raise InputError(f"sharing names {unknown[0]!r}, which is no device of the cluster.")
        return Site(base, tuple(sharing.get(name, "fractional") for name in names))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The place of every device, by name."""
        return FrozenDict({device.name: at for at, device in enumerate(self.base.devices)})

    @cached_property
    def pools(self) -> tuple[tuple[int, ...], ...]:
        """For every device those that share its memory, itself among them."""
        members: dict[str, list[int]] = {}
        for at, device in enumerate(self.base.devices):
            if device.pool:
                members.setdefault(device.pool, []).append(at)
        return tuple(
            tuple(members[device.pool]) if device.pool else (at,)
            for at, device in enumerate(self.base.devices)
        )

    def free_bytes(self, uses: Sequence[Use], place: int) -> int:
        """The free memory of a device, or of its pool."""
        taken = sum(uses[other].memory_bytes for other in self.pools[place])
        return self.base.devices[place].memory_bytes - taken

    def take(
        self, uses: Sequence[Use], claims: Iterable[Claim]
    ) -> tuple[tuple[Claim, ...], dict[int, Use]]:
        """The claims as granted, and the new use of every device that they touch.

        An exclusive claim is granted the whole device; one of a MIG profile gets its start.

        Raises:
            InputError: A device is unknown or claimed twice, or there are no claims.
            ReservationError: Too little is free.
        """
        granted: list[Claim] = []
        after: dict[int, Use] = {}
        for claim in claims:
            place = self._place(claim.device)
            use = after.get(place, uses[place])
            if self.sharing[place] == "mig":
                full, after[place] = self._instance(claim, place, use)
            else:
                if place in after:
                    raise InputError(
                        f"device {claim.device!r} is claimed twice; add the claims up."
                    )
                full, after[place] = self._part(claim, place, use)
            granted.append(full)
        if not granted:
            raise InputError("a reservation has no claims; name at least one device.")
        for place in after:
            members = self.pools[place]
            taken = sum(after.get(at, uses[at]).memory_bytes for at in members)
            device = self.base.devices[place]
            if taken > device.memory_bytes:
                asked = taken - sum(uses[at].memory_bytes for at in members)
                raise ReservationError(
                    f"device {device.name!r} has "
                    f"{format_bytes(device.memory_bytes - taken + asked)} left, but "
                    f"{format_bytes(asked)} are claimed. Solve again on what is left, or wait."
                )
        return tuple(granted), after

    def give_back(self, uses: Sequence[Use], claims: Iterable[Claim]) -> dict[int, Use]:
        """The devices' uses without claims that `take` has granted."""
        after: dict[int, Use] = {}
        for claim in claims:
            place = self._place(claim.device)
            use = after.get(place, uses[place])
            if self.sharing[place] == "mig":
                _, profile, start = split_name(claim.device)
                after[place] = use._replace(slices=use.slices & ~PROFILES[profile].mask(start or 0))
            else:
                after[place] = Use(
                    use.memory_bytes - claim.memory_bytes, use.share_milli - claim.share_milli
                )
        return after

    def _place(self, name: str) -> int:
        place = self.index.get(name)
        if place is None and "mig" in self.sharing:
            parent = self.index.get(split_name(name)[0])
            if parent is not None and self.sharing[parent] == "mig":
                return parent
        if place is None:
            raise InputError(f"device {name!r} is unknown; the snapshot lists what there is.")
        if self.sharing[place] == "mig":
            raise InputError(
                f"device {name!r} is cut into MIG instances; claim one, such as '{name}/3g'."
            )
        return place

    def _part(self, claim: Claim, place: int, use: Use) -> tuple[Claim, Use]:
        """A claim of a device that is not cut, as granted, and the device's use with it."""
        device = self.base.devices[place]
        if claim.exclusive or self.sharing[place] == "whole":
            if claim.memory_bytes > device.memory_bytes:
                raise ReservationError(
                    f"device {device.name!r} has {format_bytes(device.memory_bytes)}, but "
                    f"{format_bytes(claim.memory_bytes)} are claimed."
                )
            claim = replace(claim, memory_bytes=device.memory_bytes, share_milli=WHOLE_MILLI)
        free = WHOLE_MILLI - use.share_milli
        if claim.share_milli > free:
            whole = "all" if claim.share_milli == WHOLE_MILLI else f"{claim.share_milli}"
            raise ReservationError(
                f"device {device.name!r} has {free} of 1000 of its compute left, but {whole} is "
                "claimed. Claim a smaller share, or wait."
            )
        taken = Use(use.memory_bytes + claim.memory_bytes, use.share_milli + claim.share_milli)
        return claim, taken

    def _instance(self, claim: Claim, place: int, use: Use) -> tuple[Claim, Use]:
        """A claim of a MIG instance, as granted, and the device's use with it."""
        device, name, start = split_name(claim.device)
        profile = PROFILES[name]
        starts = profile.starts if start is None else (start,)
        free = next((at for at in starts if not use.slices & profile.mask(at)), None)
        if free is None:
            raise ReservationError(
                f"device {device!r} has no room for an instance {claim.device!r}; the snapshot "
                "lists those that are free."
            )
        nbytes = self.base.devices[place].memory_bytes * profile.memory // 8
        if claim.memory_bytes > nbytes:
            raise ReservationError(
                f"an instance {name} of {device!r} has {format_bytes(nbytes)}, but "
                f"{format_bytes(claim.memory_bytes)} are claimed. Claim a larger profile."
            )
        granted = Claim(f"{device}/{name}@{free}", nbytes, profile.share_milli, claim.exclusive)
        return granted, use._replace(slices=use.slices | profile.mask(free))


@final
@dataclass(frozen=True, slots=True)
class Reservation:
    """The claims of a job as granted, and the version of the ledger that they made."""

    job: str
    claims: tuple[Claim, ...]
    version: int


@final
@dataclass(frozen=True)
class Snapshot:
    """The free resources after so many changes of a ledger; `uses` is what every device lacks."""

    site: Site
    version: int = 0
    uses: tuple[Use, ...] = ()
    jobs: Mapping[str, Reservation] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        if not self.uses:
            object.__setattr__(self, "uses", (UNUSED,) * len(self.site.base.devices))

    def rooms(self, share_milli: int | None = None) -> tuple[Room, ...]:
        """The free parts of the devices, in their order. O(devices).

        A job that wants a share gets no more, and nothing where less is free; a MIG device is cut
        into the smallest instances that have it. `None` is all that is free.
        """
        found: list[Room] = []
        for place, device in enumerate(self.site.base.devices):
            use, sharing = self.uses[place], self.site.sharing[place]
            if sharing == "mig":
                found += instances(place, device, use.slices, share_milli)
                continue
            given = free = WHOLE_MILLI - use.share_milli
            if sharing == "whole":
                given = WHOLE_MILLI if use == UNUSED else 0
            elif share_milli is not None:
                given = share_milli if share_milli <= free else 0
            if given:
                speed = device.speed if given == WHOLE_MILLI else device.speed * given / WHOLE_MILLI
                nbytes = self.site.free_bytes(self.uses, place)
                row = replace(device, memory_bytes=nbytes, speed=speed)
                found.append(Room(place, row, given))
        return tuple(found)

    def part(self, rows: Sequence[Room]) -> Cluster:
        """The cluster of some rooms.

        Raises:
            ReservationError: There are none.
        """
        if not rows:
            raise ReservationError(
                "nothing is left: every device is taken. Release a job, or wait."
            )
        base, places = self.site.base, [room.place for room in rows]
        devices = tuple(room.device for room in rows)
        if isinstance(base, Topology):
            return Cluster(devices, base.links(places), base.ports)
        links = tuple(tuple(base.links[src][dst] for dst in places) for src in places)
        return Cluster(devices, links, base.ports)

    def residual(self, share_milli: int | None = None) -> Cluster:
        """The cluster of all free resources, as `baechi.solve` takes it.

        Args:
            share_milli: Compute offered of every device, in thousandths; devices with less are not.

        Raises:
            ReservationError: Nothing is left.
        """
        if share_milli is not None:
            check_share(share_milli, "an offer")
        return self.part(self.rooms(share_milli))

    def without(self, job: str) -> "Snapshot":
        """The snapshot after the end of a job.

        Raises:
            ReservationError: It has no reservation.
        """
        reservation = self.jobs.get(job)
        if reservation is None:
            raise ReservationError(f"job {job!r} has no reservation here.", "unknown")
        uses = list(self.uses)
        for place, use in self.site.give_back(self.uses, reservation.claims).items():
            uses[place] = use
        others = {name: row for name, row in self.jobs.items() if name != job}
        return Snapshot(self.site, self.version, tuple(uses), FrozenDict(others))


def claims_of(
    cluster: Cluster,
    placement: Placement,
    peak_bytes: Sequence[int],
    shares: Mapping[str, int] | int = WHOLE_MILLI,
) -> tuple[Claim, ...]:
    """The claims of a placement on the devices that it uses.

    Args:
        cluster: The cluster that the placement was made for.
        placement: The placement.
        peak_bytes: `Schedule.peak_bytes` of it there; a pool's is claimed once.
        shares: The compute that it takes, in thousandths of a device; by device name, or for all.
    """
    claimed: set[str] = set()
    claims = []
    for at in sorted(set(placement.devices)):
        device = cluster.devices[at]
        nbytes = 0 if device.pool and device.pool in claimed else peak_bytes[at]
        claimed.add(device.pool)
        share = shares if isinstance(shares, int) else shares[device.name]
        claims.append(Claim(device.name, nbytes, share))
    return tuple(claims)
