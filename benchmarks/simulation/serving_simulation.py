"""Simulates requests that arrive over time: the papers' online experiments, and their dispatchers.

A dispatcher sends each request to a replica: dLoRA's proactive rule, or another system's. Optionally dLoRA's reactive
migration moves rows, waiting and running ones, and a placement is recomputed each time step from the demand seen
(LoRAServe). A dispatcher knows a request's prompt and the mean output length. Dispatchers see arrays over replicas and
return a replica's number; ties go to the smaller number.

A server's host memory holds the adapters that are placed on it. One that it lacks comes from a server that has it, and
stays (LoRAServe, section IV-B); a server where it is not placed any more gives it up then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lorabatch.scheduler.baselines.dealing import furthest_behind, pending_seconds
from lorabatch.scheduler.baselines.dlora_migration import (
    AdapterRows,
    MigrationSettings,
    ReplicaLoad,
    Transfer,
    plan_migration,
)
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.simulation.replica import SimulatedReplica
from lorabatch.scheduler.workload import BASE_MODEL, Workload


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Rows that arrive over time."""

    #: The rows, with true lengths of answers.
    rows: Workload
    #: Seconds at which each row arrives, float64 `[num_rows]`.
    release_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterView:
    """State of the replicas as dispatchers see it."""

    #: Predicted seconds of the work that each replica has, float64 `[num_replicas]`.
    queue_s: NDArray[np.float64]
    #: Predicted tokens of this work, float64 `[num_replicas]`.
    queue_tokens: NDArray[np.float64]
    #: Which adapters are in which replica's memory, bool `[num_adapters, num_replicas]`.
    is_resident: NDArray[np.bool_]
    #: Seconds to load each adapter, float64 `[num_adapters]`.
    load_s: NDArray[np.float64]


class Dispatcher(Protocol):
    """Chooses replicas for requests, one at a time."""

    @property
    def placed(self) -> NDArray[np.bool_] | None:
        """Replicas whose host memory is to hold each adapter, `[num_adapters, num_replicas]`; None: every one's."""

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """The replica for a request of this adapter (-1: base) that takes `row_s` seconds."""


@dataclass(frozen=True, slots=True)
class ProactiveDispatcher:
    """dLoRA's rule: the shortest estimated pending time."""

    placed: NDArray[np.bool_] | None = None

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """The replica with the least `pending_seconds`."""
        return int(np.argmin(pending_seconds(adapter, view.queue_s, view.is_resident, view.load_s)))


@dataclass(frozen=True, slots=True)
class LeastLoadDispatcher:
    """The replica where predicted seconds are least, ranks known; every adapter is everywhere."""

    placed: NDArray[np.bool_] | None = None

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """The replica with the fewest predicted seconds of work."""
        return int(np.argmin(view.queue_s + row_s))


@dataclass(frozen=True, slots=True)
class FewestTokensDispatcher:
    """Toppings as LoRAServe describes it (section V-D, V-F): by what each server is serving and has queued, blind to
    ranks. Every adapter is on every server.
    """

    placed: NDArray[np.bool_] | None = None

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """The replica with the fewest predicted tokens of work."""
        return int(np.argmin(view.queue_tokens))


@dataclass(slots=True)
class RoundRobinDispatcher:
    """dLoRA's strawman RR: in turn among the replicas a placement gives the adapter to."""

    placed: NDArray[np.bool_]
    _next: int = 0

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """The next replica in turn among those with the adapter; among all for the base model."""
        allowed = np.arange(len(view.queue_s)) if adapter < 0 else np.flatnonzero(self.placed[adapter])
        chosen = allowed[self._next % len(allowed)]
        self._next += 1
        return int(chosen)


