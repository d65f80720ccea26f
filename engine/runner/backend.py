"""One `Backend` for each way to compute an engine's steps: its decoder, its memory and its runner.

The engine, memory and batching ask a backend's attributes and methods, never which backend it is. A further way to
compute (other kernels, another accelerator) is one more `Backend` and a line in `choose_backend`.
"""

from __future__ import annotations

import logging
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels import lacks_triton
from ...kernels.interpreted import fix_products
from ...kernels.launch import is_interpreted
from ...kernels.layouts.pages import PageLayout
from ...kernels.packed_weight import Products, can_multiply
from ...kernels.packed_weight.panels import StoredWeight, has_panels
from ...kernels.paged_attention.libraries import PromptAttention, choose_prompt_attention
from ...kernels.paged_attention.types import AttentionRule
from ...scheduler.costs.cost import CostModel
from ...scheduler.costs.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B
from ..config import (
    FP8_CAPABILITY,
    TRITON_IS_MISSING,
    DeviceKind,
    EngineConfig,
    dtype_on,
    format_problem,
    pool_format,
)
from ..errors import EngineError
from ..memory.allocation import zeroed_memory
from ..memory.copies import AdapterCopies, CopyStream
from ..memory.limits import RUN_PAGES, EngineLimits, cpu_limits, gpu_limits, host_share, this_host, total_host_bytes
from ..memory.pool import page_layout
from ..model_config.model import ModelConfig
from ..model_config.partition import Partition
from ..models.decoder import Decoder, GroupSums
from ..models.exact import ExactDecoder, attends_compiled, check_exact_on_cpu, check_exact_on_gpu, is_arithmetic_fixed
from ..models.gguf.blocks import Weight
from ..models.gpu_decoder import GpuDecoder, check_on_gpu
from ..models.load import load_weights, stored_weights
from ..models.merge import LiveWeights
from ..models.part import PartWeights
from ..models.weight_cache import Packed, WeightCache
from .compile_ahead import EngineKernels, is_compiled_ahead, start_compiling, wait_until_compiled
from .gpu_graphs import GraphExecutor, StepExecutor
from .gpu_runner import GpuRunner
from .runner import CpuRunner

if TYPE_CHECKING:
    from ..text.answers.token_rules import TokenRules

logger = logging.getLogger(__name__)

#: Computes steps, one after the other: `launch` starts one; `steps_ahead` of them may be launched before the one before
#: them is read.
StepRunner = CpuRunner | GpuRunner


