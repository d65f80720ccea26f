"""Writes `config.json` and `generation_config.json` from GGUF metadata."""

from __future__ import annotations

import math
from typing import Any

from ....system.untrusted import shown
from ...config import UNREAD_KEYS
from ...errors import EngineError, ModelFilesError
from ...model_config.family import Family
from ...model_config.gguf import ARCHITECTURES, family_of, linear_names
from ...model_config.rope import FULL, WINDOWED
from .file import GgufFile
from .keys import named_keys
from .layers import settings_of_layers

# Llama 3.1's rotary factors, precomputed by llama.cpp; they come back as `rope_parameters` in config.json.
ROPE_FACTORS = "rope_freqs.weight"
#: Phi-3's factors of frequencies.
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_NORM_EPS = {
    **dict.fromkeys(("rms", "rms_from_zero"), "attention.layer_norm_rms_epsilon"),
    **dict.fromkeys(("layer", "layer_no_bias"), "attention.layer_norm_epsilon"),
}
# Factors of `ModelConfig` -> keys.
_FACTORS = {
    "embedding_scale": "embedding_scale",
    "attention_scale": "attention.scale",
    "residual_scale": "residual_scale",
    "logit_scale": "logit_scale",
}
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_ORIGINAL = "original_max_position_embeddings"


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

    Raises `ModelFilesError` for missing metadata, `EngineError` for settings that are not understood.
    """
    family, class_name = family_of(gguf.architecture, gguf.metadata)
    num_heads = gguf.number("attention.head_count")
    own = settings_of_layers(gguf, family)
    sizes = {
        "hidden_size": int(gguf.require("embedding_length")),
        family.mlp_size_key: own.get(family.mlp_size_key) or gguf.number("feed_forward_length"),
        "num_hidden_layers": gguf.num_layers,
        "num_attention_heads": num_heads,
        **(
            {"num_key_value_heads": gguf.number("attention.head_count_kv", num_heads)}
            if family.has_grouped_heads and "num_key_value_heads" not in own
            else {}
        ),
        **({} if family.rope_rule == "no_layer" else {"head_dim": _head_dim(gguf)}),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": int(gguf.require("context_length")),
    }
    return {
        "architectures": [class_name],
        "model_type": family.name,
        **{family.aliases.get(key, key): value for key, value in sizes.items()},
        family.norm_eps_key: _shortest_float(gguf.require(_NORM_EPS[family.norm_kind])),
        **_ropes(gguf, family),
        **own,
        **_activation(family),
        **_of_gemma(gguf),
        **_windows(gguf, family),
        **_factors(gguf, family),
        **flags(gguf, family),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": dtype,
        **({UNREAD_KEYS: unread} if (unread := named_keys(gguf.metadata, gguf.architecture)) else {}),
        **token_id_config(gguf),
    }


def _activation(family: Family) -> dict[str, Any]:
    """The MLP's function: llama.cpp has one for each architecture, the default of the family."""
    keys = ("hidden_act", "hidden_activation", "activation_function")
    return {key: family.defaults[key] for key in keys if key in family.defaults}


def _of_gemma(gguf: GgufFile) -> dict[str, Any]:
    """Keys of the Gemma families, with what llama.cpp's `load_hparams` assumes for keys that the file lacks."""
    if gguf.architecture == "gemma4":
        final_cap = gguf.optional("final_logit_softcapping", 0.0)
        return {"final_logit_softcapping": None if not final_cap else _shortest_float(final_cap)}
    if gguf.architecture not in ("gemma2", "gemma3"):
        return {}
    final_cap = gguf.optional("final_logit_softcapping", 30.0 if gguf.architecture == "gemma2" else None)
    found: dict[str, Any] = {
        "query_pre_attn_scalar": _query_scalar(gguf),
        "final_logit_softcapping": None if not final_cap else _shortest_float(final_cap),
    }
    if gguf.architecture == "gemma2":
        return found | {
            "sliding_window": int(gguf.optional(_WINDOW, 4096)),
            "attn_logit_softcapping": _shortest_float(gguf.optional("attn_logit_softcapping", 50.0)),
        }
    return found