@dataclass(slots=True)
class RoutedDispatcher:
    """LoRAServe and its static baselines: by shares of each adapter, float64 `[num_adapters, num_replicas]`."""

    fraction: NDArray[np.float64]
    _sent: NDArray[np.float64] | None = None

    @property
    def placed(self) -> NDArray[np.bool_]:
        """Replicas with a share of each adapter."""
        return np.asarray(self.fraction > 0)

    def choose(self, adapter: int, row_s: float, view: ClusterView) -> int:
        """The replica furthest behind its share of the adapter; for the base model, the least busy one."""
        if adapter < 0:
            return int(np.argmin(view.queue_s))
        if self._sent is None:
            self._sent = np.zeros_like(self.fraction)
        chosen = furthest_behind(self.fraction[adapter], self._sent[adapter])
        self._sent[adapter, chosen] += 1
        return chosen


# (tokens per second of each adapter, `[num_steps, num_adapters]`, oldest first) -> dispatcher from now on.
Replan = Callable[[NDArray[np.float64]], Dispatcher]


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """Settings of a `ServingSimulation`."""

    #: Rows of a full batch, by which a row's seconds are predicted.
    batch_rows: int
    #: Seconds between two runs of dLoRA's reactive mechanism (None: it is off).
    migrate_every_s: float | None = None
    #: Settings of this mechanism.
    migration: MigrationSettings = field(default_factory=MigrationSettings)
    #: Bytes of the keys and values of one token, by which rows hold memory (0: nothing holds any).
    token_bytes: int = 0
    #: Bytes of a replica's memory for rows and adapters.
    memory_bytes: float = float("inf")
    #: Seconds between two placements (None: the first one stays).
    replan_every_s: float | None = None
    #: Seconds at which a run is cut off; rows not done by then stay NaN in the timeline.
    give_up_s: float = float("inf")


