"""The backend of a group's leader whose members have a GPU each, or run the Triton kernels in their interpreter.

Each member has a pool on its own device, which no other process writes to. `gpu_runners` has the steps, `device_copies`
the way of adapters to the pools.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ...kernels.layouts.pages import PageLayout
from ..config import EngineConfig
from ..memory.copies import AdapterCopies
from ..model_config.model import ModelConfig
from ..models.merge import LiveWeights
from ..runner.backend import GpuBackend, StepRunner
from .backend import GroupBackend
from .device_copies import CopiesToMembers, slots_bytes, slots_in
from .device_sums import DeviceSums
from .gpu_runners import LeadingRunner
from .members import GroupMembers, StartProcess
from .messages import UseDevicePool

if TYPE_CHECKING:
    from ..text.answers.token_rules import TokenRules


class GpuGroupBackend(GroupBackend, GpuBackend):
    """The leader of a group whose members have devices of their own."""

    sums: DeviceSums

    def start_members(
        self, model_folder: Path, configs: Items[EngineConfig], model: ModelConfig, start: StartProcess
    ) -> None:
        """Start the processes of the other members, with memory for the slots through which adapters arrive."""
        self._copies: CopiesToMembers | None = None
        self.members = GroupMembers(model_folder, configs, start, pools_bytes=slots_bytes(len(configs)))

    def connect(self) -> None:
        """Connect the members' devices, and learn what memory is free on each."""
        self._free_bytes_of = self.members.connect(self.sums)

    def free_bytes(self) -> int:
        """Memory that weights leave on the GPU that has the least."""
        return min(super().free_bytes(), *self._free_bytes_of)

    def copies(self) -> AdapterCopies:
        """Copies to the pools of all members, through the slots."""
        slots = slots_in(self.members.pools, len(self.partitions), self.pool_dtype)
        self._copies = CopiesToMembers(super().copies(), slots, self.members)
        return self._copies

    def runner(
        self, live: LiveWeights, memory: Tensor, layout: PageLayout, config: EngineConfig, rules: TokenRules
    ) -> StepRunner:
        """A runner that has the members compute each step, too; sends them the sizes of their pools and steps."""
        self.await_kernels()
        prompts = self.prompt_attention(layout, config)
        runner = LeadingRunner(
            *(self.decoder, live, memory, layout, config, rules, self.executor()),
            prompts=prompts,
            share=self.sums.share,
            members=self.members,
        )
        full_rows = runner.full_rows
        assert full_rows is not None, "mode exact is refused"
        self.members.send(UseDevicePool(len(memory), config.batch_rows, config.step_tokens, full_rows))
        return runner

    def close(self) -> None:
        """End the thread that feeds the slots, and the processes of the other members."""
        if self._copies is not None:
            self._copies.close()
        super().close()