def _windows(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """Windows of families that may have them. A file that names none has none, but where llama.cpp knows the model."""
    if family.name in ("phi3", "starcoder2", "mistral", "ministral3"):
        return {"sliding_window": int(gguf.optional(_WINDOW, 0)) or None}
    if family.name == "exaone4":
        # the model of 32B is known by its layers
        window = int(gguf.optional(_WINDOW, 4096 if int(gguf.require("block_count")) == 64 else 0))
        if not window:
            return {"sliding_window": None, "layer_types": [FULL] * int(gguf.require("block_count"))}
        return {"sliding_window": window, "layer_types": _layer_types(gguf, family)}
    if family.name in ("cohere2", "olmo3"):
        return {"sliding_window": int(gguf.require(_WINDOW)), "layer_types": _layer_types(gguf, family)}
    if family.name == "gemma3_text":
        listed = {"layer_types": _layer_types(gguf, family)} if gguf.optional(_PATTERN) is not None else {}
        local = _rope_of_windows(gguf, family)["rope_theta"]
        return {"sliding_window": int(gguf.require(_WINDOW)), "rope_local_base_freq": local, **listed}
    return {}


def _layer_types(gguf: GgufFile, family: Family) -> list[str]:
    """Kind of each layer by `attention.sliding_window_pattern`: a list, or every how manyth layer has no window."""
    num_layers, pattern = int(gguf.require("block_count")), gguf.optional(_PATTERN, family.window_period)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(item, bool | int) for item in pattern):
            raise EngineError(f"{gguf.path}: {_PATTERN}: expected {num_layers} times true or false.")
        return [WINDOWED if item else FULL for item in pattern]
    if type(pattern) is not int or pattern < 0:
        raise EngineError(f"{gguf.path}: {_PATTERN}={shown(pattern)}: expected a list, or a number of layers.")
    return [WINDOWED if pattern == 0 or (layer + 1) % pattern else FULL for layer in range(num_layers)]


