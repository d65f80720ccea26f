"""The backend of a group's leader: it computes its own part, and has the members compute theirs at the same time.

    leader    plan a step | place new adapters, send the step | embed, layers … logits | sample
    members                 receive it                        | embed, layers … logits | wait

Batching, page numbers, adapters on their way and sampling are the leader's alone. The pools of all members are in
memory that the leader shares, so it writes adapters and copies prefix pages for all of them, between two steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..config import EngineConfig, has_blocks
from ..errors import AdapterRefusedError, UnsupportedModelError
from ..memory.allocation import MemoryPlan, plan_pool
from ..memory.copies import AdapterCopies, Arrival, CopiesAtOnce
from ..memory.limits import cpu_limits, default_cpu_pool_bytes, total_host_bytes
from ..memory.pool import PageLayout
from ..memory.residency import ResidentAdapter
from ..model_config.model import ModelConfig
from ..model_config.partition import group_of, partition_problem
from ..models.decoder import Decoder
from ..models.merge import LiveWeights
from ..models.step_batch import StepEntry
from ..peft.random import RANDOM_FOLDER
from ..peft.weights import AdapterWeights
from ..runner.runner import CpuRunner, LaunchedStep, StepRunner
from ..runner.sampler import TokenRules
from .members import GroupMembers, StartProcess, start_process
from .messages import MergeAdapter, PlaceAdapter, RestoreBase
from .shard import ShardBackend, ShardWeights, check_served
from .steps import encode_step


class GroupBackend(ShardBackend):
    """See the module. Raises `EngineError` for what a group does not serve."""

    def __init__(
        self, model_folder: Path, config: EngineConfig, model: ModelConfig, start: StartProcess = start_process
    ) -> None:
        check_served(config)
        problem = partition_problem(model, config.tensor_parallel, has_blocks=has_blocks(model_folder))
        if problem is not None:
            raise UnsupportedModelError(problem)
        if config.num_threads is None:
            config = replace(config, num_threads=len(os.sched_getaffinity(0)))
        self.partitions = group_of(model, config.tensor_parallel)
        self.members = GroupMembers(model_folder, config, model.hidden_size, start)
        try:
            super().__init__(model_folder, config, self.partitions[0], self.members.collectives)
            #: Of each member, the leader's first.
            self.weight_bytes_of = (self.weight_bytes, *self.members.wait_until_ready())
        except BaseException:
            self.members.close()
            raise
        self._pools = torch.empty(0)

    def plan_memory(self) -> MemoryPlan:
        """See `Backend`. `pool_bytes` are those of all members."""
        pool_bytes = self.config.pool_bytes or default_cpu_pool_bytes(total_host_bytes())
        limits = cpu_limits(self.config)
        return plan_pool(self.page_layout(), self.pool_dtype.itemsize, limits, pool_bytes // len(self.partitions))

    def allocate(self, num_elements: int) -> Tensor:
        """See `Backend`."""
        self._pools = self.members.allocate(num_elements, self.pool_dtype)
        return self._pools

    def copies(self) -> AdapterCopies:
        """See `Backend`."""
        return CopiesToAll(self._pools)

    def live_weights(self) -> LiveWeights:
        """See `Backend`."""
        return GroupWeights(self.decoder, self)

    def runner(
        self, live: LiveWeights, memory: Tensor, layout: PageLayout, config: EngineConfig, rules: TokenRules
    ) -> StepRunner:
        """See `Backend`."""
        return GroupRunner(self.decoder, memory, layout, rules, self.members)

    @property
    def hung_process(self) -> str | None:
        """See `Backend`."""
        member = self.members.silent_member()
        return None if member is None else f"member {member} of {len(self.partitions)} of the tensor-parallel group"

    def close(self) -> None:
        """See `Backend`."""
        self.members.close()


class CopiesToAll(CopiesAtOnce):
    """Copies adapters, [num_members, numbers of each], to the same place in `pools`, of which the first is the one that
    is named."""

    def __init__(self, pools: Tensor) -> None:
        self._pools = pools

    def to_pool(self, numbers: Tensor, target: Tensor) -> Arrival:
        """See `AdapterCopies`."""
        return super().to_pool(numbers, self._in_all(target))

    def to_host(self, source: Tensor) -> Tensor:
        """See `AdapterCopies`."""
        return super().to_host(self._in_all(source))

    def _in_all(self, part: Tensor) -> Tensor:
        start = int(part.storage_offset())
        return self._pools[:, start : start + part.numel()]


class GroupRunner(CpuRunner):
    """Runs the leader's part of every step while the members run theirs."""

    def __init__(
        self, decoder: Decoder, memory: Tensor, layout: PageLayout, rules: TokenRules, members: GroupMembers
    ) -> None:
        super().__init__(decoder, memory, layout, rules)
        self._members = members
        self._known: WeakValueDictionary[int, ResidentAdapter] = WeakValueDictionary()
        self._named: set[int] = set()

    def launch(self, entries: Items[StepEntry]) -> LaunchedStep:
        """See `StepRunner`."""
        for entry in entries:
            if entry.adapter is not None:
                self._place(entry.adapter)
            if entry.minus is not None:
                self._place(entry.minus.resident)
        self._members.send(encode_step(entries))
        return super().launch(entries)

    def _place(self, resident: ResidentAdapter) -> None:
        """Say where an adapter lies, unless the members know."""
        if resident.order in self._known:
            return
        gone = self._named - set(self._known)
        numbers = resident.numbers
        self._members.send(
            PlaceAdapter(
                resident.order, int(numbers.storage_offset()), numbers.numel(), resident.layout, tuple(sorted(gone))
            )
        )
        self._named = (self._named - gone) | {resident.order}
        self._known[resident.order] = resident


class GroupWeights(ShardWeights):
    """Merges adapters into the decoders of all members: on every one, or on none."""

    def __init__(self, decoder: Decoder, backend: GroupBackend) -> None:
        super().__init__(decoder, backend.partition, backend.collectives)
        self._members = backend.members

    def merge(self, adapter_id: str, adapter: AdapterWeights) -> None:
        """See `LiveWeights`."""
        if self.merged_adapter_id == adapter_id:
            return
        audit = adapter.audit
        random_rank = audit.max_rank if audit.folder == RANDOM_FOLDER else 0
        self._members.send(MergeAdapter(adapter_id, str(audit.folder), audit.name, random_rank))
        refusal: AdapterRefusedError | None = None
        try:
            super().merge(adapter_id, adapter)
        except AdapterRefusedError as error:
            refusal = error
        refused = [reply.refusal for reply in self._members.merged() if reply.refusal is not None]
        if refusal is None and refused:
            refusal = AdapterRefusedError(refused[0])
        if refusal is not None:
            self._members.send(RestoreBase())
            super().restore()
            raise refusal

    def restore(self) -> None:
        """See `LiveWeights`."""
        if self.merged_adapter_id is not None:
            self._members.send(RestoreBase())
            super().restore()
