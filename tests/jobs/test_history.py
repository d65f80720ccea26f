"""What earlier jobs have measured: joined, replaced whole, and ignored where it is damaged or another machine's."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lorabatch.jobs.history import ModelHistory, add_to_history, history_path, read_history
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.estimates.lengths import AnswerLengths


def answers(num_rows: int, output_tokens: int) -> AnswerLengths:
    """All of the same length."""
    return AnswerLengths.of([(num_rows, output_tokens, False)])


COST = replace(CPU_SMOLLM2_135M, step_s=0.5)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORABATCH_HISTORY", str(tmp_path / "history"))
    found = history_path("0123" * 16, "cpu", "float32", 2)
    assert found == tmp_path / "history" / "0123012301230123-cpu-float32-2-threads.json"
    return found


def test_jobs_are_joined_and_the_latest_cost_counts(path: Path) -> None:
    assert read_history(path) == ModelHistory()
    add_to_history(path, CPU_SMOLLM2_135M, {("a", 1): answers(10, 100), (None, 1): answers(4, 8)})
    add_to_history(path, COST, {("a", 1): answers(30, 60), ("a", 2): answers(5, 500)})
    # Too short for its steps to be measured.
    add_to_history(path, None, {("b", 1): answers(1, 7)})
    found = read_history(path)
    assert found.cost == COST
    of_both = AnswerLengths.of([(10, 100, False), (30, 60, False)])
    assert found.lengths == {
        (None, 1): answers(4, 8),
        ("a", 1): of_both,
        ("a", 2): answers(5, 500),
        ("b", 1): answers(1, 7),
    }
    assert list(found.lengths) == [(None, 1), ("a", 1), ("a", 2), ("b", 1)]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_answers_of_long_ago_give_way() -> None:
    history = ModelHistory(lengths={("a", 7): answers(1_000_000, 100_000_000)})
    for _ in range(5):
        history = history.joined(None, {("a", 7): answers(1_000, 10_000)})
    assert history.lengths["a", 7].num_rows == pytest.approx(1_000)
    assert history.lengths["a", 7].mean(np.array([1_000])) < 20


def test_adapters_of_long_ago_are_forgotten(path: Path) -> None:
    history = ModelHistory().joined(None, {(f"a{i}", 3): answers(1, 1) for i in range(4_500)})
    again = history.joined(None, {("a600", 3): answers(1, 1), ("new", 3): answers(1, 1)})
    assert len(again.lengths) == 4_000
    assert {("a600", 3), ("new", 3), ("a4499", 3)} <= again.lengths.keys()
    assert ("a499", 3) not in again.lengths


def test_a_history_of_lengths_without_tasks_gives_its_costs_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_to_history(path, COST, {("a", 1): answers(1, 7)})
    before = json.loads(path.read_text()) | {"format": 2, "lengths": {"a": [[3, 1, 0, 2]], "": [[3, 1, 0, 2]]}}
    path.write_text(json.dumps(before))
    assert read_history(path) == ModelHistory(COST)
    assert not caplog.records


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "an abacus"},
        {"format": 9},
        {"cost": {"step_s": 1.0}},
        {"lengths": {"a:1": [[3, 0, 0, 3]]}},
        {"lengths": {"a:1": []}},
        {"lengths": ["a:1"]},
        {"lengths": {"a:1": [[3, "many", 0, 3]]}},
        {"lengths": {"a:1": [[3, 1, 0, 2], [3, 1, 0, 2]]}},
        {"lengths": {"a:1": [[9e9, 1, 0, 2]]}},
        {"lengths": {"a:1": [[3, 1, -1, 2]]}},
        {"lengths": {"a": [[3, 1, 0, 2]]}},
        {"lengths": {"b:": [[3, 1, 0, 2]]}},
        {"lengths": {"a:-1": [[3, 1, 0, 2]]}},
        {"lengths": {"a:10000000000000000": [[3, 1, 0, 2]]}},
    ],
    ids=lambda change: str(next(iter(change.items()))),
)
def test_files_that_are_damaged_or_another_machines_cost_one_line(
    path: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    add_to_history(path, COST, {})
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with caplog.at_level(logging.WARNING):
        assert read_history(path) == ModelHistory()
    assert len(caplog.records) == 1
    assert "is not used" in caplog.text
    # The next job begins a new one.
    add_to_history(path, COST, {})
    assert read_history(path).cost == COST


def test_a_torn_file_is_ignored(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"format": 1, "mach')
    assert read_history(path) == ModelHistory()


def test_a_folder_that_cannot_be_written_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LORABATCH_HISTORY", str(tmp_path / "file"))
    add_to_history(history_path("0" * 64, "cpu", "float32", 1), COST, {})
    assert "is not kept" in caplog.text


def test_none_is_kept_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORABATCH_HISTORY", "off")
    assert history_path("0" * 64, "cpu", "float32", 1) is None
    add_to_history(None, COST, {})
    assert read_history(None) == ModelHistory()
