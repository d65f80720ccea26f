"""The values of an adapter: finite, of some effect, equal where they must be; and their hash.

Checks work on the bits of fp32, fp16 and bf16 alike, so no tensor library is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from ..errors import AdapterRefusedError
from .changes import Changes, ParameterChange
from .ledger import Ledger
from .saved import Twins
from .tensor_file import TensorBytes, TensorEntry

HASH_FORMAT = b"lorabatch adapter content 1\n"
# Element type, mask without the sign, smallest masked value that is infinite or NaN.
_BITS: Mapping[str, tuple[str, int, int]] = {
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
}
_CHUNK_ELEMENTS = 1 << 20


def check_all_values(changes: Changes, entries: Mapping[str, TensorEntry], ledger: Ledger) -> str | None:
    """Read every value once: enter what is wrong, return the content hash (None when refused)."""
    keys = dict.fromkeys(key for change in changes.by_parameter for key in change.keys)
    with TensorBytes() as data:
        largest = {key: _largest_bits(entries[key], data) for key in keys}
        bad = [key for key, bits in largest.items() if bits >= _BITS[entries[key].dtype][2]]
        ledger.refuse_tensors(bad, "not finite", "holds NaN or infinity. Use an earlier checkpoint")
        _check_effect(changes.by_parameter, {key for key, bits in largest.items() if bits == 0}, ledger)
        for twins in changes.twins:
            _check_twins(twins, entries, data, ledger)
        return None if ledger.is_refused else content_sha256(changes.by_parameter, entries, data)


def content_sha256(changes: Iterable[ParameterChange], entries: Mapping[str, TensorEntry], data: TensorBytes) -> str:
    """Hash of what the adapter computes: parameters, scalings and bytes; not of names, files or formatting."""
    digest = hashlib.sha256(HASH_FORMAT)
    for change in changes:
        site = change.site
        facts = {
            "parameter": change.parameter,
            "shape": change.shape,
            "is_replaced": change.replaced_by is not None,
            "rows": change.rows,
            "scaling": site.scaling.hex() if site else None,
            "is_dora": bool(site and site.magnitude_key),
            "tensors": [(entries[key].dtype, entries[key].shape) for key in change.keys],
        }
        digest.update(json.dumps(facts, sort_keys=True).encode() + b"\n")
        for key in change.keys:
            digest.update(data.view(entries[key]))
    return digest.hexdigest()


def verify_content(
    changes: Iterable[ParameterChange], entries: Mapping[str, TensorEntry], data: TensorBytes, expected: str
) -> None:
    """Raise `AdapterRefusedError` unless the files still hold what was audited."""
    found = content_sha256(changes, entries, data)
    if found != expected:
        raise AdapterRefusedError(
            f"content hash {found[:12]}…: expected {expected[:12]}… as audited; the adapter's files have changed "
            "since. Start the job again, so that they are audited anew."
        )


def _elements(entry: TensorEntry, data: TensorBytes) -> npt.NDArray[np.unsignedinteger]:
    return np.frombuffer(data.view(entry), dtype=_BITS[entry.dtype][0])


def _largest_bits(entry: TensorEntry, data: TensorBytes) -> int:
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


def _check_twins(twins: Twins, entries: Mapping[str, TensorEntry], data: TensorBytes, ledger: Ledger) -> None:
    first, second = entries[twins.first], entries[twins.second]
    a = _elements(first, data).reshape(first.shape)
    b = _elements(second, data).reshape(second.shape)
    if first.dtype != second.dtype or not np.array_equal(a, b.T if twins.is_transposed else b):
        why = f"differs from {first.key}, expected equal values as both stand for one tied layer. Save it again"
        ledger.refuse_tensors([second.key], "not equal", why)
