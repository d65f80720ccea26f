"""An S3 server as a process of its own: serves on loopback until it is killed. Prints its port, and one for the test
itself, where nothing of what follows holds.

`python s3_server.py HOLD`: while the file HOLD exists, a request to write `_SUCCESS` waits (HOLD.seen appears) and is
then refused. That is where a test may kill the client. INITIAL_NO_AUTH_ACTION_COUNT=0 in the environment makes it
refuse unknown keys. CONDITIONAL_PUT makes it answer conditional PUTs as other stores do, see `CONDITIONAL_PUT_REPLIES`.
ALSO_AT="NAMESPACE ADDRESS" makes it serve the same port of that network namespace, too. While the file HOLD.fault
exists, requests have the faults that its lines name, see `FAULTS`. After a fault's name may stand which requests have
it: a method, a beginning of the path, and which share of them, as in "503 PUT /bucket/output/ 0.2". DELAY_S in the
environment makes it take so long for each request. With LOG it adds a line to that file for each: seconds since the
epoch, method, path with query, bytes of the reply.
"""

from __future__ import annotations

import io
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from lorabatch.tests.end_to_end.hosts.switch import inside

_POLL_S = 0.02
LATE_S = 5.0
#: What stores without conditional PUT answer to one: status line and error code. The last two give no code that a
#: client could look up.
CONDITIONAL_PUT_REPLIES = {
    "not-implemented": ("501 Not Implemented", "NotImplemented"),
    "invalid-argument": ("400 Bad Request", "InvalidArgument"),
    "own-code": ("400 Bad Request", "UnsupportedHeader"),
    "no-body": ("501 Not Implemented", ""),
}
#: Answers of a store in trouble. With "lost" the request is carried out, and only its answer is an error; with "silent"
#: there is no answer until the trouble is over. With "late", files are missing from listings for seconds.
FAULTS = {
    "403": ("403 Forbidden", "AccessDenied"),
    "429": ("429 Too Many Requests", "TooManyRequests"),
    "500": ("500 Internal Server Error", "InternalError"),
    "503": ("503 Service Unavailable", "SlowDown"),
    "lost": ("500 Internal Server Error", "InternalError"),
    "silent": ("503 Service Unavailable", "ServiceUnavailable"),
}


class OtherStore:
    """Moto, with one request held back, perhaps without conditional PUT, and with faults for a while."""

    def __init__(self, hold: Path, conditional_put: str) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self._hold = hold
        self._refusal = CONDITIONAL_PUT_REPLIES.get(conditional_put)
        self._written_s: dict[str, float] = {}
        self._delay_s = float(os.environ.get("DELAY_S", "0"))
        self._log = Path(os.environ["LOG"]) if "LOG" in os.environ else None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        time.sleep(self._delay_s)
        if self._log is None:
            return self._answer(environ, start_response)
        log, now_s = self._log, time.time()

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            num_bytes = next((value for name, value in headers if name.lower() == "content-length"), "0")
            num_bytes = "0" if environ["REQUEST_METHOD"] == "HEAD" else num_bytes
            path = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
            with log.open("a") as lines:
                lines.write(f"{now_s:.3f} {environ['REQUEST_METHOD']} {path.replace(' ', '%20')} {num_bytes}\n")
            return start_response(status, headers, *rest)

        return self._answer(environ, start)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            if not _has_whole_body(environ):
                return refuse("400 Bad Request", "IncompleteBody", start_response)
            self._written_s[environ["PATH_INFO"].split("/", 2)[-1]] = time.monotonic()
        for kind in self._faults(environ):
            if kind == "late" and "list-type" in environ.get("QUERY_STRING", ""):
                return self._listed_late(environ, start_response)
            while kind == "silent" and self._hold.with_suffix(".fault").exists():
                time.sleep(_POLL_S)
            if kind == "lost":
                list(self.moto(environ, lambda *_: None))
            if kind in FAULTS:
                status, code = FAULTS[kind]
                return refuse(status, "" if environ["REQUEST_METHOD"] == "HEAD" else code, start_response)
        is_success = environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("/_SUCCESS")
        if is_success and self._hold.exists():
            self._hold.with_suffix(".seen").touch()
            while self._hold.exists():
                time.sleep(_POLL_S)
            start_response("503 Service Unavailable", [])
            return [b""]
        if self._refusal and "HTTP_IF_NONE_MATCH" in environ:
            return refuse(*self._refusal, start_response)
        answer: Iterable[bytes] = self.moto(environ, start_response)
        return answer

    def _faults(self, environ: dict[str, Any]) -> Iterator[str]:
        """Of this request."""
        with suppress(FileNotFoundError):
            for line in self._hold.with_suffix(".fault").read_text().splitlines():
                kind, method, path, share = (*line.split(), *("any", "/", "1")[len(line.split()) - 1 :])
                is_method = method in ("any", environ["REQUEST_METHOD"])
                if is_method and environ["PATH_INFO"].startswith(path) and random.random() < float(share):
                    yield kind

    def _listed_late(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        begun: list[Any] = []
        body = b"".join(self.moto(environ, lambda *words: begun.extend(words))).decode()

        def shown(found: re.Match[str]) -> str:
            return found[0] if time.monotonic() - self._written_s.get(found[1], 0.0) > LATE_S else ""

        body = re.sub(r"<Contents>\s*<Key>(.*?)</Key>.*?</Contents>", shown, body, flags=re.DOTALL)
        headers = [(name, value) for name, value in begun[1] if name.lower() != "content-length"]
        start_response(begun[0], [*headers, ("Content-Length", str(len(body.encode())))])
        return [body.encode()]


def _has_whole_body(environ: dict[str, Any]) -> bool:
    """Whether a request has as many bytes as it says. Stores of S3 refuse others; moto keeps what has come."""
    if not environ.get("CONTENT_LENGTH"):
        return True
    num_bytes = int(environ["CONTENT_LENGTH"])
    try:
        body = environ["wsgi.input"].read(num_bytes)
    except OSError:
        return False
    environ["wsgi.input"] = io.BytesIO(body)
    return len(body) == num_bytes


def refuse(status: str, code: str, start_response: Callable[..., Any]) -> Iterable[bytes]:
    """An error as S3 words it; one without a code has no body."""
    start_response(status, [("Content-Type", "application/xml"), ("Connection", "close")])
    return [f"<Error><Code>{code}</Code><Message>Refused by the test</Message></Error>".encode() if code else b""]


class Silent(WSGIRequestHandler):
    """No line per request."""

    def log(self, *_: Any) -> None:
        return


def main() -> None:
    """Serve until the end."""
    store = OtherStore(Path(sys.argv[1]), os.environ.get("CONDITIONAL_PUT", ""))
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=Silent)
    if "ALSO_AT" in os.environ:
        namespace, address = os.environ["ALSO_AT"].split()
        with inside(namespace):
            other = make_server(address, server.port, store, threaded=True, request_handler=Silent)
        threading.Thread(target=other.serve_forever, daemon=True).start()
    own = make_server("127.0.0.1", 0, store.moto, threaded=True, request_handler=Silent)
    threading.Thread(target=own.serve_forever, daemon=True).start()
    print(server.port, own.port, sep="\n", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
