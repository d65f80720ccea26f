"""What a base model is (`ModelConfig`, read from `config.json`) and how an engine is set up (`EngineConfig`).

No torch here: the audit, the planner and the command line read these too.
Shapes: a linear layer's weight is `[out_features, in_features]`, as in the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import ModelFilesError, UnsupportedModelError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Mode = Literal["auto", "unmerged", "merged", "exact"]

# model_type -> family; every family below runs through the one generic decoder.
FAMILIES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `scaling` holds the parameters of the kinds other than `default`."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    partial_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, in the terms the engine needs."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int
    norm_eps: float
    rope: RopeConfig
    activation: str
    is_tied: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    # Per layer: attend to this many latest tokens; None attends to all.
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    checkpoint_dtype: str

    @property
    def q_size(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def site_shapes(self) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of one decoder layer's linear layers, by name below `model.layers.N.`."""
        h, i = self.hidden_size, self.intermediate_size
        return {
            "self_attn.q_proj": (self.q_size, h),
            "self_attn.k_proj": (self.kv_size, h),
            "self_attn.v_proj": (self.kv_size, h),
            "self_attn.o_proj": (h, self.q_size),
            "mlp.gate_proj": (i, h),
            "mlp.up_proj": (i, h),
            "mlp.down_proj": (h, i),
        }

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of every linear layer, by its name in the checkpoint (no `.weight`)."""
        shapes = {
            f"model.layers.{layer}.{site}": shape
            for layer in range(self.num_layers)
            for site, shape in self.site_shapes().items()
        }
        shapes["lm_head"] = (self.vocab_size, self.hidden_size)
        return shapes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: limits of a step and of memory. What depends on the machine is computed by the engine itself.

    `max_batch_rows`: sequences that may decode together. `max_step_tokens`: tokens of one step, prefill chunks
    included. `pool_bytes`: size of the page pool (None: a share of free memory). `num_threads`: CPU threads
    (None: leave torch's choice). `mode`: see product documentation; `exact` fixes arithmetic per row.
    """

    max_batch_rows: int = 64
    max_step_tokens: int = 512
    page_tokens: int = 16
    pool_bytes: int | None = None
    num_threads: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    mode: Mode = "auto"
    load_format: Literal["auto", "dummy"] = "auto"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder. Raises `ModelFilesError` when missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(f"{path}: missing. A model folder needs this file; check --model.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path}: not valid JSON ({error}). Fetch the model again.") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for stop tokens) of a Hugging Face model folder.

    Raises `UnsupportedModelError` for a family or setting that would not be computed exactly, and
    `ModelFilesError` for a missing or malformed file.
    """
    raw = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return parse_model_config(raw, generation)


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` from the two JSON objects; both spellings (transformers 4 and 5) of every key."""
    model_type = str(raw.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json model_type={model_type!r}: not supported. Supported: {', '.join(sorted(FAMILIES))}."
        )
    family = FAMILIES[model_type]
    try:
        return _decoder_config(family, raw, generation)
    except KeyError as error:
        raise ModelFilesError(f"config.json: key {error} is missing for model_type={model_type!r}.") from None


def _decoder_config(family: str, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    num_heads = int(raw["num_attention_heads"])
    num_layers = int(raw["num_hidden_layers"])
    hidden_size = int(raw["hidden_size"])
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        max_context_tokens=int(raw.get("max_position_embeddings", 2048)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope_config(raw),
        activation=str(raw.get("hidden_act", "silu")),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=True if family == "qwen2" else attention_bias,
        has_o_bias=attention_bias and family != "qwen2",
        has_mlp_bias=bool(raw.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        sliding_windows=_sliding_windows(family, raw, num_layers),
        eos_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        bos_token_id=next(iter(_token_ids(raw.get("bos_token_id"))), None),
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    parameters = dict(raw.get("rope_parameters") or {})
    scaling = parameters or dict(raw.get("rope_scaling") or {})
    kind: RopeKind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    theta = float(scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0)
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModelError(
            f"config.json rope type {kind!r}: not supported. Supported: default, linear, llama3."
        )
    partial = float(scaling.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise UnsupportedModelError(f"config.json partial_rotary_factor={partial}: only 1.0 is supported.")
    return RopeConfig(theta=theta, kind=kind, scaling=scaling, partial_factor=partial)


def _sliding_windows(family: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * num_layers
    layer_types = raw.get("layer_types")
    if layer_types:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    first_windowed = int(raw.get("max_window_layers", 0)) if family.startswith("qwen") else 0
    return tuple(int(window) if layer >= first_windowed else None for layer in range(num_layers))


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
