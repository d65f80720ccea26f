"""Makes the columns of rows that were classified, embedded or reranked, and reads answers back from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...engine.request import Request
from ...jobs.input.columns import EMBEDDING_FIELD, LABEL_FIELD, RELEVANCE_FIELD, SCORES_FIELD
from ...jobs.record import JobRecord
from .answers import RowAnswer

#: Columns from which `pooled_of` makes `RowAnswer.pooled` again.
POOLED_COLUMNS = (SCORES_FIELD.name, EMBEDDING_FIELD.name)
_BYTES_PER_NUMBER = 4
#: Labels and kind (`PROBLEM_TYPES`) of a classifier's head.
Head = tuple[Sequence[str], str]
_Row = tuple[Request, RowAnswer, str | None]


def task_columns(
    requests: Sequence[Request | RowAnswer],
    answers: Sequence[RowAnswer],
    names: Sequence[str | None],
    record: JobRecord,
) -> dict[str, Callable[[], pa.Array]]:
    """Column of a task -> the function that makes it. `names`: adapter of each row."""

    def column(field: pa.Field, make: Callable[[_Row], Any]) -> Callable[[], pa.Array]:
        rows = zip(requests, answers, names, strict=True)
        values = [None if isinstance(row[0], RowAnswer) else make(row) for row in rows]  # type: ignore[arg-type]
        return lambda: pa.array(values, field.type)

    made = {
        LABEL_FIELD: lambda row: _label(row, record),
        SCORES_FIELD: lambda row: _scores(row, record),
        EMBEDDING_FIELD: lambda row: _numbers(row[1]) if row[0].sampling.task == "embed" else None,
        RELEVANCE_FIELD: _relevance,
    }
    asked = {"classify": (LABEL_FIELD, SCORES_FIELD), "embed": (EMBEDDING_FIELD,), "rerank": (RELEVANCE_FIELD,)}
    return {field.name: column(field, made[field]) for task in record.tasks for field in asked[task]}


def pooled_of(values: dict[str, Any]) -> bytes | None:
    """`RowAnswer.pooled` of a row with these values of `POOLED_COLUMNS`, which are taken out."""
    scores, embedding = (values.pop(name, None) for name in POOLED_COLUMNS)
    numbers = embedding if scores is None else [score["logit"] for score in scores]
    return None if numbers is None else np.asarray(numbers, "<f4").tobytes()


def _numbers(answer: RowAnswer) -> NDArray[np.float32] | None:
    return None if answer.pooled is None else np.frombuffer(answer.pooled, "<f4")


def _head(name: str | None, num_labels: int, record: JobRecord) -> tuple[Sequence[str], str]:
    """Labels and kind of the head that classified rows of an adapter."""
    own = next((adapter for adapter in record.adapters if adapter.name == name and adapter.labels), None)
    labels = own.labels if own else record.model.labels
    assert len(labels) == num_labels, f"{num_labels} numbers for labels {labels}"
    return labels, own.problem_type if own else record.model.problem_type


def right_labels(
    right: Sequence[Any], request: Request, answer: RowAnswer, name: str | None, record: JobRecord
) -> tuple[Sequence[Any], Sequence[str]]:
    """The right answers to a row, and the texts that its answer is one of. In a row that was classified these are the
    labels, and a number that is no label itself stands for the label of that number, from 0.
    """
    if request.sampling.task != "classify" or answer.pooled is None:
        return right, request.sampling.choice
    labels, kind = _head(name or None, len(answer.pooled) // _BYTES_PER_NUMBER, record)
    if kind == "regression":
        return right, ()
    is_place = [isinstance(one, int) and str(one) not in labels and 0 <= one < len(labels) for one in right]
    return [labels[one] if fits else str(one) for one, fits in zip(right, is_place, strict=True)], labels


def heads_of(record: JobRecord) -> dict[str | None, Head]:
    """The head of each adapter of a job that has one, by content hash; None: of the base model."""
    found: dict[str | None, Head] = {None: (record.model.labels, record.model.problem_type)}
    found |= {each.sha256: (each.labels, each.problem_type) for each in record.adapters if each.labels}
    return found


def classified(answer: RowAnswer, heads: Mapping[str | None, Head]) -> dict[str, Any]:
    """A classified row's answer as templates and expressions of stages see it: its label, None for a head of
    quantities, and logit and probability of each label by its name.
    """
    labels, kind = heads.get(answer.adapter_sha256) or heads[None]
    logits = np.frombuffer(answer.pooled or b"", "<f4")
    return {
        "label": None if kind == "regression" else answer.completion,
        "logit": dict(zip(labels, logits.tolist(), strict=True)),
        "probability": dict(zip(labels, probabilities(logits, kind), strict=True)),
    }


def _label(row: _Row, record: JobRecord) -> str | None:
    """The likeliest label, which is the row's completion, too; None where numbers are quantities."""
    request, answer, name = row
    if request.sampling.task != "classify" or answer.pooled is None:
        return None
    _, kind = _head(name or None, len(answer.pooled) // _BYTES_PER_NUMBER, record)
    return None if kind == "regression" else answer.completion


def _scores(row: _Row, record: JobRecord) -> list[Mapping[str, Any]] | None:
    request, answer, name = row
    logits = _numbers(answer)
    if request.sampling.task != "classify" or logits is None:
        return None
    labels, kind = _head(name or None, len(logits), record)
    shares = zip(labels, logits.tolist(), probabilities(logits, kind), strict=True)
    return [{"label": label, "logit": logit, "probability": share} for label, logit, share in shares]


def probabilities(logits: NDArray[np.float32], kind: str) -> Sequence[float | None]:
    """Probability of each label by its logit: its share where one label is right, its own where any number is, and None
    where logits are quantities. `kind`: one of `PROBLEM_TYPES`.
    """
    wide = logits.astype(np.float64)
    if kind == "regression":
        return [None] * len(wide)
    if kind == "multi_label_classification":
        exponentials: list[float] = np.exp(-np.abs(wide)).tolist()
        return [(1.0 if x >= 0 else e) / (1.0 + e) for x, e in zip(wide.tolist(), exponentials, strict=True)]
    weights = np.exp(wide - wide.max())
    shares: list[float] = (weights / math.fsum(weights.tolist())).tolist()
    return shares


def _relevance(row: _Row) -> float | None:
    request, answer, _ = row
    if request.sampling.task != "rerank" or answer.choice_logprobs is None:
        return None
    first, second = answer.choice_logprobs
    if not math.isfinite(max(first, second)):
        return None
    return 1.0 / (1.0 + math.exp(min(second - first, 700.0)))
