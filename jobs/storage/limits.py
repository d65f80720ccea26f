"""`Operation`: bounds one operation on a store by seconds without progress, and says how long it has waited.

The clients of stores retry by counts, one inside of another: s3fs sends an upload that is cut for good 25 times. Here
an operation decides about all repetitions: it fails when `LIMIT_S` seconds have passed since the last progress before
its first failed attempt. Transfers that make progress have no limit.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from ..errors import UnansweredError
from .redaction import redacted_url, scrubbed

T = TypeVar("T")

#: Seconds without progress after which an operation has failed.
LIMIT_S = 30.0
#: Limit, in seconds, of an operation whose predecessor of its kind (reading, or changing) on the store failed without
#: an answer: at its end, a job asks a store that is away several times.
AGAIN_LIMIT_S = 4.0
#: Name of the user's limit among storage options.
LIMIT_OPTION = "limit_s"
#: Seconds that a connection may be silent.
SILENT_S = 15.0
_LEAST_S = 1.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0
_WORD_AFTER_S, _WORD_INTERVAL_S, _LOOK_INTERVAL_S = 10.0, 30.0, 1.0

_TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
_TRANSIENT_ERRNO = frozenset(
    (errno.EAGAIN, errno.ESTALE, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN)
)
# Errors by package and class, since the packages are not imported here.
_PERMANENT = frozenset(
    ("botocore.SSLError", "aiohttp.ClientSSLError", "paramiko.AuthenticationException", "paramiko.BadHostKeyException")
)
_TRANSIENT = frozenset(
    (
        "botocore.ConnectionError", "botocore.HTTPClientError", "botocore.ResponseParserError",
        "aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "paramiko.SSHException",
        "azure.ServiceRequestError", "azure.ServiceResponseError", "azure.IncompleteReadError", "google.TransportError",
    )
)  # fmt: skip
_current: ContextVar[Operation | None] = ContextVar("operation", default=None)
_lock = threading.Lock()
_running: set[Operation] = set()
# Kinds of operations, (whether they read, store), whose last one failed without an answer.
_unanswered: set[tuple[bool, str]] = set()
_READING = frozenset(("connect to", "list", "look for", "read"))


def expect_away(url: str) -> None:
    """Limit operations on this store to `AGAIN_LIMIT_S` until it answers: another process has found it away."""
    _unanswered.update((reads, _store_of(url)) for reads in (True, False))


def _store_of(where: str) -> str:
    return "{0.scheme}://{0.netloc}".format(urlsplit(where.partition("::")[0]))


class Operation:
    """One operation on a store: counts its failed attempts, and measures the time without progress.

    `doing`, `where`: for messages, as in "cannot read s3://bucket/file". `options`: storage options for this URL.
    """

    def __init__(self, doing: str, where: str, options: Mapping[str, Any]) -> None:
        self._doing, self._where, self._options = doing, where, options
        self._kind = (doing in _READING, _store_of(where))
        given = float(options.get(LIMIT_OPTION, LIMIT_S))
        self._limit_s = min(given, AGAIN_LIMIT_S) if self._kind in _unanswered else given
        # Whether failed attempts are repeated; not when the user sets the client's own repetitions of requests.
        self._is_repeated = "retries" not in (options.get("config_kwargs") or {})
        self._began_s = self._moved_s = time.monotonic()
        # Time of the last progress before the first failed attempt; None without one, or when an attempt came further.
        self._stuck_s: float | None = None
        self._num_failed, self._last = 0, ""
        # Requests done in this attempt, and the most in any attempt.
        self._num_done = self._most_done = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, this is the current operation, and one of those that `waits_said` watches."""
        token = _current.set(self)
        with _lock:
            _running.add(self)
        try:
            yield
        finally:
            with _lock:
                _running.discard(self)
            _current.reset(token)

    def tried(self, call: Callable[[], T]) -> T:
        """Calls `call` until it succeeds, again after transient errors; returns its result. Raises `UnansweredError` at
        the limit, and other errors of the call at once.
        """
        while True:
            began_s, self._num_done = time.monotonic(), 0
            try:
                found = call()
            except Exception as error:
                pause_s = self._pause_s(error, began_s)
            else:
                _unanswered.discard(self._kind)
                return found
            time.sleep(pause_s)

    async def requested(self, send: Callable[[], Awaitable[T]], *, moves: bool, is_long: bool = False) -> T:
        """Sends one request of the operation until it succeeds, as `tried` does; returns the reply. `moves`: it is an
        upload that calls `moved` as bytes go. `is_long`: the store may work on it for long, and keeps the connection
        alive.
        """
        import asyncio  # commands on local disks need none of it

        while True:
            began_s = time.monotonic()
            try:
                if is_long:
                    return await send()
                return await (self._moving(send()) if moves else asyncio.wait_for(send(), self.attempt_s()))
            except Exception as error:
                pause_s = self._pause_s(error, began_s)
            await asyncio.sleep(pause_s)

    async def _moving(self, sent: Awaitable[T]) -> T:
        """Waits for the reply to a request. Raises TimeoutError when no byte has moved for `attempt_s`."""
        import asyncio

        task = asyncio.ensure_future(sent)
        try:
            self.moved()
            while not task.done():
                if time.monotonic() - self._moved_s > self.attempt_s():
                    raise TimeoutError(f"no byte moved within {self.attempt_s():.0f} s")
                await asyncio.wait({task}, timeout=_LOOK_INTERVAL_S)
            return task.result()
        finally:
            task.cancel()

    def moved(self) -> None:
        """Note that bytes have moved, so that the attempt goes on."""
        self._moved_s = time.monotonic()

    def progressed(self) -> None:
        """Note that a request is done, which is progress unless an earlier attempt has come as far."""
        self._moved_s = time.monotonic()
        self._num_done += 1
        if self._num_done > self._most_done:
            self._most_done, self._stuck_s, self._num_failed = self._num_done, None, 0

    def attempt_s(self) -> float:
        """Seconds that an attempt may wait for a reply, since a lost connection may go unnoticed."""
        waited_s = 0.0 if self._stuck_s is None else time.monotonic() - self._stuck_s
        silent_s = float((self._options.get("config_kwargs") or {}).get("read_timeout", SILENT_S))
        return max(_LEAST_S, min(self._limit_s - waited_s, silent_s))

    def _pause_s(self, error: Exception, began_s: float) -> float:
        """Seconds until the next attempt. Raises the error, or `UnansweredError`, when there is no next attempt."""
        if isinstance(error, UnansweredError) or not is_transient(error):
            raise error
        now_s = time.monotonic()
        self._num_failed += 1
        self._last = self._described(error) or f"no reply within {now_s - began_s:.0f} s"
        if self._stuck_s is None:
            self._stuck_s = max(began_s, self._moved_s)
        left_s = self._limit_s - (now_s - self._stuck_s)
        if not self._is_repeated:
            raise error
        # A long upload that was cut is sent once more.
        if left_s <= 0 and (self._num_failed > 1 or left_s <= -self._limit_s):
            _unanswered.add(self._kind)
            tried = f"{self._attempts()} within {now_s - self._stuck_s:.0f} s, the last: {self._last}"
            raise UnansweredError(tried, has_status=http_status(error) in _TRANSIENT_STATUS) from error
        pause_s = min(_FIRST_PAUSE_S * 2 ** (self._num_failed - 1), _MAX_PAUSE_S) * random.uniform(0.5, 1.0)
        return float(min(pause_s, max(left_s, 0.0)))

    def _described(self, error: Exception) -> str:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        status = http_status(error)
        shown = scrubbed(text, self._options, self._where).rstrip(" .")
        return f"{status} {shown}".rstrip() if status in _TRANSIENT_STATUS else shown

    def _attempts(self) -> str:
        return "1 attempt" if self._num_failed == 1 else f"{self._num_failed} attempts"

    def word(self, now_s: float) -> tuple[float, str] | None:
        """Seconds that the operation has waited, and a sentence about it; None for less than `_WORD_AFTER_S`."""
        waited_s = now_s - (self._moved_s if self._stuck_s is None else self._stuck_s)
        if waited_s < _WORD_AFTER_S:
            return None
        where = redacted_url(self._where)
        if not self._num_failed:
            return waited_s, f"storage: waiting to {self._doing} {where} for {waited_s:.0f} s, no error so far"
        return waited_s, (
            f"storage: cannot {self._doing} {where} so far: {self._attempts()} in {waited_s:.0f} s, the last: "
            f"{self._last}. It is tried again until {self._limit_s:.0f} s have passed; then it has failed. What is "
            "finished is kept"
        )


