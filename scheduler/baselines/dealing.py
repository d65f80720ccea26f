"""Deals the rows of an offline job out to replicas as other systems do.

All rows are there at the start, and their policies send each request to a replica as it arrives: so the whole order is
known before the job. dLoRA's and LoRAServe's rules are the dispatchers of the online experiments (`serving.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..policies import RowsToDeal
from .loraserve import Routing, assign_loraserve
from .serving import ClusterView, Dispatcher, ProactiveDispatcher, RoutedDispatcher


def in_turn(rows: RowsToDeal) -> NDArray[np.int64]:
    """Deal shards of rows, in input order, to one replica after the other."""
    replica_of = np.zeros(rows.workload.num_rows, np.int64)
    order = _with_work(rows)
    replica_of[order] = np.arange(len(order)) // rows.rows_per_shard % rows.num_replicas
    return replica_of


def by_pending_time(rows: RowsToDeal) -> NDArray[np.int64]:
    """Deal as dLoRA (section 5.1): each row to the replica with the least work queued, adapter loads included."""
    return _dealt_by(ProactiveDispatcher(), rows)


def by_routing(rows: RowsToDeal) -> NDArray[np.int64]:
    """Deal as LoRAServe (section IV): place adapters by rank and demand; each adapter's rows follow its shares."""
    return _dealt_by(RoutedDispatcher(routing_of(rows)), rows)


def routing_of(rows: RowsToDeal) -> Routing:
    """LoRAServe's placement. The demand of an adapter, which the paper extrapolates from the past, is known: the tokens
    of its rows. Operating points are the cost model's at this job's mean lengths.
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
        fraction[used] = assign_loraserve(ranks[used], demand[used], points, rows.num_replicas).fraction
    return Routing(fraction)


def _with_work(rows: RowsToDeal) -> NDArray[np.int64]:
    """Rows that an engine will see, in input order."""
    order = rows.workload.input_order
    return order[rows.workload.max_tokens[order] > 0]


def _dealt_by(dispatcher: Dispatcher, rows: RowsToDeal) -> NDArray[np.int64]:
    """Replica that a dispatcher chooses for each row, int64 `[num_rows]`.

    All rows arrive at 0, one after the other in input order. Adapters are in storage at first.
    """
    workload, num_replicas = rows.workload, rows.num_replicas
    view = ClusterView(
        queue_s=np.zeros(num_replicas),
        queue_tokens=np.zeros(num_replicas),
        is_resident=np.zeros((len(workload.adapters), num_replicas), dtype=bool),
        load_s=np.array([rows.cost.load_seconds(adapter.weight_bytes, "storage") for adapter in workload.adapters]),
    )
    replica_of = np.zeros(workload.num_rows, np.int64)
    for row in _with_work(rows).tolist():
        adapter, row_s = int(workload.adapter_index[row]), float(rows.row_s[row])
        replica = replica_of[row] = dispatcher.choose(adapter, row_s, view)
        view.queue_s[replica] += row_s
        view.queue_tokens[replica] += workload.prompt_tokens[row] + rows.output_tokens[row]
        if adapter >= 0:
            view.is_resident[adapter, replica] = True
    return replica_of
