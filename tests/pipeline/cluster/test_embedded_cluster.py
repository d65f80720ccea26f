"""An embedded cluster on a machine with other users and with a browser that other pages use too."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import logging
import os
import pickle
import socket
import ssl
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import Browser, needs_browser
from distributed import Client
from distributed.security import Security
from stranger import PATHS
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from lorabatch.jobs.record import JobState
from lorabatch.pipeline.cluster.connect import embedded, open_client, page_address
from lorabatch.pipeline.cluster.security import temporary_security
from lorabatch.pipeline.monitoring.reporter import state_publisher
from lorabatch.pipeline.monitoring.scheduler_plugin import show_jobs


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Of one cluster for all tests here, which has shown a job."""
    with embedded(1) as client:
        show_jobs(client)
        state_publisher(client, "night-1", "/out")(JobState("running", 1.0, rows=60, rows_done=30))
        yield client


def get(client: Client, path: str, **headers: str) -> tuple[int, str]:
    """Status and text of a reply; `path` is below the address that is printed."""
    link = urlsplit(page_address(client))
    connection = http.client.HTTPConnection(link.hostname or "", link.port, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def prefix(client: Client) -> str:
    """What stands before all paths: a slash and the token."""
    return urlsplit(page_address(client)).path.removesuffix("/lora")


def test_the_printed_link_shows_jobs_and_dasks_own_pages(client: Client) -> None:
    # The first page waits for Bokeh, and leads to itself.
    with urllib.request.urlopen(page_address(client), timeout=60) as reply:
        assert (reply.status, reply.url) == (200, page_address(client))
        assert 'href="lora"' in reply.read().decode()
    assert '"rows_done": 30' in get(client, prefix(client) + "/lora.json")[1]
    assert 'lorabatch_job_rows{job_id="night",run_id="night-1"} 60' in get(client, prefix(client) + "/lora/metrics")[1]
    assert [get(client, prefix(client) + path)[0] for path in ("/status", "/workers", "/health")] == [200] * 3


@pytest.mark.parametrize("token", ["", "/", "/x", "/%00", "/%C3%A9"])
def test_without_the_token_nothing_is_shown_and_the_token_is_not_told(client: Client, token: str) -> None:
    for path in PATHS:
        status, text = get(client, token + path)
        assert status == 403, path
        assert prefix(client)[1:] not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_a_page_whose_name_leads_to_this_machine_is_refused(client: Client, host: str) -> None:
    assert get(client, prefix(client) + "/lora.json", Host=host)[0] in (400, 403)


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1", "[::1]:9"])
def test_a_tunnel_that_ends_on_another_port_is_no_stranger(client: Client, host: str) -> None:
    assert get(client, prefix(client) + "/lora.json", Host=host)[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://"])
def test_requests_of_other_pages_are_refused_also_with_the_token(client: Client, origin: str) -> None:
    assert get(client, prefix(client) + "/lora.json", Origin=origin)[0] == 403


@pytest.mark.parametrize(
    ("origin", "is_own"), [("http://evil.example", False), ("http://127.0.0.1:1", False), ("", True)]
)
def test_a_socket_is_opened_for_the_clusters_own_page_only(client: Client, origin: str, is_own: bool) -> None:
    link = urlsplit(page_address(client))
    request = HTTPRequest(
        f"ws://{link.netloc}{prefix(client)}/eventstream", headers={"Origin": origin or f"http://{link.netloc}"}
    )

    async def status() -> int:
        try:
            connection = await websocket_connect(request)
        except HTTPClientError as error:
            return error.code
        connection.close()
        while await connection.read_message() is not None:
            pass
        return 101

    assert asyncio.run(status()) == (101 if is_own else 403)


@pytest.mark.long
@needs_browser
def test_a_browser_follows_the_printed_link_to_a_page_that_stays_fresh(client: Client, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(page_address(client))
        assert "30 of 60 (" in browser.text(until="30 of 60 (")
        # Over the page's socket.
        state_publisher(client, "night-1", "/out")(JobState("running", 2.0, rows=60, rows_done=59))
        assert "59 of 60 (" in browser.text(until="59 of 60 (")


def test_requests_are_logged_without_the_token(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("tornado.access")
    with caplog.at_level(logging.INFO, logger=access.name):
        access.addHandler(caplog.handler)
        assert get(client, prefix(client) + "/no-such-page")[0] == 404
        assert get(client, prefix(client) + "/lora.json")[0] == 200
        access.removeHandler(caplog.handler)
    (missing, *others) = [record.getMessage() for record in caplog.records]
    assert missing.startswith("404 GET /***/no-such-page")
    assert not any(prefix(client)[1:] in line for line in others)


def test_a_certificate_of_another_cluster_opens_no_connection(client: Client) -> None:
    address = client.scheduler_info(n_workers=0)["address"]
    assert address.startswith("tls://127.0.0.1:")
    for security in (temporary_security(), Security.temporary(), Security()):
        with pytest.raises((OSError, TypeError)):
            open_client(address, security=security, timeout="1s")


@pytest.mark.parametrize("system", ["this one", "without files in memory"])
def test_keys_open_connections_and_lie_in_no_file(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed would leave the file behind."""
    security, is_linux = pickle.loads(pickle.dumps(temporary_security())), hasattr(os, "memfd_create")
    if system == "this one" and is_linux:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    elif is_linux:
        monkeypatch.delattr(os, "memfd_create")
    scheduler, client = security.get_listen_args("scheduler"), security.get_connection_args("client")
    assert scheduler["require_encryption"]
    assert client["require_encryption"]
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(scheduler["ssl_context"].wrap_socket, theirs, server_side=True)
        with client["ssl_context"].wrap_socket(ours) as connection, accepted.result(20) as other:
            other.sendall(b"hello")
            assert connection.recv(5) == b"hello"
            assert connection.getpeercert(binary_form=True) == other.getpeercert(binary_form=True)


def test_workers_speak_tls_among_one_another_too(client: Client) -> None:
    (worker,) = client.scheduler_info(n_workers=-1)["workers"].values()
    for address in (worker["nanny"], client.run(lambda dask_worker: dask_worker.address).popitem()[1]):
        host, port = address.removeprefix("tls://").split(":")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            context.wrap_socket(plain) as tls,
            pytest.raises(ssl.SSLError, match=r"CERTIFICATE_REQUIRED|HANDSHAKE_FAILURE"),
        ):
            assert tls.recv(1)  # with TLS 1.3, this is where a server says what it misses


def test_modules_that_others_have_put_into_dasks_folder_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask puts the folder of its nannies into `sys.path`, and takes one that is there, whose ever it is."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    planted = tmp_path / "dask-scratch-space"
    planted.mkdir()
    planted.chmod(0o777)
    (planted / "planted_module.py").write_text("")
    with embedded(1) as client:
        assert importlib.util.find_spec("planted_module") is None
        # A function of this file would be sent by its name, and workers need not find this file.
        assert list(client.run(importlib.util.find_spec, "planted_module").values()) == [None]
