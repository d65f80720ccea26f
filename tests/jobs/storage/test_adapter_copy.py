"""Pickled adapters: converted once in a confined process into what PEFT would have saved, or refused by name."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from other_forms import CONFIG, PICKLE, WEIGHTS, as_pickle
from safetensors.torch import load_file, save_file

from lorabatch.engine.config import read_model_config
from lorabatch.engine.errors import AdapterRefusedError
from lorabatch.engine.peft import audit_adapter
from lorabatch.jobs.opening.adapters import audit_all, audit_folders
from lorabatch.jobs.storage.adapter_copy import adapter_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lorabatch" / "adapters"


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("pickled") / "base")


@pytest.fixture(scope="module")
def saved_once(model: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("saved") / "safe", model)


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A folder in safetensors, as PEFT saves it."""
    return shutil.copytree(saved_once, tmp_path / "safe")


@pytest.mark.parametrize("name", [PICKLE, "adapter_model.pt", "adapter_model.pth"])
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["archive", "before 1.6"])
def test_a_pickled_adapter_has_the_content_of_the_one_in_safetensors(
    saved: Path, model: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    config = read_model_config(model)
    folder = adapter_folder(str(as_pickle(saved, tmp_path / "pickled", name, **options)), {})
    expected = audit_adapter(saved, config, "safe")
    assert expected.content_sha256
    assert audit_adapter(folder, config, "pickled").content_sha256 == expected.content_sha256
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_it_is_converted_once_and_again_when_its_files_change(saved: Path, tmp_path: Path, own_cache: Path) -> None:
    folder = as_pickle(saved, tmp_path / "pickled")
    first = adapter_folder(str(folder), {})
    written = (first / WEIGHTS).stat().st_mtime_ns
    assert adapter_folder(str(folder), {}) == first
    assert (first / WEIGHTS).stat().st_mtime_ns == written
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | {"lora_alpha": 1}))
    assert adapter_folder(str(folder), {}) != first
    assert [path.name for path in own_cache.iterdir() if path.name.startswith(".")] == []


def test_safetensors_beside_a_pickle_are_used_and_the_pickle_is_not_opened(saved: Path, own_cache: Path) -> None:
    (saved / PICKLE).write_bytes(b"not opened")
    assert adapter_folder(str(saved), {}) == saved
    assert not own_cache.exists()


