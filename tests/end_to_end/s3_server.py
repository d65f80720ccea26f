"""An S3 server as a process of its own: prints its port, serves on loopback until it is killed.

`python s3_server.py HOLD`: while the file HOLD exists, a request to write `_SUCCESS` waits (HOLD.seen appears) and is
then refused. That is where a test may kill the client. INITIAL_NO_AUTH_ACTION_COUNT=0 in the environment makes it
refuse unknown keys.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_POLL_S = 0.02


class HoldsSuccess:
    """Moto, with one request held back."""

    def __init__(self, hold: Path) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._hold = hold

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        is_success = environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("/_SUCCESS")
        if is_success and self._hold.exists():
            self._hold.with_suffix(".seen").touch()
            while self._hold.exists():
                time.sleep(_POLL_S)
            start_response("503 Service Unavailable", [])
            return [b""]
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer


class Silent(WSGIRequestHandler):
    """No line per request."""

    def log(self, *_: Any) -> None:
        return


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, HoldsSuccess(Path(sys.argv[1])), threaded=True, request_handler=Silent)
    print(server.port, flush=True)
    server.serve_forever()
