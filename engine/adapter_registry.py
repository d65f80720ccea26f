"""Adapters an engine may be asked for: content hash -> audited folder. Their tensors are read when needed."""

from __future__ import annotations

from pathlib import Path

import torch

from .adapter import AdapterAudit, audit_adapter
from .adapter.weights import AdapterWeights, load_adapter
from .config import ModelConfig
from .errors import AdapterRefusedError, AdapterUnusableError

BASE_CODE = -1


class AdapterRegistry:
    """Audits what it is given and numbers it, so that batchers see small integers."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._dtype = dtype
        self._device = device
        self._audits: dict[str, AdapterAudit] = {}
        self.code_of: dict[str | None, int] = {None: BASE_CODE}
        self._id_of_code: list[str] = []

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._audits

    def register(self, adapter_id: str, folder: Path, name: str) -> None:
        """Make an adapter known. Raises `AdapterRefusedError` when it cannot be applied exactly, or when the
        folder's content is not `adapter_id` (it changed since the job was planned)."""
        if adapter_id in self._audits:
            return
        audit = audit_adapter(folder, self._model, name)
        if audit.verdict == "refused":
            raise AdapterRefusedError("; ".join(audit.reasons))
        found = audit.identity_sha256 or ""
        if found != adapter_id:
            raise AdapterRefusedError(
                f"adapter {name!r}: {folder} holds content {found[:12]}, planned was {adapter_id[:12]}. It "
                "changed meanwhile; run the job again, and its rows are planned anew."
            )
        self._audits[adapter_id] = audit
        self.code_of[adapter_id] = len(self._id_of_code)
        self._id_of_code.append(adapter_id)

    def id_of(self, code: int) -> str:
        """The adapter behind a number."""
        return self._id_of_code[code]

    def must_merge(self, code: int) -> bool:
        """Whether the adapter is exact only when merged."""
        return self.must_merge_id(self._id_of_code[code])

    def must_merge_id(self, adapter_id: str) -> bool:
        """`must_merge` by content hash."""
        return self._audits[adapter_id].verdict == "exact-by-merge"

    def vocab_size(self, adapter_id: str | None) -> int:
        """Token ids that a row may hold: an adapter with a resized vocabulary brings its own."""
        return self._model.vocab_size if adapter_id is None else self._audits[adapter_id].vocab_size

    def tokenizer_folder(self, adapter_id: str | None) -> Path | None:
        """The adapter's folder if it ships a tokenizer of its own (a chat template alone is none)."""
        if adapter_id is None:
            return None
        folder = self._audits[adapter_id].folder
        return folder if (folder / "tokenizer.json").is_file() else None

    def num_elements(self, adapter_id: str) -> int:
        """Numbers the adapter's matrices take in the pool."""
        sites = self._audits[adapter_id].sites
        return sum(site.rank * (site.in_features + site.out_features) for site in sites)

    def load(self, adapter_id: str) -> AdapterWeights:
        """Read the adapter's tensors from its folder. Raises `AdapterUnusableError`."""
        try:
            return load_adapter(self._audits[adapter_id], self._dtype, self._device)
        except (AdapterRefusedError, OSError) as error:
            raise AdapterUnusableError(adapter_id, f"{error}") from error
