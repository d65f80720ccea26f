"""Audits as rows of plain text, for tables in a terminal or a document."""

from __future__ import annotations

from collections.abc import Iterable

from .audit import AdapterAudit

AUDIT_COLUMNS = ("adapter", "verdict", "rank", "layers", "MB", "remarks")
ACCOUNT_COLUMNS = ("kind", "name", "use")


def audit_rows(audits: Iterable[AdapterAudit]) -> list[tuple[str, ...]]:
    """One row per adapter, in the order of `AUDIT_COLUMNS`; remarks are the reasons, then the notes."""
    return [
        (
            audit.name,
            audit.verdict,
            str(audit.max_rank),
            str(len(audit.sites)),
            f"{audit.weight_bytes / 1e6:.1f}",
            "\n".join(audit.reasons + audit.notes + _own_tokenizer(audit)),
        )
        for audit in audits
    ]


def account_rows(audit: AdapterAudit) -> list[tuple[str, ...]]:
    """One row per configuration key and per tensor, in the order of `ACCOUNT_COLUMNS`."""
    kinds = (("key", audit.key_uses), ("tensor", audit.tensor_uses))
    return [(kind, name, use) for kind, uses in kinds for name, use in uses.items()]


def _own_tokenizer(audit: AdapterAudit) -> tuple[str, ...]:
    return ("brings its own tokenizer or chat template",) if audit.has_own_tokenizer else ()
