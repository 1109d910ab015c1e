"""Device kinds with known peaks, and the shares of them that operators reach.

    time of a kernel = max(FLOPs / (compute * peak), bytes / (memory * bandwidth)) + launch

`compute` and `memory` are shares of the datasheet's peaks, one pair per class of operator and
element type: a roofline with a launch added (docs/estimation.md has the source).

The rows are those of `device_kinds.toml` or of a file of the user's. One without a source is
refused: numbers must be verifiable. Nothing here needs torch or a device.
"""

import difflib
import functools
import itertools
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from baechi.errors import InputError
from baechi.records.cluster import (
    HANDOVER_NS,
    HOST,
    MAX_DEVICES,
    Cluster,
    Device,
    Link,
    check_positive_float,
)
from baechi.units import parse_bytes
from baechi.validation import (
    FrozenDict,
    check_choice,
    check_count,
    check_name,
    check_path,
    check_positive,
    settle,
)

_TABLE: Final = Path(__file__).with_name("device_kinds.toml")
_FIELDS: Final = ("name", "memory", "context", "bytes_per_s", "launch_ns", "flops_per_s", "source")
_EFFICIENCY_FIELDS: Final = ("op_class", "dtype", "compute", "memory", "source")
_COUNTED: Final = re.compile(r"(\d+)x(.+)", re.IGNORECASE)
# Classes of kernels. Those of the first row may be bound by FLOPs; those of the second are bound by
# memory.
OP_CLASSES: Final = (
    *("matmul", "convolution", "attention", "recurrent", "pooling"),
    *("elementwise", "transcendental", "reduction", "normalization", "gather", "copy"),
)
DTYPES: Final = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
ANY: Final = "any"


