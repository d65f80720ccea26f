"""The package of the command `audit` alone: what it says is what lorabatch says, without torch and the like."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lorabatch
from lorabatch.install.audit_package import NEEDED, PACKAGE, requirements, write_sources
from lorabatch.install.packages import ROOT

# Packages of lorabatch, and itself, that the command must do without.
ABSENT = (
    *("lorabatch", "torch", "triton", "dask", "distributed", "tornado", "pyarrow", "safetensors", "pulp", "llguidance"),
    *("yaml", "msgpack", "cryptography", "gguf", "bokeh", "transformers", "huggingface_hub", "pandas"),
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the package, and beside them modules that fail in place of those that must be absent."""
    folder = tmp_path_factory.mktemp("audit")
    write_sources(folder / "sources")
    for name in ABSENT:
        text = f'raise ModuleNotFoundError("No module named {name!r}", name={name!r})'
        (folder / "sources" / f"{name}.py").write_text(text)
    return folder / "sources"


def audit(alone: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `lorabatch-audit` in a fresh interpreter; its child processes have the same path."""
    code = f"import sys; sys.argv[0] = 'lorabatch-audit'; from {PACKAGE}.cli import audit_main; audit_main()"
    command = [sys.executable, "-P", "-c", code, *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(alone), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_says_what_lorabatch_says_and_needs_no_torch(
    alone: Path, tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    good = next(iter(tiny_adapters.values())).parent
    shutil.copytree(good / "rank8", tmp_path / "broken")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
    shutil.copytree(good / "rank8", tmp_path / "with-tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_llama / name, tmp_path / "with-tokenizer" / name)
    done = audit(alone, "--model", tiny_llama, "--json", good, tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    expected = lorabatch.audit([good, tmp_path], model=tiny_llama)
    assert found == json.loads(json.dumps([audited.to_json() for audited in expected]))
    verdicts = {audited["name"]: audited["verdict"] for audited in found}
    assert verdicts == dict.fromkeys([*tiny_adapters, "with-tokenizer"], "exact") | {"broken": "refused"}
    done = audit(alone, "--model", tiny_llama, good)
    assert done.returncode == 0
    assert "4 exact, 0 exact-by-merge, 0 refused" in done.stdout


def test_what_needs_the_whole_of_lorabatch_says_so(alone: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "base.gguf"
    model.write_bytes(b"GGUF" + bytes(100))
    done = audit(alone, "--model", model, next(iter(tiny_adapters.values())))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    done = audit(alone, "--model", tmp_path / "no-model", next(iter(tiny_adapters.values())))
    assert done.returncode == 2
    assert "no-model" in done.stderr


def test_its_requirements_are_locked_and_without_what_is_not_used() -> None:
    lock = (ROOT / "install" / "requirements.lock").read_text("utf-8")
    found = re.findall(r"^([\w.-]+)==", requirements(lock), re.MULTILINE)
    assert set(NEEDED) <= set(found)
    assert {"pydantic-core", "markupsafe", "shellingham"} <= set(found)
    assert not {"torch", "triton", "dask", "pyarrow", "huggingface-hub"} & set(found)
    assert requirements(lock).count("--hash=sha256:") >= len(found)
