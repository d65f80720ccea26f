"""The engine benchmark's rows, and that every system of ours gives each its own length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lorabatch.benchmarks.engine.systems import run_ours
from lorabatch.benchmarks.engine.workload import EngineWorkload, Lengths, make_workload


def test_long_tailed_answers_are_short_but_for_a_few(tiny_llama: Path, tmp_path: Path) -> None:
    lengths = sorted(row.num_tokens for row in make_workload(tiny_llama, tmp_path, 400, 1, "long-tailed").rows)
    mean = sum(lengths) / len(lengths)
    assert lengths[200] < 0.8 * mean, "half of a log-normal is well below its mean"
    assert sum(lengths[-40:]) > 0.25 * sum(lengths), "a tenth of the rows holds more than a quarter of the tokens"


def test_long_prompts_have_short_answers(tiny_llama: Path, tmp_path: Path) -> None:
    rows = make_workload(tiny_llama, tmp_path, 20, 1, prompts="long").rows
    assert all(900 <= len(row.prompt_token_ids) <= 1100 for row in rows)
    assert all(8 <= row.num_tokens <= 24 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("lengths", ["uniform", "long-tailed"])
def test_rows_end_at_their_lengths_whether_known_or_not(tiny_llama: Path, tmp_path: Path, lengths: Lengths) -> None:
    workload = make_workload(tiny_llama, tmp_path, 6, 2, lengths)
    if workload.limit_tokens is not None:  # the tiny model's context is short
        workload = replace(workload, limit_tokens=1 + max(row.num_tokens for row in workload.rows))
    workload.write(tmp_path / "workload.json")
    _, tokens, _ = run_ours(EngineWorkload.read(tmp_path / "workload.json"), "unmerged", lambda row: row.adapter)
    assert [len(row) for row in tokens] == [row.num_tokens for row in workload.rows]
