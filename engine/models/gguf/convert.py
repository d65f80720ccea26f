"""Converts GGUF files: once, into a Hugging Face style safetensors folder.

Shapes: a linear weight is `[out_features, in_features]`, as in the checkpoint (GGUF lists its axes reversed).
Sources: the GGUF specification (ggml `docs/gguf.md`) and llama.cpp's converter, which reorders the query and
key rows of the Llama family for its own rotary layout and adds 1 to the norms of the Gemma families and transposes
GPT-2's weights; all are undone here.

Storage: float32 files stay float32 and bfloat16 files stay bfloat16, both exact. Weights in blocks that
engines read (`blocks.py`) stay in them. Other kinds, and all of them for other programs, are dequantised and stored as
float16: its rounding (at most 2**-11 relative) is far below what 4- to 8-bit quantisation lost already; bfloat16's
(2**-8) would not always.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from ....system.local_cache import make_private, temporary_folder
from ....system.long_work import LongWork
from ....system.untrusted import STOPS
from ...config import BLOCKS_KEY
from ...errors import EngineError, ModelFilesError
from ...model_config.gguf import ARCHITECTURES
from .blocks import KINDS, METADATA_KEY, GgufWeight, Weight, plain
from .checks import checkpoint_names, model_of_layers, unfitting
from .config import model_config, token_id_config
from .file import GgufFile, open_gguf
from .layers import EXACT, is_in_whole_groups, restore_delta
from .tokenizer import write_tokenizer

if TYPE_CHECKING:
    import numpy as np

    from ....kernels.layouts.delta_sizes import DeltaSizes

StorageDtype = Literal["float32", "float16", "bfloat16"]
_ROTATED = ("attn_q", "attn_k")
SHARD_BYTES = 4 * 2**30


def convert_gguf(gguf_path: Path, folder: Path, shard_bytes: int = SHARD_BYTES, *, keep_blocks: bool = True) -> None:
    """Write `folder` (config, generation config, tokenizer, safetensors of at most `shard_bytes`) from a GGUF file.

    `keep_blocks`: weights in blocks stay in them, which no other program reads from safetensors.

    The folder appears whole or not at all. Several processes may convert into the same folder at once: the
    first to finish wins and the others' work is dropped; an existing folder is left as it is.

    Raises `ModelFilesError` for an unreadable or incomplete file, `EngineError` for an
    architecture, tensor, rotary setting or tokenizer that would not be converted exactly.
    """
    gguf = open_gguf(gguf_path)
    work = LongWork(f"converting {gguf_path.name}", sum(tensor.num_bytes for tensor in gguf.tensors.values()))
    make_private(folder.parent)
    with temporary_folder(folder.parent, f".{folder.name}.tmp-") as scratch:
        _convert(gguf, scratch, shard_bytes, work, keep_blocks=keep_blocks)
        try:
            os.replace(scratch, folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise


def _convert(gguf: GgufFile, scratch: Path, shard_bytes: int, work: LongWork, *, keep_blocks: bool) -> None:
    try:
        names = checkpoint_names(gguf)
        dtype = _storage_dtype(gguf, names)
        delta = _delta_sizes(gguf)
        kept = _in_blocks(gguf, names, delta) if keep_blocks else {}
        is_kept = any(name.startswith("blk.") for name in kept)
        _write_json(scratch / "config.json", model_config(gguf, dtype) | ({BLOCKS_KEY: True} if is_kept else {}))
        _write_json(scratch / "generation_config.json", token_id_config(gguf))
        write_tokenizer(gguf.metadata, scratch)
        _write_weights(gguf, names, dtype, kept, delta, scratch, shard_bytes, work)
    except (*STOPS, EngineError, OSError):
        raise
    except BaseException as error:
        raise unfitting(gguf, error) from None


def _storage_dtype(gguf: GgufFile, names: Iterable[str]) -> StorageDtype:
    # norms of heads, learned positions and convolutions are always in float32
    matrices = [name for name in names if len(gguf.tensors[name].shape) > 1 and "_norm" not in name]
    in_float32 = ("position_embd.weight", "ssm_conv1d.weight")
    matrix_types = {gguf.tensors[name].kind_name for name in matrices if not name.endswith(in_float32)}
    if matrix_types <= {"F32"}:
        return "float32"
    return "bfloat16" if matrix_types <= {"BF16"} else "float16"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _delta_sizes(gguf: GgufFile) -> DeltaSizes | None:
    """Sizes of the gated delta rule; None for a model that has no such layers."""
    model = model_of_layers(gguf)
    return None if model is None else next((layer.delta for layer in model.layers if layer.delta is not None), None)


def _in_blocks(gguf: GgufFile, names: Iterable[str], delta: DeltaSizes | None) -> dict[str, str]:
    """Weights in blocks that engines read: GGUF tensor name -> kind. Blocks cannot be transposed, and their columns
    cannot be reordered within a group.
    """
    if gguf.family.names.is_transposed:
        return {}
    kinds = {name: gguf.tensors[name].kind_name for name in names if len(gguf.tensors[name].shape) == 2}
    known = {name: kind for name, kind in kinds.items() if kind in KINDS}
    return {name: kind for name, kind in known.items() if is_in_whole_groups(name, delta, KINDS[kind][0])}


def _write_weights(
    gguf: GgufFile,
    names: Mapping[str, tuple[str, ...]],
    dtype: StorageDtype,
    kept: Mapping[str, str],
    delta: DeltaSizes | None,
    folder: Path,
    shard_bytes: int,
    work: LongWork,
) -> None:
    """Write one `model.safetensors`, or numbered shards with an index when the model is larger than a shard."""
    shards = _shards(gguf, names, getattr(torch, dtype).itemsize, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in shard:
            weight = _weight(gguf, name, getattr(torch, dtype), kept.get(name), delta)
            tensors |= zip(names[name], _parts(gguf, weight, len(names[name])), strict=True)
            work.add(gguf.tensors[name].num_bytes)
        kinds = {part: kept[name] for name in shard if name in kept for part in names[name]}
        # One key at most: the library writes several in any order, and hosts must convert to the same bytes.
        metadata = {METADATA_KEY: json.dumps(kinds)} if kinds else {"format": "pt"}
        save_file(tensors, folder / file_name, metadata=metadata)
        weight_map |= dict.fromkeys(tensors, file_name)
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _shards(
    gguf: GgufFile, names: Mapping[str, tuple[str, ...]], bytes_per_value: int, shard_bytes: int
) -> list[list[str]]:
    """Tensor names in file order, cut into runs of at most `shard_bytes` each."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name in names:
        size = math.prod(gguf.tensors[name].shape) * bytes_per_value
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _weight(gguf: GgufFile, name: str, dtype: torch.dtype, kind: str | None, delta: DeltaSizes | None) -> torch.Tensor:
    """One tensor as the checkpoint holds it. `kind`: kind of a weight that is kept in blocks; None: it is stored in
    `dtype`. `delta`: sizes of the gated delta rule, where layers have it.

    Raises `ModelFilesError` for a value that does not fit.
    """
    array = gguf.array(name) if kind is None else gguf.raw(name)
    family = gguf.family
    if ARCHITECTURES[gguf.architecture].has_paired_rows and (stem := name.rpartition(".")[0]).endswith(_ROTATED):
        heads = "attention.head_count" if stem.endswith("attn_q") else "attention.head_count_kv"
        array = _restore_rotary_rows(array, gguf.number(heads, gguf.number("attention.head_count")))
    # that of the gated delta rule is a factor in checkpoints, too
    if family.norm_kind == "rms_from_zero" and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
        array = array - 1.0  # llama.cpp's files have the factor, checkpoints its difference from 1
    if family.names.is_transposed and name.startswith("blk.") and array.ndim == 2:
        array = array.T
    if delta is not None and name.startswith("blk."):
        array = restore_delta(name, array, delta)
        dtype = torch.float32 if name.endswith(EXACT) else dtype
    # A copy: the file's arrays are read-only views of the mapped file.
    stored = torch.from_numpy(array.copy())
    weight: Weight = stored if kind is None else GgufWeight(stored, kind)
    tensor = plain(weight, dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise ModelFilesError(f"{gguf.path}: {name} holds values that are not finite numbers in {dtype}.")
    return tensor if kind is None else stored


def _restore_rotary_rows(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's reordering of rows, of numbers or bytes: each head's from (pair, half) to (half, pair)."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _parts(gguf: GgufFile, weight: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """A tensor, or query, key and value rows that the file has as one."""
    if num_parts == 1:
        return [weight]
    num_heads = gguf.number("attention.head_count")
    num_kv_heads = gguf.number("attention.head_count_kv", num_heads)
    rows = len(weight) // (num_heads + 2 * num_kv_heads)
    keys, values = num_heads * rows, (num_heads + num_kv_heads) * rows
    return [weight[:keys].clone(), weight[keys:values].clone(), weight[values:].clone()]
