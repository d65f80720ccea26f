"""Writes `config.json` and `generation_config.json` from GGUF metadata."""

from __future__ import annotations

import math
from typing import Any

from ....system.untrusted import shown
from ...config import UNREAD_KEYS
from ...errors import EngineError, ModelFilesError
from .file import GgufFile
from .keys import ARCHITECTURES, named_keys

# Llama 3.1's rotary factors, precomputed by llama.cpp; they come back as `rope_parameters` in config.json.
ROPE_FACTORS = "rope_freqs.weight"


def token_id_config(gguf: GgufFile) -> dict[str, Any]:
    """Special token ids, for `generation_config.json` and as part of `config.json`."""
    token_ids = {
        f"{role}_token_id": int(gguf.metadata[f"tokenizer.ggml.{key}_token_id"])
        for role, key in (("bos", "bos"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in gguf.metadata
    }
    return {**token_ids, "eos_token_id": _eos_token_ids(gguf)}


def model_config(gguf: GgufFile, dtype: str) -> dict[str, Any]:
    """`config.json` of the converted model; `dtype` is what its tensors are stored as.

    Raises `ModelFilesError` for missing metadata, `EngineError` for rotary settings not understood.
    """
    num_heads = int(gguf.require("attention.head_count"))
    return {
        "architectures": [ARCHITECTURES[gguf.architecture]],
        "model_type": "gemma3_text" if gguf.architecture == "gemma3" else gguf.architecture,
        "hidden_size": int(gguf.require("embedding_length")),
        "intermediate_size": int(gguf.require("feed_forward_length")),
        "num_hidden_layers": int(gguf.require("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(gguf.optional("attention.head_count_kv", num_heads)),
        "head_dim": _head_dim(gguf),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": int(gguf.require("context_length")),
        "rms_norm_eps": _shortest_float(gguf.require("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(gguf),
        # For readers older than `rope_parameters`, which would otherwise assume 10,000.
        "rope_theta": _rope_theta(gguf),
        "hidden_act": "silu",
        **_of_gemma(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": dtype,
        **({UNREAD_KEYS: unread} if (unread := named_keys(gguf.metadata, gguf.architecture)) else {}),
        **token_id_config(gguf),
    }


def _of_gemma(gguf: GgufFile) -> dict[str, Any]:
    """Keys of the Gemma families, with what llama.cpp's `load_hparams` assumes for keys that the file lacks."""
    if not gguf.architecture.startswith("gemma"):
        return {}
    found: dict[str, Any] = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
    if gguf.architecture == "gemma":
        return found
    final_cap = gguf.optional("final_logit_softcapping", 30.0 if gguf.architecture == "gemma2" else None)
    found |= {
        "query_pre_attn_scalar": _query_scalar(gguf),
        "final_logit_softcapping": None if not final_cap else _shortest_float(final_cap),
    }
    if gguf.architecture == "gemma2":
        return found | {
            "sliding_window": int(gguf.optional("attention.sliding_window", 4096)),
            "attn_logit_softcapping": _shortest_float(gguf.optional("attn_logit_softcapping", 50.0)),
        }
    local = {"rope_type": "default", "rope_theta": _shortest_float(gguf.optional("rope.freq_base_swa", 10_000.0))}
    return found | {
        "sliding_window": int(gguf.require("attention.sliding_window")),
        "rope_local_base_freq": local["rope_theta"],
        "rope_parameters": {"full_attention": _rope_parameters(gguf), "sliding_attention": local},
    }


def _query_scalar(gguf: GgufFile) -> int:
    """The number whose root divides scores. Files do not have it; llama.cpp knows the models of 27B by their layers."""
    is_27b = int(gguf.require("block_count")) == {"gemma2": 46, "gemma3": 62}[gguf.architecture]
    if is_27b:
        return int(gguf.require("embedding_length")) // int(gguf.require("attention.head_count"))
    return _head_dim(gguf)


def _head_dim(gguf: GgufFile) -> int:
    default = int(gguf.require("embedding_length")) // int(gguf.require("attention.head_count"))
    head_dim = int(gguf.optional("attention.key_length", default))
    value_dim = int(gguf.optional("attention.value_length", head_dim))
    if value_dim != head_dim:
        raise EngineError(f"{gguf.path}: attention.value_length={value_dim}: must be attention.key_length {head_dim}.")
    return head_dim


def _eos_token_ids(gguf: GgufFile) -> int | list[int]:
    """Every token that ends a turn (`eos`, `eot`, `eom`), as transformers writes them: one number or a list."""
    keys = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom")]
    token_ids = list(dict.fromkeys(int(gguf.metadata[key]) for key in keys if key in gguf.metadata))
    if not token_ids:
        raise ModelFilesError(f"{gguf.path}: metadata key {keys[0]!r} is missing: answers would never end.")
    return token_ids[0] if len(token_ids) == 1 else token_ids


def _shortest_float(value: float) -> float:
    """A float32 read from metadata, as the decimal it came from (1e-05, not 9.999999747378752e-06)."""
    return float(f"{value:.7g}")


def _rope_theta(gguf: GgufFile) -> float:
    return _shortest_float(gguf.optional("rope.freq_base", 10_000.0))


def _rope_parameters(gguf: GgufFile) -> dict[str, Any]:
    head_dim = _head_dim(gguf)
    rotated = int(gguf.optional("rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise EngineError(f"{gguf.path}: rope.dimension_count={rotated}: must be the head size {head_dim}.")
    factor = _linear_factor(gguf)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": _rope_theta(gguf)}
    if ROPE_FACTORS in gguf.tensors:
        if factor != 1.0:
            raise EngineError(f"{gguf.path}: {ROPE_FACTORS} and rope.scaling.factor={factor}: expected one.")
        parameters |= _llama3_rope(gguf, head_dim)
    elif factor != 1.0:
        parameters |= {"rope_type": "linear", "factor": factor}
    return parameters


def _linear_factor(gguf: GgufFile) -> float:
    """Factor by which positions are divided; 1 for none.

    llama.cpp's `load_hparams` has the same rules: without a type it is linear, `rope.scale_linear` is the older name of
    the factor, and a factor of 0 is none.
    """
    kind = str(gguf.optional("rope.scaling.type", "linear"))
    if kind not in ("none", "linear"):
        raise EngineError(f"{gguf.path}: rope.scaling.type={shown(kind)} is not supported. Supported: none, linear.")
    factor = _shortest_float(gguf.optional("rope.scaling.factor", gguf.optional("rope.scale_linear", 1.0)))
    if not 0.0 <= factor < math.inf:
        raise EngineError(f"{gguf.path}: rope.scaling.factor={factor}: expected a number above 0.")
    return 1.0 if kind == "none" or factor == 0.0 else factor


def _llama3_rope(gguf: GgufFile, head_dim: int) -> dict[str, Any]:
    """The `llama3` rope settings that give these factors `[head_dim / 2]`; refused when none do.

    Every published model uses low_freq_factor 1, high_freq_factor 4 and 8192 original positions; only the
    factor differs, and it is the largest entry (the lowest frequencies are divided by it in full).
    """
    import numpy as np

    found = gguf.array(ROPE_FACTORS).astype(np.float64)
    factor, low, high, original = round(float(found.max()), 4), 1.0, 4.0, 8192
    turns = original / (2 * np.pi) * _rope_theta(gguf) ** (-np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):
        raise EngineError(
            f"{gguf.path}: {ROPE_FACTORS} does not follow Llama 3's rule: its settings are not known. "
            "Give the model's Hugging Face folder instead."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
