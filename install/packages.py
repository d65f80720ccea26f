"""Installs a checkout and what it needs, and prints each package as it arrives: `make` runs it with the Python to fill.

    python install/packages.py torch              the pinned torch, in its CPU build where there is no GPU
    python install/packages.py lorabatch[demo]    this checkout, editable, with the extras it names

Versions come from `constraints.txt`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# Python compiles a module when it is first imported; most installed modules never are.
INSTALL = (*PIP, "install", "--no-compile", "-c", "constraints.txt")
# Lines of pip about its progress. They name a wheel and, if it is fetched, its size.
_WHEEL = re.compile(
    r" *(?:Downloading|Using cached|Processing) (?:\S*/)?([\w.]+)-(\d[^-]*)-\S+\.whl(?!\.metadata)(?: \((\d[^)]*)\))?"
)
_PRESENT = re.compile(r"Requirement already satisfied: ([\w.-]+)")
_BUILDING = re.compile(r" *Building \w+ for (\S+) .*: started")
_UNPACKING = "Installing collected packages: "


def main(requirement: str) -> int:
    """Install a requirement. Returns pip's exit status."""
    of_demo, of_tests = pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    if requirement != "torch":
        extras = requirement.removeprefix("lorabatch")
        expected = of_demo | of_tests if "test" in extras else of_demo
        print(f"Installing {requirement}: {len(expected)} packages", flush=True)
        return install("-e", f".{extras}", expected=expected)
    torch = f"torch=={of_demo['torch']}"
    if needs_index_of_cpu_builds(of_demo["torch"]):
        print(f"Installing {torch}, the build without CUDA: there is no nvidia-smi", flush=True)
        return install("--extra-index-url", CPU_BUILDS, torch)
    print(f"Installing {torch}", flush=True)
    return install(torch)


def pinned_versions(constraints: str) -> tuple[dict[str, str], dict[str, str]]:
    """Package -> pinned version: packages that lorabatch and its demo need, and packages that only its tests need."""
    of_demo, of_tests = (
        {_normalised(name): version for name, version in re.findall(r"^([\w.-]+)==(.+)$", section, re.MULTILINE)}
        for section in re.split("# Needed by the ", constraints)[:2]
    )
    return of_demo, of_tests


def needs_index_of_cpu_builds(version: str) -> bool:
    """Whether pip would take a torch with CUDA, of several gigabytes, on a machine without a GPU."""
    if sys.platform != "linux" or shutil.which("nvidia-smi"):
        return False
    # Unlike `install --dry-run`, this downloads nothing.
    offered = subprocess.run([*PIP, "index", "versions", "torch"], capture_output=True, text=True).stdout
    return not re.search(rf"^Available versions:.* {re.escape(version)}\+cpu", offered, re.MULTILINE)


def install(*arguments: str, expected: Collection[str] = ()) -> int:
    """Run pip and print a line per package; print all of pip's output when it fails. Returns pip's exit status.

    `expected`: names of the packages that are counted.
    """
    said: list[str] = []
    seen = set[str]()
    with subprocess.Popen(
        [*INSTALL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line)
            if shown := progress(line.rstrip(), seen, expected):
                print(f"  {shown}", flush=True)
    if pip.returncode:
        print(*said, sep="", file=sys.stderr)
    return pip.returncode


def progress(line: str, seen: set[str], expected: Collection[str]) -> str | None:
    """The progress that a line of pip shows, or None. Adds the package that the line names to `seen`."""
    wheel = _WHEEL.match(line)
    if named := wheel or _PRESENT.match(line):
        seen.add(_normalised(named[1]))
    if wheel:
        count = f"{len(seen.intersection(expected)):3}/{len(expected)}  " if expected else ""
        return f"{count}{wheel[1]} {wheel[2]}" + (f", {wheel[3]}" if wheel[3] else "")
    if building := _BUILDING.match(line):
        return f"building {building[1]}"
    return f"unpacking {line.count(',') + 1} packages" if line.startswith(_UNPACKING) else None


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
