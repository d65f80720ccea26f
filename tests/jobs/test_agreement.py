"""How answers in a format agree with those in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorabatch.jobs.agreement import Agreement, Answer
from lorabatch.jobs.history import keep_agreement, known_agreement
from lorabatch.jobs.store import JobStore

SAME: Answer = ([5, 6, 7, 8], [-0.1, -0.2, -0.3, -0.4])


def agreement(*pairs: tuple[Answer, Answer]) -> Agreement:
    return Agreement.of("job-1", "int8", pairs)


def test_equal_answers_agree_in_all_tokens() -> None:
    found = agreement((SAME, SAME), (([], []), ([], [])))
    assert (found.num_rows, found.num_equal, found.leading_share, found.logprob_distance) == (2, 2, 1.0, 0.0)


def test_only_tokens_before_the_first_difference_are_compared() -> None:
    # 6 stands at the same place again, after another beginning
    found = agreement((([5, 9, 7, 8], [-0.3, -9.0, -9.0, -9.0]), SAME), (SAME, SAME))
    assert (found.num_equal, found.leading_share) == (1, 5 / 8)
    assert found.logprob_distance == pytest.approx(0.2 / 5)


def test_an_answer_that_goes_on_or_ends_early_is_another_one() -> None:
    longer, shorter = ([5, 6, 7, 8, 9], [-0.1, -0.2, -0.3, -0.4, -0.5]), ([5], [-0.1])
    assert agreement((longer, SAME)).num_equal == agreement((shorter, SAME)).num_equal == 0
    assert (agreement((longer, SAME)).leading_share, agreement((shorter, SAME)).leading_share) == (1.0, 0.25)


def test_without_a_common_token_there_is_no_distance() -> None:
    found = agreement((([1], [-1.0]), SAME))
    assert found.logprob_distance is None
    assert str(found) == (
        "int8: 0 of 1 answers are those of float32, 0.0% of tokens come before a first difference (job-1)"
    )
    with pytest.raises(ValueError, match="no answers"):
        agreement()


def test_it_is_kept_beside_the_job_and_for_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORABATCH_HISTORY", str(tmp_path / "history"))
    store, found = JobStore(str(tmp_path / "output")), agreement((SAME, SAME))
    assert store.read_agreement() is known_agreement("ab" * 32, "int8") is None
    store.write_agreement(found)
    keep_agreement("ab" * 32, found)
    assert store.read_agreement() == known_agreement("ab" * 32, "int8") == found
    assert known_agreement("ab" * 32, "bfloat16") is known_agreement("cd" * 32, "int8") is None
    for damaged in (b"", b"[]", b'{"job_id": "x"}', b"\xff"):
        store.location.write("_lorabatch/agreement.json", damaged)
        assert store.read_agreement() is None
