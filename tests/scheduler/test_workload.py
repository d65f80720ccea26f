from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload


def make_rows(adapter_index=(0, 1, -1)):
    lengths = np.full(len(adapter_index), 5, np.int32)
    return make_workload(make_adapters([8, 16]), np.asarray(adapter_index, np.int32), lengths, lengths)


def test_rows_are_counted_per_adapter_with_the_base_model_last():
    assert make_rows((0, 0, 1, -1, -1, -1)).rows_per_adapter().tolist() == [2, 1, 3]


def test_no_rows_are_a_sound_workload():
    empty = make_rows(())
    empty.check_integrity()
    assert empty.rows_per_adapter().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter_index": np.array([0, 7, 0], np.int32)}, "adapter_index: row 1 has 7"),
        ({"adapter_index": np.array([0, 0, -2], np.int32)}, "adapter_index: row 2 has -2"),
        ({"prompt_tokens": np.array([1, -1, 1], np.int32)}, "prompt_tokens: row 1 has -1"),
        ({"prompt_tokens": np.array([1, 1], np.int32)}, r"prompt_tokens: shape \(2,\), expected \(3,\)"),
        ({"max_tokens": np.array([1, 1, 1], np.int64)}, "max_tokens: dtype int64, expected int32"),
        ({"output_tokens": np.array([5, 9, 5], np.int32)}, "output_tokens: row 1 has 9"),
    ],
)
def test_the_first_bad_row_is_named(changes, message):
    with pytest.raises(AssertionError, match=message):
        replace(make_rows(), **changes).check_integrity()