class Backend(ABC):
    """A decoder on its device, and what steps over it need. `model`: the model that it computes. `sums`: sums of a
    group, of whose model `model` is a member's part; None where it is whole.

    Constructing one loads the weights, so that free memory afterwards means what is left for the pool. Raises
    `ModelFilesError`, and `EngineError` where mode `exact` could promise nothing.
    """

    #: Pages to a multiple of which rows' runs are rounded up where memory allows.
    run_pages: int
    #: Whether block tables may name pages of the prefix cache. Otherwise these are copied into a row's own run.
    has_block_tables: bool
    decoder: Decoder
    #: Parts of a group's members, the first of which this process has; none where it leads no group.
    partitions: tuple[Partition, ...] = ()

    def __init__(
        self, model_folder: Path, config: EngineConfig, model: ModelConfig, sums: GroupSums | None = None
    ) -> None:
        self.config = config
        self.model = model
        self.sums = sums
        self._partition = None if sums is None else sums.partition
        self.device = choose_device(config)
        self.dtype, self.products, pool = choose_formats(config, self.device)
        #: Number format of keys, values and adapters; that of queries where torch attends.
        self.pool_dtype = pool if attends_compiled(model, pool) else self.dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # where kernels are launched
        if config.mode == "exact":
            self.check_exact()
        weights, packed = self.load(model_folder)
        #: Bytes of the base's tensors that this process has read, or mapped where they were packed before.
        self.weight_bytes = _tensor_bytes(weights, packed)
        self.decoder = self.build_decoder(weights, packed)

    @property
    def whole(self) -> ModelConfig:
        """The whole model, of which `model` may be a member's part."""
        return self.model if self._partition is None else self._partition.whole

    @abstractmethod
    def check_exact(self) -> None:
        """Raises `EngineError` where mode `exact` could promise nothing."""

    def load(self, model_folder: Path) -> tuple[dict[str, Weight], Packed]:
        """Weights by checkpoint name, and linear layers that are packed already."""
        return load_weights(model_folder, self.whole, self.config, self.device, self.dtype, self._partition), {}

    @abstractmethod
    def build_decoder(self, weights: dict[str, Weight], packed: Packed) -> Decoder:
        """A decoder of `weights` (by checkpoint name, taken out one by one) and `packed`, see `Decoder`."""

    @property
    @abstractmethod
    def has_lora_panels(self) -> bool:
        """Whether LoRA matrices are stored in panels (`kernels.packed_weight`). Otherwise rank rows are stored one by
        one.
        """

    @property
    @abstractmethod
    def reads_other_rows(self) -> bool:
        """Whether attention reads numbers of other rows and masks them. A row's pages are then zeroed before it gets
        them, since no mask keeps out NaN.
        """

    @property
    @abstractmethod
    def is_arithmetic_fixed(self) -> bool:
        """Whether a row's bits are the same however its prompt is cut into steps."""

    def limits(self) -> EngineLimits:
        """Limits of the engine's steps and pool, here for a pool in host memory."""
        itemsize = self.pool_dtype.itemsize
        share = host_share(self.config, "cpu", this_host())
        return cpu_limits(total_host_bytes(), self.config, self.model, itemsize, self.run_pages, share)

    @abstractmethod
    def runner(
        self, live: LiveWeights, memory: Tensor, layout: PageLayout, config: EngineConfig, rules: TokenRules
    ) -> StepRunner:
        """A runner of steps over `memory` (the flat pool). `live`: weights of the decoder. `config`: with the limits
        of a step."""

    @property
    def default_cost(self) -> CostModel:
        """Cost model of a machine of this kind, for mode `auto` without a measured one."""
        return CPU_SMOLLM2_135M if self.device.type == "cpu" else H200_LLAMA_3_8B

    def free_bytes(self) -> int:
        """Memory of a GPU that weights leave; 0 for a device that is the host."""
        return 0

    def copies(self) -> AdapterCopies:
        """How adapters move between host memory and the pool."""
        return AdapterCopies()

    @property
    def loader_threads(self) -> int:
        """Threads that read adapters while steps run: one on a CPU, where they take cores from the steps."""
        return 1

    def allocate(self, num_elements: int) -> Tensor:
        """The pools that this process writes to, [number of pools, num_elements], all zero; the first is its own."""
        return torch.zeros(1, num_elements, dtype=self.pool_dtype, device=self.device)

    def live_weights(self) -> LiveWeights:
        """The object that merges adapters into the decoder."""
        return LiveWeights(self.decoder) if self.sums is None else PartWeights(self.decoder, self.sums)

    @property
    def hung_process(self) -> str | None:
        """A process that steps need and that gives no sign of life, by name. Any thread may ask."""
        return None

    def close(self) -> None:  # noqa: B027  (most have none)
        """End the processes that steps need, other than this one."""

    def page_layout(self) -> PageLayout:
        """How the pool is cut into pages."""
        return page_layout(self.model, self.config.page_tokens, self.pool_dtype.itemsize)


class CpuBackend(Backend):
    """Steps on a CPU by compiled kernels, or by torch's operators where they were not built."""

    run_pages = RUN_PAGES["cpu"]
    has_block_tables = False

    def check_exact(self) -> None:
        """Raises `EngineError` where the model cannot be computed exactly on this CPU."""
        check_exact_on_cpu(self.model)

    def load(self, model_folder: Path) -> tuple[dict[str, Weight], Packed]:
        """Weights as files store them, with packed layers from the cache where compiled kernels multiply."""
        if self.config.load_format == "auto" and self.products is not None and has_panels():
            cached = self.weight_cache().weights(model_folder, self.whole, self.products, self._partition)
            return cached or (stored_weights(model_folder, self.whole, self._partition), {})
        return super().load(model_folder)

    def weight_cache(self) -> WeightCache:
        """The cache of weights in panels."""
        return WeightCache.of_this_host()

    def build_decoder(self, weights: dict[str, Weight], packed: Packed) -> Decoder:
        """A decoder that multiplies by `products`; in mode `exact`, one whose rows do not depend on others."""
        if self.config.mode == "exact":
            assert self.sums is None, "what parts add up rounds otherwise than the whole"
            return ExactDecoder(self.model, weights, self.dtype, products=self.products, packed=packed)
        return Decoder(self.model, weights, self.dtype, products=self.products, packed=packed, sums=self.sums)

    @property
    def has_lora_panels(self) -> bool:
        """Whether there are compiled kernels, which read panels."""
        return has_panels()

    @property
    def reads_other_rows(self) -> bool:
        """Whether torch attends, over rows side by side."""
        return not attends_compiled(self.model, self.pool_dtype)

    @property
    def is_arithmetic_fixed(self) -> bool:
        """Whether compiled kernels compute all that could round otherwise."""
        return is_arithmetic_fixed(self.model)

    def allocate(self, num_elements: int) -> Tensor:
        """This process's pool, [1, num_elements], whose memory the system hands out page by page on first use."""
        return zeroed_memory(num_elements, self.pool_dtype)[None]

    def runner(
        self, live: LiveWeights, memory: Tensor, layout: PageLayout, config: EngineConfig, rules: TokenRules
    ) -> StepRunner:
        """A runner that computes a step when it is launched."""
        return CpuRunner(self.decoder, memory, layout, rules)


