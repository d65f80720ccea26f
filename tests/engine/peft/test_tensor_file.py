"""The header reader against the safetensors library, and against damaged files.

JSON read without guessing.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from lorabatch.engine.errors import AdapterRefusedError
from lorabatch.engine.peft.tensor_file import MAX_SHARED_BYTES, TensorReader, read_header
from lorabatch.system.untrusted import parse_object


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]} | changes


def test_shapes_types_and_bytes_are_those_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    rng = np.random.default_rng(0)
    arrays = {
        "b": rng.normal(size=(3, 5)).astype(np.float32),
        "a": rng.normal(size=(7,)).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3, np.int64),
    }
    save_file(arrays, path, metadata={"format": "pt"})
    entries = read_header(path).tensors
    with safe_open(path, "np") as library, TensorReader(path.parent) as reader:
        assert entries.keys() == set(library.keys()) == arrays.keys()
        for key, found in entries.items():
            expected = library.get_tensor(key)
            assert found.shape == expected.shape
            assert found.dtype == library.get_slice(key).get_dtype()
            assert reader.read(found).tobytes() == expected.tobytes()


def test_a_file_that_became_shorter_is_refused_when_its_tensor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(4, dtype=np.float32)}, path)
    (found,) = read_header(path).tensors.values()
    path.write_bytes(path.read_bytes()[:-2])
    with TensorReader(path.parent) as reader, pytest.raises(AdapterRefusedError, match="'a' has 14 of its 16 bytes"):
        reader.read(found)


def test_tensors_that_are_read_together_are_those_that_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {
        "a": np.arange(5, dtype=np.float16),  # ends where no number of four bytes may begin
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "c": np.zeros((0, 3), np.float32),
        "d": np.arange(3, dtype=np.float32),
        "e": np.arange(8, dtype=np.float16),
    }
    save_file(arrays, path)
    tensors = read_header(path).tensors
    with TensorReader(tmp_path) as reader:
        for keys in ("abcde", "aced", "b", "da", ""):
            found = reader.read_all(tensors[key] for key in keys)
            assert {key: data.tobytes() for key, data in found.items()} == {key: arrays[key].tobytes() for key in keys}
            sizes = {key: arrays[key].itemsize for key in keys if arrays[key].size}
            assert all(found[key].ctypes.data % size == 0 for key, size in sizes.items())


def test_a_file_that_became_shorter_is_refused_by_the_first_tensor_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({key: np.arange(4, dtype=np.float32) for key in "abc"}, path)
    tensors = read_header(path).tensors
    path.write_bytes(path.read_bytes()[:-18])
    with TensorReader(tmp_path) as reader, pytest.raises(AdapterRefusedError, match="'b' has 14 of its 16 bytes"):
        reader.read_all(tensors.values())


def test_equal_headers_are_one_object_and_others_are_not(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three", "four")]
    arrays = [{"a": np.full(4, n, np.float32)} for n in range(3)] + [{"a": np.zeros((2, 2), np.float32)}]
    for folder, array in zip(folders, arrays, strict=True):
        folder.mkdir()
        save_file(array, folder / ("y.safetensors" if folder.name == "three" else "x.safetensors"))
    one, two, three, four = (read_header(next(folder.iterdir())) for folder in folders)
    assert one is two
    assert one.is_shared
    assert three is not one  # a file of another name
    assert four is not one
    with TensorReader(folders[1]) as reader:
        assert reader.read(one.tensors["a"]).view(np.float32).tolist() == [1.0] * 4


def test_large_headers_are_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(1, np.float32)}, path, metadata={"note": "x" * MAX_SHARED_BYTES})
    assert read_header(path) is not read_header(path)
    assert not read_header(path).is_shared


@pytest.mark.parametrize(
    ("header", "data", "what"),
    [
        (b"{", b"", "its header is not a JSON object"),
        (b"\xff\xfe", b"", "its header is not a JSON object"),
        ([1], b"", "its header is not a JSON object"),
        ({"a": 3}, b"", "its header entry for 'a' is malformed: 3"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "its header entry for 'a' is malformed"),
        ({"a": entry(0, 4, dtype="F99")}, b"1234", "its header entry for 'a' is malformed"),
        ({"a": entry(0, 4, shape=[-1])}, b"1234", "its header entry for 'a' is malformed"),
        ({"a": entry(0, 4, shape=[True])}, b"1234", "its header entry for 'a' is malformed"),
        ({"a": entry(0, 4, shape=[2])}, b"1234", "'a' of shape [2] F32 has 4 bytes, not 8"),
        ({"a": entry(0, 4)}, b"123", "its tensors end at byte"),
        ({"a": entry(0, 4)}, b"12345", "its tensors end at byte"),
        ({"a": entry(4, 8)}, b"12345678", "'a' starts at byte"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "'b' starts at byte"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "'b' starts at byte"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(tmp_path: Path, header: Any, data: bytes, what: str) -> None:
    path = write_raw(tmp_path / "adapter_model.safetensors", header, data)
    with pytest.raises(AdapterRefusedError) as caught:
        read_header(path)
    assert str(caught.value).startswith("adapter_model.safetensors: not a whole safetensors file, ")
    assert what in str(caught.value)
    assert "download the adapter again" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 50) + b"{}"]
)
def test_a_file_cut_short_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(AdapterRefusedError, match="not a whole safetensors file"):
        read_header(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(4, dtype=np.float32), "b": np.arange(3, dtype=np.float16)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(AdapterRefusedError):
            read_header(path)


def test_a_header_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", b"[" * 200_000)
    with pytest.raises(AdapterRefusedError, match="not a whole safetensors file"):
        read_header(path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry(0, 4)).encode()
    path = write_raw(tmp_path / "x.safetensors", b'{"a": ' + one + b', "a": ' + one + b"}", b"1234")
    with pytest.raises(AdapterRefusedError, match="'a' is given twice"):
        read_header(path)


def test_an_object_is_read() -> None:
    assert parse_object('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert parse_object(b'{"a": "\xc3\xa9"}') == {"a": "é"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": {"b": 1, "b": 1}}', "key 'b' is given twice"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ("3", "it holds int, expected an object"),
        ("[" * 100_000, "it nests too deeply"),
        ("", "Expecting value"),
    ],
)
def test_anything_else_is_an_error_that_says_why(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_object(text)
