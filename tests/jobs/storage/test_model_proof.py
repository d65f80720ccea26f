"""What was loaded from a base folder is what the job names, or it is said: by remembered digests, else by bytes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorabatch.jobs.storage import local_copy
from lorabatch.jobs.storage.local_copy import model_sha256
from lorabatch.jobs.storage.model_proof import ModelProof

FILES = {"config.json": "{}", "tokenizer.json": "t", "model.safetensors": "weights"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def prove(base: Path, tmp_path: Path) -> Iterator[Callable[..., ModelProof]]:
    """Proofs of the folder as it was at first."""
    expected = model_sha256(base, cache_root=tmp_path)
    made: list[ModelProof] = []

    def make(**options: bool) -> ModelProof:
        made.append(ModelProof(base, expected, cache_root=tmp_path, **{"with_weights": True} | options))
        return made[-1]

    yield make
    for proof in made:
        proof.close()


def replace(path: Path, content: str) -> None:
    """Rename another file over this one."""
    path.with_suffix(".new").write_text(content)
    os.replace(path.with_suffix(".new"), path)


def test_the_same_folder_is_proven_by_remembered_digests(
    base: Path, prove: Callable[..., ModelProof], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_copy.hashlib, "file_digest", lambda *_: pytest.fail("a file was read"))
    proof = prove()
    assert proof.problem(proof.digest()) is None
    assert proof.later_problem() is None


def test_a_folder_that_is_not_remembered_is_read(base: Path, prove: Callable[..., ModelProof], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "digests")
    proof = prove()
    assert proof.problem(proof.digest()) is None


@pytest.mark.parametrize("name", list(FILES))
def test_other_content_is_said_for_good(base: Path, prove: Callable[..., ModelProof], name: str) -> None:
    replace(base / name, "other")
    proof = prove()
    problem = proof.problem(proof.digest())
    assert problem is not None
    text, is_permanent = problem
    assert is_permanent
    assert "holds content" in text
    assert f"expected {proof._expected[:12]}: its files have changed" in text


@pytest.mark.parametrize("change", ["replaced", "written to", "removed", "another set"])
def test_files_that_change_while_they_are_loaded_are_loaded_again(
    base: Path, prove: Callable[..., ModelProof], change: str
) -> None:
    proof = prove()
    digest = proof.digest()
    path = base / "model.safetensors"
    if change == "replaced":
        replace(path, FILES[path.name])  # equal, but what was opened is not known
    elif change == "written to":
        path.write_text("other")
    elif change == "removed":
        path.unlink()
    else:
        (base / "added_tokens.json").write_text("{}")
    problem = proof.problem(digest)
    assert problem is not None
    text, is_permanent = problem
    assert not is_permanent
    assert "was changed while it was loaded" in text


def test_files_written_to_in_place_are_found_later(base: Path, prove: Callable[..., ModelProof]) -> None:
    proof = prove()
    assert proof.problem(proof.digest()) is None
    path = base / "model.safetensors"
    os.utime(path, ns=(1, 1))
    assert proof.later_problem() is None, "the content is the same"
    path.write_text("longer than before")
    problem = proof.later_problem()
    assert problem is not None
    assert "model.safetensors was written to while an engine used it" in problem


def test_files_replaced_after_loading_leave_the_engine_alone(base: Path, prove: Callable[..., ModelProof]) -> None:
    proof = prove()
    assert proof.problem(proof.digest()) is None
    replace(base / "model.safetensors", "other")
    (base / "tokenizer.json").unlink()
    assert proof.later_problem() is None


def test_weights_do_not_count_where_none_are_read(base: Path, tmp_path: Path) -> None:
    expected = model_sha256(base, with_weights=False, cache_root=tmp_path)
    replace(base / "model.safetensors", "other")
    proof = ModelProof(base, expected, with_weights=False, cache_root=tmp_path)
    assert proof.problem(proof.digest()) is None
    proof.close()


def test_without_a_hash_nothing_is_looked_at(tmp_path: Path) -> None:
    proof = ModelProof(tmp_path / "nowhere", "", with_weights=True)
    assert proof.problem("x") is None
    assert proof.later_problem() is None


def test_weights_that_are_not_read_are_no_part_of_the_hash(base: Path, tmp_path: Path) -> None:
    before = model_sha256(base, cache_root=tmp_path)
    (base / "model-00001-of-00001.safetensors").write_text("stale")
    assert model_sha256(base, cache_root=tmp_path) == before


def test_files_are_not_closed_while_they_are_looked_at(
    prove: Callable[..., ModelProof], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that ended at that moment ended its supervisor: "Bad file descriptor"."""
    proof = prove()
    assert proof.problem(proof.digest()) is None
    status, closing = os.fstat, threading.Thread(target=proof.close)

    def status_while_closing(number: int) -> os.stat_result:
        if closing.ident is None:
            closing.start()
            closing.join(0.2)
        return status(number)

    monkeypatch.setattr(os, "fstat", status_while_closing)
    assert proof.later_problem() is None
    closing.join()
    assert proof.later_problem() is None
