"""Files of models whose layers differ from one another: Qwen 3.5 and Gemma 4.

Their settings are read by layer, and their tensors' names follow from the model that the settings describe. Source:
llama.cpp's converter and its `src/models/qwen35.cpp` and `gemma4.cpp`. The converter lays the value heads of the gated
delta rule so that neighbours belong to different key heads; checkpoints have those of one key head together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from ....system.untrusted import shown
from ...errors import EngineError, ModelFilesError
from ...model_config.family import Family
from ...model_config.gguf import DELTA, SITES, norm_names
from ...model_config.llama import read_llama_shaped
from ...model_config.model import HEAD, ModelConfig
from ...model_config.raw import RawConfig
from ...model_config.rope import FULL, WINDOWED
from .file import GgufFile

if TYPE_CHECKING:
    import numpy as np

    from ....kernels.layouts.delta_sizes import DeltaSizes

_RECURRENT, _PATTERN = "attention.recurrent_layers", "attention.sliding_window_pattern"
_DELTA = "linear_attention"
# Tensors of a layer that it has and does not read where it reads keys and values of another.
_UNREAD = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
#: Tensors that are stored in fp32 whatever the weights are in: powers are taken of them.
EXACT = ("ssm_a", "ssm_dt.bias")
_CONVOLUTION, _OUTPUT = "ssm_conv1d.weight", "ssm_out.weight"


def settings_of_layers(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """Keys of `config.json` for layers that differ; empty for a model of layers of one kind.

    Raises `ModelFilesError` for missing metadata, `EngineError` for layers that the family does not have.
    """
    if family.has_delta_layers:
        return _delta_settings(gguf)
    return _gemma4_settings(gguf) if family.name == "gemma4_text" else {}


def read_layers(config: dict[str, Any], family: Family) -> ModelConfig | None:
    """The model that a `config.json` describes, where its layers differ; else None."""
    if not family.has_delta_layers and family.read_layers is None:
        return None
    return read_llama_shaped(family, RawConfig(family.name, config, family.defaults, family.aliases), {})


def tensor_names(architecture: str, model: ModelConfig, family: Family) -> dict[str, tuple[str, ...]]:
    """GGUF tensor name -> name of the checkpoint's tensor, for every parameter of the model."""
    names = family.names
    found: dict[str, tuple[str, ...]] = {}
    modules = {theirs: ours for ours, theirs in norm_names(architecture, family).items()}
    for site, members in names.sites.items():
        modules |= zip(members, SITES[site, len(members)], strict=True)
    whole = {f"{names.delta}.{theirs}": ours for theirs, ours in DELTA.items()}
    whole |= {names.layer_scalar: "layer_output_scale.weight"} if names.layer_scalar else {}
    top = {names.embedding: "token_embd", str(names.final_norm): "output_norm", HEAD: "output"}
    if (inputs := names.layer_inputs) is not None:
        top |= {inputs.table: "per_layer_token_embd", inputs.norm: "per_layer_proj_norm"}
        top[inputs.projection] = modules[inputs.projection]
    for parameter in model.parameter_shapes():
        stem, _, part = parameter.rpartition(".")
        if stem in top:
            found[f"{top[stem]}.{part}"] = (parameter,)
            continue
        layer, _, below = parameter.removeprefix(f"{names.layers}.").partition(".")
        module = below.rpartition(".")[0]
        found[f"blk.{layer}.{whole[below] if below in whole else f'{modules[module]}.{part}'}"] = (parameter,)
    return found


def passed_over(gguf: GgufFile, model: ModelConfig) -> Iterator[str]:
    """Tensors that text does not reach: of layers that predict further tokens, and keys and values that layers have
    and do not read.
    """
    further = tuple(f"blk.{layer}." for layer in range(model.num_layers, gguf.num_blocks))
    yield from (name for name in gguf.tensors if further and name.startswith(further))
    for index, layer in enumerate(model.layers):
        if layer.attention is not None and layer.attention.source is not None:
            yield from (f"blk.{index}.{name}" for name in _UNREAD)