def test_a_remote_pickle_is_fetched_and_converted(saved: Path, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for path in as_pickle(saved, tmp_path / "pickled").iterdir():
        files.pipe_file(f"/pickled-store/one/{path.name}", path.read_bytes())
    folder = adapter_folder("memory://pickled-store/one", {})
    assert load_file(folder / WEIGHTS).keys() == load_file(saved / WEIGHTS).keys()
    files.pipe_file(f"/pickled-store/one/{WEIGHTS}", (saved / WEIGHTS).read_bytes())
    folder = adapter_folder("memory://pickled-store/one", {})
    assert (folder / PICKLE).read_bytes() == b""


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def archived(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(f"adapter_model/{name}", data)
    return sink.getvalue()


def saved_as(value: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()


def grown() -> bytes:
    """A tensor of 4 GB in a file of 1 KB: one number, with steps of zero."""
    return saved_as({"x": torch.ones(1).expand(1 << 15, 1 << 15)})


def repeated() -> bytes:
    """A hundred views of the same numbers."""
    numbers = torch.ones(1 << 14)
    return saved_as({f"x{i}": numbers for i in range(100)})


def recompressed() -> bytes:
    """An archive whose one record of 24 MB is zeros, compressed."""
    with zipfile.ZipFile(io.BytesIO(saved_as({"x": torch.ones(4)}))) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return archived(records | {"data/0": bytes(24 << 20)}, zipfile.ZIP_DEFLATED)


HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "code": (lambda mark: pickle.dumps(Bomb(mark)), "does not hold tensors alone"),
    "code in an archive": (
        lambda mark: archived({"data.pkl": pickle.dumps({"x": Bomb(mark)}, 2), "version": b"3"}),
        "does not hold tensors alone",
    ),
    "a module": (lambda _: saved_as(torch.nn.Linear(2, 2)), "does not hold tensors alone"),
    "an array": (lambda _: saved_as({"x": np.ones(3)}), "does not hold tensors alone|is ndarray"),
    "a list": (lambda _: saved_as([torch.ones(2)]), "holds list, expected tensors by name"),
    "a nested state": (
        lambda _: saved_as({"state_dict": {"x": torch.ones(2)}}),
        "state_dict is dict, expected a tensor",
    ),
    "a number": (lambda _: saved_as({"x": 3}), "x is int, expected a tensor"),
    "names that are numbers": (lambda _: saved_as({3: torch.ones(2)}), "3 is no name of a tensor"),
    "no memory": (lambda _: saved_as({"x": torch.ones(2, device="meta")}), "no plain tensor"),
    "sparse": (lambda _: saved_as({"x": torch.eye(3).to_sparse()}), "no plain tensor"),
    "steps of zero": (lambda _: grown(), "larger than the file"),
    "shared numbers": (lambda _: repeated(), "its tensors have 6553600 bytes"),
    "compressed zeros": (lambda _: recompressed(), "its records are compressed"),
    "nothing": (lambda _: b"", "does not hold tensors alone"),
    "text": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "does not hold tensors alone"),
    "a cut archive": (lambda _: saved_as({"x": torch.ones(999)})[:-200], "does not hold tensors alone"),
    "nesting": (lambda _: b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "does not hold tensors alone"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_pickle_of_anything_but_tensors_is_refused_and_runs_nothing(
    saved: Path, tmp_path: Path, own_cache: Path, kind: str
) -> None:
    make, what = HOSTILE[kind]
    folder = as_pickle(saved, tmp_path / "hostile")
    (folder / PICKLE).write_bytes(make(tmp_path / "ran"))
    with pytest.raises(AdapterRefusedError, match=what) as caught:
        adapter_folder(str(folder), {})
    assert str(caught.value).startswith(f"{PICKLE}: ")
    assert str(caught.value).endswith("Convert it where you trust the file: load it with PEFT, then save_pretrained.")
    assert not (tmp_path / "ran").exists()
    assert not own_cache.exists() or not [path for path in own_cache.iterdir() if not path.name.startswith(".")]


def test_a_refused_pickle_costs_only_itself(saved: Path, model: Path, tmp_path: Path) -> None:
    good = as_pickle(saved, tmp_path / "good")
    bad = as_pickle(saved, tmp_path / "bad")
    (bad / PICKLE).write_bytes(b"x")
    config = read_model_config(model)
    records = audit_all({"good": str(good), "bad": str(bad)}, model, config, {})
    assert [(each.name, each.verdict) for each in records] == [("good", "exact"), ("bad", "refused")]
    assert records[1].reasons[0].startswith(f"adapter 'bad': {PICKLE}: does not hold tensors alone")
    audits = audit_folders([str(good), str(bad)], str(model), {}, check_values=True)
    assert [audit.verdict for audit in audits] == ["exact", "refused"]


def test_links_out_of_the_folder_are_not_followed(saved: Path, model: Path, tmp_path: Path) -> None:
    folder = as_pickle(saved, tmp_path / "pickled")
    (folder / PICKLE).rename(tmp_path / "elsewhere.bin")
    (folder / PICKLE).symlink_to(tmp_path / "elsewhere.bin")
    (record,) = audit_all({"one": str(folder)}, model, read_model_config(model), {})
    assert record.verdict == "refused"
    assert f"{PICKLE}: a link that leads out" in record.reasons[0]


def test_zero_3_shells_are_refused_by_that_name_from_a_pickle_too(saved: Path, model: Path, tmp_path: Path) -> None:
    folder = as_pickle(saved, tmp_path / "pickled")
    torch.save({key: torch.empty(0) for key in load_file(saved / WEIGHTS)}, folder / PICKLE)
    (record,) = audit_all({"one": str(folder)}, model, read_model_config(model), {})
    assert "DeepSpeed ZeRO-3" in record.reasons[0]


def test_whole_parameters_that_share_memory_are_written_each(tmp_path: Path, saved: Path) -> None:
    folder = as_pickle(saved, tmp_path / "pickled")
    numbers = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": numbers, "b": numbers.T}, folder / PICKLE)
    found = load_file(adapter_folder(str(folder), {}) / WEIGHTS)
    assert torch.equal(found["a"].T, found["b"])
    save_file(found, tmp_path / "again.safetensors")
