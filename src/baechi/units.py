"""Sizes and times: readable text, and `int` bytes and `int` ns."""

import re

from baechi.errors import InputError
from baechi.validation import INT64_MAX, check_count

_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"\s*(\d{1,99})(?:\.(\d{1,99}))?\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str, what: str = "size") -> int:
    """The size in bytes.

    Args:
        size: Bytes as `int`, or a string such as `"10GiB"` (powers of 1024) or `"10GB"` (of 1000).
        what: What the size is of, for the error text.

    Raises:
        InputError: The text cannot be read, or the size is negative or passes 2**63 - 1.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(size, bool) or not (isinstance(size, str) or hasattr(size, "__index__")):
        raise InputError(
            f"{what} is {size!r}, a {type(size).__name__}; "
            'give bytes as an int or a string such as "10GiB".'
        )
    if not isinstance(size, str):
        nbytes = size.__index__()  # NumPy's integers, too
    else:
        match = _SIZE.fullmatch(size)
        unit = match[3].lower() if match else ""
        if match is None or unit not in _BYTES:
            raise InputError(
                f"{what} {size!r} cannot be read. Write a non-negative number and a unit: "
                '"10GiB", "512MiB", "8GB", or an int of bytes.'
            )
        whole, fraction = match[1], match[2] or ""
        nbytes = int(whole + fraction) * _BYTES[unit] // 10 ** len(fraction)
    if not 0 <= nbytes <= INT64_MAX:
        raise InputError(f"{what} is {size!r}; it must be between 0 and 2**63 - 1 bytes.")
    return nbytes


def check_bytes(size: object, what: str) -> int:
    """The size in bytes: of a string as `parse_bytes` reads it, else as `check_count` takes it."""
    return parse_bytes(size, what=what) if isinstance(size, str) else check_count(size, what)


def format_bytes(nbytes: int) -> str:
    """The size as readable text, in powers of 1024.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def format_ns(time_ns: int) -> str:
    """The time as readable text.

    >>> format_ns(1_500_000)
    '1.50 ms'
    """
    for unit, scale in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if abs(time_ns) >= scale:
            return f"{time_ns / scale:.2f} {unit}"
    return f"{time_ns} ns"
