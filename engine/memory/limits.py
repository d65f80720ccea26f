"""Sizes the largest step and the page pool from a device's memory. No torch: plans ask it too.

On a CPU matrix products are near their best with 64 rows, and 512 tokens keep a step under a second. On a GPU the
numbers come from its memory:

- `step_tokens`: 16384, halved until what a step keeps at once (`step_bytes`) is at most a sixteenth of what the weights
  leave. A longer step costs nothing in a batch job and spreads the host's work of launching a prompt step kernel by
  kernel (some 450 launches for 32 layers) over more tokens.
- `batch_rows`: as many as the pool holds with contexts of 1024 tokens, in steps of 64, from 64 to 512. Weights are read
  once per step whatever the rows; beyond 512 rows planning a step on the host would take longer than the step.
- the pool: what weights, the copy that adapters are merged into, and the largest step leave. Modes `unmerged` and
  `exact` keep no copy, and jobs in `auto` merge nothing where it would take more than a third of what weights leave.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ...kernels.layouts.pages import PageLayout
from ..config import DeviceKind, EngineConfig, dtype_on, pool_format
from ..model_config.model import ModelConfig
from ..model_config.partition import Partition
from .pool import page_layout

_GIB = 1 << 30
_DEFAULT_CPU_POOL_BYTES = 2 * _GIB
# Compiled attention takes heads whose size is a multiple of this, see `kernels.paged_attention.compiled`.
_COMPILED_HEADS = 16
# Share of the memory left by weights that stays out of the pool: torch's allocator cannot use all of it, and graphs and
# compiled kernels need room.
_SLACK_SHARE = 0.05
# Python, torch and its libraries, before an engine has a model: 231 MB on x86, of which 80 MB are libraries.
_CPU_PROCESS_BYTES = 240 * 10**6
# Host memory of a process with a GPU, pinned buffers included. Not measured.
_GPU_PROCESS_BYTES = 4 * _GIB
# A Dask worker beside its engine: rows of the shards that it has open.
_WORKER_BYTES = 1 * _GIB
# Share of the host memory left by an engine which the adapters that left its pool may take: files, adapters that are
# read ahead and other programs take some.
_HOST_TIER_SHARE = 0.5
# Limits of the memory of a container (cgroup, version 2 and 1).
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# A folder for each GPU of the host.
_GPUS = Path("/proc/driver/nvidia/gpus")
# GPU memory that CUDA, its libraries and the driver take.
_CONTEXT_BYTES = 1 * _GIB
_FP32_BYTES = 4
_MOST_ROWS, _ROWS_STEP = 512, 64
_MOST_TOKENS, _FEWEST_TOKENS = 16384, 512
_CONTEXT_TOKENS = 1024
_STEP_SHARE = 1 / 16
# Largest share of the memory left by weights that mode `auto` gives to the copy: more would cost more rows than merging
# can win.
_MERGE_SHARE = 1 / 3
# Pages to a multiple of which rows' runs are rounded up where memory allows: on a CPU, sequences of equal runs share
# attention calls. (64 rows with answers of 16 to 72 tokens: 33 calls a layer with exact runs, 9 with runs of 4 pages.)
RUN_PAGES: dict[DeviceKind, int] = {"cpu": 4, "cuda": 1}
# Whether a row may take more pages as it grows: only if block tables name its pages one by one.
ROWS_GROW: dict[DeviceKind, bool] = {"cpu": False, "cuda": True}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of an engine's batches: of its steps and of its page pool."""

    #: Rows that may decode together.
    batch_rows: int
    #: Tokens of one step at most.
    step_tokens: int
    #: Size of the pool, all members of a group together.
    pool_bytes: int
    #: Keys and values of one token in all layers, all members together.
    token_bytes: int
    #: Tokens of a page.
    page_tokens: int
    #: Pages to a multiple of which rows' runs are rounded up where memory allows.
    run_pages: int
    #: Pages that a row takes whatever its length, for its recurrent state.
    row_pages: int = 0
    #: Host memory for adapters that left the pool, all members together; None where the host is not known.
    host_tier_bytes: int | None = None

    @property
    def num_pages(self) -> int:
        """Pages of the pool. Each member of a group has as many, in a pool of its own."""
        return self.pool_bytes // (self.page_tokens * self.token_bytes)


