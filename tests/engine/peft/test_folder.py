"""Adapter folders: which files are read, which are refused, and that none can reach outside or run code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lorabatch.engine.errors import AdapterRefusedError
from lorabatch.engine.peft.folder import open_folder, parse_config, read_config
from lorabatch.engine.tokenizer_files import tokenizer_sha256

INDEX = "adapter_model.safetensors.index.json"
WEIGHTS = "adapter_model.safetensors"
ONE, TWO = "adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(AdapterRefusedError) as caught:
        call(*arguments)
    return str(caught.value)


def config_of(folder: Path) -> dict[str, Any]:
    return parse_config(read_config(folder))


def tensors(*keys: str) -> dict[str, Any]:
    return {key: np.ones((2, 2), np.float32) for key in keys}


def write_shards(folder: Path, weight_map: Any) -> None:
    save_file(tensors("a", "b"), folder / ONE)
    save_file(tensors("c"), folder / TWO)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_named_by_an_index_are_read_as_one(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    folder = open_folder(tmp_path)
    assert {key: found.file_name for key, found in folder.entries.items()} == {"a": ONE, "b": ONE, "c": TWO}
    assert folder.weight_bytes == 3 * 16


@pytest.mark.parametrize(
    ("weight_map", "what"),
    [
        ({"a": ONE, "b": ONE, "c": "gone.safetensors"}, "names gone.safetensors, which is missing"),
        ({"a": ONE, "b": TWO, "c": TWO}, f"holds 'b', which {INDEX} places in {TWO}"),
        ({"a": ONE, "c": TWO}, f"holds 'b', which {INDEX} places in None"),
        ({"a": ONE, "b": ONE, "c": TWO, "d": TWO}, "names 1 tensors that no shard holds, first 'd'"),
        ({"a": "../outside.safetensors"}, "names '../outside.safetensors'; expected the plain name"),
        ({"a": "/etc/x.safetensors"}, "expected the plain name"),
        ({"a": "sub/x.safetensors"}, "expected the plain name"),
        ({"a": "..\\x.safetensors"}, "expected the plain name"),
        ({"a": ".."}, "expected the plain name"),
        ({"a": "weights.bin"}, "expected the plain name of a .safetensors file"),
        ({"a": 3}, "expected the plain name"),
        ({"a": ["x"]}, "expected a JSON object with weight_map"),
        (None, "expected a JSON object with weight_map"),
        ([], "expected a JSON object with weight_map"),
        ({}, "holds no tensors"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, weight_map: Any, what: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors("a"), tmp_path / "outside.safetensors")
    write_shards(folder, weight_map)
    assert what in refusal(open_folder, folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {"a": "x", "a": "y"}}', "\x00"])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert refusal(open_folder, tmp_path).startswith(f"{INDEX}: expected a JSON object with weight_map")


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    save_file(tensors("a"), tmp_path / "adapter_model.safetensors")
    assert "two sets of weights" in refusal(open_folder, tmp_path)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / ONE)
    assert refusal(open_folder, tmp_path).startswith(f"{INDEX}: missing")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    assert refusal(open_folder, tmp_path).startswith("adapter_model.safetensors: missing. Save the adapter")


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "pytorch_model.bin"])
def test_pickled_weights_are_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(mark))
    (tmp_path / name).write_bytes(bomb)
    assert refusal(open_folder, tmp_path).startswith(f"{name}: pickled weights can run code")
    save_file(tensors("a"), tmp_path / "adapter_model.safetensors")
    assert open_folder(tmp_path).notes == (f"{name}: not read, adapter_model.safetensors is used",)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()


def test_tensors_of_no_known_use_are_refused(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "adapter_model.safetensors")
    save_file(tensors("b"), tmp_path / "new_embeddings.safetensors")
    assert refusal(open_folder, tmp_path).startswith("new_embeddings.safetensors: tensors that are not part of")


def test_a_value_head_takes_no_part_in_generation(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "adapter_model.safetensors")
    save_file(tensors("b"), tmp_path / "value_head.safetensors")
    folder = open_folder(tmp_path)
    assert folder.entries.keys() == {"a"}
    assert folder.notes == ("value_head.safetensors: not read, a value head for reinforcement learning",)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "not a valid JSON object"),
        (b"{", "not a valid JSON object"),
        (b"\xff\xfe{}", "not a valid JSON object"),
        (b"[1]", "it holds list, expected an object"),
        (b'{"r": 8, "r": 16}', "key 'r' is given twice"),
        (b'{"lora_alpha": NaN}', "NaN is not a number"),
        (b'{"lora_alpha": Infinity}', "Infinity is not a number"),
        (b"[" * 200_000, "not a valid JSON object"),
    ],
)
def test_a_malformed_configuration_is_refused(tmp_path: Path, text: bytes, what: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(text)
    message = refusal(config_of, tmp_path)
    assert message.startswith("adapter_config.json: ")
    assert what in message


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b'\xef\xbb\xbf{"r": 8}')
    assert config_of(tmp_path) == {"r": 8}


def test_a_missing_configuration_or_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(config_of, tmp_path).startswith("adapter_config.json: missing")
    assert refusal(config_of, tmp_path / "nowhere").endswith(
        "not a folder. Name the folder that holds adapter_config.json."
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_folder_with_its_own_tokenizer_is_reported(tmp_path: Path, name: str) -> None:
    assert not tokenizer_sha256(tmp_path)
    (tmp_path / name).write_text("{}")
    assert tokenizer_sha256(tmp_path)


def test_files_of_a_hub_cache_are_links_to_the_blobs_of_their_repository(tmp_path: Path) -> None:
    snapshot, blobs = (tmp_path / "models--o--n" / name for name in ("snapshots/rev", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, content in {"adapter_config.json": '{"r": 8}', WEIGHTS: tensors("a")}.items():
        if isinstance(content, str):
            (blobs / name).write_text(content)
        else:
            save_file(content, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert open_folder(snapshot).weight_bytes == 16
    nested = snapshot / "sub"
    nested.mkdir()
    (nested / WEIGHTS).symlink_to(f"../../../blobs/{WEIGHTS}")
    assert open_folder(nested).weight_bytes == 16
    (tmp_path / "by-link").symlink_to(snapshot)
    assert open_folder(tmp_path / "by-link").weight_bytes == 16


@pytest.mark.parametrize("repository", ["models--o--m", "elsewhere", "models--o--n/blobs-not"])
def test_a_link_to_files_of_others_is_refused(tmp_path: Path, repository: str) -> None:
    snapshot, theirs = tmp_path / "models--o--n" / "snapshots" / "rev", tmp_path / repository / "blobs"
    snapshot.mkdir(parents=True)
    theirs.mkdir(parents=True)
    save_file(tensors("a"), theirs / WEIGHTS)
    (snapshot / WEIGHTS).symlink_to(theirs / WEIGHTS)
    assert f"{WEIGHTS}: a link that leads out of the adapter's folder" in refusal(open_folder, snapshot)


def test_blobs_that_are_a_link_themselves_are_not_those_of_the_repository(tmp_path: Path) -> None:
    snapshot, theirs = tmp_path / "models--o--n" / "snapshots" / "rev", tmp_path / "theirs"
    snapshot.mkdir(parents=True)
    theirs.mkdir()
    save_file(tensors("a"), theirs / WEIGHTS)
    (tmp_path / "models--o--n" / "blobs").symlink_to(theirs)
    (snapshot / WEIGHTS).symlink_to(f"../../blobs/{WEIGHTS}")
    assert "leads out of the adapter's folder" in refusal(open_folder, snapshot)


def test_links_inside_of_a_folder_and_links_to_files_that_are_not_read_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors("a"), folder / "real.bin")
    (folder / WEIGHTS).symlink_to("real.bin")
    (tmp_path / "README.md").write_text("hi")
    (folder / "README.md").symlink_to("../README.md")
    assert open_folder(folder).weight_bytes == 16