def current_operation() -> Operation | None:
    """The innermost operation of this thread or task."""
    return _current.get()


def note_moved() -> None:
    """Note that bytes of the current operation have moved."""
    if (operation := _current.get()) is not None:
        operation.moved()


@contextmanager
def noted(doing: str, where: str) -> Iterator[None]:
    """Within the block, let `waits_said` name an operation that cannot be limited, as on a disk of another machine."""
    with Operation(doing, where, {}).entered():
        yield


@contextmanager
def waits_said(say: Callable[[str], None], when_over: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within the block, names the operation of this process that waits the longest: after 10 s and then every 30 s.

    `say`: called with a sentence. `when_over`: called when no operation waits any more. Both are called in a thread of
    their own.
    """
    is_over = threading.Event()

    def watch() -> None:
        said: tuple[Operation, float] | None = None
        while not is_over.wait(_LOOK_INTERVAL_S):
            with _lock:
                running = list(_running)
            now_s = time.monotonic()
            found = [(*word, operation) for operation in running if (word := operation.word(now_s)) is not None]
            if not found:
                if said is not None:
                    when_over()
                said = None
                continue
            _, text, operation = max(found, key=lambda one: one[0])
            interval_s = _WORD_INTERVAL_S if said is not None and said[0] is operation else _WORD_AFTER_S
            if said is None or now_s - said[1] > interval_s:
                said = operation, now_s
                say(text)

    thread = threading.Thread(target=watch, name="storage waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def is_transient(error: BaseException) -> bool:
    """Whether the same request may be answered a moment later."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if names & _PERMANENT:
        return False
    if isinstance(error, TimeoutError | ConnectionError | EOFError) or names & _TRANSIENT:
        return True
    if (status := http_status(error)) is not None:
        return status in _TRANSIENT_STATUS
    # paramiko gives this error no number
    if isinstance(error, OSError) and (error.errno in _TRANSIENT_ERRNO or str(error) == "Socket is closed"):
        return True
    return error.__cause__ is not None and is_transient(error.__cause__)


def http_status(error: BaseException) -> int | None:
    """HTTP status of the reply behind an error; None when its filesystem package gives none."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            return cast(int | None, response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        for name in ("status", "status_code", "code"):
            if isinstance(status := getattr(one, name, None), int):
                return status
    return None
