"""Writes the sources of `lorabatch-audit`: the command `audit` alone, for machines without torch such as trainers' CI.

    python install/audit_package.py FOLDER DIST

`make release` builds a wheel of them. The package is `lorabatch_audit`, with the modules of this checkout, whose
imports are relative: it can be installed beside lorabatch. `DIST` gets `audit-requirements.txt`, the locked versions of
what it needs, with hashes.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lorabatch_audit"
#: Packages that an audit imports.
NEEDED = ("typer", "fsspec", "tokenizers", "jinja2", "pydantic", "rich", "numpy")
# A dependency of tokenizers that an audit does not use, and that takes 20 MB.
_UNUSED = ("huggingface-hub",)
# Kernels are left out, but for the sizes by which models are described.
_ROOMS = ("console", "engine", "jobs", "system", "kernels/layouts")
_MODULES = ("cli.py", "version.py", "py.typed", "kernels/__init__.py")
_PIN = re.compile(r"^([\w.-]+)==.*\n(?: .+\n)*", re.MULTILINE)
_SUMMARY = "Says of LoRA adapters whether they are applied exactly; the command audit of lorabatch."
_README = f"# lorabatch-audit\n\n{_SUMMARY} It needs no torch: `lorabatch-audit --model BASE ADAPTERS`."
_INIT = '"""lorabatch-audit: says of LoRA adapters whether they are applied exactly, without torch."""\n'


def write_sources(folder: Path) -> None:
    """Write the package and its `pyproject.toml` into a folder, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / PACKAGE
    for room in _ROOMS:
        shutil.copytree(ROOT / room, package / room, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.h"))
    for module in _MODULES:
        shutil.copyfile(ROOT / module, package / module)
    (package / "__init__.py").write_text(_INIT, encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "pyproject.toml").write_text(_pyproject(package), encoding="utf-8")


def _pyproject(package: Path) -> str:
    with (ROOT / "pyproject.toml").open("rb") as file:
        whole = tomllib.load(file)
    project = whole["project"]
    needed = [text for text in project["dependencies"] if _name(text) in NEEDED]
    packages = sorted(".".join(file.parent.relative_to(package.parent).parts) for file in package.rglob("__init__.py"))
    lines = [
        "[build-system]",
        f"requires = {whole['build-system']['requires']!r}",
        f"build-backend = {whole['build-system']['build-backend']!r}",
        "[project]",
        "name = 'lorabatch-audit'",
        f"version = {project['version']!r}",
        f"description = {_SUMMARY!r}",
        f"readme = {{ text = {json.dumps(_README)}, content-type = 'text/markdown' }}",
        f"requires-python = {project['requires-python']!r}",
        f"license = {project['license']!r}",
        f"dependencies = {needed!r}",
        "[project.scripts]",
        f"lorabatch-audit = '{PACKAGE}.cli:audit_main'",
        "[tool.setuptools]",
        f"packages = {packages!r}",
        "[tool.setuptools.package-data]",
        f"{PACKAGE} = ['py.typed']",
    ]
    return "\n".join(lines) + "\n"


def requirements(lock: str) -> str:
    """The part of a lock that the package needs, directly or not, in the order of the lock."""
    found: set[str] = set()
    asked = list(NEEDED)
    while asked:
        name = asked.pop()
        if name in found or name in _UNUSED:
            continue
        found.add(name)
        asked += [_name(text) for text in _requires(name) if "extra ==" not in text]
    pins = [match for match in _PIN.finditer(lock) if _normalised(match[1]) in found]
    head = f"# Versions with hashes of what {PACKAGE.replace('_', '-')} needs, for pip's options --no-deps -r\n"
    return head + "".join(match[0] for match in pins)


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # of another system or version of Python
        return []


def _name(requirement: str) -> str:
    return _normalised(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sources, dist = map(Path, sys.argv[1:3])
    write_sources(sources)
    dist.mkdir(exist_ok=True)
    locked = (ROOT / "install" / "requirements.lock").read_text(encoding="utf-8")
    (dist / "audit-requirements.txt").write_text(requirements(locked), encoding="utf-8")
