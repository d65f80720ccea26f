"""`IndexJob`: what indexing a chunk needs to know of the job. Travels to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.request import SamplingParams
from ..jobs.record import AdapterRecord, JobRecord, index_key
from ..jobs.spec import JobSpec


@dataclass(frozen=True, slots=True)
class IndexJob:
    """What indexing a chunk needs to know. `key`: index files written under another key are stale.

    `now`: the time that chat templates are told; that of the job's start, so that a resumed job asks the same.
    `prepared_apart`: adapters with a tokenizer or vocabulary of their own, by name.
    """

    model_url: str
    sampling: SamplingParams
    roles: Mapping[str, str]
    schema_ipc: str
    vocab_size: int
    max_context_tokens: int
    key: str
    now: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    prepared_apart: Mapping[str, AdapterRecord] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: JobRecord, spec: JobSpec) -> IndexJob:
        """For a frozen job. The spec gives what the record does not hold: storage options."""
        return cls(
            model_url=spec.model,
            sampling=record.sampling,
            roles=record.input.roles,
            schema_ipc=record.input.schema_ipc,
            vocab_size=record.model.vocab_size,
            max_context_tokens=record.model.max_context_tokens,
            key=index_key(record),
            now=record.created_at,
            storage_options=spec.storage_options,
            prepared_apart={adapter.name: adapter for adapter in record.adapters if adapter.is_prepared_apart},
        )
