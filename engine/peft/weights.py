"""Loads an audited adapter: pairs for unmerged batches, and merged values of base parameters.

Shapes: A [rank, in_features], B [out_features, rank], a layer's weight [out_features, in_features], the embedding
[vocab_size, hidden_size]. Merged values are computed in fp32 from the stored numbers and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels.merge import LoraPair
from ...kernels.packed_weight.panels import PanelWeight, has_panels
from ..errors import AdapterRefusedError
from .audit import AdapterAudit
from .content import TensorData, content_sha256
from .folder import open_folder
from .sites import LoraSite, ParameterChange
from .tensor_file import TensorEntry, TensorReader

# Half of a core's L2 cache: what was read is hashed and packed from there, in memory that is used again.
_PART_BYTES = 1 << 20
_TORCH_TYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter on one device."""

    #: Its audit.
    audit: AdapterAudit
    #: Its tensors as in the file, by their keys there.
    stored: Mapping[str, Tensor] = field(repr=False)
    #: Its pairs by layer name.
    pairs: Mapping[str, LoraPair] = field(repr=False)
    #: How merging makes each base parameter, by the parameter's name.
    changes: Mapping[str, ParameterChange] = field(repr=False)
    #: DoRA's row lengths of parameters of which only a part is here, by name.
    norms: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    #: Hash by which its content was checked; "" for random weights.
    identity_sha256: str = ""

    @property
    def head(self) -> Tensor | None:
        """The head of a classifier, [num_labels, embedding_size], on the host; None for an adapter without one."""
        head = self.audit.head
        return None if head is None or head.replaced_by is None else self.stored[head.replaced_by].cpu()

    @property
    def lora(self) -> Mapping[str, LoraPair]:
        """Pairs by layer name, for unmerged batches.

        Raises `AdapterRefusedError` for an adapter that is exact by merge only: its pairs alone would be wrong.
        """
        if self.audit.verdict != "exact":
            raise AdapterRefusedError(
                f"adapter {self.audit.name!r}: verdict {self.audit.verdict}, it cannot run unmerged. Merge it."
            )
        return self.pairs

    def effective(self, parameter_name: str, pristine: Tensor) -> Tensor:
        """Merged value of one base parameter, in `pristine`'s dtype and device; `pristine` is left as it is.

        An untouched parameter is returned as given. For a tied base, pass the embedding as the pristine value of
        `lm_head.weight`; for a bias the base's layer does not have, pass zeros. The result has other rows than
        `pristine` when the adapter resized the vocabulary. Raises `AdapterRefusedError` when merging overflows.
        """
        change = self.changes.get(parameter_name)
        if change is None:
            return pristine
        value: Tensor = self._start(change, pristine)
        if change.rows_key:
            index = torch.tensor(change.rows, device=value.device)
            value = value.index_copy(0, index, self._exact(change.rows_key, value.device))
        if change.site and parameter_name.endswith(".bias"):
            value = value + change.site.scaling * self._exact(change.site.bias_key, value.device)
        elif change.site:
            value = self._with_pair(change.site, value)
        merged = value.to(pristine.dtype)
        # one pass without a mask in memory: a NaN or an infinity reaches the extremes
        if merged.numel() and not all(map(torch.isfinite, torch.aminmax(merged))):
            raise AdapterRefusedError(
                f"adapter {self.audit.name!r}: {parameter_name} merged in {pristine.dtype} is not finite. Use a wider "
                "--dtype, or an earlier checkpoint."
            )
        return merged

    def _start(self, change: ParameterChange, pristine: Tensor) -> Tensor:
        if change.replaced_by:
            return self._exact(change.replaced_by, pristine.device)
        if tuple(pristine.shape) != change.shape:
            raise ValueError(
                f"{change.parameter}: pristine value has shape {list(pristine.shape)}, audited {list(change.shape)}"
            )
        return pristine.to(torch.float32)

    def _with_pair(self, site: LoraSite, weight: Tensor) -> Tensor:
        """W + scaling·B·A; with DoRA each row then gets the length of its magnitude (Liu 2024, section 4)."""
        value = self._plus_pair(site, weight)
        if site.magnitude_key is None:
            return value
        magnitude = self._exact(site.magnitude_key, weight.device)  # [out_features]
        norms = self.norms.get(f"{site.module}.weight")
        if norms is None:
            norms = _row_squares(value.T if site.is_embedding else value).sqrt()
        factor: Tensor = magnitude / norms  # [out_features]
        return value * factor if site.is_embedding else value * factor[:, None]

    def _plus_pair(self, site: LoraSite, weight: Tensor) -> Tensor:
        a, b = self._exact(site.a_key, weight.device), self._exact(site.b_key, weight.device)
        left, right = (a.T, b.T) if site.is_embedding else (b, a)  # an embedding is [vocab_size, hidden_size]
        return _plus_product(weight, left, right, site.scaling)

    def row_squares(self, parameter_name: str, pristine: Tensor) -> Tensor:
        """Squared length of each row that DoRA divides by, [out_features], from a part of the parameter."""
        change = self.changes[parameter_name]
        assert change.site is not None, f"{parameter_name} has no pair"
        value = self._plus_pair(change.site, self._start(change, pristine))
        return _row_squares(value.T if change.site.is_embedding else value)

    def _exact(self, key: str | None, device: torch.device) -> Tensor:
        assert key is not None, "a change without this tensor"
        return self.stored[key].to(device=device, dtype=torch.float32)