class GpuBackend(Backend):
    """Steps by the Triton kernels: on a GPU, or on a CPU in Triton's interpreter."""

    run_pages = RUN_PAGES["cuda"]
    has_block_tables = True
    has_lora_panels = False
    reads_other_rows = False
    decoder: GpuDecoder

    def check_exact(self) -> None:
        """Raises `EngineError` where the configuration cannot be exact, and fixes the interpreter's products."""
        check_exact_on_gpu(self.config)
        if is_interpreted():
            fix_products()

    @property
    def is_arithmetic_fixed(self) -> bool:
        """Whether the mode is `exact`."""
        return self.config.mode == "exact"

    def load(self, model_folder: Path) -> tuple[dict[str, Weight], Packed]:
        """Load the weights while other processes compile the kernels. Raises `EngineError` for a model that they do not
        compute."""
        check_on_gpu(self.model)
        self._ahead = self.compile_ahead(model_folder)
        return super().load(model_folder)

    def compile_ahead(self, model_folder: Path) -> subprocess.Popen[bytes] | None:
        """Start to compile the kernels, by `start_compiling`; None: they are not compiled ahead. Members of a group
        have the same kernels, which the leader has compiled.
        """
        is_leader = self._partition is None or self._partition.member == 0
        is_nvidia = self.device.type == "cuda" and torch.version.hip is None
        if not (is_nvidia and is_leader and is_compiled_ahead()):
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        kernels = EngineKernels(
            str(model_folder.absolute()),
            str(self.dtype).removeprefix("torch."),
            10 * major + minor,
            self.config.page_tokens,
            self.config.base_quantization,
            1 if self._partition is None else self._partition.num_members,
            self.config.mode == "exact",
        )
        return start_compiling(kernels)

    def build_decoder(self, weights: dict[str, Weight], packed: Packed) -> GpuDecoder:
        """A decoder for prepared steps, with weights in 8 bits or fixed products where these are asked for."""
        decoder = GpuDecoder(self.model, weights, self.dtype, products=None, sums=self.sums)
        if self.config.base_quantization != "none":
            decoder.quantize()
        if self.config.mode == "exact":
            decoder.fix_products()
        return decoder

    def limits(self) -> EngineLimits:
        """Limits of the engine's steps and pool, from the memory that weights leave on the GPU."""
        if self.device.type != "cuda":
            return super().limits()
        # the logits of a part are joined
        model = replace(self.model, vocab_size=self.whole.vocab_size)
        share = host_share(self.config, "cuda", this_host())
        return gpu_limits(self.free_bytes(), self.config, model, self.pool_dtype.itemsize, share)

    def free_bytes(self) -> int:
        """Memory of the GPU that weights leave; 0 in Triton's interpreter."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()  # what loading the weights used for a while counts as free
        return torch.cuda.mem_get_info(self.device)[0]

    def copies(self) -> AdapterCopies:
        """Copies on a stream of their own; at once in Triton's interpreter."""
        return CopyStream(self.device) if self.device.type == "cuda" else AdapterCopies()

    @property
    def loader_threads(self) -> int:
        """Threads that read adapters while steps run, by `gpu_loader_threads`."""
        if self.device.type != "cuda":
            return super().loader_threads
        num_engines = torch.cuda.device_count() / self.config.tensor_parallel
        return gpu_loader_threads(len(os.sched_getaffinity(0)), num_engines)

    def runner(
        self, live: LiveWeights, memory: Tensor, layout: PageLayout, config: EngineConfig, rules: TokenRules
    ) -> StepRunner:
        """A runner of the Triton kernels, once these are compiled."""
        self.await_kernels()
        prompts = self.prompt_attention(layout, config)
        return GpuRunner(self.decoder, live, memory, layout, config, rules, self.executor(), prompts=prompts)

    def await_kernels(self) -> None:
        """Wait until the kernels are compiled: the first steps would compile them one by one."""
        if self._ahead is not None:
            wait_until_compiled(self._ahead)

    def prompt_attention(self, layout: PageLayout, config: EngineConfig) -> PromptAttention | None:
        """The library for attention over prompts that is asked for, where it can serve; None: our kernel."""
        model = self.model
        rules = frozenset(
            AttentionRule(model.attention_scale, window, model.attention_softcap) for window in model.sliding_windows
        )
        is_exact = config.mode == "exact"
        found, problem = choose_prompt_attention(
            self.device, self.pool_dtype, layout, rules, is_exact=is_exact, has_sinks=bool(model.names.sinks)
        )
        if problem is not None:
            logger.warning("%s", problem)
        return found

    def executor(self) -> StepExecutor:
        """How decode steps are launched: as CUDA graphs, or kernel by kernel without a GPU."""
        return GraphExecutor() if self.device.type == "cuda" else StepExecutor()


