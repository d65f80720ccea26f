"""The process that compiles an engine's kernels: `python -m lorabatch.engine.runner.compile_process PARENT KERNELS`.

It runs each kind of step once, by the engine's own decoder and runner, on torch's meta device, where tensors have
shapes and no numbers. Nothing is launched: a hook of Triton's notes what would be compiled, from types, shapes and
alignments as they are on a GPU. Then each kernel is compiled in a process forked from this one, as many at once as
there are cores. A driver that only names its target stands in for the GPU's, so that no GPU memory is taken.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key

from ...kernels.layouts.pages import PageLayout
from ...kernels.merge.triton import merge
from ...system.confinement import end_with
from ...system.local_cache import file_lock
from ..config import EngineConfig, read_model_config
from ..memory.packed import pack_adapter
from ..memory.pool import PageRange, page_layout
from ..memory.residency import ResidentAdapter
from ..model_config.model import ModelConfig, packed_members
from ..model_config.names import COMMON_SITES, PackedSite
from ..model_config.partition import partitions_of
from ..models.decoder import GroupSums
from ..models.gpu_decoder import GpuDecoder
from ..models.load import dummy_weights
from ..models.merge import LiveWeights, merge_jobs, packed_jobs
from ..models.step_batch import StepEntry
from ..peft.random import dummy_adapter_weights, dummy_audit
from ..request import Request, SamplingParams
from ..sequence import Sequence
from .compile_ahead import EngineKernels
from .gpu_graphs import StepExecutor
from .gpu_plan import PREFILL_TILE_ROWS, SPLIT_KEYS
from .gpu_runner import GpuRunner
from .runner import LaunchedStep
from .sampler import SampledTokens

_META = torch.device("meta")
_NUM_PAGES = 4096
_MOST_ROWS = 16384  # of a step, see `memory.limits`
# Code is the same for all ranks, but it reads those of several chunks.
_RANK = 20
# Adapters on all linear layers, on attention's, and on those of queries, keys and values or the MLP's, which are as
# many: a merge searches among its jobs, and is compiled for each number of their bits.
_MERGED_SITES: tuple[tuple[PackedSite, ...], ...] = (COMMON_SITES, ("qkv", "o"), ("qkv",))
_DRAWN = SamplingParams(max_tokens=2, temperature=0.8, top_p=0.9, top_k=40, logprobs=True)
_GREEDY = SamplingParams(max_tokens=2)

#: A kernel's function, and the specialization that Triton compiles it by.
Noted = tuple[Any, str]


def compile_for(capability: int) -> None:
    """Make Triton compile for a GPU of this capability from now on, by the part of a driver that compiling asks for:
    nothing is launched on its stream.
    """
    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: device
    )
    triton.runtime.driver.set_active(driver)


def note_kernels(kernels: EngineKernels) -> dict[str, Noted]:
    """Kernels that an engine launches, by what they are compiled by."""
    return note_launches(kernels.capability, lambda: _launch_all(kernels))


def note_launches(capability: int, launch_all: Callable[[], object]) -> dict[str, Noted]:
    """Kernels that `launch_all` launches, by what they are compiled by for a GPU."""
    compile_for(capability)
    noted: dict[str, Noted] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        noted[f"{fn.module}.{fn.name} {key}"] = fn.jit_function, compile["specialization_data"]
        return True  # not to be compiled now, nor launched

    triton.knobs.runtime.jit_cache_hook = note
    try:
        with torch.inference_mode():
            launch_all()
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    return noted


def _launch_all(kernels: EngineKernels) -> None:
    """Every kind of step, and merges."""
    whole = read_model_config(Path(kernels.model_folder))
    partition = partitions_of(whole, kernels.tensor_parallel)[0]
    is_part = kernels.tensor_parallel > 1
    model = partition.shard if is_part else whole
    dtype: torch.dtype = getattr(torch, kernels.dtype)
    sums = _SumsByShape(partition) if is_part else None
    decoder = GpuDecoder(model, dict(dummy_weights(model, dtype, _META)), dtype, products=None, sums=sums)
    if kernels.base_quantization != "none":
        decoder.quantize()
    if kernels.is_exact:
        decoder.fix_products()
        _multiply_rows(decoder)
    config = EngineConfig(page_tokens=kernels.page_tokens, mode="exact" if kernels.is_exact else "auto")
    layout = page_layout(model, config.page_tokens, dtype.itemsize)
    memory = torch.empty(_NUM_PAGES * layout.page_elements, dtype=dtype, device=_META)
    live = LiveWeights(decoder)
    runner = _UnreadRunner(decoder, live, memory, layout, config, None, StepExecutor())
    for entries in _steps(model, dtype, layout):
        runner.launch(entries)
    if live.takes_packed:
        for sites in _MERGED_SITES:
            _merge(decoder, layout.page_elements, sites, is_packed=not is_part)


def _multiply_rows(decoder: GpuDecoder) -> None:
    """Products of every launch shape, which follows from the number of rows."""
    linears = [*decoder.layers[0].linears.values(), *decoder.linears.values()]
    for linear in {(linear.shape, linear.bias is None): linear for linear in linears}.values():
        for num_rows in (1, *range(65, _MOST_ROWS, 128)):
            linear(torch.empty(num_rows, linear.shape[1], dtype=decoder.dtype, device=_META))


def _steps(model: ModelConfig, dtype: torch.dtype, layout: PageLayout) -> Iterator[list[StepEntry]]:
    """Prompts of more than a tile, then decode rows; with LoRA and without; drawn; behind contexts that are split."""
    weights = dummy_adapter_weights(dummy_audit(model, _RANK, "any"), dtype, _META)
    packed = pack_adapter(weights, model, dtype, layout.page_elements, in_panels=False, device=_META)
    adapter = ResidentAdapter("any", 0, packed.numbers, np.arange(packed.layout.num_pages), packed.layout)
    prompt, short, long = PREFILL_TILE_ROWS + 6, 5, 6 * SPLIT_KEYS

    def entry(sampling: SamplingParams, adapter: ResidentAdapter | None, num_tokens: int, num_stored: int) -> StepEntry:
        request = Request("", (1,) * num_tokens, None, sampling)
        sequence = Sequence(request, token_ids=[1] if num_stored else [], num_stored=num_stored)
        run = PageRange(0, layout.pages_for_tokens(num_tokens + 1))
        return StepEntry(sequence, 1 if num_stored else num_tokens, run, adapter)

    yield [entry(_DRAWN, which, prompt, 0) for which in (adapter, None)]
    yield [entry(_GREEDY, None, prompt, 0)]
    # one context is much longer than the others
    yield [entry(_DRAWN, adapter, tokens, tokens) for tokens in (long, *[short] * 7)]
    yield [entry(_GREEDY, adapter, short, short)]
    yield [entry(_GREEDY, None, short, short)]


def _merge(decoder: GpuDecoder, page_elements: int, sites: tuple[PackedSite, ...], *, is_packed: bool) -> None:
    """An adapter on these sites: from the pool, or from files, where pairs are often in fp32."""
    model, jobs = decoder.model, []
    audit = dummy_audit(model, _RANK, "any")
    adapter = dummy_adapter_weights(audit, decoder.dtype if is_packed else torch.float32, _META)
    packed = pack_adapter(adapter, model, decoder.dtype, page_elements, in_panels=False, device=_META)
    of_layers = packed.layout.sites(packed.numbers, np.arange(packed.layout.num_pages))
    for layer, of_layer in zip(decoder.layers, of_layers, strict=True):
        for site in sites:
            members, linear = packed_members(model, layer.index, site), layer.linears[site]
            jobs += packed_jobs(of_layer[site], members, linear) if is_packed else merge_jobs(adapter, members, linear)
    merge(jobs, jobs[0].pairs[0].a.dtype, torch.zeros(1, dtype=torch.int32, device=_META))


class _UnreadRunner(GpuRunner):
    """Runs steps whose tokens do not exist."""

    def _launched(self, sampled: tuple[Sequence, ...], wants_logprobs: bool, num_top: int) -> LaunchedStep:
        return LaunchedStep(sampled, lambda: SampledTokens([], [], [], []))


class _SumsByShape(GroupSums):
    """Sums of a group, by shapes alone."""

    def add_up(self, x: Tensor) -> Tensor:
        """`x` itself, which has the shape of the sum."""
        return x

    def join_logits(self, x: Tensor) -> Tensor:
        """An empty tensor of the joined shape."""
        return x.new_empty(len(x), self.head_outputs)


def compile_noted(noted: dict[str, Noted]) -> dict[str, Any]:
    """Compile kernels on all cores; returns what the process prints."""
    return {"num_kernels": len(noted), "failed": compile_each(noted, len(os.sched_getaffinity(0)))}


def compile_each(noted: dict[str, Noted], num_processes: int) -> list[str]:
    """Compile each kernel in a process of its own, `num_processes` at once; names of those that failed."""
    failed: list[str] = []
    running: dict[int, str] = {}

    def end_one() -> None:
        pid, status = os.wait()
        name = running.pop(pid)
        if status:
            failed.append(f"{name}: {_how_it_ended(status)}")

    parent = os.getpid()
    triton_key()  # part of every key in the cache: a checksum of all of Triton, which forked processes find made
    for function, specialization in noted.values():
        if len(running) == num_processes:
            end_one()
        pid = os.fork()
        if not pid:
            _compile_and_exit(function, specialization, parent)
        running[pid] = function.__name__
    while running:
        end_one()
    return failed


def _compile_and_exit(function: Any, specialization: str, parent: int) -> None:
    try:
        end_with(parent)
        _build_launcher(function.preload(specialization))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _build_launcher(kernel: Any) -> None:
    """Before Triton 3.7 each kind of arguments has a launcher in C of its own, which its first launch would build."""
    from triton.backends.nvidia import driver

    if kernel is not None and hasattr(driver, "make_launcher"):
        with suppress(AssertionError):  # there is no libcuda to link with, and no GPU to launch on
            driver.CudaLauncher(kernel.src, kernel.metadata)


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else "see the error above"


def main() -> int:
    """Entry point of the process. Processes that compile the same kernels take turns: all but the first find them."""
    parent, kernels = int(sys.argv[1]), EngineKernels(**json.loads(sys.argv[2]))
    end_with(parent)
    result: dict[str, Any] = {"num_kernels": 0, "failed": []}
    done = kernels.done
    with file_lock(done.with_suffix(".lock")):
        if not done.exists():
            result = compile_noted(note_kernels(kernels))
            if not result["failed"]:
                done.touch()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
