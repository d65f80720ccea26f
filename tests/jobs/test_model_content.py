"""The same content is the same model, wherever it lies; other content is another."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lorabatch.jobs.model_content import model_sha256


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "a.safetensors", "b.safetensors"):
        (folder / name).write_text(name)
    return folder


def test_a_copy_is_the_same_model(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("does not count")
    assert model_sha256(model, cache_root=tmp_path) == model_sha256(tmp_path / "copy", cache_root=tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "b.safetensors", "chat_template.jinja"])
def test_any_change_is_another_model(model: Path, tmp_path: Path, name: str) -> None:
    before = model_sha256(model, cache_root=tmp_path)
    (model / name).write_text("other")
    assert model_sha256(model, cache_root=tmp_path) != before


def test_weights_are_read_once_until_they_change(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_sha256(model, cache_root=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", None)
        assert model_sha256(model, cache_root=tmp_path) == before
    path = model / "a.safetensors"
    facts = path.stat()
    path.write_text("A.safetensors")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert model_sha256(model, cache_root=tmp_path) != before


def test_weights_do_not_count_when_none_are_loaded(model: Path, tmp_path: Path) -> None:
    before = model_sha256(model, with_weights=False, cache_root=tmp_path)
    (model / "a.safetensors").unlink()
    assert model_sha256(model, with_weights=False, cache_root=tmp_path) == before


def test_a_cache_that_cannot_be_written_costs_time_only(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache folder should be")
    assert model_sha256(model, cache_root=blocked) == model_sha256(model, cache_root=tmp_path)
