"""An S3 server as a process of its own: prints its port, serves on loopback until it is killed.

`python s3_server.py HOLD`: while the file HOLD exists, a request to write `_SUCCESS` waits (HOLD.seen appears) and is
then refused. That is where a test may kill the client. INITIAL_NO_AUTH_ACTION_COUNT=0 in the environment makes it
refuse unknown keys. CONDITIONAL_PUT makes it answer conditional PUTs as other stores do, see `CONDITIONAL_PUT_REPLIES`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_POLL_S = 0.02
#: What stores without conditional PUT answer to one: status line and error code. The last two give no code that a
#: client could look up.
CONDITIONAL_PUT_REPLIES = {
    "not-implemented": ("501 Not Implemented", "NotImplemented"),
    "invalid-argument": ("400 Bad Request", "InvalidArgument"),
    "own-code": ("400 Bad Request", "UnsupportedHeader"),
    "no-body": ("501 Not Implemented", ""),
}


class OtherStore:
    """Moto, with one request held back, and perhaps without conditional PUT."""

    def __init__(self, hold: Path, conditional_put: str) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._hold = hold
        self._refusal = CONDITIONAL_PUT_REPLIES.get(conditional_put)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        is_success = environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("/_SUCCESS")
        if is_success and self._hold.exists():
            self._hold.with_suffix(".seen").touch()
            while self._hold.exists():
                time.sleep(_POLL_S)
            start_response("503 Service Unavailable", [])
            return [b""]
        if self._refusal and "HTTP_IF_NONE_MATCH" in environ:
            status, code = self._refusal
            start_response(status, [("Content-Type", "application/xml"), ("Connection", "close")])
            message = "A header you provided implies functionality that is not available"
            return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode() if code else b""]
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer


class Silent(WSGIRequestHandler):
    """No line per request."""

    def log(self, *_: Any) -> None:
        return


if __name__ == "__main__":
    store = OtherStore(Path(sys.argv[1]), os.environ.get("CONDITIONAL_PUT", ""))
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=Silent)
    print(server.port, flush=True)
    server.serve_forever()