def engine_limits(
    config: EngineConfig, model: ModelConfig, kind: DeviceKind, memory_bytes: int, share_bytes: int | None = None
) -> EngineLimits:
    """Limits of an engine on a device with `memory_bytes` of memory: all of one GPU's, or of the machine.
    `share_bytes`: see `host_share`; None where the host is not known.

    An engine on a GPU measures what its weights leave; here it is estimated.
    """
    pool = pool_format(kind, config.dtype, config.base_quantization)
    if kind == "cpu" and any(shape.head_dim % _COMPILED_HEADS for shape, _ in _layout(config, model, 4).groups):
        pool = "float32"  # torch attends
    itemsize, part = ITEM_BYTES[pool], Partition(model, config.tensor_parallel, 0).shard
    if kind == "cpu":
        return cpu_limits(memory_bytes, config, part, itemsize, share_bytes=share_bytes)
    linear_itemsize = itemsize if config.base_quantization == "none" else 1
    left = _left_by_weights(memory_bytes, part, itemsize, linear_itemsize)
    return gpu_limits(left, config, replace(part, vocab_size=model.vocab_size), itemsize, share_bytes)


#: Memory of a host in bytes, its cores and its GPUs.
Host = tuple[int, int, int]


def this_host() -> Host:
    """The host of this process. GPUs that the process may not use count too, since other engines use them."""
    num_gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    return total_host_bytes(), len(os.sched_getaffinity(0)), num_gpus


def host_share(config: EngineConfig, kind: str, host: Host) -> int:
    """Memory of a host that one engine may count on: engines that take all of its cores, or all of its GPUs, share it
    equally."""
    host_bytes, num_cores, num_gpus = host
    if kind == "cuda":
        num_engines = num_gpus // config.tensor_parallel
    else:
        num_engines = num_cores // (config.num_threads or num_cores)
    return host_bytes // max(1, num_engines)


