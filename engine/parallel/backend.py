"""The backend of a group's leader: it computes its own part, and has the members compute theirs at the same time.

leader plan a step | place new adapters, send the step | embed, layers … logits | sample members receive it | embed,
layers … logits | wait

Only the leader has batches, page numbers, adapters on their way and sampling. `cpu_backend` and `gpu_backend` have what
depends on where the members compute.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

import torch

from ..config import EngineConfig, has_blocks
from ..errors import AdapterRefusedError, EngineError
from ..model_config.model import ModelConfig
from ..model_config.partition import partition_problem, partitions_of
from ..models.decoder import Decoder, GroupSums
from ..models.merge import LiveWeights
from ..models.part import PartWeights
from ..peft.random import RANDOM_FOLDER
from ..peft.weights import AdapterWeights
from ..runner.backend import Backend
from .members import GroupMembers, StartProcess, start_process
from .messages import MergeAdapter, RestoreBase
from .shard import check_served, config_of_member, sums_of


class GroupBackend(Backend):
    """The part of a leader's backend that every leader has. Raises `EngineError` for what a group does not serve."""

    members: GroupMembers
    sums: GroupSums

    def __init__(
        self, model_folder: Path, config: EngineConfig, model: ModelConfig, start: StartProcess = start_process
    ) -> None:
        check_served(config)
        problem = partition_problem(model, config.tensor_parallel, has_blocks=has_blocks(model_folder))
        if problem is not None:
            raise EngineError(problem)
        if config.num_threads is None:
            config = replace(config, num_threads=len(os.sched_getaffinity(0)))
        assert config.member_threads is not None, f"{config.num_threads} threads are not shared out"
        torch.set_num_threads(config.member_threads)
        self.partitions = partitions_of(model, config.tensor_parallel)
        configs = [config_of_member(config, member) for member in range(config.tensor_parallel)]
        self.start_members(model_folder, configs, model, start)
        self.collectives = self.members.collectives
        try:
            #: Sums of the leader's part with those of others.
            self.sums = sums_of(configs[0], self.members.collectives, self.partitions[0])
            super().__init__(model_folder, configs[0], self.partitions[0].shard, self.sums)
            #: Bytes of the base's weights that each member has read, the leader's first.
            self.weight_bytes_of = (self.weight_bytes, *self.members.wait_until_ready())
            self.connect()
        except BaseException:
            self.members.close()
            raise

    def start_members(
        self, model_folder: Path, configs: Items[EngineConfig], model: ModelConfig, start: StartProcess
    ) -> None:
        """Start the processes of the other members."""
        sum_numbers = configs[0].step_tokens * model.hidden_size
        self.members = GroupMembers(model_folder, configs, start, sum_numbers=sum_numbers)

    def connect(self) -> None:
        """Let members find one another, once their parts are loaded."""

    def live_weights(self) -> LiveWeights:
        """The object that merges adapters on all members."""
        return _GroupWeights(self.decoder, self.sums, self.members)

    @property
    def hung_process(self) -> str | None:
        """Name of a member that gives no sign of life; None: all do."""
        member = self.members.silent_member()
        return None if member is None else f"member {member} of {len(self.partitions)} of the tensor-parallel group"

    def close(self) -> None:
        """End the processes of the other members."""
        self.members.close()


class _GroupWeights(PartWeights):
    """Merges adapters into the decoders of all members: on every one, or on none."""

    def __init__(self, decoder: Decoder, sums: GroupSums, members: GroupMembers) -> None:
        super().__init__(decoder, sums)
        self._members = members

    def merge(self, adapter_id: str, adapter: AdapterWeights) -> None:
        """Merge an adapter on all members. When one of them fails, all restore the base's weights."""
        if self.merged_adapter_id == adapter_id:
            return
        audit = adapter.audit
        random_rank = audit.max_rank if audit.folder == RANDOM_FOLDER else 0
        self._members.send(
            MergeAdapter(adapter_id, str(audit.folder), audit.name, random_rank, adapter.identity_sha256)
        )
        problem: Exception | None = None
        try:
            super().merge(adapter_id, adapter)
        except (AdapterRefusedError, torch.OutOfMemoryError) as error:
            problem = error
        for reply in self._members.merged():
            if problem is None and reply.refusal is not None:
                kind = torch.OutOfMemoryError if reply.is_out_of_memory else AdapterRefusedError
                problem = kind(reply.refusal)
        if problem is not None:
            self._members.send(RestoreBase(has_failed=True))
            self.undo()
            raise problem

    def restore(self) -> None:
        """Make the weights those of the base model on all members."""
        if self.merged_adapter_id is not None:
            self._members.send(RestoreBase())
            super().restore()
