"""Finds how merging makes each base parameter that an adapter touches, and checks and hashes the values it uses.

Values must be finite, of some effect, and equal where they must be. Checks work on the bits of fp32, fp16 and bf16
alike, so no tensor library is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model_config.model import HEAD
from .findings import Ledger
from .heads import find_score
from .parameters import Changes, find_saved, find_token_rows
from .sites import Contents, LoraSite, ParameterChange
from .targets import ties_targets
from .tensor_file import TensorEntry, TensorReader

#: The bytes of one tensor, uint8 [num_bytes].
TensorData = npt.NDArray[np.uint8]
HASH_FORMAT = b"lorabatch adapter content 1\n"
# Element type, mask without the sign, smallest masked value that is infinite or NaN.
_BITS: Mapping[str, tuple[str, int, int]] = {
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
}
_CHUNK_ELEMENTS = 1 << 20
# `json.dumps` would make one for each of an adapter's hundreds of modules.
_FACTS = json.JSONEncoder(sort_keys=True)


def find_changes(contents: Contents, raw: Mapping[str, Any], sites: tuple[LoraSite, ...], ledger: Ledger) -> Changes:
    """Put whole parameters, token rows and pairs together; enter what they ask of the verdict. `raw`: the adapter's
    configuration.
    """
    changes = Changes()
    find_saved(contents, changes, ledger)
    find_score(contents, raw, changes, ledger)
    find_token_rows(contents, changes, ledger)
    for site in sites:
        weight, bias = f"{site.module}.weight", f"{site.module}.bias"
        changes.add(weight, contents.shapes[weight], site=site)
        if site.bias_key:
            # A bias that lora_bias adds to a layer without one is new: zeros stand for the base's.
            changes.add(bias, contents.shapes.get(bias) or (site.out_features,), site=site)
    changes.transposed_twins += _tied_pairs(contents, sites)
    changes.by_parameter = dict(sorted(changes.by_parameter.items()))
    _judge_sites(contents, sites, ledger)
    return changes


def _tied_pairs(contents: Contents, sites: tuple[LoraSite, ...]) -> tuple[tuple[str, str], ...]:
    """Transposed twins of a tied head: with ensure_weight_tying its pair is the embedding's, transposed."""
    if not (contents.layout.is_tied and ties_targets(contents.config)):
        return ()
    by_module = {site.module: site for site in sites}
    embedding, head = by_module.get(contents.layout.embedding), by_module.get(HEAD)
    if embedding is None or head is None:
        return ()
    return (embedding.b_key, head.a_key), (embedding.a_key, head.b_key)


def _judge_sites(contents: Contents, sites: tuple[LoraSite, ...], ledger: Ledger) -> None:
    """Enter pairs that the batched kernels cannot apply as exact by merge only."""
    for site in sites:
        if site.module not in contents.layout.batched:
            why = "a pair outside the decoder layers, so it runs as its own merged wave"
            ledger.merge_only(f"{site.a_key}: {why}", "outside the layers")
    if contents.config.use_dora and sites:
        ledger.merge_only("use_dora=True: whole weights are rescaled, so it runs as its own merged wave", "dora")
    if contents.config.lora_bias and sites:
        ledger.merge_only("lora_bias=True: biases change, so it runs as its own merged wave", "lora_bias")


