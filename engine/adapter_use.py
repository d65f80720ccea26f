"""`AdapterUse`: what adapters cost an engine, in counts that add up."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import add, attrgetter, sub


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Costs of adapters: counts of an engine since it started, or added up over engines and times.

    Engines fill all fields but the fetches, which workers fill.
    """

    #: Rows that entered a batch while their adapter was in the pool already.
    pool_hits: int = 0
    #: Copies of adapters into the pool.
    loads: int = 0
    #: Copies among `loads` of adapters that host memory had kept.
    host_loads: int = 0
    #: Reads of adapters from the worker's disk, also ahead of their use.
    disk_reads: int = 0
    #: Adapters that the worker has fetched from other workers.
    peer_fetches: int = 0
    #: Adapters that the worker has fetched from storage.
    storage_fetches: int = 0
    #: Seconds that the worker's fetches took.
    fetch_s: float = 0.0
    #: Seconds of steps in which the host copied adapters into the pool and out of it, or waited for their files.
    stall_s: float = 0.0
    #: Merges of adapters into the weights, and restorations of these.
    switches: int = 0
    #: Seconds of steps that merges and restorations took.
    switching_s: float = 0.0
    #: Seconds of steps.
    step_s: float = 0.0
    #: Steps with unmerged rows.
    lora_steps: int = 0
    #: Distinct unmerged adapters of a step, summed over the steps.
    step_adapters: int = 0
    #: Rows in steps, times the seconds of the steps: their adapters were there.
    present_row_s: float = 0.0
    #: Rows that had a place in the batch and no adapter yet, times the seconds of the steps.
    absent_row_s: float = 0.0
    #: Pages of the pool, times seconds of steps.
    page_s: float = 0.0
    #: Pages that adapters held, times seconds of steps.
    adapter_page_s: float = 0.0
    #: Pages that rows held for keys and values, times seconds of steps.
    row_page_s: float = 0.0
    #: Pages that the prefix cache held, times seconds of steps.
    prefix_page_s: float = 0.0

    def __add__(self, other: AdapterUse) -> AdapterUse:
        return AdapterUse(*map(add, _adapter_use(self), _adapter_use(other)))

    def since(self, before: AdapterUse) -> AdapterUse:
        """Counts after `before`; all of them if one was set back, because the engine is another one."""
        differences = list(map(sub, _adapter_use(self), _adapter_use(before)))
        return self if min(differences) < 0 else AdapterUse(*differences)


_adapter_use = attrgetter(*(each.name for each in fields(AdapterUse)))
