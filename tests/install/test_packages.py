"""What `make` installs: which build of torch, what it prints meanwhile, and the versions it counts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lorabatch.install.packages import ROOT, install, needs_index_of_cpu_builds, pinned_versions, progress
from lorabatch.jobs.storage.redaction import INSTALLS

# What pip prints, of several versions.
PIP_SAYS = """\
Looking in indexes: https://user:hush@index.example/simple
Obtaining file:///home/me/lora%20batch
  Installing build dependencies: started
Requirement already satisfied: torch>=2.10 in ./.venv/lib (from lorabatch==0.1.0) (2.13.0+cpu)
Collecting pyarrow>=18 (from lorabatch==0.1.0)
  Downloading pyarrow-26.0.1-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (3.1 kB)
  Downloading https://user:hush@index.example/pyarrow-26.0.1-cp311-cp311-manylinux_2_28_x86_64.whl (55.0 MB)
     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 55.0/55.0 MB 79.0 MB/s eta 0:00:00
Processing ./wheels/PyYAML-6.0.3-cp311-cp311-manylinux2014_x86_64.whl (from lorabatch==0.1.0)
  Using cached annotated_types-0.8.0-py3-none-any.whl (13 kB)
WARNING: Location 'file:///simple/pulp/' is ignored: it is neither a file nor a directory.
  Building editable for lorabatch (pyproject.toml): started
  Building editable for lorabatch (pyproject.toml): finished with status 'done'
Installing collected packages: pyyaml, pyarrow, annotated-types, lorabatch
Successfully installed pyyaml-6.0.3 pyarrow-26.0.1 annotated-types-0.8.0 lorabatch-0.1.0
"""


def test_each_package_is_printed_once_with_its_size_and_how_many_are_there() -> None:
    seen: set[str] = set()
    expected = ("annotated-types", "numpy", "pyarrow", "pyyaml", "torch")
    assert [shown for line in PIP_SAYS.splitlines() if (shown := progress(line, seen, expected))] == [
        "  2/5  pyarrow 26.0.1, 55.0 MB",
        "  3/5  PyYAML 6.0.3",
        "  4/5  annotated_types 0.8.0, 13 kB",
        "building lorabatch",
        "unpacking 4 packages",
    ]


def test_a_failed_installation_prints_what_pip_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert install("--no-index", "--find-links", "/", "no-such-package==1") == 1
    assert "No matching distribution found for no-such-package==1" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has no build with CUDA")
@pytest.mark.parametrize(
    ("offered", "has_gpu", "expected"),
    [("2.13.0", False, True), ("2.13.0", True, False), ("2.13.0+cpu", False, False), ("2.12.0+cpu", False, True)],
)
def test_pytorchs_own_index_is_asked_only_without_a_gpu_and_a_cpu_build(
    offered: str, has_gpu: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"torch-{offered}-py3-none-any.whl").touch()
    # as in a pip configuration: an index of one's own
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    if has_gpu:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert needs_index_of_cpu_builds("2.13.0") is expected


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or sys.platform != "linux", reason="other packages are needed there"
)
def test_the_pinned_versions_are_of_all_that_is_installed_and_of_nothing_else() -> None:
    """A package without a pinned version would be another one any day."""
    of_demo, of_tests = pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    needed = requirements("lorabatch", "demo")
    assert of_demo.keys() == needed
    assert of_tests.keys() == requirements("lorabatch", "demo", "test") - needed


def requirements(name: str, *extras: str) -> set[str]:
    """Names of all packages that this one needs, by what those that are installed say."""
    found: set[tuple[str, str]] = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    while waiting:
        package = waiting.pop()
        if package not in found:
            found.add(package)
            for requirement in map(Requirement, distribution(package[0]).requires or ()):
                if requirement.marker is None or requirement.marker.evaluate({"extra": package[1]}):
                    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
                    waiting += [(name, extra) for extra in ("", *requirement.extras)]
    return {package for package, _ in found} - {"lorabatch"}


def test_compiled_modules_share_no_source_and_list_all_that_they_include() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    modules = settings["tool"]["setuptools"]["ext-modules"]
    sources = [source for module in modules for source in module["sources"]]
    assert len(sources) == len(set(sources)), "modules are compiled at the same time, into one object file per source"
    kernels = {str(path.relative_to(ROOT)) for kind in ("c", "h") for path in (ROOT / "kernels").rglob(f"*.{kind}")}
    for module in modules:
        assert set(module["depends"]) == kernels - set(sources)


#: Packages that messages name and that tests have not: for storage and programs that are not part of them.
NOT_PINNED = {"xllamacpp", "openvino-genai", "smbprotocol", "libarchive-c", "webdav4[fsspec]"}


def test_what_messages_say_to_install_can_be_installed() -> None:
    """This package is on no index: its extras are named by what they have."""
    listed = subprocess.check_output(["git", "ls-files", "*.py", ":!tests"], cwd=ROOT, text=True).split()
    files = [ROOT / name for name in listed]
    said = [line for path in files for line in re.findall(r"pip install ([^\n;)]*)", path.read_text("utf-8"))]
    words = {word for line in said if "{" not in line for word in shlex.split(line.rstrip("\"',: ").replace('"', ""))}
    words |= {shlex.split(word)[0] for word in INSTALLS.values()}
    named = {word for word in words if not word.startswith("-") and word != "CHECKOUT"} - NOT_PINNED
    assert {"pandas", "peft", "duckdb", "matplotlib", "huggingface_hub", "dask[dataframe]"} <= named
    assert "lorabatch" not in {Requirement(word).name for word in named}
    found = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", *sorted(named)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
