"""Data sets of the Hugging Face hub, read through its own package from a server that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.input.conversion.source import Source
from lorabatch.jobs.input.file_version import has_changed
from lorabatch.jobs.input.files import read_footers
from lorabatch.jobs.storage.stores import open_store

pytest.importorskip("huggingface_hub")
SHA = "a" * 40


class Hub(ThreadingHTTPServer):
    """One data set, `team/rows`. `files`: path in it -> content."""

    files: dict[str, bytes]
    asked: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": SHA, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _entry(self, path: str) -> dict[str, Any]:
        content = self.server.files[path]
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        found = []
        for path in form.get("paths", []):
            if path in self.server.files:
                found.append(self._entry(path))
            elif any(name.startswith(f"{path}/") for name in self.server.files):
                found.append({"type": "directory", "path": path, "oid": "0" * 40})
        self._json(found)

    def do_GET(self) -> None:
        url = urlparse(self.path)
        path = unquote(url.path)
        self.server.asked.append(path)
        if path.startswith("/api/datasets/team/rows/tree/"):
            folder = path.removeprefix("/api/datasets/team/rows/tree/").partition("/")[2]
            names = [name for name in self.server.files if not folder or name.startswith(f"{folder}/")]
            folders = {name.rpartition("/")[0] for name in names if "/" in name} - {folder}
            entries = [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)]
            self._json([*entries, *map(self._entry, names)])
        elif path.startswith("/api/datasets/team/rows"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json({"id": "team/rows", "sha": SHA, "siblings": siblings, "private": False, "gated": False})
        elif path.startswith("/datasets/team/rows/resolve/"):
            self._file(path.removeprefix("/datasets/team/rows/resolve/").partition("/")[2])
        else:
            self._json({"error": "not found"}, 404)

    def _file(self, name: str) -> None:
        if name not in self.server.files:
            self._json({"error": "Entry not found"}, 404)
            return
        content = self.server.files[name]
        tag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        span = self.headers.get("Range")
        if span is None:
            self._send(content, 200, tag)
            return
        start, _, end = span.removeprefix("bytes=").partition("-")
        last = min(int(end or len(content)), len(content) - 1)
        place = f"bytes {start}-{last}/{len(content)}"
        self._send(content[int(start) : last + 1], 206, {**tag, "Content-Range": place})


@pytest.fixture
def hub() -> Iterator[tuple[Hub, dict[str, Any]]]:
    server = Hub(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server, {"endpoint": f"http://127.0.0.1:{server.server_port}", "token": False}
    server.shutdown()
    thread.join()
    server.server_close()


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def test_a_data_set_of_parquet_files(hub: tuple[Hub, dict[str, Any]]) -> None:
    server, options = hub
    server.files = {
        "README.md": b"about",
        "data/train-00000.parquet": parquet(pa.table({"prompt": ["a", "b"]})),
        "data/test-00000.parquet": parquet(pa.table({"prompt": ["c"]})),
    }
    footers, unread = read_footers(["hf://datasets/team/rows/data/train-*.parquet"], options)
    assert [(footer.file.name, footer.file.row_group_rows) for footer in footers] == [("train-00000.parquet", (2,))]
    footers, unread = read_footers(["hf://datasets/team/rows"], options)
    assert [footer.file.name for footer in footers] == ["test-00000.parquet", "train-00000.parquet"]
    assert unread == ("README.md",)
    (version,) = {footer.file.version for footer in footers if footer.file.name.startswith("train")}
    assert version is not None
    assert version.tag
    fs, _ = open_store("hf://datasets/team/rows", options)
    path = "datasets/team/rows/data/train-00000.parquet"
    assert not has_changed(fs, path, version)
    server.files["data/train-00000.parquet"] = parquet(pa.table({"prompt": ["a", "x"]}))
    assert has_changed(fs, path, version)


def test_a_revision_of_a_data_set(hub: tuple[Hub, dict[str, Any]]) -> None:
    server, options = hub
    server.files = {"data/train.parquet": parquet(pa.table({"prompt": ["a"]}))}
    footers, _ = read_footers(["hf://datasets/team/rows@v1.0/data/*.parquet"], options)
    assert [footer.file.name for footer in footers] == ["train.parquet"]
    revisions = {path.partition("/tree/")[2].partition("/")[0] for path in server.asked if "/tree/" in path}
    revisions |= {path.partition("/resolve/")[2].partition("/")[0] for path in server.asked if "/resolve/" in path}
    assert revisions == {"v1.0"}


def test_a_data_set_of_json_lines(hub: tuple[Hub, dict[str, Any]], tmp_path: Path) -> None:
    server, options = hub
    server.files = {"README.md": b"about", "train.jsonl": b'{"prompt": "a"}\n'}
    made, found = tmp_path / "made.parquet", []
    made.write_bytes(parquet(pa.table({"prompt": ["a"]})))

    def convert(items: Any) -> list[str]:
        found.extend(items)
        return [str(made)]

    read_footers(["hf://datasets/team/rows"], options, convert)
    (source,) = found
    assert isinstance(source, Source)
    assert (source.name, source.kind) == ("train.jsonl", "JSON Lines")
    with source.text() as (text, _):
        assert text.read() == server.files["train.jsonl"]
    size, version = source.facts()
    assert (size, bool(version.tag)) == (16, True)
