"""The backend of a group's leader whose members share memory: their pools are in memory that the leader has mapped, so
that it writes adapters and copies prefix pages for all of them, between two steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.layouts.pages import PageLayout
from ..config import EngineConfig
from ..memory.copies import AdapterCopies, Arrival, Parts
from ..model_config.model import ModelConfig
from ..models.merge import LiveWeights
from ..runner.backend import CpuBackend, StepRunner
from ..runner.runner import CpuRunner
from .backend import GroupBackend
from .gpu_backend import GpuGroupBackend
from .members import StartProcess, start_process
from .shard import uses_device_sums

if TYPE_CHECKING:
    from ..text.answers.token_rules import TokenRules


class _CpuGroupBackend(GroupBackend, CpuBackend):
    """The leader of a group on CPUs."""

    def __init__(
        self, model_folder: Path, config: EngineConfig, model: ModelConfig, start: StartProcess = start_process
    ) -> None:
        super().__init__(model_folder, config, model, start)
        self._pools = torch.empty(0)

    def allocate(self, num_elements: int) -> Tensor:
        """The pools of all members, [num_members, num_elements]."""
        self._pools = self.members.allocate(num_elements, self.pool_dtype)
        return self._pools

    def copies(self) -> AdapterCopies:
        """Copies to and from the pools of all members."""
        return _CopiesToAll(self._pools)

    def runner(
        self, live: LiveWeights, memory: Tensor, layout: PageLayout, config: EngineConfig, rules: TokenRules
    ) -> StepRunner:
        """A runner that has the members compute each step, too."""
        return CpuRunner(self.decoder, memory, layout, rules, self.members.send_step)


def choose_group_backend(
    model_folder: Path, config: EngineConfig, model: ModelConfig, start: StartProcess = start_process
) -> GroupBackend:
    """The backend of a group's leader on the configured device, with its kernels."""
    if uses_device_sums(config):
        return GpuGroupBackend(model_folder, config, model, start)
    return _CpuGroupBackend(model_folder, config, model, start)


class _CopiesToAll(AdapterCopies):
    """Copies adapters, [num_members, numbers of each], to the same pages of all `pools`."""

    def __init__(self, pools: Tensor) -> None:
        self._pools = pools

    def to_pool(self, numbers: Tensor, memory: Tensor, parts: Parts) -> Arrival:
        """Copy each member's numbers to its pool, to the same parts as in `memory`, the first."""
        return super().to_pool(numbers, self._pools, parts)

    def to_host(self, memory: Tensor, parts: Parts) -> Tensor:
        """Copy the pages of all members to the host."""
        return super().to_host(self._pools, parts)