@final
@dataclass(frozen=True, slots=True)
class Kernel:
    """Work of one kernel: FLOPs, 0 where only bytes count, and bytes read or written, each once."""

    op_class: str
    dtype: str
    flops: int
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that a class of operators reaches.

    Attributes:
        op_class: One of `OP_CLASSES`.
        dtype: One of `DTYPES`, or `"any"` for types without a row of their own.
        compute: Share of the peak FLOP/s. Above 1 where the row's peak is for less than is used,
            such as for one core of several.
        memory: Share of the peak bytes/s.
        source: Source of the two shares.

    Raises:
        InputError: An unknown class or type, a share that is not positive and finite, no source.
    """

    op_class: str
    dtype: str
    compute: float
    memory: float
    source: str

    def __post_init__(self) -> None:
        what = f"the efficiency of {self.op_class!r} in {self.dtype!r}"
        for name, choices in (("op_class", OP_CLASSES), ("dtype", (*DTYPES, ANY))):
            check_choice(getattr(self, name), choices, f"{name} of {what}")
        settle(self, check_positive_float, ("compute", "memory"), f"of {what}")
        check_name(self.source, f"source of {what}")


_Share: TypeAlias = tuple[str | None, Efficiency]  # the kind that it is for; `None` is all


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """Relative errors of computed times before and after a calibration: median and largest.

    They are of `n` distinct operators, counting forward and backward separately, which spend most
    of their time in one class and element type; in the class `"all"`, of the sum over all.
    """

    op_class: str
    dtype: str
    n: int
    before: float
    worst_before: float
    after: float
    worst_after: float


@final
@dataclass(frozen=True, slots=True)
class Calibration:
    """Efficiencies and a launch floor that were fitted to measured profiles.

    Attributes:
        kind: Name of the device kind whose peaks the efficiencies are shares of.
        efficiencies: Those that the profiles determine; others stay as in the table of kinds.
        launch_ns: Minimum time of a kernel.
        host_launch_ns: Time of the launching host for a kernel; 0 where the profiles have none.
        fits: Errors of the fit, per class and element type; the last row is over all operators.
        environment: Environment of the measured profiles.

    Raises:
        InputError: No kind, or a negative launch floor.
    """

    kind: str
    efficiencies: tuple[Efficiency, ...]
    launch_ns: int
    fits: tuple[Fit, ...] = ()
    environment: str = ""
    host_launch_ns: int = 0

    def __post_init__(self) -> None:
        check_name(self.kind, "kind of a calibration")
        settle(self, check_count, ("launch_ns", "host_launch_ns"), "of a calibration")
        object.__setattr__(self, "efficiencies", tuple(self.efficiencies))
        object.__setattr__(self, "fits", tuple(self.fits))

    def table(self) -> str:
        """The errors of the fit, as a readable table."""
        head = "class           dtype     n  median before    worst  median after    worst"
        rows = (
            f"{fit.op_class:<14}  {fit.dtype:<5}  {fit.n:>4}  {fit.before:>13.1%}  "
            f"{fit.worst_before:>7.1%}  {fit.after:>12.1%}  {fit.worst_after:>7.1%}"
            for fit in self.fits
        )
        return "\n".join((head, *rows))


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
        host_launch_ns: Time that the launching host is busy with a kernel.

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
    host_launch_ns: int = 0

    def __post_init__(self) -> None:
        what = f"of device kind {check_name(self.name, 'name of a device kind')!r}"
        counts = ("memory_bytes", "context_bytes", "launch_ns", "host_launch_ns")
        settle(self, check_count, counts, what)
        if self.memory_bytes <= self.context_bytes:
            raise InputError(
                f"memory {what} is {self.memory_bytes} bytes and its context takes "
                f"{self.context_bytes} of them; nothing is left."
            )
        settle(self, check_positive_float, ("bytes_per_s",), what)
        if not isinstance(self.flops_per_s, Mapping) or "fp32" not in self.flops_per_s:
            raise InputError(f"flops_per_s {what} has no fp32 peak, which all other types fall to.")
        peaks = {}
        for dtype, peak in self.flops_per_s.items():
            check_choice(dtype, DTYPES, f"a type in flops_per_s {what}")
            peaks[dtype] = check_positive_float(peak, f"the {dtype} peak {what}")
        object.__setattr__(self, "flops_per_s", FrozenDict(peaks))
        if not isinstance(self.source, str) or not self.source.strip():
            raise InputError(
                f"device kind {self.name!r} has no source; say where its numbers are from, such "
                "as the address of a datasheet."
            )

    def calibrated(self, calibration: Calibration) -> "DeviceKind":
        """The kind with a calibration's efficiencies and launches before its own.

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
        host_ns = calibration.host_launch_ns or self.host_launch_ns
        floor_ns = calibration.launch_ns
        return replace(self, launch_ns=floor_ns, efficiencies=efficiencies, host_launch_ns=host_ns)

    def peak(self, dtype: str) -> float:
        """FLOP/s in an element type; that of fp32 where the kind has no unit for it."""
        return self.flops_per_s.get(dtype, self.flops_per_s["fp32"])

    def efficiency(self, op_class: str, dtype: str) -> Efficiency:
        """The efficiency of a class of operators: the row of the type, or else of any type.

        Raises:
            InputError: The table has no row for the class.
        """
        first = reversed(self.efficiencies)  # of two rows for the same, the first counts
        rows = {row.dtype: row for row in first if row.op_class == op_class}
        if dtype in rows or ANY in rows:
            return rows.get(dtype) or rows[ANY]
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

    def run_ns(self, kernels: Sequence[Kernel], lanes: int = 1) -> int:
        """Time of kernels run one after another, launches included, rounded up.

        Where as much runs on several lanes, it is at least that of the work of all: kernels fill
        the device, but for the time of their launches.
        """
        work_ns = sum(map(self.kernel_ns, kernels))
        alone_ns = work_ns + self.launch_ns * len(kernels)
        return math.ceil(alone_ns if lanes == 1 else max(alone_ns, lanes * work_ns))


def known(file: str | os.PathLike[str] | None = None) -> tuple[DeviceKind, ...]:
    """All kinds: those of a file of the user's first, where there is one, then Baechi's own.

    A user's row replaces Baechi's of the same name, and a user's efficiencies of a class Baechi's.

    Raises:
        InputError: The file cannot be read, or a row is wrong; the text names the row.
    """
    return _own_kinds() if file is None else _merged(Path(check_path(file)))


@functools.cache
def _own_kinds() -> tuple[DeviceKind, ...]:
    return _merged(None)  # to read the table takes 3 ms, and every estimate asks for it


def _merged(file: Path | None) -> tuple[DeviceKind, ...]:
    kinds, efficiencies = _read(_TABLE)
    more, own = ({}, []) if file is None else _read(file)
    kinds = {**more, **{name: row for name, row in kinds.items() if name not in more}}
    names = {row["name"] for row in kinds.values()}
    for kind, share in own:
        if kind is not None and kind not in names:
            raise InputError(
                f"efficiency {share.op_class!r} in {file} is for kind {kind!r}, which is in no "
                "table; write the name as its row has it."
            )
    return tuple(_kind(row, (own, efficiencies)) for row in kinds.values())


