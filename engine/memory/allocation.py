"""How much memory an engine takes: sizes that depend on the machine, computed once at the start.

How a GPU's memory is shared out: the pool gets what weights, merging and the largest step leave.

What rows leave behind in their pages, and who must not read it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.launch import is_interpreted
from ...kernels.packed_weight.panels import has_panels
from ...kernels.paged_attention.compiled import can_attend_compiled
from ..config import EngineConfig, StepLimits, cpu_limits, gpu_limits
from ..errors import PoolExhaustedError
from ..model_config.model import PACKED_SITES, ModelConfig
from .pool import PageLayout, PageRun

_GIB = 1 << 30
_DEFAULT_CPU_POOL_BYTES = 2 * _GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages of the pool and their layout, the compute device and dtype, and the limits of a step."""

    device: torch.device
    dtype: torch.dtype
    layout: PageLayout
    num_pages: int
    limits: StepLimits


def choose_device(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype: bf16 on a GPU, fp32 on a CPU (where bf16 multiplies far more slowly), unless told."""
    name = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={config.device!r}: torch sees no GPU here. Use 'cpu', or a build with CUDA.")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if config.dtype == "auto":
        return device, torch.bfloat16 if device.type == "cuda" else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if config.dtype not in dtypes:
        raise ValueError(f"dtype={config.dtype!r}: must be auto, {', '.join(dtypes)}")
    return device, dtypes[config.dtype]


def serves_by_kernels(config: EngineConfig, device: torch.device) -> bool:
    """Whether an engine on `device` runs the Triton kernels. Raises ValueError where they cannot run."""
    if device.type == "cuda":
        return True
    if config.kernels == "triton" and not is_interpreted():
        raise ValueError(
            "kernels='triton': on a CPU they run in Triton's interpreter only. Set TRITON_INTERPRET=1 before the "
            "first import, or leave kernels='auto'."
        )
    return config.kernels == "triton"


def plan_memory(config: EngineConfig, model: ModelConfig) -> MemoryPlan:
    """Size the pool. Call after the weights are on the device, so that free memory means what is left.

    Raises `PoolExhaustedError` when not even one page fits into `pool_bytes`.
    """
    device, dtype = choose_device(config)
    layout = PageLayout.of(model, config.page_tokens, is_page_wise=serves_by_kernels(config, device))
    page_bytes = layout.page_elements * dtype.itemsize
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading the weights used for a while counts as free
        limits, pool_bytes = gpu_plan(torch.cuda.mem_get_info(device)[0], config, model, dtype.itemsize)
    else:
        limits, pool_bytes = cpu_limits(config), config.pool_bytes or _default_pool_bytes()
    num_pages = pool_bytes // page_bytes
    if num_pages < 1:
        raise PoolExhaustedError(
            f"pool_bytes={pool_bytes}: one page of this model takes {page_bytes} bytes; raise pool_bytes."
        )
    return MemoryPlan(device, dtype, layout, num_pages, limits)


def gpu_plan(free_bytes: int, config: EngineConfig, model: ModelConfig, itemsize: int) -> tuple[StepLimits, int]:
    """Limits of a step and bytes of the pool on a GPU with `free_bytes` left by the weights."""

    def pool_bytes(limits: StepLimits) -> int:
        return config.pool_bytes or gpu_pool_bytes(free_bytes, limits, model, itemsize)

    token_bytes = 2 * model.num_layers * model.kv_size * itemsize
    limits = gpu_limits(config, free_bytes, lambda limits: step_bytes(limits, model, itemsize), pool_bytes, token_bytes)
    return limits, pool_bytes(limits)


def host_tier_bytes(config: EngineConfig) -> int:
    """Host memory for adapters that had to leave the pool."""
    if config.host_tier_bytes is not None:
        return config.host_tier_bytes
    return min(_GIB, _total_bytes() // 16)


def _default_pool_bytes() -> int:
    return min(_DEFAULT_CPU_POOL_BYTES, _total_bytes() // 8)


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def zeroed_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[num_elements]`, all zero. On a CPU pages are taken from the system as they are first used: a pool of
    gigabytes is there at once and counts only for what it holds (small pages, docs/adr/0013).
    """
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    # torch.zeros writes every byte; the system hands out memory that is zero already, and aligned to its pages.
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements)


def adapters_lie_in_panels(memory: torch.Tensor, layout: PageLayout) -> bool:
    """Whether steps on this pool compute LoRA by compiled CPU kernels."""
    return not layout.is_page_wise and memory.device.type == "cpu" and memory.dtype == torch.float32 and has_panels()


# For what torch's allocator cannot use, for graphs and compiled kernels.
_SLACK_SHARE = 0.05
_FP32_BYTES = 4


def gpu_pool_bytes(free_bytes: int, limits: StepLimits, model: ModelConfig, itemsize: int) -> int:
    """Bytes of the pool when `free_bytes` are left after the weights; 0 when nothing is left for it."""
    left = free_bytes * (1 - _SLACK_SHARE) - live_weight_bytes(model, itemsize) - step_bytes(limits, model, itemsize)
    return max(int(left), 0)


def live_weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Copies of the decoder layers' linear weights that adapters are merged into, kept once an adapter was merged."""
    sizes = (out * size for site in PACKED_SITES for out, size in model.members_of_site(site).values())
    return model.num_layers * sum(sizes) * itemsize


def step_bytes(limits: StepLimits, model: ModelConfig, itemsize: int) -> int:
    """Numbers of the largest step that live at once: a layer's, and the logits of every running row.

    Per token: residual stream, normed input and the product that joins it (3 hidden), and the wider of attention
    (qkv, queries' answers) and the MLP (its packed product and the activation). Per row: logits, their copy for
    log-probabilities, and one in fp32 for the sum of their exponentials.
    """
    attention = 2 * model.q_size + 2 * model.kv_size
    mlp = (3 if model.has_gate else 2) * model.intermediate_size
    per_token = (3 * model.hidden_size + max(attention, mlp)) * itemsize
    per_row = model.vocab_size * (2 * itemsize + _FP32_BYTES)
    return limits.step_tokens * per_token + limits.batch_rows * per_row


def eraser_for(memory: Tensor, layout: PageLayout, model: ModelConfig) -> Callable[[PageRun], None] | None:
    """Erases a run of `memory` (flat) before a row gets it; None where attention reads a row's own numbers only.

    Torch's attention reads up to the longest row of a group and masks the rest. That may be the numbers of a row that
    became NaN, which no mask keeps out.
    """
    if layout.is_page_wise or can_attend_compiled(model.head_dim, memory.dtype):
        return None

    def erase(run: PageRun) -> None:
        memory[run.start * layout.page_elements : run.end * layout.page_elements].zero_()

    return erase
