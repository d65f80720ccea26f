"""A TCP proxy on loopback in front of a server, which has faults for a while: a store's network in trouble.

`FaultyProxy` is for a test's own process. Its faults hold for connections of that moment and later ones.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

#: What happens to requests: cut after so many bytes of the request; answered with a status; taken without any answer;
#: passed on in small pieces with pauses; not read any more after so many bytes, with the connection open.
Kind = Literal["cut", "status", "silent", "drip", "stall"]
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Fault:
    """One fault. `methods`: of the requests that have it (none: all). `after_bytes`: of the request or, where
    `of_reply`, of its reply. `status`: as "503 Slow Down". `pause_s`: between two pieces of `piece_bytes`.
    """

    kind: Kind
    methods: tuple[str, ...] = ()
    after_bytes: int = 0
    of_reply: bool = False
    status: str = "503 Slow Down"
    piece_bytes: int = 1
    pause_s: float = 1.0

    def concerns(self, beginning: bytes) -> bool:
        """Whether a request that begins so has it."""
        return not self.methods or beginning.split(b" ", 1)[0].decode("latin-1") in self.methods


def listening_socket(address: str) -> socket.socket:
    """A socket for connections, in this thread's network namespace."""
    return socket.create_server((address, 0), backlog=128)


class FaultyProxy:
    """Passes connections on to `server_port`. `num_faults`: requests that had the fault so far. `listener`: where
    clients connect, if not on loopback.
    """

    def __init__(self, server_port: int, listener: socket.socket | None = None) -> None:
        self._server_port = server_port
        self._fault: Fault | None = None
        self._is_over = threading.Event()
        self._listener = listener or listening_socket("127.0.0.1")
        self._open: set[socket.socket] = set()
        self.port: int = self._listener.getsockname()[1]
        self.num_faults = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def fail(self, fault: Fault | None) -> None:
        """Have requests this fault from now on; None ends it."""
        self._fault = fault

    def close(self) -> None:
        """End it, and every connection."""
        self._is_over.set()
        for opened in (self._listener, *list(self._open)):
            _shut(opened)

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._is_over.is_set():
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._server_port))
        self._open |= {client, server}
        replies = threading.Thread(target=self._pass_replies, args=[server, client], daemon=True)
        replies.start()
        try:
            self._pass_requests(client, server)
        except OSError:
            pass
        finally:
            _shut(client)
            _shut(server)
            self._open -= {client, server}

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        """One piece after the other; one that begins like a request may begin a fault."""
        passed, fault = 0, None
        while piece := client.recv(_PIECE_BYTES):
            if _begins_request(piece):
                passed, found = 0, self._fault
                fault = found if found is not None and not found.of_reply and found.concerns(piece) else None
                self.num_faults += fault is not None
            match fault:
                case Fault(kind="cut", after_bytes=most) if passed + len(piece) > most:
                    server.sendall(piece[: max(0, most - passed)])
                    return
                case Fault(kind="silent"):
                    continue
                case Fault(kind="stall", after_bytes=most) if passed + len(piece) > most:
                    self._is_over.wait()
                    return
                case Fault(kind="status", status=status):
                    client.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                    return
                case Fault(kind="drip"):
                    self._drip(fault, piece, server)
                case _:
                    server.sendall(piece)
            passed += len(piece)

    def _pass_replies(self, server: socket.socket, client: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while piece := server.recv(_PIECE_BYTES):
                passed = 0 if piece.startswith(b"HTTP/1.") else passed
                fault = self._fault if self._fault is not None and self._fault.of_reply else None
                match fault:
                    case Fault(kind="cut", after_bytes=most) if passed + len(piece) > most:
                        self.num_faults += 1
                        client.sendall(piece[: max(0, most - passed)])
                        _shut(client)
                        return
                    case Fault(kind="drip"):
                        self.num_faults += 1
                        self._drip(fault, piece, client)
                    case _:
                        client.sendall(piece)
                passed += len(piece)

    def _drip(self, fault: Fault, data: bytes, to: socket.socket) -> None:
        """Send in pieces with pauses, until the fault or the proxy ends."""
        for start in range(0, len(data), fault.piece_bytes):
            to.sendall(data[start : start + fault.piece_bytes])
            if self._fault is fault:
                self._is_over.wait(fault.pause_s)


def _begins_request(piece: bytes) -> bool:
    return piece[:1].isalpha() and b" HTTP/1." in piece[: piece.find(b"\r\n") if b"\r\n" in piece else 0]


def _shut(opened: socket.socket) -> None:
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()


@contextmanager
def faulty_proxy(server_port: int) -> Iterator[FaultyProxy]:
    """A proxy that ends with the block."""
    proxy = FaultyProxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