def _host_tier(config: EngineConfig, limits: EngineLimits, own_bytes: int, share_bytes: int | None) -> EngineLimits:
    """The limits with the host memory for adapters that leave the pool: what was asked for, else half of what the
    engine's share of the host leaves beside its worker and its own processes, each of which takes `own_bytes`."""
    tier = config.host_tier_bytes
    if tier is None and share_bytes is not None:
        left = share_bytes - _WORKER_BYTES - config.tensor_parallel * own_bytes
        tier = max(0, int(left * _HOST_TIER_SHARE))
    return replace(limits, host_tier_bytes=tier)


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Memory that an engine on a CPU takes at most, in bytes, all processes of a group together."""

    #: Weights of the base model, which the engines of a machine share where the cache of packed weights has them.
    weights: int
    #: Keys, values and adapters, once the pool is full.
    pool: int
    #: The processes by themselves, and their largest step.
    working: int
    #: Additional memory once an adapter has been merged into all linear layers.
    merged: int

    @property
    def unmerged(self) -> int:
        """Memory of the engine while no adapter is merged."""
        return self.weights + self.pool + self.working


def cpu_memory(config: EngineConfig, model: ModelConfig, limits: EngineLimits, file_bytes: int) -> CpuMemory:
    """Planned memory of an engine on a CPU. `file_bytes`: bytes of the model's weights in its files.

    Linear layers multiply in the files' own format, unless the job rounds them; a tied head is packed beside the
    embeddings. A merged adapter takes two copies of the layers in fp32: the base's and the merged one.
    """
    embeddings = model.vocab_size * model.embedding_size
    linears = live_weight_bytes(model, 1)
    table = model.layer_table_elements
    itemsize = file_bytes / (linears + table + embeddings * (1 if model.is_tied else 2))
    if dtype_on("cpu", config.dtype) == "bfloat16":
        itemsize = 2
    linear_itemsize = 1 if config.base_quantization == "int8" else itemsize
    step = step_bytes(limits.batch_rows, limits.step_tokens, model, _FP32_BYTES)
    return CpuMemory(
        weights=int(linears * linear_itemsize + (2 * embeddings + table) * itemsize),
        pool=limits.pool_bytes,
        working=config.tensor_parallel * (_CPU_PROCESS_BYTES + step),
        merged=2 * linears * _FP32_BYTES,
    )


def weight_bytes(model: ModelConfig, itemsize: int, linear_itemsize: int | None = None) -> int:
    """Bytes of the base model on a device: linear layers (of `linear_itemsize` bytes a number), embeddings and head."""
    embeddings = model.vocab_size * model.embedding_size * (1 if model.is_tied else 2) + model.layer_table_elements
    return live_weight_bytes(model, linear_itemsize or itemsize) + embeddings * itemsize


def adapter_growth(model: ModelConfig, num_members: int) -> float:
    """Ratio of the memory that an adapter on all linear layers takes in the pools of a group to what it takes in one
    pool: halves of its pairs are in every pool.
    """

    def elements(part: ModelConfig) -> int:
        return sum(sum(shape) for layer in range(part.num_layers) for shape in part.layer_shapes(layer).values())

    return num_members * elements(Partition(model, num_members, 0).shard) / elements(model)


def keeps_merged_copy(config: EngineConfig) -> bool:
    """Whether an engine on a GPU leaves memory for weights to merge adapters into."""
    return config.mode in ("auto", "merged")


def has_room_to_merge(memory_bytes: int, model: ModelConfig, itemsize: int) -> bool:
    """Whether a GPU with `memory_bytes` of memory has room for a copy of the weights to merge adapters into, beside the
    pool.
    """
    return live_weight_bytes(model, itemsize) <= _left_by_weights(memory_bytes, model, itemsize) * _MERGE_SHARE


def _left_by_weights(memory_bytes: int, model: ModelConfig, itemsize: int, linear_itemsize: int | None = None) -> int:
    return max(0, memory_bytes - _CONTEXT_BYTES - weight_bytes(model, itemsize, linear_itemsize))


def cpu_limits(
    host_bytes: int,
    config: EngineConfig,
    model: ModelConfig,
    itemsize: int,
    run_pages: int = RUN_PAGES["cpu"],
    share_bytes: int | None = None,
) -> EngineLimits:
    """Limits of an engine on a CPU with `host_bytes` of memory: what was asked for, or the defaults. `model`: the part
    of a member. `itemsize`: bytes of a number in the pool. `share_bytes`: see `host_share`.
    """
    pool_bytes = config.pool_bytes or min(_DEFAULT_CPU_POOL_BYTES, host_bytes // 8)
    token_bytes, row_pages = _row_memory(config, model, itemsize)
    rows, tokens = config.batch_rows, config.step_tokens
    limits = EngineLimits(rows, tokens, pool_bytes, token_bytes, config.page_tokens, run_pages, row_pages)
    weights = weight_bytes(model, itemsize, 1 if config.base_quantization != "none" else None)
    merged = 2 * live_weight_bytes(model, _FP32_BYTES) if keeps_merged_copy(config) else 0
    own = _CPU_PROCESS_BYTES + weights + merged + step_bytes(rows, tokens, model, _FP32_BYTES)
    return _host_tier(config, limits, own + pool_bytes // config.tensor_parallel, share_bytes)


def gpu_limits(
    free_bytes: int, config: EngineConfig, model: ModelConfig, itemsize: int, share_bytes: int | None = None
) -> EngineLimits:
    """Limits of an engine on a GPU with `free_bytes` left by the weights; of a group, on the member's GPU that has the
    least. `model`: the part of a member, with the whole vocabulary. `itemsize`: bytes of a number in the pool.
    `share_bytes`: see `host_share`.
    """
    copy_bytes = live_weight_bytes(model, itemsize) if keeps_merged_copy(config) else 0

    def pool_bytes(batch_rows: int, step_tokens: int) -> int:
        if config.pool_bytes:
            return config.pool_bytes
        step = step_bytes(batch_rows, step_tokens, model, itemsize)
        return gpu_pool_bytes(free_bytes, copy_bytes, step) * config.tensor_parallel

    def is_small(step_tokens: int) -> bool:
        return step_bytes(rows or _ROWS_STEP, step_tokens, model, itemsize) <= free_bytes * _STEP_SHARE

    token_bytes, row_pages = _row_memory(config, model, itemsize)
    rows, tokens = config.max_batch_rows, config.max_step_tokens
    if tokens is None:
        tokens = _MOST_TOKENS
        while tokens > _FEWEST_TOKENS and not is_small(tokens):
            tokens //= 2
    if rows is None:
        fitting = pool_bytes(_MOST_ROWS, tokens) // ((_CONTEXT_TOKENS + row_pages * config.page_tokens) * token_bytes)
        rows = min(max(fitting // _ROWS_STEP, 1) * _ROWS_STEP, _MOST_ROWS)
    pool = pool_bytes(rows, tokens)
    limits = EngineLimits(rows, tokens, pool, token_bytes, config.page_tokens, RUN_PAGES["cuda"], row_pages)
    return _host_tier(config, limits, _GPU_PROCESS_BYTES, share_bytes)


def _layout(config: EngineConfig, model: ModelConfig, itemsize: int) -> PageLayout:
    return page_layout(model, config.page_tokens, itemsize)


def _row_memory(config: EngineConfig, model: ModelConfig, itemsize: int) -> tuple[int, int]:
    """Bytes of the keys and values of one token on all members, of which each has a part like `model`; and pages that a
    row takes whatever its length.
    """
    layout = _layout(config, model, itemsize)
    return layout.group_starts[-1] * itemsize * config.tensor_parallel, layout.row_pages


def gpu_pool_bytes(free_bytes: int, copy_bytes: int, largest_step_bytes: int) -> int:
    """Bytes of the pool of one GPU when `free_bytes` are left after the weights, `copy_bytes` are kept for merged ones,
    and the largest step takes `largest_step_bytes`; 0 when nothing is left for it.
    """
    return max(int(free_bytes * (1 - _SLACK_SHARE) - copy_bytes - largest_step_bytes), 0)


def live_weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of the copies of the decoder layers' linear weights that adapters are merged into, kept once an adapter was
    merged.
    """
    return model.layer_elements * itemsize


def step_bytes(batch_rows: int, step_tokens: int, model: ModelConfig, itemsize: int) -> int:
    """Bytes of the numbers of the largest step that live at once: a layer's, and the logits of every running row.

    Per token: residual stream, normed input and the product that joins it (3 hidden), and the wider of the widest mixer
    (its packed product and its answers) and the MLP (its packed product and the activation). Per row: logits, their
    copies for log-probabilities and behind a graph that ends with them, and one in fp32 for the sum of their
    exponentials.
    """
    mixer = max(sum(layer.mixer.parts) + layer.mixed_size for layer in model.layers)
    mlp = (3 if model.has_gate else 2) * model.intermediate_size
    per_token = (3 * model.hidden_size + max(mixer, mlp)) * itemsize
    per_row = model.vocab_size * (3 * itemsize + _FP32_BYTES)
    return step_tokens * per_token + batch_rows * per_row


def total_host_bytes() -> int:
    """Memory of this machine, or of the container that limits it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such limit, or none set ("max")
            limits.append(int(file.read_text()))
    return min(limits)
