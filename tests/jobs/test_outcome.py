"""The outcome of a job in words: cut answers with what to do, lengths, errors by kind, examples that stay on a line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from lorabatch.jobs.outcome import (
    AdapterOutcome,
    cost_shares,
    cut_note,
    example_lines,
    lengths_text,
    outcome_table,
    score_table,
)

COUNT = AdapterOutcome(
    "sql",
    56,
    3,
    700,
    prompt_tokens=2900,
    finish_reasons={"error": 3, "length": 5, "stop": 48},
    answer_tokens={"shortest": 3, "mean": 13.2, "median": 12.5, "p95": 24.0, "longest": 24},
    num_cut=5,
    cut_at=(24, 24),
    errors={"prompt": 2, "engine": 1},
    engine_s=8.0,
)


def test_counts_survive_their_file() -> None:
    assert AdapterOutcome.from_json(json.loads(json.dumps(asdict(COUNT)))) == COUNT
    newer = asdict(COUNT) | {"of_a_newer_version": 3}
    assert AdapterOutcome.from_json(newer) == COUNT


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "5 answers were cut off at 24 tokens (sql 5): "),
        ({"adapter": ""}, "5 answers were cut off at 24 tokens (base model 5): "),
        ({"num_cut": 1, "cut_at": (1, 1)}, "1 answer was cut off at 1 token (sql 1): "),
        ({"num_cut": 7_300, "cut_at": (16, 1_024)}, "7,300 answers were cut off at 16 to 1,024 tokens (sql 7,300): "),
    ],
)
def test_answers_that_were_cut_off_are_said_with_what_to_do(changes: dict[str, object], said: str) -> None:
    note = cut_note([replace(COUNT, **changes)])  # type: ignore[arg-type]
    assert note.startswith(said)
    assert "Raise --max-tokens" in note
    assert cut_note([replace(COUNT, num_cut=0, cut_at=None)]) == ""


def test_cut_answers_name_the_adapters_with_the_most_of_them() -> None:
    counts = [replace(COUNT, adapter=f"a{i}", num_cut=i, cut_at=(i, 2 * i)) for i in range(1, 9)]
    assert cut_note(counts).startswith(
        "36 answers were cut off at 1 to 16 tokens (a8 8, a7 7, a6 6, a5 5, a4 4 and 3 more)"
    )


def test_the_table_has_a_line_for_each_adapter_the_most_rows_first() -> None:
    base = replace(COUNT, adapter="", num_rows=7, errors={}, num_errors=0)
    lines = outcome_table([base, COUNT])
    assert [" ".join(line.split()) for line in lines] == [
        "adapter rows ended cut off errors answer tokens",
        "sql 56 48 5 2 prompt, 1 engine 3 to 24, mean 13.2",
        "(base model) 7 2 5 0 3 to 24, mean 13.2",
    ]
    paced = outcome_table([replace(base, rows_per_s=0.5, prompt_tokens_per_s=1234.4)])
    assert [" ".join(line.split())[-19:] for line in paced] == ["s/s prompt tokens/s", "mean 13.2 0.5 1,234"]
    many = outcome_table([replace(COUNT, adapter=f"adapter-{i}") for i in range(25)])
    assert len(many) == 12
    assert many[-1] == "… and 15 more adapters; summary.json and `lorabatch report` have all"
    assert outcome_table([]) == []


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ({}, "-"),
        ({"shortest": 4, "mean": 4.0, "median": 4, "p95": 4, "longest": 4}, "4"),
        ({"shortest": 1, "mean": 1500.26, "median": 9, "p95": 9, "longest": 4096}, "1 to 4,096, mean 1,500.3"),
    ],
)
def test_lengths_of_answers_in_words(tokens: dict[str, float], text: str) -> None:
    assert lengths_text(replace(COUNT, answer_tokens=tokens)) == text


def test_examples_are_escaped_and_cut_at_the_end_of_the_prompt_and_the_beginning_of_the_answer() -> None:
    examples = (
        {"id": 7, "prompt_end": "x" * 200 + "the end\n", "answer": "begin\x1b[2J" + "y" * 200, "finish_reason": "stop"},
        {"id": "b", "prompt_end": None, "answer": "", "finish_reason": "length"},
    )
    name, first, second = example_lines([replace(COUNT, examples=examples)])
    assert name == "sql:"
    assert first.startswith('  7: "…xxx')
    assert 'the end\\n" -> "begin\\u001b[2Jyyy' in first
    assert first.endswith('y…"')
    assert len(first) < 180
    assert second == '  b: ""'


@pytest.mark.parametrize(
    "header", ["<|im_end|>\n<|im_start|>assistant\n", "<|eot_id|>", "<end_of_turn>\n<start_of_turn>model\n"]
)
def test_the_header_of_an_answer_takes_no_room_from_prompts(header: str) -> None:
    examples = tuple({"id": i, "prompt_end": f"question {i}?{header}", "answer": "yes"} for i in range(2))
    _, first, second = example_lines([replace(COUNT, examples=examples)])
    assert (first, second) == ('  0: "question 0?…" -> "yes"', '  1: "question 1?…" -> "yes"')
    (_, alone) = example_lines([replace(COUNT, examples=examples[:1])])
    assert json.dumps(f"question 0?{header}") in alone


def test_costs_are_shared_by_the_cost_models_seconds_and_by_tokens_where_these_are_not_known() -> None:
    counts = [replace(COUNT, engine_s=1.0), replace(COUNT, engine_s=3.0)]
    assert cost_shares(counts) == ([0.25, 0.75], "seconds of the cost model, as in a plan")
    assert cost_shares([counts[0], replace(COUNT, engine_s=None)]) == ([0.5, 0.5], "generated tokens")
    assert cost_shares([])[0] == []
    assert cost_shares([replace(COUNT, engine_s=0.0, completion_tokens=0)])[0] == [0.0]


def test_scores_are_a_table_with_the_best_first_and_the_columns_that_are_known() -> None:
    base = {"num_scored": 40, "num_rows": 40, "mean": 0.5, "interval": [0.352, 0.648]}
    better = {"adapter": "", "num_rows": 40, "difference": 0.25, "interval": [0.1, 0.4], "p_value": 0.002}
    better |= {"num_better": 12, "num_worse": 2}
    counts = [
        replace(COUNT, adapter="", score=base),
        replace(COUNT, adapter="late", score=base | {"mean": 0.75, "interval": [0.598, 0.858], "to_base": better}),
        replace(COUNT, adapter="unscored"),
    ]
    assert score_table(counts) == [
        "adapter       score            95 %  of rows                    to base  better, worse",
        "late          75.0%  59.8% to 85.8%       40  +25.0% (+10.0% to +40.0%)          12, 2",
        "(base model)  50.0%  35.2% to 64.8%       40                          -              -",
    ]
    assert score_table(counts[2:]) == []
    many = [replace(COUNT, adapter=f"a{i:02}", score=base) for i in range(33)]
    assert score_table(many)[-1] == "… and 3 more adapters with a score"
