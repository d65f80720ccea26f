"""Where mode `exact` keeps its promise: a row's bytes do not depend on who shares its steps."""

from __future__ import annotations

import logging

import torch

from ..kernels.native import native_build
from ..kernels.packed_weight import can_pack
from ..kernels.paged_attention.compiled import can_attend_compiled
from .errors import ExactModeError
from .model_config import ModelConfig

logger = logging.getLogger(__name__)


def is_arithmetic_fixed(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled kernels compute all that a row's neighbours, its chunks or the number of threads could change
    the rounding of."""
    is_fp32 = device.type == "cpu" and dtype == torch.float32
    return is_fp32 and native_build() is not None and can_attend_compiled(model.head_dim, dtype)


def check_exact_promise(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """For an engine in mode `exact`: raises `ExactModeError` where nothing would be promised on a CPU, and logs where
    less is promised than equal bytes whatever the threads."""
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        logger.warning(
            "mode='exact', device='%s': equal bytes are promised on CPUs in float32 only. Here a row's last bits may "
            "depend on the rows beside it, since the products of linear layers round by their number.",
            device.type,
        )
    elif dtype != torch.float32:
        raise ExactModeError(
            f"mode='exact', dtype={name!r}: on a CPU products in {name} round by the number of rows beside a row. Use "
            "dtype='float32', or another mode."
        )
    elif not can_pack(device, dtype):
        raise ExactModeError(
            "mode='exact': there are no compiled CPU kernels here, and this torch has no oneDNN to stand in for them. "
            "Install lorabatch where a C compiler with OpenMP is at hand, or use another mode."
        )
    elif not is_arithmetic_fixed(model, device, dtype):
        logger.warning(
            "mode='exact': torch computes what compiled CPU kernels do elsewhere (%s). Bytes are equal among engines "
            "of the same torch, processor and number of threads only: give engine_threads.",
            "they are not installed here" if native_build() is None else f"heads of {model.head_dim} numbers",
        )
