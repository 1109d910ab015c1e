"""JSON files of every public value, for other processes, machines and languages.

A file is one object::

    {"format": "baechi", "type": "Cluster", "version": 2, "digest": "9f86...", "value": {...}}

`value` has the fields of the dataclass of that name, in its order. A field that equals its default
may be absent, as may `digest` (sha256 of the canonical JSON of `value`: keys sorted, no blanks,
ASCII), so that a graph can be written by hand or by a scheduler in another language; a digest that
is present must match. Equal values give equal bytes, and files are written atomically.

Version 1 had no phases of ops; they are restored from the names of ops in graphs of training steps
made by Baechi.

One codec serves all types (`codec.py`): a new dataclass needs an entry in `_KINDS` only.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar
from typing import overload as typing_overload

from baechi.errors import FormatError, InputError
from baechi.records.cluster import Cluster, Constraints, Device, Link, Topology
from baechi.records.device_kinds import Calibration
from baechi.records.graph import Op, OpGraph, Phase, Tensor
from baechi.records.instructions import Program
from baechi.records.op_costs import OpCost, Profile
from baechi.records.placement import Measurement, Placement, Schedule, Span, Transfer
from baechi.storage.codec import Refusal, codec
from baechi.traced.traced_model import Traced
from baechi.validation import FrozenDict, check_path

VERSION: Final = 2
_KINDS = (
    *(Op, Tensor, OpGraph, Device, Link, Cluster, Topology, Constraints),
    *(Placement, Span, Transfer, Schedule, OpCost, Profile, Calibration, Measurement, Traced),
    Program,
)
TYPES: Final[Mapping[str, type]] = FrozenDict({kind.__name__: kind for kind in _KINDS})
_ENVELOPE: Final = ("format", "type", "version", "digest", "value")
_WIDTH: Final = 100  # a line of a file, as a line of code
_T = TypeVar("_T")


def dump(value: object, path: str | os.PathLike[str]) -> None:
    """Write `value` to a JSON file atomically.

    Raises:
        InputError: The type is not in `TYPES`, the value cannot be JSON (an infinite float),
            or the path cannot be written.
    """
    write_whole(path, dumps(value))


def dumps(value: object) -> str:
    """`value` as the text of a JSON file; equal values give equal texts."""
    kind: type = type(value)
    if TYPES.get(kind.__name__) is not kind:
        raise InputError(f"type {kind.__name__} cannot be saved; give one of {', '.join(TYPES)}.")
    try:
        raw = codec(kind).write(value)
    except Refusal as refusal:
        raise InputError(f"cannot save this {kind.__name__}: {refusal}") from refusal
    envelope = {"format": "baechi", "type": kind.__name__, "version": VERSION}
    return _layout({**envelope, "digest": _digest(raw), "value": raw}) + "\n"


@typing_overload
def load(path: str | os.PathLike[str]) -> Any: ...
@typing_overload
def load(path: str | os.PathLike[str], expect: type[_T]) -> _T: ...
def load(path: str | os.PathLike[str], expect: Any = None) -> Any:
    """The value in a JSON file, written by `dump` or by hand.

    Args:
        path: The file.
        expect: The type that it must hold; any of `TYPES` if absent.

    Raises:
        FormatError: The file is not a Baechi file, is damaged, has another version, or has a wrong
            field; the text names the path and the field.
        InputError: The file cannot be read.
    """
    check_path(path)
    if expect is not None and expect not in TYPES.values():
        raise InputError(f"expect is {expect!r}; give one of {', '.join(TYPES)}, or nothing.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"cannot read {os.fspath(path)}: there is no such file.") from error
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{os.fspath(path)}: byte {error.start} is not UTF-8, so this is no JSON file."
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {os.fspath(path)}: {error.strerror}.") from error
    return loads(text, expect, source=os.fspath(path))


@typing_overload
def loads(text: str, *, source: str = ...) -> Any: ...
@typing_overload
def loads(text: str, expect: type[_T], *, source: str = ...) -> _T: ...
def loads(text: str, expect: Any = None, *, source: str = "text") -> Any:
    """The value in `text`; `source` names it in errors. Raises `FormatError` as `load` does."""
    try:
        raw = parse_json(text)
        kind, value = _open_envelope(raw, expect)
        found = codec(kind).read(value)
        return _with_phases(found) if kind is OpGraph and raw["version"] == 1 else found
    except (FormatError, Refusal) as error:
        raise FormatError(f"{source}: {error}") from error
    except RecursionError as error:
        raise FormatError(f"{source}: the JSON is nested too deeply.") from error


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` atomically, so that no reader ever sees half of it.

    Raises:
        InputError: The path cannot be written; the old file is unchanged.
    """
    given = Path(check_path(path))
    try:
        if given.exists() and not given.is_file():  # a pipe or /dev/stdout must not be replaced
            given.write_text(text, encoding="utf-8")
            return
        target = given.resolve()
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)}: {error.strerror}.") from error
    except UnicodeEncodeError as error:
        half = text[max(error.start - 20, 0) : error.end]
        raise InputError(
            f"cannot write {os.fspath(path)}: a name in it is no Unicode text, since {half!r} ends "
            "in a lone surrogate; rename it."
        ) from error


