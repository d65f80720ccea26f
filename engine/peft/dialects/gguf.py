"""Reads LoRA adapters in GGUF, as llama.cpp's `convert_lora_to_gguf.py` writes them.

Facts of that script and of llama.cpp's `llama-adapter.cpp`:
- `general.type` is `adapter`, `adapter.type` is `lora`. A tensor `blk.0.attn_q.weight` of the model has
  `blk.0.attn_q.weight.lora_a` [rank, in_features] and `.lora_b` [out_features, rank] in PEFT's orientation, but for the
  embedding, whose lora_a is [vocab_size, rank].
- The factor of B·A is `adapter.lora.alpha` / rank, rank by tensor; without alpha, or with 0, it is 1. The file has no
  room for rank-stabilised LoRA, alpha patterns and DoRA, which the script drops or refuses.
- Rows are in the model file's order: where each head's halves of queries and keys alternate there, they do here, and
  value heads of the gated delta rule are apart from their key head's others. Layers whose columns the model file has
  in another order (`ssm_out`), or whose weights it has transposed (GPT-2), cannot be converted.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....system.gguf import ALIGNMENT, KINDS_NOT_READ, KINDS_READ, VERSIONS, GgufTensor, GgufWalk, check_sizes
from ....system.untrusted import shown_name
from ...errors import AdapterRefusedError
from ...model_config.families import FAMILIES
from ...model_config.gguf import ARCHITECTURES, architectures_of, linear_parts
from ...model_config.model import HEAD
from ..config import AdapterConfig
from ..findings import Ledger
from ..names import BaseLayout
from ..tensor_file import ELEMENT_BYTES, FLOAT_TYPES, MAX_NAME_CHARACTERS, MAX_TENSORS, Header, TensorEntry

#: Names of the metadata that are looked at.
TYPE, ARCHITECTURE, KIND, ALPHA = "general.type", "general.architecture", "adapter.type", "adapter.lora.alpha"
# Weight of the projection of all layers' own inputs, which stands in no layer.
_ALL_INPUTS = "per_layer_model_proj"
_TENSOR = re.compile(
    rf"(?P<weight>token_embd|output|{_ALL_INPUTS}|blk\.(?P<layer>\d{{1,6}})\.(?P<part>\w+))\.weight"
    r"\.lora_(?P<half>[ab])"
)
_NO_PART = "it describes the file"
_REFUSED_KEYS = {
    "adapter.alora.invocation_tokens": "activated LoRA acts on part of a prompt only. Use a plain LoRA",
}
_INFORMATIVE = {
    "adapter.lora.task_name": "a name for people",
    "adapter.lora.prompt_prefix": "llama.cpp leaves it to the caller to begin prompts with it",
}
# Keys of an `adapter_config.json` beside the file that would change what the file says.
_LOST_KEYS = ("use_rslora", "use_dora", "alpha_pattern", "lora_bias", "modules_to_save", "trainable_token_indices")
_USE_PEFT = "Give the PEFT adapter that was converted"


def read_gguf_header(path: Path) -> Header:
    """Metadata and tensors of one file, without their values. Raises `AdapterRefusedError` for a damaged file, and for
    one whose tensors are of a kind that is not read.
    """
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise _damaged(path, "it does not start with 'GGUF'")
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise AdapterRefusedError(f"{path.name}: cannot be read ({error}). Check its permissions.") from None
    try:
        with content:
            walk = GgufWalk(content)
            version, num_tensors, num_keys = walk.preamble()
            if version not in VERSIONS or walk.order == ">":
                raise _damaged(path, f"version {version} in byte order {walk.order!r} is not read")
            if num_tensors > MAX_TENSORS:
                raise _damaged(path, f"{num_tensors} tensors, expected at most {MAX_TENSORS}")
            values = walk.keys(num_keys, lambda _: None)
            # No list matters but the tokens that invoke an activated LoRA.
            metadata = {key: True if is_list else read() for key, (is_list, read) in values.items()}
            tensors = walk.tensors(num_tensors, metadata.get("general.alignment", ALIGNMENT))
            _check_kinds(path, tensors)
            check_sizes(tensors, len(content))
    except (ValueError, OverflowError) as error:
        raise _damaged(path, shown_name(str(error))) from None
    return Header({key: _entry(key, path.name, tensor) for key, tensor in tensors.items()}, False, metadata)


def _damaged(path: Path, what: str) -> AdapterRefusedError:
    return AdapterRefusedError(f"{path.name}: not a whole GGUF file, {what}. Copy or convert the adapter again.")


def _check_kinds(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    for name, tensor in tensors.items():
        known = KINDS_READ[tensor.kind][0] if tensor.kind in KINDS_READ else KINDS_NOT_READ.get(tensor.kind, "unknown")
        if known not in (*FLOAT_TYPES, "Q8_0"):
            raise AdapterRefusedError(
                f"{path.name}: {shown_name(name)} is stored as {known}, expected {', '.join(FLOAT_TYPES)} or Q8_0. "
                "Convert the adapter again."
            )
        if len(name) > MAX_NAME_CHARACTERS:
            raise AdapterRefusedError(f"{path.name}: {shown_name(name)} is no name of a tensor.")


def _entry(key: str, file_name: str, tensor: GgufTensor) -> TensorEntry:
    kind = tensor.kind_name
    if kind != "Q8_0":
        return TensorEntry(key, kind, tensor.shape, file_name, tensor.offset, tensor.num_bytes)
    num_bytes = tensor.num_bytes // 34 * 32 * ELEMENT_BYTES["F32"]
    return TensorEntry(key, "F32", tensor.shape, file_name, tensor.offset, num_bytes, q8_bytes=tensor.num_bytes)


def read_gguf(
    raw: Mapping[str, Any], header: Header, layout: BaseLayout, ledger: Ledger
) -> tuple[AdapterConfig, Mapping[str, TensorEntry]]:
    """Configuration and tensors in PEFT's terms; what stands against them is entered as refusals. `raw`: the object in
    an `adapter_config.json` beside the file, empty without one.
    """
    alpha = _read_metadata(header.metadata, layout, ledger)
    for key, value in raw.items():
        if key in _LOST_KEYS and value:
            ledger.refuse_key(key, value, f"the file in GGUF has no room for it. {_USE_PEFT}")
        elif key == "lora_alpha" and value != alpha:
            ledger.refuse_key(key, value, f"{ALPHA} is {alpha}, unclear which one is meant. {_USE_PEFT}")
        else:
            ledger.ignore_key(key, "the file in GGUF says what is computed")
    found: dict[str, TensorEntry] = {}
    ranks: dict[str, int] = {}
    for key, entry in header.tensors.items():
        place = _place(key, layout)
        if place is None:
            why = f"not a pair of a linear layer of {layout.family}, so what it does is not known. {_USE_PEFT}"
            ledger.refuse_tensors([key], "unknown tensor", why)
            continue
        module, name, part, half = place
        found[name] = replace(_arranged(entry, part, half, layout), key=name)
        if half == "a":
            # Another shape is refused for itself.
            ranks[module] = max(found[name].shape[0], 1) if len(entry.shape) == 2 else 1
    ledger.notes.append("an adapter in GGUF: its tensors are named and shaped here as PEFT would store them")
    return _config(alpha, ranks), found


def _read_metadata(metadata: Mapping[str, Any], layout: BaseLayout, ledger: Ledger) -> float:
    """The alpha of all pairs; 0: the factor is 1."""
    expected = {TYPE: ("adapter",), KIND: ("lora",), ARCHITECTURE: _architectures(layout)}
    if metadata.get(TYPE) == "model" or (metadata.get(TYPE) is None and KIND not in metadata):
        ledger.refuse_key(TYPE, metadata.get(TYPE), "expected 'adapter': the file is a model. Name it as --model")
        return 0.0
    for key, wanted in expected.items():
        if not wanted:
            ledger.refuse_key(
                key, metadata.get(key), f"adapters in GGUF are not read for a base of {layout.family}. {_USE_PEFT}"
            )
        elif metadata.get(key) not in wanted:
            what = f"expected {' or '.join(map(repr, wanted))}"
            what += f" for a base of {layout.family}" if key == ARCHITECTURE else ""
            ledger.refuse_key(key, metadata.get(key), f"{what}. Use the base it was trained on")
        else:
            ledger.use_key(key)
    alpha = metadata.get(ALPHA, 0.0)
    if type(alpha) not in (int, float) or not 0 <= alpha < 1e9:
        ledger.refuse_key(ALPHA, alpha, "expected a number of at least 0. Convert the adapter again")
        alpha = 0.0
    elif ALPHA in metadata:
        ledger.use_key(ALPHA)
    for key, value in metadata.items():
        if key in _REFUSED_KEYS:
            ledger.refuse_key(key, value, _REFUSED_KEYS[key])
        elif key.startswith("adapter.") and key not in (KIND, ALPHA, *_INFORMATIVE):
            ledger.refuse_key(key, value, "this key is not known, so what it changes is not known. Convert again")
        elif key not in ledger.key_uses:
            ledger.ignore_key(key, _INFORMATIVE.get(key, _NO_PART))
    return float(alpha)


def _place(key: str, layout: BaseLayout) -> tuple[str, str, str, str] | None:
    """Module, PEFT's name of the tensor, weight of llama.cpp and half of a tensor's name; None where it has none."""
    match = _TENSOR.fullmatch(key)
    if match is None:
        return None
    half, weight = match["half"], match["weight"]
    if weight == "token_embd":
        return layout.embedding, f"{layout.embedding}.lora_embedding_{half.upper()}", weight, half
    if match["part"] is not None:
        names = linear_parts(layout.family).get(match["part"], ())
        candidates = [f"{layout.layers}.{int(match['layer'])}.{name}" for name in names]
    else:
        inputs = FAMILIES[layout.family].names.layer_inputs
        candidates = [HEAD] if weight == "output" else [inputs.projection] if inputs is not None else []
    module = next((name for name in candidates if name in layout.linear), next(iter(candidates), None))
    return None if module is None else (module, f"{module}.lora_{half.upper()}.weight", match["part"] or weight, half)


def _architectures(layout: BaseLayout) -> tuple[str, ...]:
    """Architectures of adapters for a base; none where the converter cannot write them."""
    return () if layout.is_transposed else architectures_of(layout.family)


def _arranged(entry: TensorEntry, part: str, half: str, layout: BaseLayout) -> TensorEntry:
    """The tensor in PEFT's orientation and order of rows."""
    if len(entry.shape) != 2:
        return entry
    if part == "token_embd" and half == "a":
        return replace(entry, shape=entry.shape[::-1], is_transposed=True)
    return replace(entry, row_order=_row_order(part, entry.shape[0], layout)) if half == "b" else entry


