"""What a folder, glob, hub id or hub cache stands for, and the latest checkpoint of a run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from other_forms import CONFIG, PICKLE, as_mlx, as_pickle

from lorabatch.jobs.errors import JobRequestError, StorageError
from lorabatch.jobs.opening.adapters import audit_folders, find_adapters
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.storage.adapter_copy import adapter_folder
from lorabatch.jobs.storage.local_copy import local_folder
from lorabatch.jobs.storage.location import Location

REVISION = "0123456789abcdef0123456789abcdef01234567"


def write_runs(place: Location) -> None:
    for run, numbers in {"a": (50, 100, 1000), "b": (1000,), "_draft": (1,), ".git": (1,)}.items():
        for number in numbers:
            place.write(f"{run}/checkpoint-{number}/{CONFIG}", b"{}")
        place.write(f"{run}/checkpoint-best/{CONFIG}", b"{}")
        place.write(f"{run}/trainer_state.json", b"{}")
    place.write("README.md", b"")


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("*/checkpoint-1000", {"a": "a/checkpoint-1000", "b": "b/checkpoint-1000"}),
        ("a/checkpoint-*0", {f"checkpoint-{n}": f"a/checkpoint-{n}" for n in (50, 100, 1000)}),
        ("?/checkpoint-1000*", {f"{run}-checkpoint-1000": f"{run}/checkpoint-1000" for run in "ab"}),
        ("[b-z]/checkpoint-*0", {"b-checkpoint-1000": "b/checkpoint-1000"}),
        ("**/checkpoint-best", {"a": "a/checkpoint-best", "b": "b/checkpoint-best"}),
        ("*/latest", {"a": "a/checkpoint-1000", "b": "b/checkpoint-1000"}),
        ("_*/checkpoint-1", {"_draft": "_draft/checkpoint-1"}),
    ],
)
def test_a_glob_names_adapters_by_what_its_wildcards_stand_for(
    tmp_path: Path, glob: str, expected: dict[str, str]
) -> None:
    write_runs(Location(str(tmp_path)))
    assert find_adapters(f"{tmp_path}/{glob}", {}) == {name: f"{tmp_path}/{path}" for name, path in expected.items()}


def test_names_of_a_glob_do_not_depend_on_what_else_matches(tmp_path: Path) -> None:
    write_runs(Location(str(tmp_path)))
    before = find_adapters(f"{tmp_path}/*/checkpoint-*", {})
    Location(str(tmp_path)).write(f"c/checkpoint-7/{CONFIG}", b"{}")
    after = find_adapters(f"{tmp_path}/*/checkpoint-*", {})
    assert after == before | {"c-checkpoint-7": f"{tmp_path}/c/checkpoint-7"}


def test_a_folder_whose_name_looks_like_a_glob_is_that_folder(tmp_path: Path) -> None:
    Location(str(tmp_path / "runs[1]")).write(f"one/{CONFIG}", b"{}")
    assert find_adapters(f"{tmp_path}/runs[1]", {}) == {"one": f"{tmp_path}/runs[1]/one"}


def test_a_glob_without_matches_or_with_two_of_one_name_is_refused(tmp_path: Path) -> None:
    write_runs(Location(str(tmp_path)))
    with pytest.raises(JobRequestError, match="no folder matches"):
        find_adapters(f"{tmp_path}/*/ckpt-*", {})
    Location(str(tmp_path)).write(f"a-checkpoint/50/{CONFIG}", b"{}")
    Location(str(tmp_path)).write(f"a/checkpoint-50/50/{CONFIG}", b"{}")
    with pytest.raises(JobRequestError, match=r"would both be 'a-checkpoint-50'.*--adapters NAME=URL"):
        find_adapters(f"{tmp_path}/**", {})


def test_latest_is_the_largest_number_not_the_last_name(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    write_runs(Location(url, options))
    assert find_adapters(f"{url}/a/latest", options) == {"a": f"{url}/a/checkpoint-1000"}
    assert find_adapters(f"{url}/*/latest", options) == {run: f"{url}/{run}/checkpoint-1000" for run in "ab"}
    assert find_adapters({"mine": f"{url}/a/latest", "b": f"{url}/b"}, options) == {
        "mine": f"{url}/a/checkpoint-1000",
        "b": f"{url}/b",
    }
    with pytest.raises(JobRequestError, match=r"no checkpoint in .*Expected folders checkpoint-NUMBER"):
        find_adapters({"mine": f"{url}/a/checkpoint-50/latest"}, options)


def test_a_folder_that_is_called_latest_is_itself(tmp_path: Path) -> None:
    write_runs(Location(str(tmp_path)))
    Location(str(tmp_path)).write(f"a/latest/{CONFIG}", b"{}")
    assert find_adapters({"mine": f"{tmp_path}/a/latest"}, {}) == {"mine": f"{tmp_path}/a/latest"}


def test_paths_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_runs(Location(str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    for given, expected in {
        "a/latest": f"{tmp_path}/a/latest",
        "*/latest": f"{tmp_path}/*/latest",
        "a": f"{tmp_path}/a",
        "org/name": "org/name",
    }.items():
        spec = JobSpec(model=str(tmp_path), adapters=given, input="in.parquet", output="out")
        assert spec.with_absolute_paths().adapters == expected
    spec = JobSpec(model=str(tmp_path), adapters={"x": "a/latest", "y": "org/name"}, input="in.parquet", output="out")
    assert spec.with_absolute_paths().adapters == {"x": f"{tmp_path}/a/latest", "y": "org/name"}


def cached(root: Path, source: Path, repository: str, revisions: tuple[str, ...] = (REVISION,)) -> Path:
    """A repository as a hub's cache has it: files of snapshots are links to blobs."""
    folder = root / repository
    (folder / "blobs").mkdir(parents=True)
    for revision in revisions:
        snapshot = folder / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for file in source.iterdir():
            blob = hashlib.sha256(file.read_bytes()).hexdigest()
            (folder / "blobs" / blob).write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revisions[-1])
    return folder