def is_in_whole_groups(name: str, sizes: DeltaSizes | None, group: int) -> bool:
    """Whether a weight in blocks can stay in them: columns are reordered by whole heads, which must be whole groups.
    `group`: numbers of a group.
    """
    if sizes is None or not name.endswith(_OUTPUT):
        return not name.endswith(_CONVOLUTION)
    return sizes.key_heads == sizes.value_heads or sizes.value_size % group == 0


def restore_delta(name: str, array: np.ndarray[Any, Any], sizes: DeltaSizes) -> np.ndarray[Any, Any]:
    """A tensor of the gated delta rule, in numbers or bytes of whole groups, as checkpoints have it; others as they
    are.
    """
    import numpy as np

    stem = name.split(".", 2)[2]
    keys, per_key = sizes.key_heads, sizes.value_heads // sizes.key_heads
    before = {"attn_qkv.weight": 2 * sizes.num_keys, _CONVOLUTION: 2 * sizes.num_keys, "attn_gate.weight": 0}
    of_heads = ("ssm_beta.weight", "ssm_alpha.weight", *EXACT)
    if stem in before or stem in of_heads:
        first = before.get(stem, 0)
        values = array[first:].reshape(per_key, keys, -1, *array.shape[1:]).swapaxes(0, 1)
        array = np.concatenate([array[:first], values.reshape(-1, *array.shape[1:])])
    if stem == _OUTPUT:
        array = array.reshape(len(array), per_key, keys, -1).swapaxes(1, 2).reshape(array.shape)
    if stem == _CONVOLUTION:
        array = array[:, None, :]
    if stem == "ssm_a":
        with np.errstate(invalid="ignore", divide="ignore"):
            array = np.log(-array)
    return array


