"""Drafts of a batch of rows: one for each completion, the same in any batch."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from lorabatch.engine.request import SamplingParams
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.pipeline.dataset.chunk import IndexJob
from lorabatch.pipeline.dataset.prompt_reader import PromptReader
from lorabatch.pipeline.dataset.row_checks import ErrorKind

JOB = IndexJob(
    model_url="",
    sampling=SamplingParams(max_tokens=4, temperature=1.0, n=2),
    roles={"prompt": "text", "adapter": "adapter", "seed": "seed"},
    schema_ipc="",
    vocab_size=10_000,
    max_context_tokens=32,
    key="",
    now="2025-01-01T00:00:00+00:00",
)
BATCH = pa.record_batch(
    {"text": ["a b", None, "c", "d " * 40], "adapter": ["x", "x", None, ""], "seed": [7, None, None, None]}
)
PLACES = [f"in.parquet:{row}" for row in range(4)]


def test_each_completion_of_a_row_has_a_draft(weightless_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(weightless_model)
    drafts = PromptReader(JOB, lambda _: tokenizer).read(BATCH, PLACES)
    assert [(draft.row, draft.sample, draft.adapter) for draft in drafts] == [
        (0, 0, "x"), (0, 1, "x"), (1, 0, "x"), (2, 0, None), (2, 1, None), (3, 0, None),
    ]  # fmt: skip
    assert [draft.kind for draft in drafts if draft.problems] == [ErrorKind.PROMPT, ErrorKind.TOO_LONG]
    assert {draft.sampling.seed for draft in drafts if draft.row == 0} == {7}
    assert [draft.row_id for draft in drafts[::2]] == ["in.parquet:0", "in.parquet:1", "in.parquet:2"]


def test_a_row_reads_the_same_in_any_batch(weightless_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(weightless_model)
    reader = PromptReader(JOB, lambda _: tokenizer)
    alone = [draft for row in range(4) for draft in reader.read(BATCH.slice(row, 1), PLACES[row : row + 1])]
    together = reader.read(BATCH, PLACES)
    assert [(d.tokens, d.sampling, d.problems) for d in together] == [(d.tokens, d.sampling, d.problems) for d in alone]
