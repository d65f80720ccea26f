"""Configures an engine (`EngineConfig`) and reads the model of a folder (`ModelConfig`). No torch: planners ask too."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..system.untrusted import MALFORMED, parse_json, read_regular, shown_name
from .errors import ModelFilesError

if TYPE_CHECKING:
    from ..scheduler.costs.cost import CostModel
    from .model_config.model import ModelConfig

__all__ = [
    "BLOCKS_KEY",
    "DEFAULT_BATCH_ROWS",
    "DEFAULT_STEP_TOKENS",
    "UNREAD_KEYS",
    "BaseQuantization",
    "DeviceKind",
    "EngineConfig",
    "Mode",
    "dtype_on",
    "has_blocks",
    "read_json",
    "read_model_config",
    "unknown_config_keys",
]
Mode = Literal["auto", "unmerged", "merged", "exact"]
BaseQuantization = Literal["none", "int8", "fp8"]
#: Least compute capability of GPUs that multiply in 8-bit floating point.
FP8_CAPABILITY = (8, 9)
DeviceKind = Literal["cpu", "cuda"]
DEFAULT_BATCH_ROWS, DEFAULT_STEP_TOKENS = 64, 512
#: Key of `config.json` in folders that were converted from GGUF: linear layers are in blocks of few bits.
BLOCKS_KEY = "gguf_blocks"
#: Key of `config.json` in such folders: metadata keys of the GGUF file that nothing reads.
UNREAD_KEYS = "gguf_unread_keys"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. The engine computes the limits that are None from its machine (`memory.limits`)."""

    #: Sequences that may decode together; None: chosen by `memory.limits`.
    max_batch_rows: int | None = None
    #: Tokens of one step, prefill chunks included; None: chosen by `memory.limits`.
    max_step_tokens: int | None = None
    #: Tokens of one page of keys and values.
    page_tokens: int = 16
    #: Size of the page pool, all members of a group together; None: chosen by `memory.limits`.
    pool_bytes: int | None = None
    #: Host memory for adapters that had to leave the pool, all members together; None: chosen by `memory.limits`.
    host_tier_bytes: int | None = None
    #: CPU threads, all members together; None: torch's choice.
    num_threads: int | None = None
    #: Number format of products and pool: `float32`, `bfloat16` or `float16`; `auto`: see `dtype_on` and `pool_format`.
    dtype: str = "auto"
    #: `int8` multiplies the base model's linear layers in 8 bits, on CPUs that can; `fp8` in 8-bit floating point, on
    #: GPUs that can.
    base_quantization: BaseQuantization = "none"
    #: Device by torch's name, such as `cpu` or `cuda:1`; `auto`: a GPU if there is one.
    device: str = "auto"
    #: Mode of serving, see the product documentation; `exact` fixes the arithmetic of each row.
    mode: Mode = "auto"
    #: Name in `scheduler.batchers.batching.BATCHERS` of what chooses the steps; None: the batcher of the mode.
    batcher: str | None = None
    #: Whether the common beginning of several prompts is computed once (in `exact` where compiled CPU kernels serve).
    uses_prefix_cache: bool = True
    #: `dummy`: random weights instead of the checkpoint's, for benchmarks.
    load_format: Literal["auto", "dummy"] = "auto"
    #: GPUs always run the Triton kernels; `triton` runs them on a CPU too, in Triton's interpreter, to test them.
    kernels: Literal["auto", "triton"] = "auto"
    #: Whether a GPU's next step may be launched before the last one is read.
    launches_ahead: bool = True
    #: Predicts the seconds of steps and merges, by which mode `auto` decides; None: the preset of a machine of that
    #: kind.
    cost: CostModel | None = None
    #: Processes that compute the engine's steps together (`engine/parallel`).
    tensor_parallel: int = 1

    @property
    def member_threads(self) -> int | None:
        """CPU threads of each process of the engine; None: torch's choice."""
        if self.num_threads is None:
            return None
        return max(1, self.num_threads // self.tensor_parallel)

    @property
    def batch_rows(self) -> int:
        """Rows that may decode together, as asked for or by default, before the machine is known."""
        return self.max_batch_rows or DEFAULT_BATCH_ROWS

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, as asked for or by default, before the machine is known."""
        return self.max_step_tokens or DEFAULT_STEP_TOKENS


def dtype_on(kind: DeviceKind, asked: str) -> str:
    """Number format of an engine: bfloat16 on a GPU, float32 on a CPU, unless asked otherwise."""
    return asked if asked != "auto" else "bfloat16" if kind == "cuda" else "float32"


def pool_format(kind: DeviceKind, dtype: str, base_quantization: BaseQuantization) -> str:
    """Number format of keys, values and adapters in an engine's pool. Beside a base in 8 bits it is bfloat16 unless
    float32 is asked for."""
    return "bfloat16" if base_quantization != "none" and dtype == "auto" else dtype_on(kind, dtype)


def products_format(kind: DeviceKind, dtype: str, base_quantization: BaseQuantization) -> str:
    """Number format in which an engine multiplies. Step costs are kept apart by it."""
    return dtype_on(kind, dtype) if base_quantization == "none" else base_quantization


#: Sentence for an engine on a GPU where Triton is not installed.
TRITON_IS_MISSING = (
    "engines on GPUs need Triton, which is not installed. Take a build of torch with CUDA, which needs it too, or: "
    "pip install triton"
)


def format_problem(
    kind: DeviceKind, dtype: str, base_quantization: BaseQuantization, products: Collection[str], name: str
) -> str:
    """Why a device cannot serve a number format, as a sentence with what to do; "" if it can.

    `products`: formats in which the device multiplies, besides float32 on a CPU, and float32, bfloat16 and float16 on a
    GPU. `name`: the device for people.
    """
    asked = f"base_quantization={base_quantization!r}"
    if kind == "cpu" and base_quantization == "fp8":
        return f"{asked}: served on GPUs only. Use int8 or none on a CPU."
    if kind == "cpu" and base_quantization == "int8" and dtype != "float16":
        if "int8" in products:
            return ""
        return (
            f"{asked}: this processor has neither AVX512_VNNI nor AVX_VNNI, or the compiled CPU kernels are missing. "
            "Use base_quantization none."
        )
    if kind == "cpu" and dtype not in ("auto", "float32", *products):
        return (
            f"dtype={dtype!r}: this processor multiplies {' and '.join(['float32', *_of_16_bits(products)])} only "
            "(bfloat16 needs AVX512_BF16 and the compiled CPU kernels). Use dtype auto: a checkpoint of 16 bits stays "
            "so in memory."
        )
    if kind == "cpu" or base_quantization == "none":
        return ""
    if base_quantization == "int8":
        return f"{asked}: served on CPUs only. Use fp8 or none on a GPU."
    if dtype_on(kind, dtype) != "bfloat16":
        return f"{asked}, dtype={dtype!r}: products of 8 bits give bfloat16. Use dtype auto."
    if "fp8" not in products:
        return (
            f"{asked}: {name} does not multiply in 8-bit floating point (compute capability 8.9 and later do: L4, "
            "H100, B200). Use none."
        )
    return ""


def _of_16_bits(products: Collection[str]) -> list[str]:
    return [name for name in products if name == "bfloat16"]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder. Raises `ModelFilesError` when missing or malformed."""
    try:
        value = parse_json(read_regular(path).decode("utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(f"{path}: missing. A model folder needs this file; check --model.") from None
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read ({error.strerror}). Check --model.") from None
    except ValueError as error:
        raise ModelFilesError(f"{path}: not valid JSON ({error}). Fetch the model again.") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def unknown_config_keys(folder: Path) -> list[str]:
    """Keys of a model folder's `config.json`, and of the GGUF file that it was converted from, that nothing reads: this
    engine, transformers or llama.cpp.
    """
    from .model_config.keys import unknown_keys

    raw = read_json(folder / "config.json")
    return [*unknown_keys(raw), *map(str, raw.get(UNREAD_KEYS, ()))]


def has_blocks(folder: Path) -> bool:
    """Whether linear layers of a model folder are stored in blocks of few bits, as `models/gguf` converts them."""
    return bool(read_json(folder / "config.json").get(BLOCKS_KEY))


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for stop tokens) of a Hugging Face model folder. A head that
    the checkpoint stores apart from its embedding is not tied, whatever `config.json` says.

    Raises `EngineError` for a family or setting that would not be computed exactly, and
    `ModelFilesError` for a missing or malformed file.
    """
    from .model_config import parse_model_config  # the command line shows its help without
    from .model_config.folder import has_own_head
    from .model_config.model import HEAD

    raw = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    try:
        model = parse_model_config(raw, generation)
    except MALFORMED as error:
        raise ModelFilesError(
            f"{folder / 'config.json'}: values of other types than expected ({type(error).__name__}: "
            f"{shown_name(str(error))}). Fetch the model again, or check --model."
        ) from error
    spellings = model.names.spellings
    if model.is_tied and has_own_head(
        folder, spellings(f"{HEAD}.weight"), spellings(f"{model.names.embedding}.weight")
    ):
        # transformers does the same since version 5: it keeps both tensors when both are stored and differ.
        return replace(model, is_tied=False, says_tied=True)
    return model
