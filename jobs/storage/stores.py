"""`open_store`: opens filesystems of fsspec whose calls are limited (`limits.py`), and sets up their client libraries.

| library | what ends one attempt |
|---|---|
| s3fs | 15 s, or what is left of the limit, without a reply or a byte read or sent |
| gcsfs, http | no byte read for 15 s |
| adlfs, SFTP | no byte read or written for 15 s |
| gcsfs, adlfs | a look at one file: what is left of the limit; a write: as long, and 20 s for each MB |

The user's storage options take precedence over these settings. `{"limit_s": 90}` sets another limit; `retries` in
`config_kwargs` leaves all repetitions to the S3 client.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, BinaryIO, cast

from ..errors import StorageError, UnansweredError
from .limits import LIMIT_OPTION, SILENT_S, Operation, current_operation
from .redaction import redacted_url, storage_reason

_CONNECT_S = 5.0
# Connections of a process to S3, whose client has ten by default.
_CONNECTIONS = 32
# Most bytes of an upload that cannot be slow while its store is well.
_SMALL_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
# Most unsent bytes that the system holds of an upload. It sends them after the last byte was handed over, while the
# operation waits for the reply.
_UNSENT_BYTES = 1 << 18
# Least speed of a transfer whose library reports no progress; a slower one has stalled.
_LEAST_BYTES_PER_S = 50_000
# Call of a filesystem that is limited -> verb for messages.
_CALLS: Mapping[str, str] = {
    "cat_file": "read", "cp_file": "copy", "exists": "look for", "find": "list", "get_file": "read", "glob": "list",
    "info": "look for",
    "isdir": "look for", "ls": "list", "makedirs": "make the folder", "mv": "move",
    "open": "read", "pipe_file": "write", "put_file": "write", "rm": "remove", "rm_file": "remove",
}  # fmt: skip
# Limited calls without a transfer, whatever the folder holds.
_QUICK_CALLS = frozenset(("exists", "info", "isdir", "makedirs", "rm_file"))
# Requests of S3 that may take long where the store is well, and keep the connection alive meanwhile.
_LONG_REQUESTS = frozenset(("complete_multipart_upload", "copy_object", "upload_part_copy"))


def open_store(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path there. Its calls are limited unless it is the local one.

    `options`: storage options for this URL; see `options_for`. Raises what fsspec raises.
    """
    from fsspec.core import url_to_fs

    given = without_limit(options)
    protocol = url.partition("://")[0] if "://" in url and "::" not in url else ""
    if protocol in ("", "file", "local") and "::" not in url:
        return cast(tuple[Any, str], url_to_fs(url, **given))
    all_options = _with_defaults(given, _settings(protocol))
    # Some filesystems connect when they are made.
    operation = Operation("connect to", url, options)
    with operation.entered():
        fs, path = operation.tried(partial(url_to_fs, url, **all_options))
    if hasattr(fs, "_call_s3"):
        _limit_requests(fs)
    if hasattr(fs, "ftp"):
        fs.ftp.get_channel().settimeout(SILENT_S)
    return LimitedFiles(fs, options), path


def without_limit(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options without `limit_s`, as fsspec takes them."""
    return {name: value for name, value in options.items() if name != LIMIT_OPTION}


def _with_defaults(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Our options, overridden by the user's of the same names; options that are mappings are merged by key."""
    both = {
        name: {**ours[name], **value} for name, value in given.items() if isinstance(value, Mapping) and name in ours
    }
    return {**ours, **given, **both}


def _settings(protocol: str) -> dict[str, Any]:
    """Options by which a store's library gives up a connection that stalls, and sends each request once."""
    match protocol:
        case "s3" | "s3a":
            times = {"connect_timeout": _CONNECT_S, "read_timeout": SILENT_S}
            own = {"retries": {"total_max_attempts": 1}, "max_pool_connections": _CONNECTIONS}
            return {"config_kwargs": {**times, **own, **_socket_setting()}}
        case "gs" | "gcs":
            return {"session_kwargs": {"timeout": _http_times()}}
        case "http" | "https":
            return {"client_kwargs": {"timeout": _http_times()}}
        case "az" | "abfs" | "abfss":
            return {"connection_timeout": int(SILENT_S), "read_timeout": int(SILENT_S)}
        case "sftp" | "ssh":
            return {"timeout": _CONNECT_S, "banner_timeout": SILENT_S, "auth_timeout": SILENT_S}
    return {}


@cache
def _http_times() -> Any:
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=SILENT_S)


@cache
def _socket_setting() -> dict[str, Any]:
    """The setting of aiobotocore by which its sockets hold few unsent bytes; empty for versions without it."""
    from aiobotocore.config import AioConfig

    setting = {"connector_args": {"socket_factory": _lean_socket}}
    try:
        AioConfig(**setting)
    except Exception:
        return {}
    return setting