class ServingSimulation:
    """One run of requests. The timeline given to the replicas holds the result."""

    def __init__(
        self,
        requests: Requests,
        replicas: Sequence[SimulatedReplica],
        dispatcher: Dispatcher,
        cost: CostModel,
        settings: ServingSettings,
        replan: Replan | None = None,
    ) -> None:
        workload = requests.rows
        #: The requests of this run.
        self.requests = requests
        self._workload, self._replicas, self._dispatcher = workload, list(replicas), dispatcher
        self._settings, self._replan, self._release = settings, replan, requests.release_s
        self._row_s = self._predicted_row_s(cost)
        self._row_tokens = workload.prompt_tokens + self._mean_output()
        self._queue_s, self._queue_tokens = np.zeros(len(self._replicas)), np.zeros(len(self._replicas))
        num_adapters = len(workload.adapters)
        self._is_resident = np.zeros((num_adapters, len(self._replicas)), dtype=bool)
        #: Adapters in the host memory of each replica, bool `[num_adapters, num_replicas]`.
        self.in_host = np.ones_like(self._is_resident) if dispatcher.placed is None else dispatcher.placed.copy()
        #: Adapters in the host memory of each replica, most at once, int64 `[num_replicas]`.
        self.most_in_host: NDArray[np.int64] = self.in_host.sum(axis=0)
        self._weight_bytes = [adapter.weight_bytes for adapter in workload.adapters]
        # Seconds of the load that a row has brought to its replica's queue.
        self._loading_s = np.zeros(workload.num_rows)
        #: Rows that have moved.
        self.num_moved = 0
        # Moves that replicas make when their step ends.
        self._leaving: dict[int, list[Transfer]] = {}
        self._load_s = np.array([cost.load_seconds(a.weight_bytes, "host") for a in workload.adapters])
        self._place = np.full(workload.num_rows, -1, np.int64)
        self._heap: list[tuple[float, int, int, NDArray[np.int64]]] = []
        self._is_stepping = [False] * len(self._replicas)
        self._order = 0
        self._history: list[NDArray[np.float64]] = []

    def _mean_output(self) -> float:
        assert self._workload.output_tokens is not None
        return float(self._workload.output_tokens.mean()) if self._workload.num_rows else 0.0

    def _predicted_row_s(self, cost: CostModel) -> NDArray[np.float64]:
        workload = self._workload
        ranks = np.array([a.rank for a in workload.adapters] + [0], dtype=np.float64)
        return cost.row_seconds(
            workload.prompt_tokens,
            self._mean_output(),
            batch_rows=self._settings.batch_rows,
            rank=ranks[workload.adapter_index],
        )

    def run(self) -> None:
        """Play every arrival and every step in order of time."""
        arrivals = np.argsort(self._release, kind="stable")
        next_arrival = 0
        timers = {"migrate": self._settings.migrate_every_s, "replan": self._settings.replan_every_s}
        due = {name: every for name, every in timers.items() if every is not None}
        while next_arrival < len(arrivals) or self._heap:
            arrival_s = self._release[arrivals[next_arrival]] if next_arrival < len(arrivals) else float("inf")
            step_s = self._heap[0][0] if self._heap else float("inf")
            now = min(arrival_s, step_s)
            if now > self._settings.give_up_s:
                return
            for name in sorted(due):
                if now >= due[name]:
                    (self._migrate if name == "migrate" else self._replace)(now)
                    due[name] = now + (timers[name] or 0.0)
            if arrival_s <= step_s:
                self._arrive(now, int(arrivals[next_arrival]))
                next_arrival += 1
            else:
                self._stepped(now, arrival_s)

    def _arrive(self, now: float, row: int) -> None:
        adapter = int(self._workload.adapter_index[row])
        view = ClusterView(self._queue_s, self._queue_tokens, self._is_resident, self._load_s)
        replica = self._dispatcher.choose(adapter, float(self._row_s[row]), view)
        self._give(now, replica, np.array([row]))

    def _give(self, now: float, replica: int, rows: NDArray[np.int64], begun: dict[int, int] | None = None) -> None:
        """Queue rows on a replica. `begun`: these rows and the tokens that they have generated elsewhere."""
        self._place[rows] = replica
        for row in rows.tolist():
            self._bring_adapter(now, replica, row)
        self._add_to_queue(replica, rows)
        if begun is None:
            self._replicas[replica].add(rows)
        else:
            self._replicas[replica].take_over(begun)
        if not self._is_stepping[replica]:
            self._start(now, replica, now)

    def _bring_adapter(self, now: float, replica: int, row: int) -> None:
        """Have a row's adapter read from host memory, or from another server's where this one has no copy."""
        adapter = int(self._workload.adapter_index[row])
        self._loading_s[row] = 0.0
        if adapter < 0:
            return
        if not self._is_resident[adapter, replica]:
            self._is_resident[adapter, replica] = True
            self._loading_s[row] = self._load_s[adapter]
        if not self.in_host[adapter, replica]:
            self._replicas[replica].fetch(adapter, now, "peer")
            self.in_host[adapter, replica] = True
            self._give_up_copies()

    def _give_up_copies(self) -> None:
        """Drop adapters from host memories where they are not placed any more, but not the last copy."""
        placed = self._dispatcher.placed
        if placed is not None:
            kept = self.in_host & placed
            self.in_host = np.where(kept.any(axis=1, keepdims=True), kept, self.in_host)
        self.most_in_host = np.maximum(self.most_in_host, self.in_host.sum(axis=0))

    def _add_to_queue(self, replica: int, rows: NDArray[np.int64]) -> None:
        self._queue_s[replica] += self._row_s[rows].sum() + self._loading_s[rows].sum()
        self._queue_tokens[replica] += self._row_tokens[rows].sum()

    def _take_from_queue(self, replica: int, rows: NDArray[np.int64]) -> None:
        seconds = self._row_s[rows].sum() + self._loading_s[rows].sum()
        self._queue_s[replica] = max(0.0, self._queue_s[replica] - seconds)
        self._queue_tokens[replica] = max(0.0, self._queue_tokens[replica] - self._row_tokens[rows].sum())

    def _start(self, now: float, replica: int, until_s: float) -> None:
        if self._replicas[replica].num_rows == 0:
            return
        end_s, finished = self._replicas[replica].step(now, until_s)
        self._is_stepping[replica] = True
        self._order += 1
        heapq.heappush(self._heap, (end_s, self._order, replica, finished))

    def _stepped(self, now: float, next_arrival_s: float) -> None:
        _, _, replica, finished = heapq.heappop(self._heap)
        self._is_stepping[replica] = False
        self._take_from_queue(replica, finished)
        self._is_resident[:, replica] = False
        self._is_resident[self._replicas[replica].resident, replica] = True
        waiting = self._workload.adapter_index[self._replicas[replica].waiting]
        self._is_resident[waiting[waiting >= 0], replica] = True
        for move in self._leaving.pop(replica, []):
            self._move(now, move)
        self._start(now, replica, next_arrival_s)

    def _migrate(self, now: float) -> None:
        """Plan migrations. Rows leave a replica between two of its steps, as they do in a job."""
        if self._leaving:
            return
        loads = [self._load_of(replica) for replica in range(len(self._replicas))]
        sizes = self._weight_bytes if self._settings.token_bytes else []
        adapter_bytes: dict[str | None, float] = {str(number): float(size) for number, size in enumerate(sizes)}
        moves, _ = plan_migration(loads, adapter_bytes, self._settings.migration)
        for move in moves:
            source = int(move.from_replica_id)
            if self._is_stepping[source]:
                self._leaving.setdefault(source, []).append(move)
            else:
                self._move(now, move)

    def _move(self, now: float, move: Transfer) -> None:
        """Move rows: those that wait first, then those that began last."""
        source, target = int(move.from_replica_id), int(move.to_replica_id)
        number = BASE_MODEL if move.adapter_id is None else int(move.adapter_id)
        here = np.concatenate([self._replicas[source].running, self._replicas[source].waiting])
        of_adapter = here[self._workload.adapter_index[here] == number]
        handed = self._replicas[source].hand_over(of_adapter, move.num_rows)
        if handed:
            rows = np.fromiter(handed, np.int64, len(handed))
            self.num_moved += len(rows)
            self._take_from_queue(source, rows)
            self._give(now, target, rows, handed)

    def _load_of(self, replica: int) -> ReplicaLoad:
        """Rows of a replica, waiting and running, as the planner of migrations sees them. Only running rows hold
        memory, as much as they reserve.
        """
        engine, workload = self._replicas[replica], self._workload
        rows = np.concatenate([engine.running, engine.waiting])
        reserved = (
            workload.prompt_tokens[rows].astype(np.int64) + workload.max_tokens[rows]
        ) * self._settings.token_bytes
        held = np.where(np.arange(len(rows)) < len(engine.running), reserved, 0)
        present, group, counts = np.unique(workload.adapter_index[rows], return_inverse=True, return_counts=True)
        means = [
            np.bincount(group, weights=values, minlength=len(present)) / np.maximum(counts, 1)
            for values in (self._row_s[rows], held)
        ]
        groups = tuple(
            AdapterRows(None if a == BASE_MODEL else str(a), int(n), float(s), float(size))
            for a, n, s, size in zip(present, counts, *means, strict=True)
        )
        resident = (str(a) for a in np.flatnonzero(self._is_resident[:, replica]))
        fixed_s = max(0.0, float(self._queue_s[replica] - self._row_s[rows].sum()))
        memory = self._settings.memory_bytes
        return ReplicaLoad(str(replica), groups, frozenset((*resident, None)), fixed_s, memory)

    def _replace(self, now: float) -> None:
        assert self._replan is not None, "replan_every_s without a replan"
        every = self._settings.replan_every_s or 1.0
        arrived = (self._release <= now) & (self._release > now - every) & (self._workload.adapter_index >= 0)
        assert self._workload.output_tokens is not None
        tokens = self._workload.prompt_tokens[arrived] + self._workload.output_tokens[arrived]
        adapters = self._workload.adapter_index[arrived]
        self._history.append(np.bincount(adapters, weights=tokens, minlength=len(self._load_s)) / every)
        self._dispatcher = self._replan(np.array(self._history))
        self._give_up_copies()