def _delta_settings(gguf: GgufFile) -> dict[str, Any]:
    """Sizes of the gated delta rule, and the layers that have it: all but every nth, or as the file lists them."""
    value_heads, inner = _count(gguf, "ssm.time_step_rank"), _count(gguf, "ssm.inner_size")
    if inner % value_heads:
        _refuse(gguf, "ssm.inner_size", f"expected a multiple of ssm.time_step_rank={value_heads}")
    period = int(gguf.optional("full_attention_interval", 4))
    if period < 1:
        _refuse(gguf, "full_attention_interval", "expected a number of layers")
    is_recurrent = [bool((layer + 1) % period) for layer in range(gguf.num_layers)]
    if (listed := gguf.optional(_RECURRENT)) is not None:
        is_recurrent = _flags(gguf, _RECURRENT, listed)[: gguf.num_layers]
    return {
        "linear_num_key_heads": _count(gguf, "ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": _count(gguf, "ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": _count(gguf, "ssm.conv_kernel"),
        "layer_types": [_DELTA if item else FULL for item in is_recurrent],
    }


def _gemma4_settings(gguf: GgufFile) -> dict[str, Any]:
    """Heads and MLPs by layer, windows, shared keys and values, and inputs of each layer."""
    is_windowed = _flags(gguf, _PATTERN, gguf.require(_PATTERN))
    if is_windowed[-1]:
        _refuse(gguf, _PATTERN, "expected false for the last layer, as transformers attends to all in it")
    num_shared = int(gguf.optional("attention.shared_kv_layers", 0))
    first = gguf.num_layers - num_shared
    if not 0 < first <= gguf.num_layers:
        _refuse(gguf, "attention.shared_kv_layers", f"expected less than {gguf.num_layers} layers")
    inputs = int(gguf.optional("embedding_length_per_layer_input", 0))
    table = gguf.tensors.get("per_layer_token_embd.weight")
    return {
        **_gemma4_heads(gguf, is_windowed, first),
        **_gemma4_mlps(gguf, first),
        "num_kv_shared_layers": num_shared,
        "sliding_window": _count(gguf, "attention.sliding_window"),
        "layer_types": [WINDOWED if item else FULL for item in is_windowed],
        "hidden_size_per_layer_input": inputs,
        **({"vocab_size_per_layer_input": table.shape[0]} if inputs and table is not None else {}),
    }


def _gemma4_heads(gguf: GgufFile, is_windowed: list[bool], first: int) -> dict[str, Any]:
    """Heads of windowed layers, and of those that attend to all. `first`: first layer without keys of its own."""
    size = _count(gguf, "attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if gguf.optional(key, size) != size:
            _refuse(gguf, key, f"expected attention.key_length_swa={size}")
    by_layer = _by_layer(gguf, "attention.head_count_kv")
    kv_heads = {kind: {n for n, of in zip(by_layer, is_windowed, strict=True) if of is kind} for kind in (True, False)}
    if any(len(counts) > 1 for counts in kv_heads.values()):
        _refuse(gguf, "attention.head_count_kv", "expected one number for all layers with windows, and one for others")
    of_full = kv_heads[False].pop()
    of_windowed = kv_heads[True].pop() if kv_heads[True] else of_full
    own = [layer for layer in range(first) if not is_windowed[layer]]
    # a layer without values of its own takes its keys for them
    keys_are_values = bool(own) and not any(f"blk.{layer}.attn_v.weight" in gguf.tensors for layer in own)
    if of_full != of_windowed and not keys_are_values:
        _refuse(gguf, "attention.head_count_kv", "expected one number for all layers where keys are not values")
    return {
        "head_dim": size,
        "global_head_dim": _count(gguf, "attention.key_length"),
        "num_key_value_heads": of_windowed,
        **({"num_global_key_value_heads": of_full} if keys_are_values else {}),
        "attention_k_eq_v": keys_are_values,
    }


def _gemma4_mlps(gguf: GgufFile, first: int) -> dict[str, Any]:
    """Features inside MLPs: twice as many in layers that share keys, or as many. `first`: first such layer."""
    sizes = _by_layer(gguf, "feed_forward_length")
    own, of_shared = set(sizes[:first]), set(sizes[first:])
    inner = sizes[0]
    if own != {inner} or not (of_shared <= {inner} or of_shared == {2 * inner}):
        key = "feed_forward_length"
        _refuse(gguf, key, f"expected {inner} in all layers, or {2 * inner} in the last {len(sizes) - first}")
    return {"intermediate_size": inner, "use_double_wide_mlp": of_shared == {2 * inner}}


def _by_layer(gguf: GgufFile, key: str) -> list[int]:
    value = gguf.require(key)
    values = value if isinstance(value, list) else [value] * gguf.num_layers
    if len(values) != gguf.num_layers or not all(type(item) is int and item > 0 for item in values):
        _refuse(gguf, key, f"expected a number above 0, or {gguf.num_layers} of them")
    return values


def _flags(gguf: GgufFile, key: str, value: Any) -> list[bool]:
    """A list of true or false for each layer."""
    is_right = isinstance(value, list) and len(value) == gguf.num_blocks
    if not is_right or not all(isinstance(item, bool | int) for item in value):
        _refuse(gguf, key, f"expected {gguf.num_blocks} times true or false")
    return [bool(item) for item in value]


def _count(gguf: GgufFile, key: str) -> int:
    value = gguf.require(key)
    if type(value) is not int or value < 1:
        raise ModelFilesError(f"{gguf.path}: {key}={shown(value)}: expected a number above 0. Fetch the file again.")
    return value


def _refuse(gguf: GgufFile, key: str, expected: str) -> NoReturn:
    raise EngineError(
        f"{gguf.path}: {key}={shown(gguf.optional(key))}: {expected}. Give the model's Hugging Face folder instead."
    )