@pytest.fixture(scope="module")
def material(
    make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A base model and an adapter."""
    root = tmp_path_factory.mktemp("hub")
    model = make_model(root / "base")
    return model, make_adapter(root / "one", model, target_modules="all-linear")


def test_the_root_of_a_hub_cache_stands_for_its_adapters(material: tuple[Path, Path], tmp_path: Path) -> None:
    model, adapter = material
    root = tmp_path / "hub"
    one = cached(root, adapter, "models--org--one", ("0" * 40, REVISION))
    cached(root, as_pickle(adapter, tmp_path / "bin"), "models--other--two")
    cached(root, adapter, "models--org--two")
    cached(root, model, "models--org--base")
    (root / "datasets--org--rows").mkdir()
    found = find_adapters(str(root), {})
    assert found.keys() == {"one", "other--two", "org--two"}
    assert adapter_folder(found["one"], {}).name == REVISION
    assert find_adapters(str(one), {}) == {"one": str(one)}
    audits = audit_folders([str(root)], str(model), {}, check_values=True)
    assert [(audit.name, audit.verdict) for audit in audits] == [
        ("one", "exact"),
        ("org--two", "exact"),
        ("other--two", "exact"),
    ]
    assert len({audit.content_sha256 for audit in audits}) == 1
    (one / "refs" / "main").write_text("f" * 40)
    (audit,) = audit_folders([str(one)], str(model), {}, check_values=True)
    assert "2 snapshots, and refs/main names none of them" in audit.reasons[0]


def test_a_hub_cache_without_adapters_is_refused(material: tuple[Path, Path], tmp_path: Path) -> None:
    cached(tmp_path / "hub", material[0], "models--org--base")
    with pytest.raises(JobRequestError, match="none of its repositories is an adapter"):
        find_adapters(str(tmp_path / "hub"), {})


class Hub(BaseHTTPRequestHandler):
    """Speaks what huggingface_hub asks of the hub for a snapshot. `repositories`: id, or id@revision -> folder."""

    repositories: dict[str, Path]
    asked: list[str]

    def do_GET(self) -> None:
        """Answer a question about a repository, or give one of its files."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Describe a file."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        parts = [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        hub_id, parts = "/".join(parts[2:4] if is_api else parts[:2]), parts[4:] if is_api else parts[2:]
        # behind `revision`, `tree` or `resolve`
        revision = parts[1] if len(parts) > 1 else "main"
        name = next((name for name in self.repositories if revision in (commit_of(name), name.partition("@")[2])), None)
        name = hub_id if revision == "main" else name
        folder = self.repositories.get(name or "")
        if hub_id not in {name.partition("@")[0] for name in self.repositories}:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not there"}, with_body)
        elif folder is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "not there"}, with_body)
        elif is_api and "tree" in parts:
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                for file in sorted(folder.iterdir())
            ]
            self._send(200, json.dumps(files).encode(), {}, with_body)
        elif is_api:
            names = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            about = {"id": hub_id, "modelId": "x", "sha": commit_of(name), "siblings": names}
            about |= {"private": False, "tags": [], "downloads": 0, "likes": 0}
            self._send(200, json.dumps(about).encode(), {}, with_body)
        else:
            data = (folder / parts[-1]).read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": commit_of(name)}, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def commit_of(name: str | None) -> str:
    """The commit of a repository at a revision, as 40 digits."""
    return hashlib.sha1((name or "").encode()).hexdigest()


