"""The oldest versions that `pyproject.toml` allows run a job, with every extra that a user may want.

Each form makes an environment of its own. torch is a build without CUDA: the oldest allowed, and the pinned one. Where
no such build is offered for a Python, what needs no torch is run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement

from lorabatch.install.packages import CPU_BUILDS, ROOT, pinned_versions
from lorabatch.tests.end_to_end.bucket import Bucket, s3_server

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="builds of torch are chosen for it")]
EXTRAS = ("demo", "s3", "gpu")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def lower_bounds() -> dict[str, str]:
    """By name what pip is asked for: `==` where `pyproject.toml` says `>=`."""
    extras = [line for extra in EXTRAS for line in SETTINGS["optional-dependencies"][extra]]
    found = {}
    for requirement in map(Requirement, SETTINGS["dependencies"] + extras):
        (bound,) = (part.version for part in requirement.specifier if part.operator == ">=")
        named = requirement.name + (f"[{','.join(requirement.extras)}]" if requirement.extras else "")
        found[requirement.name] = f"{named}=={bound}" + (f"; {requirement.marker}" if requirement.marker else "")
    # s3fs needs the fsspec of its own version
    del found["fsspec"]
    return found


def python_of(version: str) -> str:
    """An interpreter of this version that runs; skips the test without one."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
        return found
    pytest.skip(f"there is no Python {version}")


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    """A server in the environment of the tests; its clients are of the oldest versions."""
    with s3_server(tmp_path) as found:
        found.fs.mkdir("bucket")
        yield found


class Environment:
    """A virtual environment with lorabatch in it, and a folder to use it from, outside the checkout."""

    def __init__(self, folder: Path, python: str) -> None:
        folder.mkdir()
        self.folder, self.bin = folder, folder / "env" / "bin"
        self.values = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LORABATCH"))}
        self.values |= {"LORABATCH_HISTORY": "off", "PATH": f"{self.bin}:{os.environ['PATH']}", "COLUMNS": "200"}
        self.run([python, "-m", "venv", str(folder / "env")])

    def run(self, command: list[str], **more: Any) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.values, capture_output=True, text=True, **more)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def pip(self, *words: str) -> None:
        self.run([str(self.bin / "pip"), "install", "-q", "--no-compile", "--disable-pip-version-check", *words])

    def lorabatch(self, *words: str) -> str:
        return self.run([str(self.bin / "lorabatch"), *words])

    def has(self, build: str) -> bool:
        """Whether this build of torch could be installed: it is offered, and no constraint of the machine's pip names
        another version.
        """
        pip = [str(self.bin / "pip"), "install", "-q", "--no-compile", "--retries", "0"]
        command = [*pip, "--extra-index-url", CPU_BUILDS, build]
        done = subprocess.run(command, env=self.values, capture_output=True, text=True, check=False)
        is_refused = any(reason in done.stderr for reason in ("No matching distribution found", "ResolutionImpossible"))
        assert done.returncode == 0 or is_refused, done.stderr
        return done.returncode == 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy of what is tracked, so that nothing is built in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "checkout")], check=True)
    shutil.copy(ROOT / "pyproject.toml", folder / "checkout")
    command = ["pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(folder / "checkout")]
    # without a compiler it is for every Python: what it does is known to be the same
    subprocess.run([sys.executable, "-m", *command], check=True, env=os.environ | {"CC": "false"})
    (found,) = folder.glob("*.whl")
    return found.rename(found.with_name(f"lorabatch-{SETTINGS['version']}-py3-none-any.whl"))


@pytest.mark.parametrize("torch", ["oldest", "pinned"])
@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_the_oldest_versions_that_are_allowed_run_a_job(
    version: str,
    torch: str,
    wheel: Path,
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    bucket: Bucket,
    tmp_path: Path,
) -> None:
    user = Environment(tmp_path / "user", python_of(version))
    bounds = lower_bounds()
    builds = {"oldest": bounds.pop("torch"), "pinned": f"torch=={pinned_torch()}"}
    has_torch = user.has(f"{builds[torch]}+cpu")
    if not has_torch and torch == "oldest":
        pytest.skip(f"no {builds[torch]} without CUDA is offered for Python {version}")
    if torch == "pinned":
        bounds.pop("triton")  # torch decides
    user.pip("--only-binary", ":all:", *bounds.values())
    user.pip("--no-deps", str(wheel))
    pq.write_table(pa.table({"adapter": [None, *tiny_adapters], "prompt": ["a b c"] * 5}), user.folder / "rows.parquet")
    adapters = str(next(iter(tiny_adapters.values())).parent)
    job = ["--model", str(tiny_llama), "--adapters", adapters, "--max-tokens", "4", "--workers", "1"]
    assert "--max-tokens" in user.lorabatch("run", "--help")
    assert "4 exact, 0 exact-by-merge, 0 refused" in user.lorabatch("audit", "--model", str(tiny_llama), adapters)
    user.lorabatch("plan", *job, "--input", "rows.parquet")
    user.lorabatch("simulate", "--rows", "50", "--adapters", "4", "--workers", "2")
    if not has_torch:
        pytest.skip(
            f"no {builds[torch]} without CUDA is offered for Python {version}: only what needs no torch was run"
        )
    user.lorabatch("run", *job, "--input", "rows.parquet", "--output", "out")
    status = json.loads(user.lorabatch("status", "out", "--json"))
    assert (status["outcome"], status["state"]["rows_done"], status["state"]["rows_error"]) == ("done", 5, 0)
    user.lorabatch("report", "out")
    assert "Bokeh" in (user.folder / "report.html").read_text(encoding="utf-8")
    query = "import duckdb; print(duckdb.sql(\"SELECT count(DISTINCT id) FROM 'out/*.parquet'\").fetchone())"
    assert user.run([str(user.bin / "python"), "-c", query]) == "(5,)\n"
    bucket.fs.put(str(user.folder / "rows.parquet"), "bucket/rows.parquet")
    remote = ["--input", "s3://bucket/rows.parquet", "--output", "s3://bucket/out"]
    user.lorabatch("run", *job, *remote, "--storage-options", json.dumps(bucket.options))
    assert {"_SUCCESS", "part-00000.parquet"} <= bucket.names("out")


def pinned_torch() -> str:
    """The version that `make` installs."""
    return pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))[0]["torch"]
