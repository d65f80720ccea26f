"""Jobs that say what their answers may be, through the command: constrained, typed, several for a row, with the
likeliest tokens beside them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lorabatch.cli import app

LABEL = {
    "type": "object",
    "properties": {
        "label": {"enum": ["spam", "ham"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 9},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["label", "score", "words"],
    "additionalProperties": False,
}


def words(model: Path, rows: list[dict[str, Any]], folder: Path, *options: str) -> list[str]:
    """Options of a job of these rows, which are written."""
    folder.mkdir(exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pq.write_table(table, folder / "input.parquet")
    given = ["--model", str(model), "--workers", "2", "--input", str(folder / "input.parquet")]
    return [*given, "--output", str(folder / "output"), "--row-settings", "all", *options]


def run(model: Path, rows: list[dict[str, Any]], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lorabatch", "run", *words(model, rows, folder, *options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def answers(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / "output").to_pylist()
    return found


def exported_choices(output: Path, target: Path) -> dict[str, Any]:
    """The choices of each line of a batch file of a job's rows, and their usage."""
    command = [sys.executable, "-m", "lorabatch", "export", str(output), str(target)]
    subprocess.run(command, check=True, timeout=100)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    bodies = {line["custom_id"]: line["response"]["body"] for line in lines}
    assert len(bodies) == len(lines)
    return {custom_id: (body["choices"], body["usage"]) for custom_id, body in bodies.items()}


@pytest.mark.long
def test_a_schema_for_the_job_gives_typed_answers_beside_rows_with_their_own_constraint(
    tiny_llama: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"id": i, "prompt": f"the quick brown fox {i}", "max_tokens": 60} for i in range(24)]
    rows[3] |= {"regex": "[0-9]{2,4}"}
    rows[4] |= {"choice": ["yes", "no"]}
    rows[5] |= {"response_format": '{"type": "text"}'}
    rows[6] |= {"max_tokens": 3}
    rows[7] |= {"response_format": '{"type": "json_schema", "json_schema": {"schema": {"not": {}}}}'}
    done = run(tiny_llama, rows, tmp_path, "--json-schema", json.dumps(LABEL), "--temperature", "1.2")
    assert done.returncode == 0, done.stderr
    found = {row["id"]: row for row in answers(tmp_path)}
    assert len(found) == len(rows)
    for number, row in found.items():
        if number in (3, 4, 5, 6, 7):
            assert row["answer"] is None
        elif row["finish_reason"] == "stop":
            value = json.loads(row["completion"])
            jsonschema.validate(value, LABEL)
            assert row["answer"] == value
    assert re.fullmatch("[0-9]{2,4}", found[3]["completion"])
    assert found[4]["completion"] in ("yes", "no")
    assert found[6]["finish_reason"] == "length"
    assert "not" in found[7]["error"]
    labels = duckdb.sql(f"SELECT answer.label FROM '{tmp_path}/output/*.parquet' WHERE answer IS NOT NULL").fetchall()
    assert len(labels) >= 10
    assert {label for (label,) in labels} <= {"spam", "ham"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--json-schema", '{"type": "array", "uniqueItems": true}'], "uniqueItems"),
        (["--regex", "(("], "regex"),
        (["--response-format", '{"type": "xml"}'], "response_format.type='xml'"),
        (["--choice", "a", "--regex", "b"], "regex, choice: expected at most one"),
        (["--n", "0"], "n=0: expected from 1 to 128"),
        (["--logit-bias", "[1]"], "logit_bias"),
        (["--stop-token-ids", "99999999"], "token 99999999"),
    ],
)
def test_what_cannot_be_kept_refuses_the_job(
    options: list[str], named: str, weightless_model: Path, tmp_path: Path
) -> None:
    """`plan` refuses what `run` refuses."""
    given = words(weightless_model, [{"id": 1, "prompt": "a"}], tmp_path, "--load-format", "dummy", *options)
    done = CliRunner().invoke(app, ["plan", *given])
    assert (done.exit_code, named in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "output").exists()


