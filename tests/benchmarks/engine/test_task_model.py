"""Models of other families that the agreement benchmark answers with."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorabatch.benchmarks.engine import agreement
from lorabatch.benchmarks.engine.result import FORMAT_OPTIONS
from lorabatch.benchmarks.engine.task_model import train
from lorabatch.demo.tasks import TASKS
from lorabatch.kernels.packed_weight import can_multiply


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_trained_model_answers_every_task_in_every_format(family: str, tmp_path: Path) -> None:
    train(tmp_path, family, minutes=0.05)
    found = agreement.main(1, [tmp_path])
    formats = [products for products in FORMAT_OPTIONS if can_multiply(products)]
    assert [(one.agreement.products, one.task) for one in found] == [(f, task) for f in formats for task in TASKS]
    assert all(one.agreement.num_equal == one.agreement.num_rows == 1 for one in found[: len(TASKS)])
