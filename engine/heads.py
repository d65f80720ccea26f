"""Makes the results of rows that are classified or embedded, from the hidden states of their prompts.

A head is applied on the host, row by row, in fp32: a row's numbers depend neither on the rows beside it nor on threads.
Rows of one step may have heads of any numbers of labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .errors import EngineError
from .memory.registry import AdapterRegistry
from .request import Result
from .sequence import Sequence

# Numbers of one product, rows by labels by features: more are computed in turns.
_MOST_NUMBERS = 1 << 22
_SMALLEST_LENGTH = 1e-12
Vectors = NDArray[np.float32]


class Heads:
    """The heads of a base and its adapters. `of_base`: that of the base, [num_labels, embedding_size]; None if it has
    none.
    """

    def __init__(self, registry: AdapterRegistry, of_base: Callable[[], Tensor | None]) -> None:
        self._registry = registry
        self._of_base = of_base

    def results(self, sequences: Items[Sequence]) -> list[Result]:
        """The results of rows whose prompts are computed, in the order of their adapters. A row whose numbers are not
        finite is an error.
        """
        by_adapter = sorted(sequences, key=lambda s: (s.request.adapter_id or "", s.request.sampling.task))
        results = []
        for (adapter_id, task), group in groupby(
            by_adapter, key=lambda s: (s.request.adapter_id, s.request.sampling.task)
        ):
            rows = list(group)
            states = np.stack([_mean(sequence) for sequence in rows])  # [num_rows, embedding_size]
            if task == "classify":
                values = products(states, self._head(adapter_id))
            else:
                values = np.stack([_embedding(s, state) for s, state in zip(rows, states, strict=True)])
            results += [self._result(*row) for row in zip(rows, values, strict=True)]
        return results

    def _head(self, adapter_id: str | None) -> Vectors:
        head = None if adapter_id is None else self._registry.head(adapter_id)
        head = self._of_base() if head is None else head
        if head is None:
            raise EngineError(f"adapter {adapter_id}: its rows are classified before its head was read")
        found: Vectors = head.detach().float().cpu().numpy()
        return found

    def _result(self, sequence: Sequence, values: Vectors) -> Result:
        request = sequence.request
        if not np.isfinite(values).all():
            return Result.refused(
                request,
                "the numbers of the row's prompt are NaN or infinite: use a wider --dtype, or an earlier checkpoint of "
                "the adapter",
            )
        text = ""
        if request.sampling.task == "classify":
            labels, problem_type = self._registry.labels(request.adapter_id)
            text = chosen_label(labels, problem_type, values) or f"{float(values[0]):.9g}"
        return replace(sequence.result(text, "stop"), pooled=values.astype("<f4").tobytes())


def chosen_label(labels: Items[str], problem_type: str, logits: Vectors) -> str | None:
    """The likeliest label, the first of equals; None where numbers are quantities."""
    return None if problem_type == "regression" else labels[int(np.argmax(logits))]


def products(states: Vectors, head: Vectors) -> Vectors:
    """The product of each row with each row of a head, [num_rows, num_labels]. Halves are added up number by number, so
    that its rounding depends on these two rows alone.
    """
    at_once = max(1, _MOST_NUMBERS // head.size)
    with np.errstate(over="ignore", invalid="ignore"):  # a row whose numbers are not finite is an error of its own
        parts = [_folded(states[i : i + at_once, None, :] * head[None]) for i in range(0, len(states), at_once)]
    return np.concatenate(parts)


def _folded(numbers: NDArray[Any]) -> NDArray[Any]:
    """Sums over the last axis."""
    while (width := numbers.shape[-1]) > 1:
        half = width // 2
        folded = numbers[..., :half] + numbers[..., half : 2 * half]
        if width % 2:
            folded[..., 0] += numbers[..., -1]
        numbers = folded
    return numbers[..., 0]


def _mean(sequence: Sequence) -> Vectors:
    """The mean of the hidden states that were pooled."""
    assert sequence.pooled is not None, f"row {sequence.request.request_id} ends before its prompt was computed"
    count = sequence.prompt_tokens if sequence.pools_all else 1
    return (sequence.pooled / count).astype(np.float32)


def _embedding(sequence: Sequence, state: Vectors) -> Vectors:
    if not sequence.request.sampling.normalize_embeddings:
        return state
    wide = state.astype(np.float64)
    length = max(math.sqrt(_folded(wide * wide)), _SMALLEST_LENGTH)
    return np.asarray(wide / length, np.float32)
