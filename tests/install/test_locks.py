"""Locked versions are those that are tested, with hashes, and what containers and conda install is there."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from lorabatch.install.packages import ROOT, pinned_versions

FOLDER = ROOT / "install"
LOCKS = ("requirements.lock", "requirements-cuda.lock")
_PIN = re.compile(r"^([\w.-]+)==([\w.]+)(.*\n(?: .+\n)*)", re.MULTILINE)


def pins(name: str) -> dict[str, tuple[str, str]]:
    """Version, and marker with hashes, by name."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    found = {package: (version, rest) for package, version, rest in _PIN.findall(text)}
    assert len(found) == len(re.findall(r"^\w", text, re.MULTILINE))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_version_has_hashes_and_is_the_tested_one(name: str) -> None:
    of_demo, of_tests = pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    tested = of_demo | of_tests
    for package, (version, rest) in pins(name).items():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", rest), package
        # what only other systems and GPUs need is not installed where the tests run
        assert tested.get(package, version) == version, package


def test_the_locks_have_all_that_lorabatch_and_its_demo_need_and_torch_stands_apart() -> None:
    of_demo, _ = pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    without_torch, with_cuda = (pins(name).keys() for name in LOCKS)
    assert of_demo.keys() <= without_torch | with_cuda
    assert {"torch"} == with_cuda & of_demo.keys()
    assert "triton" in with_cuda
    assert {"s3fs", "huggingface-hub"} <= without_torch
    assert not without_torch & with_cuda
    assert not [package for package in without_torch if package.startswith(("nvidia", "cuda"))]


def test_the_container_and_the_conda_environment_install_files_that_are_there() -> None:
    container = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    stages = re.findall(r"^FROM (\S+) AS (\w+)", container, re.MULTILINE)
    assert [name for _, name in stages] == ["base", "compiler", "wheel", "cpu", "cuda"]
    assert {base for base, _ in stages[1:]} <= {name for _, name in stages}
    assert {Path(name).name for name in re.findall(r"-r (\S+)", container)} == set(LOCKS)
    conda = yaml.safe_load((FOLDER / "environment.yml").read_text(encoding="utf-8"))
    assert conda["dependencies"][-1]["pip"] == ["--require-hashes", *(f"-r {name}" for name in reversed(LOCKS))]


def test_an_image_is_made_of_what_is_installed_and_not_of_what_git_ignores() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")]

    def is_ignored(path: str) -> bool:
        names = path.split("/")
        places = ["/".join(names[: count + 1]) for count in range(len(names))]
        return any(fnmatch(place, form.removeprefix("**/")) for place in (*places, names[-1]) for form in ignored)

    for line in (ROOT / ".gitignore").read_text("utf-8").splitlines():
        assert is_ignored(line.strip("/").replace("*", "x")), line
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = [name.removeprefix("lorabatch").replace(".", "/").strip("/") for name in settings["packages"]]
    sources = [name for module in settings["ext-modules"] for name in (*module["sources"], *module["depends"])]
    needed = [*(f"{folder}/__init__.py".strip("/") for folder in folders), *sources]
    needed += ["pyproject.toml", "setup.cfg", "README.md", "LICENSE", "constraints.txt", "demo/prompts.parquet"]
    needed += [f"install/{name}" for name in LOCKS]
    assert all((ROOT / name).exists() for name in needed)
    assert [name for name in needed if is_ignored(name)] == []
