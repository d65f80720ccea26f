"""Log-probabilities of prompts: those of transformers and PEFT, whatever of a prompt others have computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import Oracle, make_engine, prompts, register_all, serve

from lorabatch.engine.models import step_batch
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.kernels.launch import is_interpreted

SHARED = tuple(range(20, 90))


def rows_for(adapter_ids: list[str | None], count: int = 12) -> list[Request]:
    """Prompts that begin alike and others, one of them of one token; every third row is not asked."""
    endings = prompts(count, 300)
    return [
        Request(
            f"row-{i}",
            (7,) if i == 1 else (*SHARED, *ending) if i % 2 == 0 else ending,
            adapter_ids[i // 2 % len(adapter_ids)],
            SamplingParams(max_tokens=4, prompt_logprobs=i % 3 != 2, prompt_top_logprobs=i % 3 * (i % 3 != 2) * 3),
        )
        for i, ending in enumerate(endings)
    ]


def check(rows: list[Request], results: dict[str, Result], oracle: Oracle, names: dict[str | None, str | None]) -> None:
    for row in rows:
        result, sampling = results[row.request_id], row.sampling
        if not sampling.wants_prompt_logprobs:
            assert result.prompt_logprobs is result.prompt_top_logprobs is None
            continue
        ids = row.prompt_token_ids
        expected = oracle.logprobs_of(ids[:1], ids[1:], names[row.adapter_id]) if len(ids) > 1 else ()
        logprobs = [float(each[token]) for each, token in zip(expected, ids[1:], strict=True)]
        assert result.prompt_logprobs == pytest.approx(logprobs, abs=1e-3)
        if not sampling.prompt_top_logprobs:
            assert result.prompt_top_logprobs is None
            continue
        assert len(result.prompt_top_logprobs or ()) == len(expected)
        for top, each in zip(result.prompt_top_logprobs or (), expected, strict=True):
            values = [float(each[token]) for token, _ in top]
            assert [logprob for _, logprob in top] == pytest.approx(values, abs=1e-3)
            assert values == pytest.approx(each.topk(3).values.tolist(), abs=1e-3)


def test_they_are_those_of_transformers_and_peft_beside_prompts_that_begin_alike(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_batch, "HEAD_ROWS", 7)
    engine = make_engine(tiny_llama, page_tokens=4, max_step_tokens=40, max_batch_rows=4)
    names: dict[str | None, str | None] = {None: None}
    names |= {sha: name for name, sha in register_all(engine, tiny_adapters).items()}
    rows = rows_for(list(names)[:2], 24)
    results = serve(engine, rows)
    check(rows, results, Oracle(tiny_llama, tiny_adapters), names)
    assert engine.telemetry().reused_prompt_tokens > 0, "rows that are not asked copy pages of those that are"
    # once more, when all pages are there
    again = [replace(row, request_id=f"{row.request_id} again") for row in rows]
    found = serve(engine, again)
    for row in rows:
        before, after = results[row.request_id], found[f"{row.request_id} again"]
        assert after.prompt_logprobs == pytest.approx(before.prompt_logprobs, abs=1e-4)
        assert after.token_ids == before.token_ids
        if row.sampling.wants_prompt_logprobs:
            assert after.reused_prompt_tokens == 0


def test_they_have_the_same_bits_however_a_prompt_is_cut_and_after_a_move(tiny_llama: Path) -> None:
    rows = rows_for([None])
    stayed = serve(make_engine(tiny_llama, "exact"), rows)
    cut = serve(make_engine(tiny_llama, "exact", max_step_tokens=9), rows)
    one, other = make_engine(tiny_llama, "exact"), make_engine(tiny_llama, "exact")
    one.add(rows)
    moved: dict[str, Result] = {}
    for _ in range(6):
        moved |= {result.request_id: result for result in one.step()}
    other.import_rows(one.export_rows([row.request_id for row in rows]))
    while other.num_unfinished:
        moved |= {result.request_id: result for result in other.step()}
    assert cut == moved == stayed
    assert any(result.prompt_top_logprobs for result in stayed.values())


def test_a_score_has_those_of_its_prompt_too(tiny_llama: Path) -> None:
    sampling = SamplingParams(prompt_logprobs=True).scoring((5, 6))
    whole = Request("whole", (9, 8, 7, 5, 6), None, SamplingParams(max_tokens=1, prompt_logprobs=True))
    results = serve(make_engine(tiny_llama), [Request("score", (9, 8, 7), None, sampling), whole])
    score = results["score"]
    assert [*(score.prompt_logprobs or ()), *(score.token_logprobs or ())] == pytest.approx(
        list(results["whole"].prompt_logprobs or ()), abs=1e-4
    )


@pytest.mark.long
def test_a_device_gives_those_of_a_cpu_beside_rows_that_run_ahead(tiny_llama: Path) -> None:
    rows = [replace(row, prompt_token_ids=row.prompt_token_ids[-9:]) for row in rows_for([None], 6)]
    rows += [Request("free", (5, 6, 7), None, SamplingParams(max_tokens=6, temperature=1.0))]
    rows += [Request("yes", (5, 6), None, SamplingParams(max_tokens=6, choice=("yes", "no"), prompt_top_logprobs=2))]
    expected = serve(make_engine(tiny_llama), rows)
    device: dict[str, Any] = {"device": "cpu", "kernels": "triton"}
    device = device if is_interpreted() else {"device": "cuda", "dtype": "float32"}
    found = serve(make_engine(tiny_llama, page_tokens=4, **device), rows)
    for name, result in found.items():
        assert result.prompt_logprobs == pytest.approx(expected[name].prompt_logprobs, abs=1e-3)
        tops, wanted = result.prompt_top_logprobs, expected[name].prompt_top_logprobs
        assert (tops is None) == (wanted is None)
        for top, other in zip(tops or (), wanted or (), strict=True):
            assert [p for _, p in top] == pytest.approx([p for _, p in other], abs=1e-3)
        assert result.choice_logprobs == pytest.approx(expected[name].choice_logprobs, abs=1e-3)
    with torch.no_grad():
        assert found["row-1"].prompt_logprobs == ()
