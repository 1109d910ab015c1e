"""Safetensors files by their headers, beside the format's own library."""

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file, save_file

import baechi
from baechi.storage.weight_files import DTYPES, StoredTensor, stored_weights, write_weights

ARRAYS = {
    "bytes": numpy.arange(3, dtype=numpy.uint8),
    "matrix": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "number": numpy.array(7, dtype=numpy.int64),
    "nothing": numpy.zeros((0, 4), dtype=numpy.float16),
}
SIZES = dict(DTYPES.values())  # of an element


def written(folder: Path, limit: int = 10**9) -> None:
    arrays = list(ARRAYS.values())
    rows = [(name, a.dtype.name, a.shape, a.nbytes) for name, a in ARRAYS.items()]
    write_weights(folder, rows, lambda i: [memoryview(arrays[i].tobytes())], limit)


def assert_read(found: dict[str, StoredTensor]) -> None:
    assert found.keys() == ARRAYS.keys()
    for name, row in found.items():
        data = row.path.read_bytes()[row.offset : row.offset + row.nbytes]
        array = numpy.frombuffer(data, row.dtype).reshape(row.shape)
        assert numpy.array_equal(array, ARRAYS[name])
        assert row.offset % SIZES[row.dtype] == 0


def test_our_files_are_read_by_the_library_and_its_files_by_us(tmp_path: Path) -> None:
    written(tmp_path / "ours")
    theirs = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(numpy.array_equal(theirs[name], array) for name, array in ARRAYS.items())
    save_file(ARRAYS, tmp_path / "other.safetensors", {"format": "np"})
    for source in (tmp_path / "ours", tmp_path / "other.safetensors", str(tmp_path)):
        assert_read(stored_weights(source))


def test_shards_and_their_index(tmp_path: Path) -> None:
    written(tmp_path, 24)
    names = sorted(path.name for path in tmp_path.iterdir())
    files = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names == [*files, "model.safetensors.index.json"]
    sizes = [sum(a.nbytes for a in load_file(tmp_path / name).values()) for name in files]
    assert sizes == [3, 24, 8]
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert_read(stored_weights(source))
    written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("cut", [1, 60, 400, 10**6])
def test_a_file_that_is_cut_short(tmp_path: Path, cut: int) -> None:
    written(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: -min(cut, path.stat().st_size)])
    with pytest.raises(baechi.FormatError, match=r"model.safetensors .*(short|Get it anew)"):
        stored_weights(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"no",
        b'{"a": {"dtype": "F3", "shape": [], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": 1}',
    ],
)
def test_a_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(baechi.FormatError, match=r"x.safetensors has no safetensors header"):
        stored_weights(path)


def test_folders_and_indices_that_name_no_weights(tmp_path: Path) -> None:
    with pytest.raises(baechi.InputError, match="no such file or folder"):
        stored_weights(tmp_path / "away")
    with pytest.raises(baechi.InputError, match=r"it has none\. Name the file"):
        stored_weights(tmp_path)
    written(tmp_path, 24)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(baechi.InputError, match="cannot read weights"):
        stored_weights(tmp_path)
    written(tmp_path, 24)
    index = tmp_path / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["gone"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(text))
    with pytest.raises(baechi.FormatError, match=r"'gone' is in model-00001.* \(1 such names\)"):
        stored_weights(tmp_path)
    index.write_text("[]")
    with pytest.raises(baechi.FormatError, match="is no index"):
        stored_weights(tmp_path)
    save_file(ARRAYS, tmp_path / "model.safetensors")
    with pytest.raises(
        baechi.InputError, match=r"it has model.safetensors.index.json, model-00001"
    ):
        stored_weights(tmp_path)