def find(kind: str, file: str | os.PathLike[str] | None = None) -> DeviceKind:
    """The kind of that name or alias; case and punctuation do not matter.

    Raises:
        InputError: There is none; the text lists similar names, and all names.
    """
    kinds = known(file)
    named = {_plain(name): row for row in reversed(kinds) for name in (*row.aliases, row.name)}
    plain = _plain(str(kind))
    if plain in named:
        return named[plain]
    within = [name for name in named if plain and plain in name]
    similar = within or difflib.get_close_matches(plain, list(named), n=3)
    near = {named[name].name for name in similar}
    hint = f" Did you mean {' or '.join(sorted(near))}?" if near else ""
    raise InputError(
        f"device kind {kind!r} is unknown.{hint} The kinds are "
        f"{', '.join(row.name for row in kinds)}; a file of your own may add others."
    )


def cluster(text: str, link: Link) -> Cluster:
    """Equal devices of a kind, such as `"8xH100-SXM-80GB"`, each pair joined by `link`.

    Each has the kind's memory less what its context takes. Between GPUs a link without an overhead
    gets `HANDOVER_NS`.

    Raises:
        InputError: The text is not a count, an `x`, and a known kind.
    """
    match = _COUNTED.fullmatch(text.strip())
    if match is None:
        raise InputError(f"cluster {text!r} cannot be read; write a count and a kind: 8xA100-...")
    row = find(match[2])
    count = check_positive(int(match[1]), f"the count in cluster {text!r}", MAX_DEVICES)
    place = "cpu" if row.name == "cpu" else "cuda"
    free_bytes = row.memory_bytes - row.context_bytes
    host = "" if place == "cpu" else HOST
    if host and link.overhead_ns == 0:
        link = replace(link, overhead_ns=HANDOVER_NS)
    devices = [Device(f"{place}:{i}", free_bytes, kind=row.name, host=host) for i in range(count)]
    return Cluster.connected(devices, link)


def _read(file: Path) -> tuple[dict[str, dict[str, Any]], list[_Share]]:
    """The kinds of a file, raw and by plain name, and its efficiencies."""
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
    found: dict[str, dict[str, Any]] = {}
    for i, row in enumerate(kinds):
        title = f"device kind {row.get('name', f'number {i + 1}')!r} in {file}"
        _check_fields(row, _FIELDS, ("aliases", "host_launch_ns"), title)
        name = _plain(check_name(row["name"], f"name of {title}"))
        if name in found:
            raise InputError(f"device kind {row['name']!r} is in {file} twice; leave one out.")
        found[name] = row
    shares = []
    for i, row in enumerate(efficiencies):
        title = f"efficiency {row.get('op_class', f'number {i + 1}')!r} in {file}"
        _check_fields(row, _EFFICIENCY_FIELDS, ("kind",), title)
        shares.append((row.get("kind"), Efficiency(*(row[name] for name in _EFFICIENCY_FIELDS))))
    return found, shares


def _check_fields(
    row: dict[str, Any], needed: Sequence[str], optional: Sequence[str], title: str
) -> None:
    for name in needed:
        if name not in row:
            raise InputError(f"{title} has no {name}; a row needs {', '.join(needed)}.")
    for name in row:
        if name not in (*needed, *optional):
            may = ", ".join((*needed, *optional))
            raise InputError(f"{title} has {name!r}; a row may have {may}.")


def _kind(row: dict[str, Any], tables: Sequence[Sequence[_Share]]) -> DeviceKind:
    """One row with the efficiencies that apply to it: the first table's that names the class.

    Of one table, the rows for the kind alone go before those for all.
    """
    name = row["name"]
    aliases = row.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
        raise InputError(f"aliases of device kind {name!r} are {aliases!r}; give a list of names.")
    chosen: dict[str, list[Efficiency]] = {}
    for table, owner in itertools.product(tables, (name, None)):
        found: dict[str, list[Efficiency]] = {}
        for kind, share in table:
            if kind == owner:
                found.setdefault(share.op_class, []).append(share)
        chosen = found | chosen
    return DeviceKind(
        name=name,
        memory_bytes=parse_bytes(row["memory"], what=f"memory of device kind {name!r}"),
        context_bytes=parse_bytes(row["context"], what=f"context of device kind {name!r}"),
        bytes_per_s=row["bytes_per_s"],
        launch_ns=row["launch_ns"],
        flops_per_s=row["flops_per_s"],
        source=row["source"],
        aliases=tuple(aliases),
        host_launch_ns=row.get("host_launch_ns", 0),
        efficiencies=tuple(share for op_class in sorted(chosen) for share in chosen[op_class]),
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
