"""The decoder that serves a base model on a device."""

from __future__ import annotations

from pathlib import Path

import torch

from ..kernels.packed_weight import can_pack
from .config import EngineConfig, ModelConfig
from .decoder import Decoder
from .device_decoder import DeviceDecoder
from .exact_decoder import ExactDecoder
from .exact_promise import check_exact_promise
from .memory_plan import serves_by_kernels
from .weights import dummy_weights, read_weights


def load_decoder(
    folder: Path, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """Read (or make) the weights and build the decoder of the device and mode. Raises `ModelFilesError`, and
    `ExactModeError` where mode `exact` could promise nothing."""
    if config.mode == "exact":
        check_exact_promise(model, device, dtype)
    if config.load_format == "dummy":
        weights = dummy_weights(model, dtype, device)
    else:
        weights = read_weights(folder, model, dtype, device)
    if serves_by_kernels(config, device):
        return DeviceDecoder(model, weights, is_packed=False)
    decoder = ExactDecoder if config.mode == "exact" else Decoder
    return decoder(model, weights, is_packed=can_pack(device, dtype))