@pytest.fixture
def hub() -> Iterator[type[Hub]]:
    """A hub on the loopback interface; its address is `hub.endpoint`."""

    class OwnHub(Hub):
        repositories: dict[str, Path] = {}  # noqa: RUF012
        asked: list[str] = []  # noqa: RUF012
        endpoint = ""

    server = ThreadingHTTPServer(("127.0.0.1", 0), OwnHub)
    OwnHub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield OwnHub
    server.shutdown()
    server.server_close()


def audited(hub: Any, cache: Path, model: Path, *ids: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `lorabatch audit` in a process that knows only this hub."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(cache / "hf"),
        "XDG_CACHE_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "lorabatch", "audit", "--json", "--model", str(model), *ids]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_adapters_are_taken_from_the_hub_by_id(material: tuple[Path, Path], tmp_path: Path, hub: Any) -> None:
    model, adapter = material
    hub.repositories |= {
        "org/safe": adapter,
        "org/pickled": as_pickle(adapter, tmp_path / "pickled"),
        "org/mlx": as_mlx(adapter, tmp_path / "mlx"),
    }
    code, out, err = audited(hub, tmp_path / "cache", model, "org/safe", "org/pickled", "org/mlx")
    assert code == 0, err
    audits = json.loads(out)
    assert {audit["name"]: audit["verdict"] for audit in audits} == dict.fromkeys(("safe", "pickled", "mlx"), "exact")
    assert len({audit["content_sha256"] for audit in audits}) == 1
    assert any(path.endswith(PICKLE) for path in hub.asked)
    code, _, err = audited(hub, tmp_path / "cache", model, "org/missing")
    assert code != 0
    assert "'org/missing': no such local folder, and the hub did not give it" in " ".join(err.split())


def test_a_revision_of_the_hub_is_pinned_for_adapter_and_base(
    material: tuple[Path, Path], make_adapter: Callable[..., Path], tmp_path: Path, hub: Any
) -> None:
    model, adapter = material
    newer = make_adapter(tmp_path / "newer", model, target_modules=["q_proj"], seed=5)
    hub.repositories |= {
        "org/one": newer,
        "org/one@v1.0": adapter,
        "org/one@refs/pr/1": adapter,
        "org/Base-1B": tmp_path,
        "org/Base-1B@v2": model,
    }
    commit = "org/one@" + commit_of("org/one@v1.0")
    code, out, err = audited(hub, tmp_path / "cache", Path("org/Base-1B@v2"), "org/one@v1.0")
    assert code == 0, err
    (pinned,) = json.loads(out)
    assert (pinned["name"], pinned["verdict"]) == ("one", "exact")
    assert any(note.endswith("the one that is served is Base-1B") for note in pinned["notes"])
    hashes = []
    for hub_id in ("org/one", commit, "org/one@refs/pr/1"):
        _, out, err = audited(hub, tmp_path / "cache", model, hub_id)
        hashes += [audit["content_sha256"] for audit in json.loads(out)]
    assert [found == pinned["content_sha256"] for found in hashes] == [False, True, True]
    code, _, err = audited(hub, tmp_path / "cache", model, "org/one@v9")
    assert code != 0
    assert "'org/one@v9': no such local folder, and the hub did not give it" in " ".join(err.split())
    spec = JobSpec(model="org/Base-1B@v2", adapters="org/one@v1.0", input="in.parquet", output="out")
    spec = spec.with_absolute_paths()
    assert (spec.model, spec.adapters) == ("org/Base-1B@v2", "org/one@v1.0")


def test_a_base_is_read_from_a_hubs_cache(material: tuple[Path, Path], tmp_path: Path) -> None:
    model, adapter = material
    base = cached(tmp_path / "hub", model, "models--org--base", ("0" * 40, REVISION))
    cached(tmp_path / "hub", adapter, "models--org--one")
    assert local_folder(str(base), {}) == base / "snapshots" / REVISION
    (audit,) = audit_folders([str(adapter)], str(base), {}, check_values=True)
    assert audit.verdict == "exact"
    with pytest.raises(StorageError, match=r"a hub's cache\. Name one of its models: org/base, org/one\."):
        local_folder(str(tmp_path / "hub"), {})
