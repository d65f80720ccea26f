"""Operations on a store that is away, refuses or is slow are bounded by seconds without progress, and said meanwhile.

The store is an S3 server behind a proxy that has the faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from botocore.exceptions import ClientError

from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.storage.limits import http_status, is_transient, waits_said
from lorabatch.jobs.storage.local_copy import local_folder
from lorabatch.jobs.storage.location import Location
from lorabatch.jobs.storage.single_file import replaced_file
from lorabatch.jobs.storage.stores import open_store
from lorabatch.tests.end_to_end.faulty_proxy import Fault, FaultyProxy, faulty_proxy

BIG = 2_000_000
# Seconds without a byte that end one attempt.
STALL_S = 15.0


@pytest.fixture(scope="module")
def proxy(s3_options: dict[str, Any]) -> Iterator[FaultyProxy]:
    with faulty_proxy(int(s3_options["client_kwargs"]["endpoint_url"].rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _no_fault(proxy: FaultyProxy) -> Iterator[None]:
    proxy.num_faults = 0
    yield
    proxy.fail(None)


@pytest.fixture(scope="module")
def options(s3_options: dict[str, Any], proxy: FaultyProxy) -> dict[str, Any]:
    """Of the store by the proxy. Its client is there already: to make one takes a second."""
    options = s3_options | {"client_kwargs": {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}}
    assert not Location("s3://no-bucket/place", options).exists("small")
    return options


@pytest.fixture
def url(s3_options: dict[str, Any]) -> str:
    """A folder with one small file and one of two megabytes."""
    bucket = f"bucket-{uuid4().hex}"
    fs = fsspec.filesystem("s3", **s3_options)
    fs.mkdir(bucket)
    fs.pipe_file(f"{bucket}/place/small", b"1" * 1000)
    fs.pipe_file(f"{bucket}/place/big", b"2" * BIG)
    return f"s3://{bucket}/place"


def _put(location: Location) -> None:
    with replaced_file(f"{location.url}/new", location.storage_options) as file:
        file.write(b"4" * BIG)


CALLS: dict[str, Callable[[Location], object]] = {
    "write": lambda location: location.write("new", b"3" * 1000),
    "write much": lambda location: location.write("new", b"3" * BIG),
    "create": lambda location: location.create("new", b"3" * 1000),
    "append": lambda location: location.append("new", b"3" * 1000),
    "put a file": _put,
    "read": lambda location: location.read("small"),
    "read much": lambda location: location.read("big"),
    "read in part": lambda location: location.open("big").read(BIG // 2),
    "fetch": lambda location: local_folder(location.url, location.storage_options),
    "list": lambda location: location.list(),
    "look": lambda location: location.exists("small"),
    "remove": lambda location: location.remove(["small"]),
}
REFUSED = Fault("status", status="503 Slow Down")
CUT = Fault("cut", after_bytes=0)
# By name: the fault, the calls that it concerns, and how long an attempt may take beyond the limit.
FOR_GOOD: dict[str, tuple[Fault, tuple[str, ...], float]] = {
    "cut": (CUT, tuple(CALLS), 0),
    "cut uploads": (Fault("cut", ("PUT",), after_bytes=600), ("write", "create", "append"), 0),
    "cut in the middle": (Fault("cut", ("PUT",), after_bytes=BIG // 2), ("write much", "put a file"), 0),
    "cut replies": (Fault("cut", after_bytes=300, of_reply=True), ("read", "list"), 0),
    "cut long replies": (
        Fault("cut", after_bytes=BIG // 4, of_reply=True), ("read much", "read in part", "fetch"), 0,
    ),
    "refused": (REFUSED, tuple(CALLS), 0),
    "broken": (Fault("status", status="500 Internal Server Error"), tuple(CALLS), 0),
    "throttled": (Fault("status", status="429 Too Many Requests"), ("write", "read", "list"), 0),
    "silent": (Fault("silent"), tuple(CALLS), 4),
    "stalled": (Fault("stall", ("PUT",), after_bytes=BIG // 4), ("write much", "put a file"), 2 * STALL_S),
}  # fmt: skip


def assert_given_up(
    call: str, fault: Fault, url: str, options: dict[str, Any], proxy: FaultyProxy, most_s: float
) -> None:
    location = Location(url, options)
    proxy.fail(fault)
    began_s = time.monotonic()
    with pytest.raises(StorageError) as caught:
        CALLS[call](location)
    took_s = time.monotonic() - began_s
    proxy.fail(None)
    assert took_s < most_s, (took_s, caught.value)
    assert proxy.num_faults > 1, "it was tried once only"
    said = str(caught.value)
    assert url in said, said
    assert "attempt" in said, said
    assert ("refuses for now" if fault.kind == "status" else "no reply") in said, said
    assert options["secret"] not in said
    assert not location.exists("new"), "half of a file was left"
    assert location.create("new", b"5"), "the store is well again"


@pytest.mark.parametrize(("call", "fault"), [("write", CUT), ("read", REFUSED)])
def test_an_operation_fails_at_its_limit_with_the_stores_own_words(
    call: str, fault: Fault, url: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    assert_given_up(call, fault, url, options | {"limit_s": 2.0}, proxy, 10)


@pytest.mark.long
@pytest.mark.parametrize(("name", "call"), [(name, call) for name, (_, calls, _) in FOR_GOOD.items() for call in calls])
def test_every_operation_is_bounded_whatever_the_fault(
    name: str,
    call: str,
    url: str,
    options: dict[str, Any],
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fault, _, more_s = FOR_GOOD[name]
    # Two operations are the most that one of these calls consists of.
    assert_given_up(call, fault, url, options | {"limit_s": 4}, proxy, 2 * (4 + more_s) + 5)


@pytest.mark.parametrize("limit_s", [0.5, pytest.param(2.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("call", ["read much", "write much"])
def test_a_transfer_that_moves_takes_as_long_as_it_takes(
    call: str, limit_s: float, url: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    location = Location(url, options | {"limit_s": limit_s})
    pause_s = 3 * limit_s / (BIG // 65536)
    proxy.fail(Fault("drip", of_reply=call == "read much", piece_bytes=65536, pause_s=pause_s))
    began_s = time.monotonic()
    CALLS[call](location)
    took_s = time.monotonic() - began_s
    proxy.fail(None)
    assert took_s > 2 * limit_s, took_s
    assert len(location.read("big" if call == "read much" else "new")) == BIG


@pytest.mark.parametrize("fault", [CUT, REFUSED, Fault("cut", after_bytes=300, of_reply=True)], ids=lambda f: f.kind)
def test_trouble_for_a_moment_costs_time_only(
    fault: Fault, url: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    location = Location(url, options)
    proxy.fail(fault)
    threading.Timer(0.5, proxy.fail, [None]).start()
    assert location.read("small") == b"1" * 1000
    assert proxy.num_faults > 0


def test_a_store_that_is_away_is_not_waited_for_as_long_again(
    url: str, options: dict[str, Any], proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.jobs.storage.limits.AGAIN_LIMIT_S", 0.2)
    location = Location(url, options | {"limit_s": 1.5})
    proxy.fail(CUT)
    took_s = []
    for _ in range(2):
        began_s = time.monotonic()
        with pytest.raises(StorageError):
            location.read("small")
        took_s.append(time.monotonic() - began_s)
    assert took_s[0] > 1.5 > 2 * took_s[1], took_s
    proxy.fail(None)
    assert location.read("small") == b"1" * 1000


@pytest.mark.long
@pytest.mark.parametrize(("fault", "words"), [
    (CUT, "attempts in 10 s, the last: "), (REFUSED, "503"), (Fault("silent"), "no error so far"),
    (Fault("drip", of_reply=True, piece_bytes=10), "no error so far"),
], ids=["cut", "refused", "silent", "slow"])  # fmt: skip
def test_an_operation_that_waits_is_said_with_its_place_and_error(
    fault: Fault, words: str, url: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    said: list[str] = []
    over = threading.Event()
    location = Location(url, options)
    location.read("small")
    proxy.fail(fault)
    threading.Timer(14, proxy.fail, [None]).start()
    with waits_said(said.append, over.set):
        assert location.read("small") == b"1" * 1000
        assert over.wait(10), "it does not wait any more"
    assert len(said) == 1, said
    assert f"storage: {'waiting to' if 'no error' in words else 'cannot'} read {url}/small" in said[0]
    assert words in said[0]
    assert options["secret"] not in said[0]


def test_settings_of_the_user_come_before_ours(url: str, options: dict[str, Any]) -> None:
    config = {"read_timeout": 30.0, "retries": {"max_attempts": 2}, "connector_args": {"keepalive_timeout": 2}}
    fs, path = open_store(url, options | {"config_kwargs": config, "limit_s": 60})
    given = fs.store.config_kwargs
    assert {name: given[name] for name in config} == config
    assert given["connect_timeout"] == 5.0
    assert fs.info(f"{path}/small")["size"] == 1000
    assert open_store(str(__file__), {"limit_s": 3})[0].protocol == ("file", "local")


def _status(status: int, kind: type[OSError] = OSError) -> OSError:
    error = kind("said by the store")
    reply = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = ClientError(reply, "PutObject")  # type: ignore[arg-type]
    return error


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 412, 429, 500, 501, 502, 503, 504])
def test_only_a_status_that_may_change_is_asked_for_again(status: int) -> None:
    assert http_status(_status(status)) == status
    assert is_transient(_status(status)) == (status in (429, 500, 502, 503, 504))


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (FileNotFoundError("x"), False), (PermissionError("x"), False), (ValueError("x"), False),
        (OSError(28, "x"), False),
        (TimeoutError(), True), (ConnectionResetError(), True), (OSError(113, "no route"), True), (EOFError(), True),
        (_status(400, TimeoutError), True),
    ],
    ids=repr,
)  # fmt: skip
def test_only_errors_of_the_moment_are_asked_for_again(error: Exception, again: bool) -> None:
    assert is_transient(error) is again
