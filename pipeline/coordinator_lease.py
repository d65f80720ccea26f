"""A coordinator's lease of its run: renewed by a thread of its own, and looked at before anything is done."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any, Self

from distributed import Client

from .lease_keeper import LEASE_OP

logger = logging.getLogger(__name__)

_RENEWALS_PER_LIMIT = 5
_ANSWER_LIMIT_S = 5.0


class CoordinatorLease:
    """A context manager. Without a `LeaseKeeper` on the scheduler it is never lost."""

    def __init__(self, client: Client, run_id: str, limit_s: float) -> None:
        self._client = client
        self._run_id = run_id
        self._limit_s = limit_s
        self._is_lost = False
        self._is_over = threading.Event()
        self._renewed_s = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name="coordinator lease", daemon=True)

    def __enter__(self) -> Self:
        self.attempt: int | None = self._ask("take", limit_s=self._limit_s).get("attempt")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()

    def end(self) -> None:
        """The run is over; nobody must take over."""
        self._is_over.set()
        self._ask("end")

    @property
    def is_lost(self) -> bool:
        """Whether another coordinator has taken over. Who has slept meanwhile asks first, and waits for the answer."""
        if not self._is_lost and time.monotonic() - self._renewed_s > self._limit_s / 2:
            self._renew()
        return self._is_lost

    def _keep(self) -> None:
        while not self._is_over.wait(self._limit_s / _RENEWALS_PER_LIMIT) and not self._is_lost:
            self._renew()

    def _renew(self) -> None:
        if self.attempt is not None:
            asked_s = time.monotonic()
            answer = self._ask("renew", attempt=self.attempt)
            self._is_lost |= not answer.get("is_held", True)
            if answer:
                self._renewed_s = asked_s

    def _ask(self, action: str, **content: Any) -> dict[str, Any]:
        """The scheduler's answer; nothing when it gives none."""
        call = getattr(self._client.scheduler, LEASE_OP)
        try:
            found = self._client.sync(
                call, run_id=self._run_id, action=action, callback_timeout=_ANSWER_LIMIT_S, **content
            )
        except Exception as error:
            logger.debug("no answer about the lease: %s", error)
            return {}
        return found if isinstance(found, dict) and "status" not in found else {}