def check_all_values(folder: Path, changes: Changes, entries: Mapping[str, TensorEntry], ledger: Ledger) -> str | None:
    """Read every value once: enter what is wrong, return the content hash (None when refused)."""
    of_twins = {key for twins in (*changes.twins, *changes.transposed_twins) for key in twins}
    largest: dict[str, int] = {}
    kept: dict[str, TensorData] = {}
    with TensorReader(folder) as reader:

        def read_and_check(key: str) -> TensorData:
            data = reader.read(entries[key])
            largest[key] = _largest_bits(entries[key], data)
            if key in of_twins:
                kept[key] = data
            return data

        content = content_sha256(changes.by_parameter.values(), entries, read_and_check)
        kept |= {key: reader.read(entries[key]) for key in of_twins - kept.keys()}
        bad = [key for key, bits in largest.items() if bits >= _BITS[entries[key].dtype][2]]
        ledger.refuse_tensors(bad, "not finite", "holds NaN or infinity. Use an earlier checkpoint")
        _check_effect(changes.by_parameter.values(), {key for key, bits in largest.items() if bits == 0}, ledger)
        for twins in changes.twins:
            _check_twins(twins, entries, kept, ledger, is_transposed=False)
        for twins in changes.transposed_twins:
            _check_twins(twins, entries, kept, ledger, is_transposed=True)
    return None if ledger.is_refused else content


def content_sha256(
    changes: Iterable[ParameterChange], entries: Mapping[str, TensorEntry], read: Callable[[str], TensorData]
) -> str:
    """Hash of what the adapter computes: parameters, scalings and bytes; not of names, files or formatting.

    `read` gives the bytes of a tensor by its key. It is called once for each tensor, so that the caller can check or
    keep the bytes on their way.
    """
    keys_of = [(change, change.keys) for change in changes]
    uses_left = Counter(key for _, keys in keys_of for key in keys)
    kept: dict[str, TensorData] = {}
    digest = hashlib.sha256(HASH_FORMAT)
    for change, keys in keys_of:
        site = change.site
        facts = {
            "parameter": change.parameter,
            "shape": change.shape,
            "is_replaced": change.replaced_by is not None,
            "rows": change.rows,
            "scaling": site.scaling.hex() if site else None,
            "is_dora": bool(site and site.magnitude_key),
            "tensors": [(entries[key].dtype, entries[key].shape) for key in keys],
        }
        digest.update(_FACTS.encode(facts).encode() + b"\n")
        for key in keys:
            data = kept.pop(key) if key in kept else read(key)
            digest.update(data.data)
            uses_left[key] -= 1
            if uses_left[key]:
                kept[key] = data
    return digest.hexdigest()


def _elements(entry: TensorEntry, data: TensorData) -> npt.NDArray[np.unsignedinteger]:
    return data.view(_BITS[entry.dtype][0])


def _largest_bits(entry: TensorEntry, data: TensorData) -> int:
    """Largest magnitude as bits: 0 when all is zero, at least the limit of `_BITS` when something is not finite."""
    elements = _elements(entry, data)
    mask = _BITS[entry.dtype][1]
    chunks = (elements[i : i + _CHUNK_ELEMENTS] & mask for i in range(0, elements.size, _CHUNK_ELEMENTS))
    return max((int(chunk.max()) for chunk in chunks), default=0)


def _check_effect(changes: Iterable[ParameterChange], zero: set[str], ledger: Ledger) -> None:
    """Plain pairs whose every product is zero would serve the base under the adapter's name."""
    pairs = []
    for change in changes:
        site = change.site
        if change.replaced_by or change.rows_key or site is None or site.magnitude_key or site.bias_key:
            return
        pairs.append(site)
    if all(site.scaling == 0 or site.a_key in zero or site.b_key in zero for site in pairs):
        example = pairs[0]
        ledger.refuse(
            f"{example.b_key}: every pair has no effect (lora_B or lora_A all zero, or lora_alpha=0), expected "
            "trained weights. Save the adapter after training"
        )


def _check_twins(
    twins: tuple[str, str],
    entries: Mapping[str, TensorEntry],
    data: Mapping[str, TensorData],
    ledger: Ledger,
    *,
    is_transposed: bool,
) -> None:
    first, second = (entries[key] for key in twins)
    a = _elements(first, data[first.key]).reshape(first.shape)
    b = _elements(second, data[second.key]).reshape(second.shape)
    if first.dtype != second.dtype or not np.array_equal(a, b.T if is_transposed else b):
        why = f"differs from {first.key}, expected equal values as both stand for one tied layer. Save it again"
        ledger.refuse_tensors([second.key], "not equal", why)
