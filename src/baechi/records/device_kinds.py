"""Device kinds with known peaks, from `device_kinds.toml` or a file of the user's.

A row holds the peaks of a kind; `kernel_ns` computes the time of a kernel from them. Nothing here
needs torch or a device. A row without a source is refused: numbers must be verifiable.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from baechi.errors import InputError
from baechi.records.cluster import Cluster, Device, Link, check_size
from baechi.records.efficiency import (
    ANY,
    DTYPES,
    Calibration,
    Efficiency,
    Kernel,
    check_positive_float,
)
from baechi.units import parse_bytes
from baechi.validation import FrozenDict, check_count, check_name, check_path

_TABLE: Final = Path(__file__).with_name("device_kinds.toml")
_NEEDED: Final = ("name", "memory", "context", "bytes_per_s", "launch_ns", "flops_per_s", "source")
_MAY: Final = ("aliases",)
_COUNTED: Final = re.compile(r"(\d+)x(.+)", re.IGNORECASE)
_EFFICIENCY: Final = ("op_class", "dtype", "compute", "memory", "source", "kind")


@final
@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Peak rates and memory of a kind of device.

    Attributes:
        name: Its name in the table.
        memory_bytes: Memory as shown by the driver.
        context_bytes: Part of it used by CUDA, its libraries and the driver.
        bytes_per_s: Memory bandwidth.
        launch_ns: Time of an empty kernel.
        flops_per_s: Dense peak by element type; a type that is missing computes as fp32.
        source: Source of the numbers.
        aliases: Other names, such as the one returned by `torch.cuda.get_device_name`.
        efficiencies: Shares of the peaks that classes of operators reach.

    Raises:
        InputError: A number that is not positive, no fp32 peak, or no source.
    """

    name: str
    memory_bytes: int
    context_bytes: int
    bytes_per_s: float
    launch_ns: int
    flops_per_s: Mapping[str, float]
    source: str
    aliases: tuple[str, ...] = ()
    efficiencies: tuple[Efficiency, ...] = ()

    def __post_init__(self) -> None:
        what = f"of device kind {check_name(self.name, 'name of a device kind')!r}"
        for attribute in ("memory_bytes", "context_bytes", "launch_ns"):
            count = check_count(getattr(self, attribute), f"{attribute} {what}")
            object.__setattr__(self, attribute, count)
        if self.memory_bytes <= self.context_bytes:
            raise InputError(
                f"memory {what} is {self.memory_bytes} bytes and its context takes "
                f"{self.context_bytes} of them; nothing is left."
            )
        rate = check_positive_float(self.bytes_per_s, f"bytes_per_s {what}")
        object.__setattr__(self, "bytes_per_s", rate)
        if not isinstance(self.flops_per_s, Mapping) or "fp32" not in self.flops_per_s:
            raise InputError(f"flops_per_s {what} has no fp32 peak, which all other types fall to.")
        peaks = {}
        for dtype, peak in self.flops_per_s.items():
            if dtype not in DTYPES:
                known = ", ".join(DTYPES)
                raise InputError(f"flops_per_s {what} has {dtype!r}; the types are {known}.")
            peaks[dtype] = check_positive_float(peak, f"the {dtype} peak {what}")
        object.__setattr__(self, "flops_per_s", FrozenDict(peaks))
        if not isinstance(self.source, str) or not self.source.strip():
            raise InputError(
                f"device kind {self.name!r} has no source; say where its numbers are from, such "
                "as the address of a datasheet."
            )

    def calibrated(self, calibration: Calibration) -> "DeviceKind":
        """The kind with a calibration's efficiencies and launch floor before its own.

        Raises:
            InputError: The calibration is of another kind, so of shares of other peaks.
        """
        if calibration.kind != self.name:
            raise InputError(
                f"the calibration is for device kind {calibration.kind!r}, not {self.name!r}; "
                "its efficiencies are shares of the other's peaks. Calibrate on this kind."
            )
        fitted = {(e.op_class, e.dtype) for e in calibration.efficiencies}
        kept = [e for e in self.efficiencies if (e.op_class, e.dtype) not in fitted]
        efficiencies = (*calibration.efficiencies, *kept)
        return replace(self, launch_ns=calibration.launch_ns, efficiencies=efficiencies)

    def peak(self, dtype: str) -> float:
        """FLOP/s in an element type; that of fp32 where the kind has no unit for it."""
        return self.flops_per_s.get(dtype, self.flops_per_s["fp32"])

    def efficiency(self, op_class: str, dtype: str) -> Efficiency:
        """The efficiency of a class of operators: the row of the type, or else of any type.

        Raises:
            InputError: The table has no row for the class.
        """
        for wanted in (dtype, ANY):
            for row in self.efficiencies:
                if row.op_class == op_class and row.dtype == wanted:
                    return row
        raise InputError(
            f"device kind {self.name!r} has no efficiency for {op_class} in {dtype}; add an "
            f'[[efficiency]] row with op_class = "{op_class}" and dtype = "{ANY}".'
        )

    def ideal_ns(self, kernel: Kernel) -> tuple[float, float]:
        """Time of its FLOPs and time of its bytes, both at the peaks."""
        compute_ns = 1e9 * kernel.flops / self.peak(kernel.dtype)
        return compute_ns, 1e9 * kernel.nbytes / self.bytes_per_s

    def kernel_ns(self, kernel: Kernel) -> float:
        """Time of a kernel, without the launch."""
        share = self.efficiency(kernel.op_class, kernel.dtype)
        compute_ns, memory_ns = self.ideal_ns(kernel)
        return max(compute_ns / share.compute, memory_ns / share.memory)

    def run_ns(self, kernels: Sequence[Kernel]) -> int:
        """Time of kernels run one after another, launches included, rounded up."""
        return math.ceil(sum(map(self.kernel_ns, kernels)) + self.launch_ns * len(kernels))