def parse_json(text: str) -> Any:
    """The plain value of a JSON text.

    Raises:
        FormatError: It is not JSON, is nested too deeply, or has a duplicate key or a number that
            is infinite, NaN, or thousands of digits long.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise FormatError(f"the key {twice!r} occurs twice in one object.")
        return found

    def constant(name: str) -> None:
        raise FormatError(f"it holds {name}, which is no JSON number.")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise FormatError(f"the JSON ends too early ({where}); it is cut off.") from error
        raise FormatError(f"this is not JSON: {error.msg} at {where}.") from error
    except RecursionError as error:
        raise FormatError("the JSON is nested too deeply.") from error
    except FormatError:
        raise
    except ValueError as error:  # Python reads no integer of more than 4300 digits
        raise FormatError("it holds an integer of thousands of digits; 64 bits is all.") from error


def _open_envelope(raw: Any, expect: type | None) -> tuple[type, Any]:
    """The type and the raw value of a parsed file, after all checks except those of the value."""
    if not isinstance(raw, dict) or "format" not in raw:
        raise FormatError('this is no Baechi file: it is no JSON object with "format": "baechi".')
    if raw["format"] != "baechi":
        raise FormatError(f"this is no Baechi file: its format is {raw['format']!r}, not 'baechi'.")
    version = raw.get("version")
    if type(version) is not int:
        raise FormatError(f"version is {version!r}; it must be an integer.")
    if not 1 <= version <= VERSION:
        raise FormatError(
            f"written by version {version}, this Baechi reads 1 to {VERSION}. "
            "Write the file again with this Baechi, or install the one that wrote it."
        )
    for name in raw:
        if name not in _ENVELOPE:
            raise FormatError(f"unknown field {name!r}; a file has {', '.join(_ENVELOPE)}.")
    kind = TYPES.get(raw["type"]) if isinstance(raw.get("type"), str) else None
    if kind is None:
        known = ", ".join(TYPES)
        raise FormatError(f"type is {raw.get('type')!r}; it must be one of {known}.")
    if expect is not None and kind is not expect:
        raise FormatError(f"this file holds type {kind.__name__}, but {expect.__name__} is wanted.")
    if "value" not in raw:
        raise FormatError("the field 'value' is missing.")
    if "digest" in raw and raw["digest"] != _digest(raw["value"]):
        raise FormatError(
            "the digest does not match the value: the file was damaged, or edited by hand. "
            "If the edit is meant, delete the digest field."
        )
    return kind, raw["value"]


def _with_phases(graph: OpGraph) -> OpGraph:
    """A graph of version 1 with its phases restored from names; all forward if there are none.

    There a backward op was `backward:` and its forward op's name, and only `recompute:...` read a
    tensor of each op that it ran again.
    """
    n = graph.op_index.get("loss", len(graph.ops))
    phased: list[tuple[Phase, tuple[int, ...]]] = [("forward", ())] * n
    if n < len(graph.ops):
        phased.append(("loss", ()))
    for op in range(n + 1, len(graph.ops)):
        kind, _, name = graph.ops[op].name.partition(":")
        tensors = [graph.tensors[tensor] for tensor in graph.op_inputs[op]]
        if kind == "backward" and graph.op_index.get(name, n) < n:
            phased.append(("backward", (graph.op_index[name],)))
        elif kind == "recompute":
            ran = {t.producer for t in tensors if t.consumers == (op,)}
            phased.append(("recompute", tuple(sorted(ran))))
        else:
            return graph
    ops = zip(graph.ops, phased, strict=True)
    rows = tuple(replace(op, phase=phase, forward=forward) for op, (phase, forward) in ops)
    try:
        return OpGraph(rows, graph.tensors, graph.times)
    except InputError:
        return graph


def _digest(raw: Any) -> str:
    text = json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _layout(raw: Any, indent: int = 0, prefix: int = 0) -> str:
    """`raw` as JSON: values that fit on a line are on one line, and lists of scalars fill lines."""
    line = json.dumps(raw)
    if not isinstance(raw, dict | list) or not raw or indent + prefix + len(line) < _WIDTH:
        return line
    outer, inner = " " * indent, " " * (indent + 1)
    if isinstance(raw, dict):
        keys = {json.dumps(name) + ": ": value for name, value in raw.items()}
        cells = [key + _layout(value, indent + 1, len(key) + 1) for key, value in keys.items()]
        return f"{{\n{inner}" + f",\n{inner}".join(cells) + f"\n{outer}}}"
    if any(isinstance(value, dict | list) for value in raw):
        cells = [_layout(value, indent + 1, 1) for value in raw]
        return f"[\n{inner}" + f",\n{inner}".join(cells) + f"\n{outer}]"
    rows = [inner]
    for cell in map(json.dumps, raw):
        if len(rows[-1]) > len(inner) and len(rows[-1]) + len(cell) + 2 > _WIDTH:
            rows[-1] = rows[-1].rstrip()
            rows.append(inner)
        rows[-1] += cell + ", "
    return "[\n" + "\n".join(rows).removesuffix(", ") + f"\n{outer}]"