def gpu_loader_threads(num_cores: int, num_engines: float) -> int:
    """Threads that read adapters for one of `num_engines` on a host: half of its share of the cores, at most 8.

    Reading, checking and packing an adapter of an 8B takes a core longer than ten of its rows take the GPU.
    """
    return max(1, min(8, int(num_cores / (2 * num_engines))))


#: Makes an engine's backend from the model folder, the configuration and the folder's model.
MakeBackend = Callable[[Path, EngineConfig, ModelConfig], Backend]


def choose_backend(
    model_folder: Path, config: EngineConfig, model: ModelConfig, sums: GroupSums | None = None
) -> Backend:
    """The backend of the configured device and kernels. Raises what `Backend` and `backend_type` do."""
    return backend_type(config, choose_device(config))(model_folder, config, model, sums)


def backend_type(config: EngineConfig, device: torch.device) -> type[Backend]:
    """The Triton kernels on a GPU; elsewhere compiled kernels unless `config.kernels` asks for Triton's interpreter.

    Raises EngineError where the Triton kernels cannot run.
    """
    if device.type != "cuda" and config.kernels != "triton":
        return CpuBackend
    if lacks_triton():
        raise EngineError(f"device={config.device!r}: {TRITON_IS_MISSING}")
    if device.type == "cuda":
        return GpuBackend
    if not is_interpreted():
        raise EngineError(
            "kernels='triton': on a CPU they run in Triton's interpreter only. Set TRITON_INTERPRET=1 before the "
            "first import, or leave kernels='auto'."
        )
    return GpuBackend


def choose_device(config: EngineConfig) -> torch.device:
    """The device of a configuration. Raises EngineError for one that is not there."""
    name = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise EngineError(f"device={config.device!r}: torch sees no GPU here. Use 'cpu', or a build with CUDA.")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def choose_formats(config: EngineConfig, device: torch.device) -> tuple[torch.dtype, Products | None, torch.dtype]:
    """Number formats of activations, of products of packed linear layers, and of the page pool: bf16 on a GPU and fp32
    on a CPU unless asked otherwise. Activations are in fp32 on a CPU. Without a format of products torch or Triton
    multiply, in that of activations.

    Raises EngineError for a number format that the device does not multiply in.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    asked = dtype_on("cuda" if device.type == "cuda" else "cpu", config.dtype)
    if asked not in dtypes:
        raise EngineError(f"dtype={config.dtype!r}: must be auto, {', '.join(dtypes)}")
    if backend_type(config, device) is GpuBackend:
        # Triton's interpreter multiplies in every format but int8.
        if device.type == "cuda" or config.base_quantization == "int8":
            _check(config, "cuda", _gpu_products(device), _name(device))
        return dtypes[asked], None, dtypes[asked]
    candidates: tuple[Products, ...] = ("float32", "bfloat16", "int8")
    products = [name for name in candidates if can_multiply(name)]
    _check(config, "cpu", products, "this processor")
    multiplied = config.base_quantization if config.base_quantization == "int8" else asked
    pool = pool_format("cpu", config.dtype, config.base_quantization)
    return torch.float32, next((name for name in products if name == multiplied), None), dtypes[pool]


def _check(config: EngineConfig, kind: DeviceKind, products: Sequence[str], name: str) -> None:
    problem = format_problem(kind, config.dtype, config.base_quantization, products, name)
    if problem:
        raise EngineError(problem)


def _gpu_products(device: torch.device) -> list[str]:
    """Formats of 8 bits in which a GPU multiplies."""
    is_recent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    return ["fp8"] if is_recent else []


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this device"


def _tensor_bytes(weights: Mapping[str, Weight], packed: Packed) -> int:
    tensors = [weight for weight in weights.values() if isinstance(weight, Tensor)]
    tensors += [weight.numbers for weight in packed.values() if isinstance(weight, StoredWeight)]
    return sum(tensor.nbytes for tensor in tensors)