@pytest.mark.long
def test_several_completions_of_a_row_are_rows_of_their_own(tiny_llama: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": i, "prompt": f"once upon a midnight {i}", "note": i * i} for i in range(12)]
    rows[5] |= {"n": 1, "temperature": 0.0}
    done = run(tiny_llama, rows, tmp_path, "--n", "3", "--temperature", "1", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    found = answers(tmp_path)
    assert sorted((row["id"], row["sample"]) for row in found) == [
        (i, sample) for i in range(12) for sample in range(1 if i == 5 else 3)
    ]
    assert all(row["note"] == row["id"] ** 2 for row in found)
    texts = {row["completion"] for row in found}
    assert len(texts) > 30, "samples of a row differ"
    alone = [row | {"n": None} for row in rows]
    done = run(tiny_llama, alone, tmp_path / "alone", "--temperature", "1", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    first = {row["id"]: row["completion"] for row in found if row["sample"] == 0}
    assert {row["id"]: row["completion"] for row in answers(tmp_path / "alone")} == first


@pytest.mark.long
def test_lists_of_completions_are_the_rows_of_others(tiny_llama: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": i, "prompt": f"once upon a midnight {i}", "note": i * i} for i in range(12)]
    rows[5] |= {"n": 1, "temperature": 0.0}
    done = run(tiny_llama, rows, tmp_path, "--n", "3", "--temperature", "1", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    found = answers(tmp_path)
    listed = run(
        tiny_llama, rows, tmp_path / "lists", "--n", "3", "--temperature", "1", "--max-tokens", "12",
        "--samples", "lists", "--rows-per-shard", "4",
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
    of_row: dict[int, list[Any]] = {}
    for row in sorted(found, key=lambda row: row["sample"]):
        of_row.setdefault(row["id"], []).append((row["completion"], row["finish_reason"], row["completion_tokens"]))
    for row in answers(tmp_path / "lists"):
        columns = row["completion"], row["finish_reason"], row["completion_tokens"]
        assert list(zip(*columns, strict=True)) == of_row.pop(row["id"])
        assert (row["note"], row["error"], "sample" in row) == (row["id"] ** 2, None, False)
    assert not of_row
    exported = [exported_choices(tmp_path / name / "output", tmp_path / "batch.jsonl") for name in (".", "lists")]
    assert exported[0] == exported[1]


@pytest.mark.long
def test_the_likeliest_tokens_are_those_of_transformers(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"id": i, "prompt_token_ids": [5 + i, 9, 11], "top_logprobs": i % 4} for i in range(8)]
    done = run(tiny_llama, rows, tmp_path, "--max-tokens", "5", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for row in answers(tmp_path):
        count = row["id"] % 4
        if not count:
            assert row["token_top_logprobs"] is None
            continue
        prompt = [5 + row["id"], 9, 11]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0, len(prompt) - 1 : -1]
        values, ids = logits.log_softmax(-1).topk(count)
        assert [[t["token_id"] for t in top] for top in row["token_top_logprobs"]] == ids.tolist()
        for top, expected in zip(row["token_top_logprobs"], values.tolist(), strict=True):
            assert [t["logprob"] for t in top] == pytest.approx(expected, abs=1e-4)
        assert all(math.isfinite(value) for value in row["token_logprobs"])


@pytest.mark.long
def test_choices_of_a_job_are_a_column_beside_the_scores_of_all_texts(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    texts, adapters = ["spam", "spammer", "no spam at all"], [None, "rank8"]
    rows: list[dict[str, Any]] = [
        {"id": i, "adapter": adapters[i % 2], "prompt": f"the quick brown fox {i}", "continuation": None}
        for i in range(12)
    ]
    rows[3] |= {"continuation": texts, "prompt": rows[5]["prompt"]}
    rows[4] |= {"regex": "[0-9]{2}"}
    folder = str(next(iter(tiny_adapters.values())).parent)
    asked = [option for text in texts for option in ("--choice", text)]
    done = run(tiny_llama, rows, tmp_path, "--adapters", folder, "--max-tokens", "30", "--temperature", "1", *asked)
    assert done.returncode == 0, done.stderr
    found = {(row["id"], row["sample"]): row for row in answers(tmp_path)}
    for (number, _), row in found.items():
        if number in (3, 4):
            assert row["choice"] is row["choice_logprobs"] is None
            continue
        assert (row["choice"], row["finish_reason"]) == (row["completion"], "stop")
        assert [score["choice"] for score in row["choice_logprobs"]] == texts
        assert row["choice"] in texts
    # the same prompt and adapter, its texts scored as continuations
    scores = [found[3, sample]["continuation_logprob"] for sample in range(len(texts))]
    assert [score["logprob"] for score in found[5, 0]["choice_logprobs"]] == pytest.approx(scores, abs=1e-4)
    shares = duckdb.sql(
        "SELECT choice, list_sum(list_transform(choice_logprobs, lambda s: exp(s.logprob))) "
        f"FROM '{tmp_path}/output/*.parquet' WHERE choice IS NOT NULL"
    ).fetchall()
    assert len(shares) == 10
    assert all(share > 0 for _, share in shares)


@pytest.mark.long
def test_scores_are_the_log_likelihoods_of_peft(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    texts: list[Any] = [[" jumps over", " the", " a lazy dog"], None, ["x"], [" fox"]]
    adapters = [None, "rank8", "rank20", "rank8"]
    rows = [
        {"id": i, "adapter": adapters[i % 4], "prompt": f"the quick brown fox {i}", "continuation": texts[i % 4]}
        for i in range(16)
    ]
    folder = next(iter(tiny_adapters.values())).parent
    done = run(tiny_llama, rows, tmp_path, "--max-tokens", "4", "--adapters", str(folder), "--temperature", "0.9")
    assert done.returncode == 0, done.stderr
    found = answers(tmp_path)
    assert len(found) == sum(len(row["continuation"] or [None]) for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder / "rank8"), adapter_name="rank8")
    model.load_adapter(str(folder / "rank20"), adapter_name="rank20")
    for row in found:
        if rows[row["id"]]["continuation"] is None:
            assert row["continuation_logprob"] is None
            continue
        text = rows[row["id"]]["continuation"][row["sample"]]
        prompt, ids = (tokenizer(part, add_special_tokens=False).input_ids for part in (row["prompt"], text))
        assert (row["completion"], row["token_ids"], row["finish_reason"]) == (text, ids, "stop")
        with torch.inference_mode():
            if row["adapter"] is None:
                with model.disable_adapter():
                    logits = model(torch.tensor([prompt + ids])).logits[0]
            else:
                model.set_adapter(row["adapter"])
                logits = model(torch.tensor([prompt + ids])).logits[0]
        of_each = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])
        assert row["continuation_logprob"] == pytest.approx(float(of_each.sum()), abs=1e-3)
