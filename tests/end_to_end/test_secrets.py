"""Secrets in URLs, storage options and the environment: nowhere in the output, the logs or what is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from echo_job import ECHO_FOLDER, EchoJob, make_rows

SIGNATURE, TOKEN, PASSWORD = "signature-5f2c", "token-91ab", "password-77de"

pytestmark = pytest.mark.long


class SignedFiles(BaseHTTPRequestHandler):
    """Serves one file to those who know the signature, by ranges, as object stores do for signed URLs."""

    content = b""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        if f"X-Signature={SIGNATURE}" not in self.path:
            self.send_error(403)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        last = int(wanted[2]) if wanted and wanted[2] else len(self.content) - 1
        body = self.content[first : last + 1]
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(self.content)}")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def signed_input(echo_job: EchoJob) -> Iterator[str]:
    """The input behind a URL that needs a signature."""
    echo_job.write_input(make_rows(60))
    SignedFiles.content = (echo_job.folder / "input.parquet").read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), SignedFiles)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/rows.parquet"
    server.shutdown()
    thread.join()
    server.server_close()


def lorabatch(echo_job: EchoJob, **more: str) -> subprocess.CompletedProcess[str]:
    options = echo_job.options(**more)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    storage = json.dumps({"http": {"headers": {"Authorization": f"Bearer {TOKEN}"}}})
    return subprocess.run(
        [sys.executable, str(ECHO_FOLDER / "echo_cli.py"), "run", *words, f"--storage-options={storage}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"AWS_SECRET_ACCESS_KEY": PASSWORD, "HF_TOKEN": PASSWORD},
    )


def leaks(folder: Path) -> list[str]:
    """Files below a folder that hold a secret."""
    secrets = [secret.encode() for secret in (SIGNATURE, TOKEN, PASSWORD)]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)]


@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_a_job_with_secrets_leaves_them_nowhere(echo_job: EchoJob, signed_input: str, chain: str) -> None:
    done = lorabatch(echo_job, input=f"{chain}{signed_input}?X-Signature={SIGNATURE}")
    assert done.returncode == 0, done.stderr
    assert len(echo_job.rows()) == 60
    assert leaks(echo_job.folder) == []
    assert not any(secret in done.stdout + done.stderr for secret in (SIGNATURE, TOKEN, PASSWORD))
    assert echo_job.record.input.files[0].name == "rows.parquet"
    assert echo_job.record.input.files[0].url.endswith("rows.parquet?***")


def test_a_job_that_fails_tells_no_secret_either(echo_job: EchoJob, signed_input: str) -> None:
    refused = lorabatch(echo_job, input=f"{signed_input}?X-Signature={PASSWORD}")
    assert refused.returncode == 2
    assert "rows.parquet" in refused.stderr
    assert not any(secret in refused.stdout + refused.stderr for secret in (TOKEN, PASSWORD))
    echo_job.set_engine(fail_start="no engine for the test")
    failed = lorabatch(echo_job, input=f"{signed_input}?X-Signature={SIGNATURE}")
    assert failed.returncode == 1
    assert "no engine for the test" in failed.stderr
    assert leaks(echo_job.folder) == []
    assert not any(secret in failed.stdout + failed.stderr for secret in (SIGNATURE, TOKEN, PASSWORD))
