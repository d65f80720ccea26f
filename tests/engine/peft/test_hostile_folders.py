"""Adapter folders made to end or to hang the audit: each is refused by name, and the next one is audited.

What libraries do not survive is in `tests/jobs/opening/test_confined_audit.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorabatch.engine.peft import audit_adapter
from lorabatch.system.confinement import confined
from lorabatch.system.untrusted import NoProcessError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"


def configured(**keys: Any) -> Callable[[Path], None]:
    """Sets keys of the configuration."""

    def change(folder: Path) -> None:
        file = folder / CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def headed(header: str) -> Callable[[Path], None]:
    """Replaces the weights by a file with this header and no data."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header.encode())

    return change


def tensor(shape: str, key: str = "x") -> str:
    return f'{{"{key}":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}'


def replaced(name: str, target: str | None) -> Callable[[Path], None]:
    """Puts a link to `target`, or a pipe, in a file's place."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if target is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(target)

    return change


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def sharded_by_pipe(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00001.safetensors")
    os.mkfifo(folder / INDEX)


def sparse(name: str, num_bytes: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(num_bytes)

    return change


def linked(name: str) -> Callable[[Path], None]:
    """Moves a file out of the folder, next to it, and links to it, as one would link to another tenant's."""

    def change(folder: Path) -> None:
        (folder / name).touch()
        theirs = (folder / name).rename(folder.with_name(f"theirs-{name}"))
        (folder / name).symlink_to(theirs)

    return change


EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
HUGE = "1" + "0" * 3000
SLOW = "([a-z0-9_.]+)+!"
NESTED = "[" * 100_000 + "]" * 100_000
FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "alpha of 400 digits": (written(CONFIG, f'{{"lora_alpha": 1{"0" * 400}}}'), "a number of 401 digits"),
    "alpha beyond floats": (written(CONFIG, '{"lora_alpha": 1e999}'), "expected a finite number"),
    "rank of 64 digits": (configured(r=10**63), "expected 100000"),
    "nested configuration": (written(CONFIG, f'{{"x": {NESTED}}}'), "it nests too deeply"),
    "nested below the limit of Python": (configured(x=json.loads("[" * 400 + "]" * 400)), "this key is not known"),
    "pipe as configuration": (replaced(CONFIG, None), "adapter_config.json: cannot be read (not a regular file)"),
    "device as configuration": (replaced(CONFIG, "/dev/zero"), "cannot be read (not a regular file)"),
    "configuration of others": (linked(CONFIG), f"{CONFIG}: a link that leads out of the adapter's folder"),
    "weights of others": (linked(WEIGHTS), f"{WEIGHTS}: a link that leads out of the adapter's folder"),
    "tokenizer of others": (
        linked("tokenizer.json"),
        "tokenizer.json: a link that leads out of the adapter's folder",
    ),
    "configuration of 1 TB": (sparse(CONFIG, 1 << 40), "bytes, expected at most"),
    "pipe as weights": (replaced(WEIGHTS, None), "adapter_model.safetensors: missing"),
    "device as weights": (replaced(WEIGHTS, "/dev/zero"), "adapter_model.safetensors: missing"),
    "pipe as index": (sharded_by_pipe, "adapter_model.safetensors.index.json: missing"),
    "tokenizer of 1 TB": (sparse("tokenizer.json", 1 << 40), "bytes, expected at most"),
    "shape of 3,000 digits": (headed(tensor(f"[{HUGE},{HUGE}]")), "a number of 3001 digits"),
    "2,000 dimensions": (headed(tensor(str([10**60] * 2000))), "header entry for 'x' is malformed"),
    "bytes of 500 digits": (headed(tensor(str([10**60] * 8))), "has 0 bytes, not 4000"),
    "nested header": (headed(f'{{"x": {NESTED}}}'), "it nests too deeply"),
    "name of 1 MB": (headed(tensor("[0]", ".lora_A" * 150_000)), "characters, expected at most 512"),
    "800,000 empty tensors": (
        headed("{" + ",".join(f'"{i}":{EMPTY}' for i in range(800_000)) + "}"),
        "its header has 46288891 bytes, expected at most 33554432",
    ),
    "500,000 empty tensors": (
        headed("{" + ",".join(f'"{i}":{EMPTY}' for i in range(500_000)) + "}"),
        "it lists 500000 tensors, expected at most 120000",
    ),
    "100,000 targets": (configured(target_modules=[f"m{i}" for i in range(100_000)]), "adapter 'bad'"),
    **{
        f"backtracking in {key}": (configured(**{key: value}), "it takes more than 5 s of computing")
        for key, value in {
            "target_modules": SLOW,
            "exclude_modules": SLOW,
            "rank_pattern": {SLOW: 4},
            "alpha_pattern": {SLOW: 4},
            "modules_to_save": [SLOW],
        }.items()
    },
    "backtracking in layers_pattern": (
        configured(layers_pattern=[SLOW], layers_to_transform=[0]),
        "it takes more than 5 s of computing",
    ),
    "20,000 groups": (configured(target_modules="(a)" * 20_000), "adapter 'bad'"),
    "5,000 nested groups": (configured(exclude_modules="(" * 5000 + "a" + ")" * 5000), "expected a valid regular"),
    "group of our own name": (
        configured(layers_pattern=["(?P<index>layers)"], layers_to_transform=[0]),
        "redefinition of group name",
    ),
    "pattern of 1 MB": (configured(target_modules="a|" * 500_000), "characters, expected at most 100000"),
    "negative infinity": (written(CONFIG, '{"lora_alpha": -Infinity}'), "is not a number"),
    "half a surrogate pair": (configured(**{"\ud800": 1}), r"\ud800=1: this key is not known"),
    "escape sequences": (configured(**{"\x1b[2J\x1b]0;title\x07\x9b": 1}), r"\x1b[2J\x1b]0;title\x07\x9b=1"),
    "key that turns its line": (configured(**{"\u202etxt.exe\u2028": 1}), r"\u202etxt.exe\u2028=1"),
    "key of 1 MB": (configured(**{"k" * 1_000_000: 1}), f"{'k' * 79}…=1: this key"),
}


