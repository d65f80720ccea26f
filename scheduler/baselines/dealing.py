"""Deals the rows of an offline job out to replicas as other systems do.

All rows are there at the start, and their policies send each request to a replica as it arrives: so the whole order is
known before the job. Ties go to the smaller number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..policies import RowsToDeal
from .loraserve import Leftovers, assign_loraserve


def in_turn(rows: RowsToDeal) -> NDArray[np.int64]:
    """Deal shards of rows, in input order, to one replica after the other."""
    replica_of = np.zeros(rows.workload.num_rows, np.int64)
    order = _with_work(rows)
    replica_of[order] = np.arange(len(order)) // rows.rows_per_shard % rows.num_replicas
    return replica_of


def by_pending_time(rows: RowsToDeal) -> NDArray[np.int64]:
    """Deal as dLoRA (section 5.1): each row to the replica with the least work queued, adapter loads included.

    Adapters are in storage at first.
    """
    workload, queue_s = rows.workload, np.zeros(rows.num_replicas)
    is_resident = np.zeros((len(workload.adapters), rows.num_replicas), dtype=bool)
    load_s = np.array([rows.cost.load_seconds(adapter.weight_bytes, "storage") for adapter in workload.adapters])
    replica_of = np.zeros(workload.num_rows, np.int64)
    for row in _with_work(rows).tolist():
        adapter = int(workload.adapter_index[row])
        pending_s = pending_seconds(adapter, queue_s, is_resident, load_s)
        replica = int(np.argmin(pending_s))
        # The load is pending there from now on, before the row.
        queue_s[replica] = pending_s[replica] + rows.row_s[row]
        if adapter >= 0:
            is_resident[adapter, replica] = True
        replica_of[row] = replica
    return replica_of


def pending_seconds(
    adapter: int, queue_s: NDArray[np.float64], is_resident: NDArray[np.bool_], load_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Queueing time plus loading the adapter where it is absent, float64 `[num_replicas]` (dLoRA section 5.1).

    `adapter`: -1 for the base model. `is_resident` `[num_adapters, num_replicas]`, `load_s` `[num_adapters]`.
    """
    return queue_s if adapter < 0 else queue_s + np.where(is_resident[adapter], 0.0, load_s[adapter])


def by_routing(rows: RowsToDeal, leftovers: Leftovers = "whole") -> NDArray[np.int64]:
    """Deal as LoRAServe (section IV): place adapters by rank and demand; each adapter's rows follow its shares, rows of
    the base model go to the replica with the least work.
    """
    workload, fraction, queue_s = rows.workload, routing_of(rows, leftovers), np.zeros(rows.num_replicas)
    sent = np.zeros_like(fraction)
    replica_of = np.zeros(workload.num_rows, np.int64)
    for row in _with_work(rows).tolist():
        adapter = int(workload.adapter_index[row])
        if adapter >= 0:
            replica = furthest_behind(fraction[adapter], sent[adapter])
            sent[adapter, replica] += 1
        else:
            replica = int(np.argmin(queue_s))
        queue_s[replica] += rows.row_s[row]
        replica_of[row] = replica
    return replica_of


def by_levelled_routing(rows: RowsToDeal) -> NDArray[np.int64]:
    """Deal as `by_routing`, with what no server of its rank has room for split over servers."""
    return by_routing(rows, "levelled")


def furthest_behind(share: NDArray[np.float64], sent: NDArray[np.float64]) -> int:
    """The replica furthest behind its share of an adapter's rows; `sent`: rows so far, float64 `[num_replicas]`.

    LoRAServe sends a request to a server with the probability that is the server's share of the adapter (section IV,
    phi). Without draws, runs repeat, and each replica has its share to within one row.
    """
    behind = share * (sent.sum() + 1) - sent
    return int(np.argmax(np.where(share > 0, behind, -np.inf)))


def routing_of(rows: RowsToDeal, leftovers: Leftovers = "whole") -> NDArray[np.float64]:
    """LoRAServe's placement: share of each adapter on each replica, float64 `[num_adapters, num_replicas]`.

    The demand of an adapter, which the paper extrapolates from the past, is known: the tokens of its rows. Operating
    points are the cost model's at this job's mean lengths, without an objective of latency, which no offline job has.
    """
    workload, order = rows.workload, _with_work(rows)
    adapter, tokens = workload.adapter_index[order], (workload.prompt_tokens + rows.output_tokens)[order]
    has_adapter = adapter >= 0
    num_adapters = len(workload.adapters)
    demand = np.zeros(num_adapters)
    np.add.at(demand, adapter[has_adapter], tokens[has_adapter])
    used = np.flatnonzero(demand)
    fraction = np.zeros((num_adapters, rows.num_replicas))
    fraction[:, 0] = 1.0
    if len(used):
        ranks = np.array([info.rank for info in workload.adapters], np.int64)
        prompt, output = float(workload.prompt_tokens[order].mean()), float(rows.output_tokens[order].mean())
        points = {
            int(rank): rows.cost.operating_point(
                int(rank), batch_rows=rows.batch_rows, prompt_tokens=prompt, output_tokens=output
            )
            for rank in np.unique(ranks[used])
        }
        fraction[used] = assign_loraserve(ranks[used], demand[used], points, rows.num_replicas, leftovers)
    return fraction


def _with_work(rows: RowsToDeal) -> NDArray[np.int64]:
    """Rows that an engine will see, in input order."""
    order = rows.workload.input_order
    return order[rows.workload.max_tokens[order] > 0]