def _factors(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """Factors that a family has; one that is 0 in the file, or that it lacks, is none, as in llama.cpp."""
    if family.name == "granite" and gguf.optional("rope.scaling.finetuned", True) is not True:
        raise EngineError(f"{gguf.path}: rope.scaling.finetuned=false: a model without rotary positions is not served.")
    found: dict[str, Any] = {}
    for field, key in family.factors.items():
        name = "logit_scale" if field == "logit_divisor" else _FACTORS[field]
        default = _head_dim(gguf) ** -0.5 if field == "attention_scale" else 1.0
        found[key] = _shortest_float(gguf.optional(name, 0.0)) or default
    return found


def flags(gguf: GgufFile, family: Family) -> dict[str, bool]:
    """Keys that say which layers have biases and norms of heads, by the tensors that the file has. Those that are as
    the family assumes are left out.

    Raises `EngineError` for biases on some of the layers whose biases one key decides.
    """
    in_layers = gguf.in_layers
    found: dict[str, bool] = {}
    rules = family.bias_rules
    sites: dict[str, dict[str, bool]] = {}
    for site, name, _ in linear_names(family, in_layers):
        rule = rules.get(site, False)
        if isinstance(rule, str):
            sites.setdefault(rule, {})[name] = f"{name}.bias" in in_layers
    for key, has_bias in sites.items():
        if len(set(has_bias.values())) > 1:
            without = [name for name, has in has_bias.items() if not has]
            raise EngineError(
                f"{gguf.path}: biases on {', '.join(name for name, has in has_bias.items() if has)} without those on "
                f"{', '.join(without)}: not supported in a {gguf.architecture} model. Give the model's Hugging Face "
                "folder instead."
            )
        found[key] = any(has_bias.values())
    if family.head_norm_key is not None:
        found[family.head_norm_key] = "attn_q_norm.weight" in in_layers
    return {key: value for key, value in found.items() if value != family.defaults.get(key, False)}


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


def _ropes(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """The rotary settings, by kind of layer where the family has them so."""
    if family.rope_rule == "no_layer":
        return {}
    if "proportional" in family.rope_kinds:
        windowed = {"rope_type": "default", "rope_theta": _shortest_float(gguf.require("rope.freq_base_swa"))}
        return {"rope_parameters": {FULL: _proportional(gguf, family), WINDOWED: windowed}}
    found = _rope_parameters(gguf, family)
    # For readers older than `rope_parameters`, which would otherwise assume 10,000.
    old: dict[str, Any] = {"rope_theta": found["rope_theta"]}
    if family.can_rotate_partially:
        old["partial_rotary_factor"] = found["partial_rotary_factor"]
    if family.name == "phi3":
        old[_ORIGINAL] = int(gguf.optional("rope.scaling.original_context_length", gguf.require("context_length")))
    if not family.has_ropes_by_layer_type:
        return {"rope_parameters": found, **old}
    return {"rope_parameters": {"full_attention": found, "sliding_attention": _rope_of_windows(gguf, family)}, **old}


def _rope_of_windows(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """The rotary settings of layers with a window, which are never stretched."""
    default = 10_000.0 if family.name == "gemma3_text" else _rope_theta(gguf)
    return {"rope_type": "default", "rope_theta": _shortest_float(gguf.optional("rope.freq_base_swa", default))}


def _rope_parameters(gguf: GgufFile, family: Family) -> dict[str, Any]:
    head_dim = _head_dim(gguf)
    rotated = _rotated(gguf, head_dim, is_partial=family.can_rotate_partially)
    kind = _rope_kind(gguf, family)
    factor = 1.0 if kind == "none" else _factor(gguf)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": _rope_theta(gguf)}
    if family.can_rotate_partially:
        parameters["partial_rotary_factor"] = _share(rotated, head_dim)
    if kind == "longrope":
        return parameters | _longrope(gguf, rotated // 2)
    if kind == "yarn":
        return parameters | _yarn(gguf, factor) | _growth(gguf)
    _refuse_yarn(gguf)
    if ROPE_FACTORS in gguf.tensors:
        if factor != 1.0:
            raise EngineError(f"{gguf.path}: {ROPE_FACTORS} and rope.scaling.factor={factor}: expected one.")
        parameters |= _llama3_rope(gguf, head_dim)
    elif factor != 1.0:
        parameters |= {"rope_type": "linear", "factor": factor}
    return parameters | _growth(gguf)


def _rotated(gguf: GgufFile, head_dim: int, *, is_partial: bool) -> int:
    """Features of a head that are rotated."""
    rotated = int(gguf.optional("rope.dimension_count", head_dim))
    if rotated != head_dim and not (is_partial and 0 < rotated < head_dim):
        raise EngineError(f"{gguf.path}: rope.dimension_count={rotated}: must be the head size {head_dim}.")
    return rotated


def _refuse_yarn(gguf: GgufFile) -> None:
    """Refuse what only yarn has."""
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        if gguf.optional(f"rope.scaling.{key}", 0) not in (0, 1 if key == "yarn_attn_factor" else -1):
            value = gguf.optional(f"rope.scaling.{key}")
            raise EngineError(f"{gguf.path}: rope.scaling.{key}={shown(value)}: not supported without yarn.")


def _proportional(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """Gemma 4's settings of layers that attend to all. llama.cpp rotates whole heads, and divides the frequencies that
    such a layer does not have by a number so large that nothing is left of them.
    """
    import numpy as np

    head_dim = _head_dim(gguf)
    _rotated(gguf, head_dim, is_partial=False)
    factor = 1.0 if _rope_kind(gguf, family) == "none" else _factor(gguf)
    if factor != 1.0:
        raise EngineError(f"{gguf.path}: rope.scaling.factor={factor}: not supported in a {gguf.architecture} model.")
    _refuse_yarn(gguf)
    if ROPE_FACTORS not in gguf.tensors:
        raise ModelFilesError(f"{gguf.path}: missing tensors: {ROPE_FACTORS}. Fetch the file again.")
    found = gguf.array(ROPE_FACTORS)
    num_pairs = int(np.argmax(found != 1.0)) if (found != 1.0).any() else len(found)
    if found.shape != (head_dim // 2,) or not num_pairs or not (found[num_pairs:] >= 1e20).all():
        raise EngineError(
            f"{gguf.path}: {ROPE_FACTORS}: expected {head_dim // 2} numbers, first 1 and then 1e30. Give the model's "
            "Hugging Face folder instead."
        )
    return {
        "rope_type": "proportional",
        "rope_theta": _rope_theta(gguf),
        "partial_rotary_factor": _share(2 * num_pairs, head_dim),
    }


def _share(rotated: int, head_dim: int) -> float:
    """The share of a head that is rotated, so that multiplied by the head's size it is not less than `rotated`."""
    share = rotated / head_dim
    return share if int(share * head_dim) == rotated else math.nextafter(share, 1.0)


def _rope_kind(gguf: GgufFile, family: Family) -> str:
    """Kind of rotary positions: `none`, `linear` (which files without a kind have), `yarn`, or `longrope`."""
    kinds = ["none", "linear", *(["yarn"] if "yarn" in family.rope_kinds else [])]
    if family.name == "phi3":
        kinds.append("longrope")
        if LONG_FACTORS in gguf.tensors and gguf.optional("rope.scaling.type", "longrope") == "longrope":
            return "longrope"
    kind = str(gguf.optional("rope.scaling.type", "linear"))
    if kind not in kinds:
        raise EngineError(
            f"{gguf.path}: rope.scaling.type={shown(kind)} is not supported. Supported: {', '.join(kinds)}."
        )
    return kind


def _factor(gguf: GgufFile) -> float:
    """Factor by which positions are divided; 1 for none.

    llama.cpp's `load_hparams` has the same rules: `rope.scale_linear` is the older name of the factor, and a factor of
    0 is none.
    """
    factor = _shortest_float(gguf.optional("rope.scaling.factor", gguf.optional("rope.scale_linear", 1.0)))
    if not 0.0 <= factor < math.inf:
        raise EngineError(f"{gguf.path}: rope.scaling.factor={factor}: expected a number above 0.")
    return factor or 1.0


def _longrope(gguf: GgufFile, num_pairs: int) -> dict[str, Any]:
    """Phi-3's factors of frequencies `[rotated / 2]`, for short rows and for long ones."""
    factors = {}
    for key, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        if name not in gguf.tensors or gguf.tensors[name].shape != (num_pairs,):
            raise EngineError(f"{gguf.path}: {name}: expected {num_pairs} numbers.")
        factors[key] = [_shortest_float(number) for number in gguf.array(name).tolist()]
    return {
        "rope_type": "longrope",
        **factors,
        _ORIGINAL: int(gguf.require("rope.scaling.original_context_length")),
        "attention_factor": _shortest_float(gguf.optional("rope.scaling.attn_factor", 1.0)),
    }


def _yarn(gguf: GgufFile, factor: float) -> dict[str, Any]:
    """YaRN's settings, with what llama.cpp assumes for keys that the file lacks.

    llama.cpp stretches by `yarn_log_multiplier` where transformers has `mscale_all_dim`, and takes `mscale` for 1.
    """
    extension = gguf.optional("rope.scaling.yarn_ext_factor", 1.0)
    if extension not in (1.0, -1.0):
        raise EngineError(f"{gguf.path}: rope.scaling.yarn_ext_factor={shown(extension)}: not supported.")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        _ORIGINAL: int(gguf.optional("rope.scaling.original_context_length", gguf.require("context_length"))),
        "beta_fast": _shortest_float(gguf.optional("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": _shortest_float(gguf.optional("rope.scaling.yarn_beta_slow", 1.0)),
    }
    if weight := gguf.optional("rope.scaling.yarn_log_multiplier", 0.0):
        found |= {"mscale": 1.0, "mscale_all_dim": _shortest_float(weight)}
    if temperature := gguf.optional("rope.scaling.yarn_attn_factor", 0.0):
        found["attention_factor"] = _shortest_float(temperature)
    return found


def _growth(gguf: GgufFile) -> dict[str, Any]:
    """Growth of queries with their position, in Ministral 3: once for each original context."""
    beta = gguf.optional("attention.temperature_scale", 0.0)
    if not beta or "attention.temperature_scale" not in ARCHITECTURES[gguf.architecture].keys:
        return {}
    original = int(gguf.require("rope.scaling.original_context_length"))
    return {"llama_4_scaling_beta": _shortest_float(beta), _ORIGINAL: original}


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