def is_long(name: str) -> bool:
    """Each pattern that backtracks takes the five seconds that it is allowed; one of them will do."""
    return name.startswith("backtracking in ") and name != "backtracking in target_modules"


CASES = [pytest.param(*case, id=name, marks=[pytest.mark.long] * is_long(name)) for name, case in FOLDERS.items()]


@pytest.mark.parametrize(("change", "reason"), CASES)
def test_a_hostile_folder_is_refused_by_name(
    plain: Any, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    bad = Path(shutil.copytree(plain.folder, tmp_path / "bad"))
    change(bad)
    audit = audit_adapter(bad, plain.base.config, "bad")
    assert audit.verdict == "refused"
    said = "\n".join(audit.reasons)
    assert reason in said
    assert "adapter 'bad'" in said
    assert said.replace("\n", "").isprintable()
    assert max(map(len, audit.reasons)) < 1000
    json.dumps(audit.to_json()).encode()
    assert audit_adapter(plain.folder, plain.base.config, "good").verdict == "exact"


@pytest.mark.parametrize(
    ("executable", "reason"), [("/nowhere/python", "No such file"), ("/bin/false", "ends at once")]
)
def test_a_process_that_cannot_start_is_no_fault_of_the_data(
    monkeypatch: pytest.MonkeyPatch, plain: Any, executable: str, reason: str
) -> None:
    confined.cache_clear()
    monkeypatch.setattr(sys, "executable", executable)
    (plain.folder / "adapter_config.json").write_text('{"target_modules": "(q_proj)+"}')
    with pytest.raises(NoProcessError, match=f"cannot start the process.*{reason}.*This machine lacks memory"):
        audit_adapter(plain.folder, plain.base.config, "innocent")
    confined.cache_clear()


def test_notes_have_no_control_characters(plain: Any) -> None:
    configured(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "\x1b[2J", "\ud800"])(plain.folder)
    audit = audit_adapter(plain.folder, plain.base.config, "noted")
    assert r"\x1b[2J" in "".join(audit.notes)
    assert r"\ud800" in "".join(audit.notes)
    assert "".join(audit.notes).isprintable()
