"""Why a row cannot be served, found before it is queued."""

from __future__ import annotations

from .adapter_registry import AdapterRegistry
from .exported_row import ExportedRow
from .running_batch import RunningBatch


def problem_with(
    row: ExportedRow, registry: AdapterRegistry, batch: RunningBatch, max_context_tokens: int
) -> str | None:
    """A plain sentence, or None for a row that can be served."""
    request = row.request
    problems = request.sampling.problems() or row.problems()
    if problems:
        return "; ".join(problems)
    if request.adapter_id is not None and request.adapter_id not in registry:
        return f"adapter {request.adapter_id[:12]} is not known to this engine"
    ids, vocab_size = request.prompt_token_ids, registry.vocab_size(request.adapter_id)
    if not ids:
        return "the prompt has no tokens"
    if min(ids + row.token_ids) < 0 or max(ids + row.token_ids) >= vocab_size:
        return f"prompt_token_ids must lie in 0..{vocab_size - 1}"
    max_tokens = request.sampling.max_tokens
    if len(ids) + max_tokens > max_context_tokens:
        return (
            f"prompt of {len(ids)} tokens + max_tokens={max_tokens} exceeds the context of {max_context_tokens} tokens"
        )
    pages, num_pages = batch.pages_of_row(request), batch.pool.num_pages
    if pages > num_pages:
        return f"the row and its adapter need {pages} pages, the pool has {num_pages}; raise pool_bytes"
    return None
