"""A batch file with three models through `import`, `run` and `export`, its results read by the `openai` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from typer.testing import CliRunner

from lorabatch.cli import app

MODELS = ("tiny-llama", "rank1", "rank8")
QUESTIONS = ("the quick brown fox", "once upon a midnight dreary", "name: Ada Lovelace", "SELECT id FROM rows")


def command(*words: object, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == exit_code, done.output
    return done.output


def line(custom_id: str, url: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def through_a_job(batch: Path, model: Path, adapters: dict[str, Path], *options: object) -> dict[str, dict[str, Any]]:
    """The lines of the results, by custom id."""
    rows, output, results = (batch.with_name(name) for name in ("rows.parquet", "output", "results.jsonl"))
    command("import", batch, rows, "--base", MODELS[0])
    given = [word for name in MODELS[1:] for word in ("--adapters", f"{name}={adapters[name]}")]
    job = ("--model", model, *given, "--input", rows, "--output", output, "--workers", 1, *options)
    command("run", *job)
    command("export", output, results)
    before = results.read_bytes()
    command("export", output, results)
    assert results.read_bytes() == before
    lines = [json.loads(text) for text in before.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines) == pq.read_metadata(rows).num_rows
    return found


def direct(folder: Path, model: Path, adapters: dict[str, Path], rows: list[dict[str, Any]]) -> dict[str, str]:
    """What a job of Parquet answers to the same."""
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    given = [word for name in MODELS[1:] for word in ("--adapters", f"{name}={adapters[name]}")]
    command(
        "run", "--model", model, *given, "--input", folder / "rows.parquet", "--output", folder / "output",
        "--workers", 1, "--max-tokens", 8,
    )  # fmt: skip
    parts = pa.concat_tables(map(pq.read_table, sorted((folder / "output").glob("part-*.parquet"))))
    return {row["id"]: row["completion"] for row in parts.to_pylist()}


@pytest.mark.long
def test_chats_of_three_models_and_lines_that_are_none(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    url = "/v1/chat/completions"
    asked = {f"{model}-{i}": (model, text) for model in MODELS for i, text in enumerate(QUESTIONS)}
    good = [
        line(
            custom_id,
            url,
            model=model,
            messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": text}],
            max_completion_tokens=8,
            temperature=0,
            logprobs=True,
            n=1,
            user="someone",
        )
        for custom_id, (model, text) in asked.items()
    ]
    bad = [
        b"{not json",
        line("two answers", url, model=MODELS[0], messages=[{"role": "user", "content": "x"}], audio={"voice": "a"}),
        line("picture", url, model="rank1", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        line("unknown", url, model="nobody", messages=[{"role": "user", "content": "x"}], max_tokens=8),
        line("rank1-0", url, model="rank1", messages=[{"role": "user", "content": "again"}]),
    ]
    batch = tmp_path / "batch.jsonl"
    batch.write_bytes(b"\n".join([*good[:6], *bad, *good[6:]]))
    found = through_a_job(batch, tiny_llama, tiny_adapters, "--max-errors", 5)

    expected_rows = [
        {"id": custom_id, "adapter": None if model == MODELS[0] else model,
         "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}]}
        for custom_id, (model, text) in asked.items()
    ]  # fmt: skip
    expected = direct(tmp_path / "direct", tiny_llama, tiny_adapters, expected_rows)
    for custom_id, (model, _) in asked.items():
        result = found.pop(custom_id)
        assert result["error"] is None
        body = ChatCompletion.model_validate(result["response"]["body"], strict=True)
        assert (result["response"]["status_code"], body.model) == (200, model)
        (choice,) = body.choices
        assert choice.message.content == expected[custom_id]
        assert choice.finish_reason in ("stop", "length")
        assert body.usage is not None
        assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == body.usage.completion_tokens <= 8
    errors = {custom_id: result["error"]["message"] for custom_id, result in found.items()}
    assert all(result["response"] is None for result in found.values())
    assert {custom_id: text.partition(" ")[0] for custom_id, text in errors.items()} == {
        "batch.jsonl:7": "batch.jsonl:7:",
        "two answers": "batch.jsonl:8:",
        "picture": "messages[0].content[0]:",
        "unknown": "adapter='nobody':",
        "batch.jsonl:11": "batch.jsonl:11:",
    }
    assert "rank1-0" in errors["batch.jsonl:11"]


@pytest.mark.long
@pytest.mark.parametrize("as_tokens", [False, True])
def test_completions_of_three_models(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, as_tokens: bool
) -> None:
    prompts = {name: [5, 7, 11] if as_tokens else f"the quick {name}" for name in MODELS}
    batch = tmp_path / "batch.jsonl"
    lines = [line(name, "/v1/completions", model=name, prompt=prompts[name], logprobs=0) for name in MODELS]
    batch.write_bytes(b"\n".join(lines))
    found = through_a_job(batch, tiny_llama, tiny_adapters)
    for name in MODELS:
        body = Completion.model_validate(found[name]["response"]["body"], strict=True)
        assert (body.model, body.object) == (name, "text_completion")
        assert body.usage is not None
        # the default of completions
        assert body.usage.completion_tokens <= 16
        assert body.choices[0].logprobs is not None
        assert len(body.choices[0].logprobs.tokens or ()) == body.usage.completion_tokens


@pytest.mark.long
def test_a_job_that_was_not_imported_is_exported_and_one_that_is_not_there_is_a_wrong_request(
    tiny_llama: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["the quick", "brown fox"]}), tmp_path / "in.parquet")
    job = ("--model", tiny_llama, "--input", tmp_path / "in.parquet", "--output", tmp_path / "out")
    command("run", *job, "--workers", 1, "--max-tokens", 3)
    command("export", tmp_path / "out", tmp_path / "results.jsonl")
    found = [json.loads(text) for text in (tmp_path / "results.jsonl").read_bytes().splitlines()]
    assert {line["custom_id"] for line in found} == {"in.parquet:0", "in.parquet:1"}
    assert {Completion.model_validate(line["response"]["body"]).model for line in found} == {"tiny-llama"}
    assert "no job there" in command("export", tmp_path, tmp_path / "other.jsonl", exit_code=2)
    assert "no such file" in command("import", tmp_path / "gone", tmp_path / "x.parquet", exit_code=2)
