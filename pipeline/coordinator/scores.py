"""Puts the scores of a job's adapters together: mean and interval of each, and how it differs from base and best.

The parts of a sweep have the answers of a row in several places: scores are joined by the hashes of the rows' ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...jobs.outcome import EXAMPLE_CHARACTERS
from ...jobs.score_statistics import best_of, by_row, common_scores, mean_interval, paired
from ...system.untrusted import shortened
from ..dataset.fingerprints import id_hash

# Most scores of a job that are compared, and most answers of it whose texts are at hand to show. Of more, those of the
# rows with the smallest hashes are taken, which are the same rows for every adapter.
_MOST_SCORES, _MOST_TEXTS = 4_000_000, 20_000
# Rows that are shown for each adapter and each direction.
_FLIPS_SHOWN = 3
_HASHES = 1 << 64


@dataclass(slots=True)
class ScoreTally:
    """Scores of one adapter's rows in some parts."""

    #: Hash of the row's id and score, of each answer that is compared; those of a part are one pair of arrays.
    scores: list[tuple[NDArray[np.uint64], NDArray[np.float64]]] = field(default_factory=list)
    #: Scored answers.
    num_scored: int = 0
    #: Hash of the row's id -> id, right answer and answer of a row that may be shown.
    texts: dict[int, tuple[Any, Any, str]] = field(default_factory=dict)

    def add(self, other: ScoreTally) -> None:
        """Add the scores of other parts."""
        self.scores += other.scores
        self.num_scored += other.num_scored
        self.texts = other.texts | self.texts

    def add_rows(self, rows: list[tuple[Any, float, Any, str]], num_asked: int) -> None:
        """Add answers: id, score, right answer and completion. `num_asked`: answers of the whole job."""
        most_compared, most_shown = (
            _HASHES * min(most / max(num_asked, 1), 1.0) for most in (_MOST_SCORES, _MOST_TEXTS)
        )
        hashed = [(id_hash(row_id), score) for row_id, score, _, _ in rows]
        kept = [one for one in hashed if one[0] <= most_compared]
        self.scores.append((np.array([key for key, _ in kept], np.uint64), np.array([score for _, score in kept])))
        self.num_scored += len(rows)
        for (key, _), (row_id, _, right, answer) in zip(hashed, rows, strict=True):
            if key <= most_shown:
                self.texts.setdefault(key, (row_id, right, answer))


def score_outcomes(tallies: Mapping[str | None, ScoreTally]) -> dict[str | None, dict[str, Any]]:
    """`AdapterOutcome.score` of each adapter with a score, by name; None is the base model."""
    scores = {
        name: by_row(*(np.concatenate(column) for column in zip(*tally.scores, strict=True)))
        for name, tally in tallies.items()
        if tally.num_scored
    }
    scores = {name: found for name, found in scores.items() if len(found[0])}
    if not scores:
        return {}
    best = best_of({name: float(values.mean()) for name, (_, values) in scores.items()})
    rivals = {"to_base": None, "to_best": best}
    found = {}
    for name, (keys, values) in scores.items():
        of_adapter: dict[str, Any] = {"num_scored": tallies[name].num_scored, "num_rows": len(keys)}
        of_adapter |= {"mean": float(values.mean()), "interval": list(mean_interval(values))}
        for key, rival in rivals.items():
            if rival in scores and rival != name:
                _, ours, others = common_scores(scores[name], scores[rival])
                of_adapter[key] = paired(ours, others) | {"adapter": rival or ""} if len(ours) else None
        rival = None if None in scores else best
        if rival != name:
            of_adapter["flips"] = list(_flips(scores[name], scores[rival], tallies[name], tallies[rival]))
        found[name] = of_adapter
    return found


def _flips(
    scores: tuple[NDArray[np.uint64], NDArray[np.float64]],
    before: tuple[NDArray[np.uint64], NDArray[np.float64]],
    ours: ScoreTally,
    others: ScoreTally,
) -> Iterator[dict[str, Any]]:
    """Some rows with a higher, then some with a lower score than that of a rival, with the texts of both."""
    keys, values, rivals = common_scores(scores, before)
    for is_better in (True, False):
        flipped = keys[values > rivals] if is_better else keys[values < rivals]
        shown = [key for key in flipped.tolist() if key in ours.texts and key in others.texts]
        for key in shown[:_FLIPS_SHOWN]:
            row_id, right, answer = ours.texts[key]
            yield {
                "id": row_id if isinstance(row_id, int | str) else str(row_id),
                "right": shortened(str(right), EXAMPLE_CHARACTERS),
                "before": shortened(others.texts[key][2], EXAMPLE_CHARACTERS),
                "answer": shortened(answer, EXAMPLE_CHARACTERS),
                "is_better": is_better,
            }
