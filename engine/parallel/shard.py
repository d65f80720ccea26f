"""Parts that leader and members of a group have alike: the part of the decoder, and the sums of all parts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..config import EngineConfig
from ..errors import EngineError
from ..model_config.partition import Partition
from ..models.decoder import GroupSums
from ..runner.backend import GpuBackend, backend_type, choose_device, choose_formats
from .collectives import Collectives
from .device_sums import DeviceSums


class _SumsInMemory(GroupSums):
    """Adds up and joins tensors in memory that the members share, for parts on a CPU."""

    def __init__(self, collectives: Collectives, partition: Partition) -> None:
        super().__init__(partition)
        self._collectives = collectives

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all members' `x`, by `Collectives`."""
        return self._collectives.add_up(x)

    def join_logits(self, x: Tensor) -> Tensor:
        """The logits of all members on the leader; on other members their own."""
        joined = self._collectives.join_columns(x)
        return x if joined is None else joined


def sums_of(config: EngineConfig, collectives: Collectives, partition: Partition) -> GroupSums:
    """The object that adds up a member's part with the others."""
    if uses_device_sums(config):
        return DeviceSums(partition, choose_device(config))
    return _SumsInMemory(collectives, partition)


def uses_device_sums(config: EngineConfig) -> bool:
    """Whether members meet on their devices, by the Triton kernels, rather than in memory that they share."""
    return backend_type(config, choose_device(config)) is GpuBackend


def config_of_member(config: EngineConfig, member: int) -> EngineConfig:
    """The configuration of one member: on a GPU of its own, the leader's or one of those behind it."""
    device = choose_device(config)
    if device.type != "cuda":
        return config
    return replace(config, device=f"cuda:{(device.index or 0) + member}")


def check_served(config: EngineConfig) -> None:
    """Raises `EngineError` for what groups do not serve."""
    asked = f"tensor_parallel={config.tensor_parallel}"
    if config.mode == "exact":
        raise EngineError(f"{asked}, mode='exact': what members add up rounds otherwise than the whole. Use 1.")
    device = choose_device(config)
    choose_formats(config, device)  # refused before members start
    if device.type == "cuda":
        first = device.index or 0
        there = torch.cuda.device_count() - first
        if there < config.tensor_parallel:
            raise EngineError(
                f"{asked}, device='{device}': torch sees {there} GPU{'s' * (there != 1)} from there on, expected one "
                "for each process of the engine. Lower tensor_parallel, or let this process see more of them "
                "(CUDA_VISIBLE_DEVICES)."
            )