def _lean_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose unsent bytes are few."""
    found = socket.socket(*address[:3])
    with suppress(AttributeError, OSError):  # an option of Linux
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return found


class LimitedFiles:
    """A filesystem of fsspec whose calls are operations with a limit. `store`: the filesystem itself."""

    def __init__(self, store: Any, options: Mapping[str, Any]) -> None:
        self.store = store
        self._options = options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.store, name)
        return partial(self._call, name, found) if name in _CALLS else found

    def isfile(self, path: str) -> bool:
        """Whether there is a file of this name. Raises what `info` raises, but for a missing one: fsspec's own `isfile`
        takes a store that refuses or does not answer for an empty one.
        """
        try:
            return bool(self.info(path)["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from fsspec.asyn import sync

        path = args[1] if name == "put_file" else args[0]
        with suppress(NotImplementedError, TypeError):
            path = self.store.unstrip_protocol(path)
        operation = Operation(_CALLS[name], str(path), self._options)

        def attempt() -> Any:
            self._connect_again()
            limit_s = self._time_limit_s(name, operation, args)
            if limit_s is None:
                return call(*args, **kwargs)
            # the call itself takes a limit in some filesystems only
            return sync(self.store.loop, getattr(self.store, f"_{name}"), *args, timeout=limit_s, **kwargs)

        with operation.entered():
            found = operation.tried(attempt)
        return LimitedFile(found, str(path), self._options) if name == "open" else found

    def _time_limit_s(self, name: str, operation: Operation, args: tuple[Any, ...]) -> float | None:
        """The limit of one attempt, for filesystems whose library repeats requests by itself; None for others."""
        if not getattr(self.store, "async_impl", False) or hasattr(self.store, "_call_s3"):
            return None
        if name in _QUICK_CALLS:
            return operation.attempt_s()
        if name in ("pipe_file", "put_file"):
            num_bytes = len(args[1]) if name == "pipe_file" else os.path.getsize(args[0])
            return operation.attempt_s() + num_bytes / _LEAST_BYTES_PER_S
        return None

    def _connect_again(self) -> None:
        """Connect to a server of SFTP again where the connection was cut: its library does not."""
        if not hasattr(self.store, "ftp"):
            return
        transport = self.store.client.get_transport()
        if transport is None or not transport.is_active():
            self.store._connect()
            self.store.ftp.get_channel().settimeout(SILENT_S)


class LimitedFile(io.RawIOBase):
    """A file of a store, open for reading. Each read is an operation with a limit; it raises `StorageError` there."""

    def __init__(self, file: BinaryIO, where: str, options: Mapping[str, Any]) -> None:
        self._file, self._where, self._options = file, where, options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        """Reads `size` bytes, all without a size; fewer only at the end of the file. Raises `StorageError` at the
        limit.
        """
        place = self._file.tell()

        def attempt() -> bytes:
            self._file.seek(place)
            return self._file.read(size)

        operation = Operation("read", self._where, self._options)
        try:
            with operation.entered():
                return operation.tried(attempt)
        except UnansweredError as error:
            # a `StorageError`, since readers take other errors for damage
            reason = storage_reason(error, self._options, self._where)
            failed = StorageError(f"cannot read {redacted_url(self._where)}: {reason}")
            failed.is_away = True
            raise failed from None

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer. Returns their number."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position in the file, and returns it, as files of SFTP do not."""
        self._file.seek(offset, whence)
        return self._file.tell()

    def tell(self) -> int:
        """The position in the file."""
        return self._file.tell()

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Whether the position can be moved."""
        return self._file.seekable()

    def close(self) -> None:
        """Closes the file of the store too."""
        if not self.closed:
            self._file.close()
        super().close()


def _limit_requests(fs: Any) -> None:
    """Let the current operation decide about repetitions of the requests that an `s3fs.S3FileSystem` sends."""
    if fs.retries == 1:
        return
    fs.retries = 1
    send = fs._call_s3

    async def call(method: str, *args: Any, **kwargs: Any) -> Any:
        operation = current_operation()
        if operation is None:
            return await send(method, *args, **kwargs)
        body = kwargs.get("Body")
        if body is not None and _num_bytes(body) > _SMALL_BYTES:
            body = kwargs["Body"] = _MovingUpload(body, operation)
        moves, is_long = isinstance(body, _MovingUpload), method in _LONG_REQUESTS

        def attempt() -> Awaitable[Any]:
            if isinstance(body, _MovingUpload):
                body.seek(0)
            return cast(Awaitable[Any], send(method, *args, **kwargs))

        reply = await operation.requested(attempt, moves=moves, is_long=is_long)
        if method == "get_object":
            operation.moved()
            reply["Body"] = _MovingBody(reply["Body"], operation)
        else:
            operation.progressed()
        return reply

    fs._call_s3 = call


def _num_bytes(body: Any) -> float:
    return len(body) if hasattr(body, "__len__") else float("inf")


class _MovingUpload(io.RawIOBase):
    """The body of an upload; notes in its operation that bytes have moved whenever it is read."""

    def __init__(self, body: Any, operation: Operation) -> None:
        self._file = body if hasattr(body, "read") else io.BytesIO(body)
        self._operation = operation

    def read(self, size: int = -1) -> bytes:
        """Reads at most `size` bytes of the body, all without a size."""
        self._operation.moved()
        return cast(bytes, self._file.read(size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position in the body."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """The position in the body."""
        return int(self._file.tell())

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true: an upload that failed is sent again from its begin."""
        return True


class _MovingBody:
    """The body of a reply of S3; notes in its operation that bytes have moved whenever it is read."""

    def __init__(self, body: Any, operation: Operation) -> None:
        self._body, self._operation = body, operation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    async def read(self, size: int | None = None) -> bytes:
        """Reads at most `size` bytes, all without a size."""
        if size is not None and size >= 0:
            return await self._piece(size)
        pieces = []
        while piece := await self._piece(_PIECE_BYTES):
            pieces.append(piece)
        return b"".join(pieces)

    async def _piece(self, size: int) -> bytes:
        piece: bytes = await self._body.read(size)
        if piece:
            self._operation.moved()
        else:
            self._operation.progressed()
        return piece