def known(file: str | os.PathLike[str] | None = None) -> tuple[DeviceKind, ...]:
    """All kinds: those of a file of the user's first, where there is one, then Baechi's own.

    A user's row replaces Baechi's of the same name, and a user's efficiencies of a class Baechi's.

    Raises:
        InputError: The file cannot be read, or a row is wrong; the text names the row.
    """
    kinds, efficiencies = _read(_TABLE)
    tables = [efficiencies]
    if file is not None:
        check_path(file)
        more, own = _read(Path(file))
        names = {_plain(row["name"]) for row in more}
        kinds = [*more, *(row for row in kinds if _plain(row["name"]) not in names)]
        tables = [own, efficiencies]
        _check_owners(own, {row["name"] for row in kinds}, file)
    return tuple(_kind(row, tables) for row in kinds)


def find(kind: str, file: str | os.PathLike[str] | None = None) -> DeviceKind:
    """The kind of that name or alias; case and punctuation do not matter.

    Raises:
        InputError: There is none; the text lists similar names, and all names.
    """
    kinds = known(file)
    named = {_plain(name): row for row in reversed(kinds) for name in (*row.aliases, row.name)}
    if not isinstance(kind, str) or _plain(kind) not in named:
        near = {named[name].name for name in _near(str(kind), named)}
        hint = f" Did you mean {' or '.join(sorted(near))}?" if near else ""
        raise InputError(
            f"device kind {kind!r} is unknown.{hint} The kinds are "
            f"{', '.join(row.name for row in kinds)}; a file of your own may add others."
        )
    return named[_plain(kind)]


def cluster(
    text: str, link: Link, *, file: str | os.PathLike[str] | None = None, kind: str | None = None
) -> Cluster:
    """Equal devices of a kind, such as `"8xH100-SXM-80GB"`, each pair joined by `link`.

    Each has the kind's memory less what its context takes.

    Args:
        text: A count, an `x`, and a kind.
        link: The link of every pair.
        file: A file of the user's with more kinds.
        kind: What to write into `Device.kind`; the name in the table if absent.

    Raises:
        InputError: The text cannot be read, or the kind is unknown.
    """
    match = _COUNTED.fullmatch(text.strip())
    if match is None:
        raise InputError(f"cluster {text!r} cannot be read; write a count and a kind: 8xA100-...")
    row = find(match[2], file)
    memory_bytes = row.memory_bytes - row.context_bytes
    count = int(match[1])
    if count < 1:
        raise InputError(f"cluster {text!r} has no devices; give at least one.")
    check_size(count)
    devices = [Device(f"cuda:{i}", memory_bytes, kind=kind or row.name) for i in range(count)]
    if row.name == "cpu":
        devices = [replace(device, name=f"cpu:{i}") for i, device in enumerate(devices)]
    return Cluster.connected(devices, link)