def _plus_product(weight: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """`weight + scaling * left @ right` in fp32; on CPUs by compiled kernels, if they are there: their bits do not
    depend on the number of threads."""
    if weight.device.type != "cpu" or not has_panels():
        return torch.addmm(weight, left, right, alpha=scaling)
    value = weight.clone(memory_format=torch.contiguous_format)
    PanelWeight(right.T).add_product_(value, left, scaling)
    return value


def _row_squares(values: Tensor) -> Tensor:
    """Squared length of each row. Halves are added up number by number: unlike a reduction's, their rounding does
    not depend on who computes which part."""
    squares = values * values
    while (width := squares.shape[1]) > 1:
        half = width // 2
        folded = squares[:, :half] + squares[:, half : 2 * half]
        if width % 2:
            folded[:, 0] += squares[:, -1]
        squares = folded
    return squares[:, 0]


def load_adapter(audit: AdapterAudit, device: torch.device | str, identity_sha256: str | None = None) -> AdapterWeights:
    """Read an audited adapter to `device`. Arguments and errors are those of `read_adapter`."""
    stored: dict[str, Tensor] = {}
    read_adapter(audit, lambda part: stored.update((k, t.to(device)) for k, t in part.items()), identity_sha256)
    pairs = {
        site.module: LoraPair(stored[site.a_key], stored[site.b_key], site.scaling)
        for site in audit.sites
        if audit.verdict == "exact"
    }
    changes = {change.parameter: change for change in audit.changes if change is not audit.head}
    return AdapterWeights(audit, stored, pairs, changes, identity_sha256=identity_sha256 or "")


def read_adapter(
    audit: AdapterAudit, take: Callable[[Mapping[str, Tensor]], None], identity_sha256: str | None = None
) -> None:
    """Read an audited adapter part by part: each byte once, hashed on the way, while it is in the processor's cache.

    `take` gets the tensors of each part by their keys; what it made of them counts only if this returns.
    `identity_sha256`: what the adapter must be (None: what the audit found, which must have read the values). Raises
    `AdapterRefusedError` when the audit refused it, did not read its values, or when the files have changed.
    """
    if audit.verdict == "refused":
        raise AdapterRefusedError(" ".join(audit.reasons))
    expected = identity_sha256 or audit.identity_sha256
    if expected is None:
        raise AdapterRefusedError(f"adapter {audit.name!r}: its values were not audited. Use check_values=True.")
    entries = audit.sources or open_folder(audit.folder).entries
    used = dict.fromkeys(key for change in audit.changes for key in change.keys)
    missing = sorted(used.keys() - entries.keys())
    if missing:
        raise AdapterRefusedError(f"adapter {audit.name!r}: {missing[0]} is gone since the audit.")
    parts = _parts([entries[key] for key in used])
    data: dict[str, TensorData] = {}

    def read(key: str) -> TensorData:
        if key not in data:  # the first of the next part: hashing asks for them in the same order
            part = next(parts)
            data.clear()
            data.update(reader.read_all(part))
            take({entry.key: _tensor(entry, data[entry.key]) for entry in part})
        return data[key]

    with TensorReader(audit.folder) as reader:
        found = audit.identity_of(content_sha256(audit.changes, entries, read))
    if found != expected:
        raise AdapterRefusedError(
            f"adapter {audit.name!r}: {audit.folder} holds content {found[:12]}, expected {expected[:12]}. "
            "Its files have changed since they were audited."
        )


def _parts(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Tensors in order, in parts of at most `_PART_BYTES`, or of one."""
    part: list[TensorEntry] = []
    for entry in entries:
        if part and sum(e.num_bytes for e in part) + entry.num_bytes > _PART_BYTES:
            yield part
            part = []
        part.append(entry)
    if part:
        yield part


def _tensor(entry: TensorEntry, data: TensorData) -> Tensor:
    """A tensor over the bytes, which are not copied."""
    if entry.num_bytes == 0:
        return torch.empty(entry.shape, dtype=_TORCH_TYPES[entry.dtype])
    return torch.frombuffer(data.data, dtype=_TORCH_TYPES[entry.dtype]).reshape(entry.shape)
