"""The likeliest tokens of each place are those of transformers and PEFT, for answers and for given texts, whatever runs
beside them and wherever a row goes on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import Oracle, make_engine, prompts, register_all, serve

from lorabatch.engine.models import step_batch
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.engine.teacher import pack, token_bytes, unpack
from lorabatch.kernels.launch import is_interpreted

K = 24
# Log-probabilities nearer to each other than rounding may stand in either order.
CLOSE = 1e-4


def rows_for(adapter_ids: list[str | None], count: int = 10, k: int = K) -> list[Request]:
    """Given and generated completions side by side, some with other log-probabilities, behind prompts of which some
    begin alike.
    """
    shared, endings = tuple(range(20, 61)), prompts(2 * count, 300)
    rows = []
    for i in range(count):
        prompt, text = endings[i], endings[count + i]
        sampling = SamplingParams(
            max_tokens=5 + i % 3,
            teacher_top_k=k,
            top_logprobs=3 * (i % 4 == 1),
            prompt_logprobs=i % 5 == 2,
            prompt_top_logprobs=2 * (i % 5 == 4),
            ignore_eos=True,
        )
        sampling = sampling.scoring(text[: 1 if i == 3 else None]) if i % 2 else sampling
        rows.append(Request(f"row-{i}", (*shared, *prompt)[:: -1 if i % 3 == 0 else 1], adapter_ids[i % 3], sampling))
    return rows


def check(rows: list[Request], results: dict[str, Result], oracle: Oracle, names: dict[str | None, str | None]) -> None:
    for row in rows:
        result, sampling = results[row.request_id], row.sampling
        assert result.error is None
        assert sampling.continuation_token_ids in ((), result.token_ids)
        expected = oracle.logprobs_of(row.prompt_token_ids, result.token_ids, names[row.adapter_id])
        scores = [float(each[token]) for each, token in zip(expected, result.token_ids, strict=True)]
        assert result.token_logprobs == pytest.approx(scores, abs=1e-3)
        ids, logprobs = unpack([result.teacher or b""], sampling.teacher_top_k)
        assert ids.shape == logprobs.shape == (len(result.token_ids), sampling.teacher_top_k)
        for place, of_all in enumerate(expected):
            best = of_all.topk(sampling.teacher_top_k)
            mine = of_all[ids[place].astype(np.int64)]
            assert mine.tolist() == pytest.approx(best.values.tolist(), abs=CLOSE)
            assert len(set(ids[place].tolist())) == sampling.teacher_top_k
            assert logprobs[place].astype(np.float32) == pytest.approx(best.values.numpy(), abs=1e-3, rel=2**-11)
            top = (result.top_logprobs or [()] * len(expected))[place]
            assert [token for token, _ in top] == ids[place].tolist()[: len(top)]
        if sampling.wants_prompt_logprobs:
            prompt = row.prompt_token_ids
            found = oracle.scores(prompt[:1], prompt[1:], names[row.adapter_id])
            assert result.prompt_logprobs == pytest.approx(found, abs=1e-3)


@pytest.mark.parametrize("settings_of_engine", [{}, {"max_step_tokens": 9}, {"mode": "exact"}, {"mode": "merged"}])
def test_they_are_those_of_transformers_and_peft(
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    settings_of_engine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_batch, "HEAD_ROWS", 7)
    engine = make_engine(tiny_llama, **({"page_tokens": 4, "max_step_tokens": 60} | settings_of_engine))
    names: dict[str | None, str | None] = {None: None}
    names |= {sha: name for name, sha in register_all(engine, tiny_adapters).items()}
    rows = rows_for(list(names)[:3])
    rows += [replace(row, request_id=f"{row.request_id} again") for row in rows]  # whose prompts are stored by now
    results = serve(engine, rows)
    check(rows, results, Oracle(tiny_llama, tiny_adapters), names)
    if settings_of_engine != {"mode": "exact"}:
        assert engine.telemetry().reused_prompt_tokens > 0


# Adapters that change what the head computes, or the rows that it computes from.
OWN_HEADS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 11, 30]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("mode", "is_tied"), [("unmerged", False), ("exact", True), pytest.param("auto", True, marks=pytest.mark.long)]
)
def test_adapters_with_a_head_or_tokens_of_their_own_teach_by_these(
    make_model: Any, make_adapter: Any, tmp_path: Path, mode: Any, is_tied: bool
) -> None:
    base = make_model(tmp_path / "base", num_hidden_layers=1, tie_word_embeddings=is_tied)
    kinds = {name: lora for name, lora in OWN_HEADS.items() if name == "tokens" or not is_tied}
    kinds |= {"plain": {"target_modules": ["q_proj", "up_proj"]}}
    folders = {name: make_adapter(tmp_path / name, base, seed=seed, **kinds[name]) for seed, name in enumerate(kinds)}
    engine = make_engine(base, mode)
    ids = register_all(engine, folders) | {"base": None}
    rows = {
        name: [replace(row, request_id=f"{name} {row.request_id}") for row in rows_for([ids[name]] * 3, 4)]
        for name in ids
    }
    results = serve(engine, [row for of_each in zip(*rows.values(), strict=True) for row in of_each])
    for name, mine in rows.items():
        known = {} if name == "base" else {name: folders[name]}
        check(mine, results, Oracle(base, known), {ids[name]: name if known else None})


def test_a_given_text_takes_steps_of_many_tokens(tiny_llama: Path) -> None:
    text = tuple(range(30, 80))
    sampling = SamplingParams(teacher_top_k=4).scoring(text)
    engine = make_engine(tiny_llama, max_step_tokens=64)
    (result,) = serve(engine, [Request("row", (5, 6), None, sampling)]).values()
    assert engine.telemetry().num_steps == 1
    assert (result.token_ids, result.finish_reason) == (text, "stop")
    assert len(result.teacher or b"") == len(text) * token_bytes(4)


def test_rows_go_on_anywhere_with_the_same_bits(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_batch, "HEAD_ROWS", 5)
    rows = rows_for([None, None, None])
    stayed = serve(make_engine(tiny_llama, "exact", max_step_tokens=200), rows)
    num_in_parts = 0
    for num_steps in (1, 6, 9, 12):
        one, other = (make_engine(tiny_llama, "exact", max_step_tokens=16) for _ in range(2))
        one.add(rows)
        moved: dict[str, Result] = {}
        for _ in range(num_steps):
            moved |= {result.request_id: result for result in one.step()}
        begun = one.export_rows([row.request_id for row in rows])
        assert all(row.problems() == [] for row in begun)
        other.import_rows(begun)
        while other.num_unfinished:
            moved |= {result.request_id: result for result in other.step()}
        assert moved == stayed
        num_in_parts += sum(bool(row.teacher) and row.request.sampling.is_given for row in begun)
    assert num_in_parts, "no given text moved with a part of it scored"


def test_rows_that_lost_their_memory_begin_again_with_the_same_bits(tiny_llama: Path) -> None:
    rows = [replace(row, sampling=replace(row.sampling, min_tokens=0)) for row in rows_for([None, None, None], 16)]
    stayed = serve(make_engine(tiny_llama, "exact", max_step_tokens=200), rows)
    tight = serve(make_engine(tiny_llama, "exact", max_step_tokens=16, pool_bytes=150_000), rows)
    assert tight == stayed


def test_what_moved_rows_carry_must_fit_their_tokens() -> None:
    sampling = SamplingParams(max_tokens=9, teacher_top_k=2).scoring((5, 6, 7))
    row = ExportedRow(Request("row", (1, 2), None, sampling), (5, 6), (-1.0, -2.0), (), bytes(24))
    assert row.problems() == []
    assert "bytes of likeliest tokens, expected 24" in replace(row, teacher=bytes(23)).problems()[0]
    assert "other tokens than the completion" in replace(row, token_ids=(5, 7)).problems()[0]


@pytest.mark.parametrize("count", [1000, 1024])
def test_more_tokens_than_the_model_has_are_refused_for_their_row_only(tiny_llama: Path, count: int) -> None:
    good = Request("good", (5, 6), None, SamplingParams(max_tokens=2, teacher_top_k=3, ignore_eos=True))
    bad = replace(good, request_id="bad", sampling=replace(good.sampling, teacher_top_k=count))
    results = serve(make_engine(tiny_llama), [good, bad])
    assert f"teacher_top_k={count}: expected at most" in (results["bad"].error or "")
    assert len(results["good"].teacher or b"") == 2 * token_bytes(3)


def test_rows_of_one_step_may_ask_for_several_numbers_of_tokens(tiny_llama: Path) -> None:
    rows = [
        replace(row, sampling=replace(row.sampling, teacher_top_k=i % 4)) for i, row in enumerate(rows_for([None] * 3))
    ]
    together = serve(make_engine(tiny_llama, "exact", max_step_tokens=99), rows)
    alone = {row.request_id: serve(make_engine(tiny_llama, "exact"), [row])[row.request_id] for row in rows}
    assert together == alone
    assert together["row-0"].teacher is None


@settings(max_examples=examples(40), deadline=None)
@given(
    num_places=st.integers(0, 5), count=st.integers(1, 70), seed=st.integers(0, 2**32), scale=st.sampled_from([1, 9e5])
)
def test_places_are_packed_without_loss_but_rounding(num_places: int, count: int, seed: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 2**32, (num_places, count), np.uint32)
    logprobs = (-generator.random((num_places, count)) * scale).astype(np.float32)
    packed = pack(ids, logprobs)
    size = token_bytes(count)
    pieces = [packed[i : i + size] for i in range(0, len(packed), size)]
    assert len(pieces) == num_places
    found, values = unpack(pieces, count)
    assert (found == ids).all()
    with np.errstate(over="ignore"):
        assert (values == logprobs.astype(np.float16)).all()


@pytest.mark.long
def test_a_device_gives_those_of_a_cpu(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(row, prompt_token_ids=row.prompt_token_ids[-9:]) for row in rows_for([None] * 3, 6)]
    rows += [Request("free", (5, 6, 7), None, SamplingParams(max_tokens=6, temperature=1.0))]
    expected = serve(make_engine(tiny_llama), rows)
    monkeypatch.setattr(step_batch, "HEAD_ROWS", 7)
    device: dict[str, Any] = {"device": "cpu", "kernels": "triton"}
    device = device if is_interpreted() else {"device": "cuda", "dtype": "float32"}
    found = serve(make_engine(tiny_llama, page_tokens=4, **device), rows)
    for name, result in found.items():
        assert result.token_ids == expected[name].token_ids
        assert result.prompt_logprobs == pytest.approx(expected[name].prompt_logprobs, abs=1e-3)
        if result.teacher is None:
            continue
        mine, theirs = (unpack([each.teacher or b""], K)[1].astype(np.float32) for each in (result, expected[name]))
        assert mine == pytest.approx(theirs, abs=1e-3, rel=2**-10)