def _row_order(part: str, num_rows: int, layout: BaseLayout) -> tuple[int, int, int, int] | None:
    """`TensorEntry.row_order` of a B; None for rows in PEFT's order, and for as many as no weight of the base has,
    which are refused by their shape.
    """
    if part in ("attn_q", "attn_k") and any(ARCHITECTURES[name].has_paired_rows for name in _architectures(layout)):
        heads = layout.num_heads if part == "attn_q" else layout.num_kv_heads
        return None if num_rows % (2 * heads) else (0, heads, num_rows // heads // 2, 2)
    sizes = layout.delta
    if sizes is None or part not in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"):
        return None
    first = 2 * sizes.num_keys if part == "attn_qkv" else 0
    is_known = num_rows > first and (num_rows - first) % sizes.value_heads == 0
    return (first, 1, sizes.value_heads // sizes.key_heads, sizes.key_heads) if is_known else None


def _config(alpha: float, ranks: Mapping[str, int]) -> AdapterConfig:
    ((rank, _),) = Counter(ranks.values()).most_common(1) or [(1, 0)]
    others = {module: own for module, own in ranks.items() if own != rank}
    rank_pattern = {re.escape(module): own for module, own in others.items()}
    return AdapterConfig(
        r=rank,
        lora_alpha=alpha or rank,
        rank_pattern=rank_pattern,
        alpha_pattern={} if alpha else {pattern: float(own) for pattern, own in rank_pattern.items()},
        target_modules=tuple(sorted(ranks)),
    )
