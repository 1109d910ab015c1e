"""Constraints on placements besides memory: allowed devices, their number, memory margins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from baechi.errors import InputError
from baechi.units import parse_bytes
from baechi.validation import FrozenDict, check_name, check_positive


@final
@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on the placements of a graph on a cluster, written with names.

    Ops of one group share a device, so what holds for an op holds for its group. A name is an op's;
    where no op has it, a group's. Names are looked up when the constraints meet a graph and a
    cluster, in `solve` and `simulate`.

    Attributes:
        pins: Op or group to the device where it must run.
        forbidden: Op or group to the devices where it must not.
        excluded: Devices that must stay empty.
        max_devices: Maximum number of devices in use; `None` is no limit.
        margins: Device to bytes of its memory that stay free; a string such as `"1GiB"` is read at
            construction. The margin of a pool is the largest of its devices'.

    Raises:
        InputError: A name is empty, a margin negative, `max_devices` below 1, or a list of devices
            is a string.
    """

    pins: Mapping[str, str] = field(default_factory=FrozenDict)
    forbidden: Mapping[str, tuple[str, ...]] = field(default_factory=FrozenDict)
    excluded: tuple[str, ...] = ()
    max_devices: int | None = None
    margins: Mapping[str, int] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, str, Callable[[Any, str], Any], str], ...] = (
            ("pins", "a pinned op", check_name, "the device of pin {!r}"),
            ("forbidden", "an op with forbidden devices", _names, "forbidden[{!r}]"),
            ("margins", "a device with a margin", parse_bytes, "margin of device {!r}"),
        )
        for attribute, key, check, entry in checks:
            rows = getattr(self, attribute)
            if not isinstance(rows, Mapping):
                kind = type(rows).__name__
                raise InputError(f"{attribute} is {rows!r}, a {kind}; give a mapping by name.")
            known = {check_name(n, key): check(row, entry.format(n)) for n, row in rows.items()}
            object.__setattr__(self, attribute, FrozenDict(known))
        object.__setattr__(self, "excluded", _names(self.excluded, "excluded"))
        if self.max_devices is not None:
            count = check_positive(self.max_devices, "max_devices")
            object.__setattr__(self, "max_devices", count)


def _names(value: Any, what: str) -> tuple[str, ...]:
    """Device names, sorted, without repetition."""
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise InputError(f"{what} is {value!r}; give a list of device names.")
    return tuple(sorted({check_name(name, f"a device of {what}") for name in value}))