def _read(file: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The raw rows of a file, checked for what they must and may have."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the device kinds in {file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the device kinds in {file} are no TOML: {error}.") from error
    wrong = [name for name in raw if name not in ("kind", "efficiency")]
    kinds, efficiencies = raw.get("kind", []), raw.get("efficiency", [])
    lists = isinstance(kinds, list) and isinstance(efficiencies, list)
    if wrong or not lists or not all(isinstance(row, dict) for row in (*kinds, *efficiencies)):
        has = f"has {wrong[0]!r}" if wrong else "has no lists of tables"
        raise InputError(f"{file} {has}; it may have [[kind]] and [[efficiency]] tables.")
    for i, row in enumerate(kinds):
        title = f"device kind {row.get('name', f'number {i + 1}')!r} in {file}"
        _check_fields(row, _NEEDED, _MAY, title)
        check_name(row["name"], f"name of {title}")
    names = [_plain(row["name"]) for row in kinds]
    for row in kinds:
        if names.count(_plain(row["name"])) > 1:
            raise InputError(f"device kind {row['name']!r} is in {file} twice; leave one out.")
    for i, row in enumerate(efficiencies):
        title = f"efficiency {row.get('op_class', f'number {i + 1}')!r} in {file}"
        _check_fields(row, _EFFICIENCY[:-1], _EFFICIENCY[-1:], title)
    return kinds, efficiencies


def _check_owners(
    efficiencies: Sequence[dict[str, Any]], names: set[str], file: str | os.PathLike[str]
) -> None:
    """Check that every efficiency of a single kind names a known kind."""
    for row in efficiencies:
        if "kind" in row and row["kind"] not in names:
            raise InputError(
                f"efficiency {row['op_class']!r} in {os.fspath(file)} is for kind "
                f"{row['kind']!r}, which is in no table; write the name as its row has it."
            )


def _check_fields(
    row: dict[str, Any], needed: Sequence[str], may: Sequence[str], title: str
) -> None:
    for name in needed:
        if name not in row:
            raise InputError(f"{title} has no {name}; a row needs {', '.join(needed)}.")
    for name in row:
        if name not in (*needed, *may):
            raise InputError(f"{title} has {name!r}; a row may have {', '.join((*needed, *may))}.")


def _kind(row: dict[str, Any], tables: Sequence[Sequence[dict[str, Any]]]) -> DeviceKind:
    """One row with the efficiencies that apply to it: the first table's that names the class.

    Of one table, the rows for the kind alone go before those for all.
    """
    name = row["name"]
    aliases = row.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
        raise InputError(f"aliases of device kind {name!r} are {aliases!r}; give a list of names.")
    # The first table with rows for a class is the only one read for it.
    chosen: dict[str, list[Efficiency]] = {}
    for own in tables:
        for special in (True, False):
            applies = [e for e in own if e.get("kind") == (name if special else None)]
            found: dict[str, list[Efficiency]] = {}
            for share in applies:
                row_of = Efficiency(*(share[field] for field in _EFFICIENCY[:-1]))
                found.setdefault(row_of.op_class, []).append(row_of)
            chosen = {**found, **chosen}
    return DeviceKind(
        name=name,
        memory_bytes=parse_bytes(row["memory"], what=f"memory of device kind {name!r}"),
        context_bytes=parse_bytes(row["context"], what=f"context of device kind {name!r}"),
        bytes_per_s=row["bytes_per_s"],
        launch_ns=row["launch_ns"],
        flops_per_s=row["flops_per_s"],
        source=row["source"],
        aliases=tuple(aliases),
        efficiencies=tuple(share for op_class in sorted(chosen) for share in chosen[op_class]),
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _near(kind: str, named: Mapping[str, DeviceKind]) -> list[str]:
    """Names that contain the requested one, or resemble it."""
    plain = _plain(kind)
    within = [name for name in named if plain and plain in name]
    return within or difflib.get_close_matches(plain, list(named), n=3)
