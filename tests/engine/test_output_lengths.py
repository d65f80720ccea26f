"""The expected length starts at half of what is allowed and follows what is seen."""

from __future__ import annotations

from lorabatch.engine.output_lengths import OutputLengths


def test_before_any_row_has_finished_half_of_max_tokens_is_expected() -> None:
    lengths = OutputLengths()
    assert lengths.mean() == 1.0
    lengths.asked(100)
    lengths.asked(300)
    assert lengths.mean() == 100.0


def test_many_finished_rows_outweigh_what_was_expected() -> None:
    lengths = OutputLengths()
    lengths.asked(200)
    lengths.finished(1)
    assert 90 < lengths.mean() < 100
    for _ in range(2000):
        lengths.finished(10)
    assert abs(lengths.mean() - 10) < 1
