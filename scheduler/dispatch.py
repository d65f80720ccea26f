"""Which replica gets the next request while requests arrive: dLoRA's proactive rule and what others do.

Dispatchers see arrays over replicas and answer with a replica's number; ties go to the smaller number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .loraserve import Routing


@dataclass(frozen=True, slots=True, eq=False)
class ClusterView:
    """`queue_s`, `queue_tokens` float64 `[num_replicas]`: predicted seconds and tokens of the work each has.
    `is_resident` bool `[num_adapters, num_replicas]`: whose memory holds what. `load_s` float64 `[num_adapters]`: to
    fetch one.
    """

    queue_s: NDArray[np.float64]
    queue_tokens: NDArray[np.float64]
    is_resident: NDArray[np.bool_]
    load_s: NDArray[np.float64]


class Dispatcher(Protocol):
    """Chooses replicas for requests, one at a time."""

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """The replica for a request of this adapter (-1: base) that takes `row_s` seconds."""


def pending_seconds(adapter: int, view: ClusterView) -> NDArray[np.float64]:
    """`[num_replicas]`: queueing time plus loading the adapter where it is absent (dLoRA section 5.1)."""
    if adapter < 0:
        return view.queue_s
    return view.queue_s + np.where(view.is_resident[adapter], 0.0, view.load_s[adapter])


@dataclass(frozen=True, slots=True)
class ProactiveDispatcher:
    """dLoRA: the shortest estimated pending time."""

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """See `Dispatcher.choose`."""
        return int(np.argmin(pending_seconds(adapter, view)))


@dataclass(frozen=True, slots=True)
class LeastLoadDispatcher:
    """The replica where predicted seconds are least, ranks known; every adapter is thought to be everywhere."""

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """See `Dispatcher.choose`."""
        return int(np.argmin(view.queue_s + row_s))


@dataclass(frozen=True, slots=True)
class FewestTokensDispatcher:
    """Toppings as LoRAServe describes it (section V-D, V-F): by what each server is serving and has queued, blind to
    ranks."""

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """See `Dispatcher.choose`."""
        return int(np.argmin(view.queue_tokens))


@dataclass(slots=True)
class RoundRobinDispatcher:
    """dLoRA's strawman RR: in turn among the replicas a placement gives the adapter to."""

    placed: NDArray[np.bool_]
    _next: int = 0

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """See `Dispatcher.choose`."""
        allowed = np.arange(len(view.queue_s)) if adapter < 0 else np.flatnonzero(self.placed[adapter])
        chosen = allowed[self._next % len(allowed)]
        self._next += 1
        return int(chosen)


@dataclass(slots=True)
class RoutedDispatcher:
    """LoRAServe and its static baselines: by the routing table, each replica getting its exact share over time.

    The paper sends a request to a server with the probability that is the server's share of the adapter's load (section
    IV). Instead of drawing, the replica furthest behind its share is chosen, so runs repeat and short runs are fair;
    shares are of predicted seconds, not of rows, for the placement has split load.
    """

    routing: Routing
    _sent: NDArray[np.float64] | None = None

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """See `Dispatcher.choose`."""
        if adapter < 0:
            return int(np.argmin(view.queue_s))
        if self._sent is None:
            self._sent = np.zeros_like(self.routing.fraction)
        share = self.routing.fraction[adapter]
        behind = share * (self._sent[adapter].sum() + row_s) - self._sent[adapter]
        chosen = int(np.argmax(np.where(share > 0, behind, -np.inf)))
        self._sent[adapter, chosen] += row_s
        return chosen
