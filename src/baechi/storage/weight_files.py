"""Files of weights in the safetensors format: where each tensor lies, and new files.

A file is the length of its header (8 bytes, little-endian), the header, and the tensors' bytes. The
header is JSON: the dtype, the shape and the place of every tensor. A model of several files has
an index, `model.safetensors.index.json`, from every name to its file.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, final

from baechi.errors import FormatError, InputError

# The format's dtypes by torch's names, and the bytes of an element.
DTYPES: Final = {
    **{"BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "I16": ("int16", 2)},
    **{"U16": ("uint16", 2), "I32": ("int32", 4), "U32": ("uint32", 4), "I64": ("int64", 8)},
    **{"U64": ("uint64", 8), "F16": ("float16", 2), "BF16": ("bfloat16", 2)},
    **{"F32": ("float32", 4), "F64": ("float64", 8), "C64": ("complex64", 8)},
    **{"F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1)},
}
_LONGEST_HEADER: Final = 100_000_000  # bytes; the format's own limit
_INDEX: Final = ".safetensors.index.json"
_STEM: Final = "model"  # of the names that transformers gives


@final
@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor: `nbytes` from `offset` on in the file at `path`, in C order.

    `dtype` is a name of torch's, such as `"bfloat16"`.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def stored_weights(source: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, an index, or a folder with one of these, by name.

    Only headers are read. The result may be renamed and mixed with other tensors, and given to
    `place(weights=...)`.

    Raises:
        InputError: There is no such file, or a folder has none or several.
        FormatError: A file is cut short, is no such file, or lacks what the index names.
    """
    path = _file_of(Path(source))
    if not path.name.endswith(".json"):
        return _header(path)
    try:
        names = json.loads(path.read_bytes())["weight_map"]
        files = {file: _header(path.parent / file) for file in sorted(set(names.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is no index of safetensors files: {error!r}") from None
    lost = [name for name, file in names.items() if name not in files[file]]
    if lost:
        raise FormatError(
            f"{path} says that {lost[0]!r} is in {names[lost[0]]}, which does not have it "
            f"({len(lost)} such names). Files and index are of different models; copy them anew."
        )
    return {name: files[file][name] for name, file in names.items()}


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        if not path.is_file():
            raise InputError(f"there are no weights at {path}: no such file or folder.")
        return path
    rows = sorted(row for row in path.iterdir() if row.is_file())
    indices = [row for row in rows if row.name.endswith(_INDEX)]
    files = [row for row in rows if row.suffix == ".safetensors"]
    whole = path / f"{_STEM}.safetensors"
    if len(indices) == 1 and whole not in files:
        return indices[0]
    if not indices and (whole in files or len(files) == 1):
        return whole if whole in files else files[0]
    found = ", ".join(row.name for row in [*indices, *files][:5]) or "none"
    raise InputError(
        f"{path} must have one safetensors file, or several and one index; it has {found}. "
        "Name the file or the index to load."
    )


def _header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise FormatError(
                    f"{path} is cut short, or no safetensors file: {size:,} bytes cannot hold its "
                    f"header of {length:,}."
                )
            rows = json.loads(file.read(length))
        rows.pop("__metadata__", None)
        found = {name: _stored(path, row, 8 + length) for name, row in rows.items()}
    except OSError as error:
        raise InputError(f"cannot read weights: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} has no safetensors header that can be read: {error!r}") from None
    end = max((row.offset + row.nbytes for row in found.values()), default=8 + length)
    if end != size:
        raise FormatError(
            f"{path} has {size:,} bytes, and its header tells of {end:,}: it was not copied or "
            "written to its end. Get it anew."
        )
    return found


def _stored(path: Path, row: dict[str, Any], start: int) -> StoredTensor:
    name, nbytes = DTYPES[row["dtype"]]
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * nbytes:
        raise ValueError(f"{end - begin} bytes for {row['dtype']} {list(shape)}")
    return StoredTensor(path, name, shape, start + begin, end - begin)


# The name, dtype, shape and bytes of a tensor to write.
Row = tuple[str, str, tuple[int, ...], int]


def write_weights(
    folder: str | os.PathLike[str],
    rows: Sequence[Row],
    read: Callable[[int], Iterable[memoryview]],
    max_shard: int,
) -> None:
    """Write tensors as one file, or as files of at most `max_shard` bytes with an index.

    Names are those of transformers; files of theirs that were in the folder before go. All are
    written beside their final names first, so an error leaves the folder as it was.

    Args:
        folder: Is made where it is not there.
        rows: The tensors, in order.
        read: The bytes of a tensor, given its number, piece by piece.
        max_shard: A tensor that is larger has a file of its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[int]] = [[]]
    for number, row in enumerate(rows):
        if shards[-1] and sum(rows[i][3] for i in shards[-1]) + row[3] > max_shard:
            shards.append([])
        shards[-1].append(number)
    n = len(shards)
    names = [f"{_STEM}-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
    names = [f"{_STEM}.safetensors"] if n == 1 else names
    index = folder / f"{_STEM}{_INDEX}"
    with TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        for name, shard in zip(names, shards, strict=True):
            _write_file(Path(temporary) / name, [(rows[i], read(i)) for i in shard])
        files = {rows[i][0]: name for name, row in zip(names, shards, strict=True) for i in row}
        total = {"total_size": sum(row[3] for row in rows)}
        text = json.dumps({"metadata": total, "weight_map": files}, indent=2, sort_keys=True)
        (Path(temporary) / index.name).write_text(text + "\n", encoding="utf-8")
        # From here on a reader finds the old files, none, or the new ones, but never some of each.
        index.unlink(missing_ok=True)
        for old in [*folder.glob(f"{_STEM}-*-of-*.safetensors"), folder / f"{_STEM}.safetensors"]:
            old.unlink(missing_ok=True)
        for name in [*names, *([index.name] if n > 1 else [])]:
            os.replace(Path(temporary) / name, folder / name)


def _write_file(path: Path, rows: Sequence[tuple[Row, Iterable[memoryview]]]) -> None:
    # Large elements first, so that each tensor begins at a multiple of its element's bytes.
    sizes = dict(DTYPES.values())
    codes = {name: code for code, (name, _) in DTYPES.items()}
    rows = sorted(rows, key=lambda row: -sizes[row[0][1]])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for (name, dtype, shape, nbytes), _ in rows:
        places = [end, end := end + nbytes]
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, parts in rows:
            for part in parts:
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
