"""What `make` installs: which build of torch, what it prints meanwhile, and the versions it counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
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
    for name, pinned in (of_demo | of_tests).items():
        with suppress(PackageNotFoundError):
            if (installed := distribution(name).version.partition("+")[0]) != pinned:
                pytest.skip(f"{name} {installed} is installed: other versions than the pinned ones need other packages")
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


#: Packages that messages and documents name and no extra has: for other stores and programs, or for one look.
WITHOUT_EXTRA = {
    *("smbprotocol", "libarchive-c", "webdav4[fsspec]", "xllamacpp", "openvino-genai", "pip-audit"),
    "jsonschema-specifications",  # what an extra brings
}
# Options of pip that a value follows.
WITH_VALUE = {"-r", "-c", "--index-url", "--extra-index-url"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = SETTINGS["optional-dependencies"]


def installations() -> list[tuple[str, list[str]]]:
    """Name of a file, and the words behind `pip install` there, for all that the repository says to install."""
    command = ["git", "ls-files", "*.py", "*.md", "Makefile", "install", ":!tests", ":!docs/adr"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    lines = [
        (name, line)
        for name in names
        for line in re.findall(r"pip install ([^\n;)`#]+)", (ROOT / name).read_text("utf-8"))
        if not re.search(r"[{$]", line)
    ]
    lines += [("INSTALLS", words) for words in INSTALLS.values()]
    words = ((name, re.split(r"[\s\"']+", line)) for name, line in lines)
    return [(name, [bare for word in found if (bare := word.strip(",:"))]) for name, found in words]


def test_what_messages_and_documents_say_to_install_is_what_the_extras_have() -> None:
    """This package is on no index: a checkout is installed with extras, and what else is needed by its own name."""
    needed = {Requirement(line).name for line in SETTINGS["dependencies"]}
    extras = {extra: {named(line) for line in lines} for extra, lines in EXTRAS.items()}
    seen: set[str] = set()
    for place, words in installations():
        packages: set[str] = set()
        for word, before in zip(words, ["", *words], strict=False):
            if word.startswith("-") or before in WITH_VALUE or word.endswith(".whl") or word in (".", "CHECKOUT"):
                continue
            if word.startswith(".["):
                assert set(word[2:-1].split(",")) <= EXTRAS.keys(), f"{place}: {word}"
            else:
                packages.add(named(word))
        assert "lorabatch" not in packages, place
        seen |= packages
        rest = packages - WITHOUT_EXTRA - {"torch"}
        has_all = [extra for extra in extras if rest <= extras[extra] | needed]
        assert has_all or rest <= extras["test"] | extras["bench"] | needed, f"{place}: no extra has {sorted(rest)}"
    assert {"pandas", "peft", "duckdb", "matplotlib", "huggingface_hub", "dask[dataframe]", "triton", "s3fs"} <= seen
    assert seen >= WITHOUT_EXTRA


def named(requirement: str) -> str:
    """Name of a requirement, with its extras."""
    found = Requirement(requirement)
    return found.name + (f"[{','.join(sorted(found.extras))}]" if found.extras else "")


def test_the_extras_are_listed_with_what_they_add() -> None:
    table = re.findall(r"^\| `(\w+)` \| (.+) \|$", (ROOT / "docs/start/install.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(name for name, _ in table) == sorted(EXTRAS)
    needed = {re.split(r"\W", line)[0] for line in SETTINGS["dependencies"]}
    for extra, lines in EXTRAS.items():
        added = {Requirement(line).name for line in lines} - needed
        assert added, f"{extra} adds nothing to what is installed anyway"
