"""`open_client`: Dask's own client, opened again when Dask stumbles while it connects."""

from __future__ import annotations

import logging
from typing import Any

from distributed import Client

logger = logging.getLogger(__name__)

_ATTEMPTS = 5


def open_client(target: Any, **options: Any) -> Client:
    """A client that is nobody's default. `target`, `options`: as of `distributed.Client`, which also says what is
    raised.

    A client asserts that the scheduler's greeting comes alone. The scheduler sends what falls due within 2 ms as one
    message, so whatever it tells all its clients at that moment (a worker that was lost) makes the assertion fail.
    """
    for left in reversed(range(_ATTEMPTS)):
        client = Client.__new__(Client)
        try:
            Client.__init__(client, target, set_as_default=False, **options)
        except AssertionError:
            client.close()
            if not left:
                raise
            logger.info("the scheduler's greeting did not come alone; connecting again")
        else:
            return client
    raise AssertionError("unreachable")
