"""Rows that move between engines in the middle: the same tokens, texts and log-probabilities as undisturbed."""

from __future__ import annotations

import random
from pathlib import Path

import msgpack
import pytest

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.system.codec import from_plain, to_plain

MODES: tuple[Mode, ...] = ("unmerged", "merged", "exact")


def make_engine(model: Path, adapters: dict[str, Path], mode: Mode) -> Engine:
    config = EngineConfig(mode=mode, max_batch_rows=6, max_step_tokens=24, pool_bytes=4 << 20)
    engine = Engine(model, config)
    for name, folder in adapters.items():
        engine.register_adapter(_content(engine, folder), folder, name)
    return engine


def _content(engine: Engine, folder: Path) -> str:
    content = audit_adapter(folder, engine.model, folder.name).content_sha256
    assert content is not None
    return content


def make_requests(engine: Engine, adapters: dict[str, Path], rng: random.Random, count: int = 14) -> list[Request]:
    """Greedy and sampled rows of every adapter and the base, with everything that could go wrong in a move."""
    ids = [None, *(_content(engine, folder) for folder in adapters.values())]
    requests = []
    for i in range(count):
        sampling = SamplingParams(
            max_tokens=rng.randrange(4, 16),
            min_tokens=rng.choice((0, 0, 3)),
            temperature=rng.choice((0.0, 1.0, 1.7)),
            top_k=rng.choice((0, 20)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(100),
            stop=rng.choice(((), tuple("aeiou"), ("the", "er", "on"))),
            logprobs=True,
            ignore_eos=rng.random() < 0.5,
        )
        prompt = tuple(rng.randrange(3, engine.model.vocab_size) for _ in range(rng.randrange(1, 40)))
        requests.append(Request(f"row-{i}", prompt, ids[i % len(ids)], sampling, stream_id=1000 + i))
    return requests


def travel(row: ExportedRow) -> ExportedRow:
    """The row after its way through the bytes that processes exchange."""
    travelled: ExportedRow = from_plain(ExportedRow, msgpack.unpackb(msgpack.packb(to_plain(row))))
    return travelled


def serve_moving(here: Engine, there: Engine, requests: list[Request], rng: random.Random) -> dict[str, Result]:
    """Serve rows while some of them, waiting or running, move between two engines at random moments."""
    here.add(requests)
    results: dict[str, Result] = {}
    names = [request.request_id for request in requests]
    while here.num_unfinished or there.num_unfinished:
        for engine, other in ((here, there), (there, here)):
            for result in engine.step():
                assert result.request_id not in results
                results[result.request_id] = result
            engine.check_integrity()
            if rng.random() < 0.4:
                rows = engine.export_rows(rng.sample(names, 4))
                engine.check_integrity()
                assert not {row.request.request_id for row in rows} & results.keys()
                other.import_rows(map(travel, rows))
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_move_at_random_moments_end_as_undisturbed(
    tiny_llama: Path, tiny_adapters: dict[str, Path], mode: Mode, seed: int
) -> None:
    rng = random.Random(seed)
    here, there = (make_engine(tiny_llama, tiny_adapters, mode) for _ in range(2))
    requests = make_requests(here, tiny_adapters, rng)
    alone = {result.request_id: result for result in here.run(requests)}
    moved = serve_moving(here, there, requests, rng)
    assert moved.keys() == alone.keys()
    for name, result in moved.items():
        expected = alone[name]
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text), name
        assert (result.finish_reason, result.mode) == (expected.finish_reason, expected.mode)
        assert result.prompt_tokens == expected.prompt_tokens
        assert result.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-4)
    assert {result.finish_reason for result in alone.values()} == {"stop", "length"}


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_a_stop_string_across_the_move_is_found(tiny_llama: Path, num_tokens: int) -> None:
    here, there = (make_engine(tiny_llama, {}, "unmerged") for _ in range(2))
    free = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=4)
    (whole,) = here.run([Request("free", (5, 6, 7), None, free)])
    tokenizer = Tokenizer.from_folder(tiny_llama)
    before, after = (tokenizer.decode(list(whole.token_ids[:i])) for i in (num_tokens, num_tokens + 2))
    stop = after[len(before) - 1 :]
    assert len(stop) > 1
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=4, stop=(stop,))
    here.add([Request("row", (5, 6, 7), None, sampling)])
    for _ in range(num_tokens):
        assert here.step() == []
    (row,) = here.export_rows(["row"])
    assert row.token_ids == whole.token_ids[:num_tokens]
    there.import_rows([row])
    results = [result for _ in range(12) for result in there.step()]
    assert [(r.text, r.finish_reason) for r in results] == [(whole.text[: whole.text.index(stop)], "stop")]


def test_a_row_can_move_twice_before_its_next_token(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    here, there = (make_engine(tiny_llama, tiny_adapters, "unmerged") for _ in range(2))
    (request,) = make_requests(here, tiny_adapters, random.Random(1), count=1)
    (expected,) = here.run([request])
    here.add([request])
    for _ in range(3):
        here.step()
    rows = here.export_rows([request.request_id])
    there.import_rows(rows)
    assert there.export_rows([request.request_id]) == rows
    assert there.num_unfinished == here.num_unfinished == 0
    here.import_rows(rows)
    assert [r for _ in range(20) for r in here.step()] == [expected]


def test_finished_and_unknown_rows_are_not_exported(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, {}, "unmerged")
    list(engine.run([Request("done", (5,), None, SamplingParams(max_tokens=1))]))
    engine.add([Request("waiting", (5,), None, SamplingParams())])
    assert [row.request.request_id for row in engine.export_rows(["done", "never", "waiting"])] == ["waiting"]


def test_a_row_that_claims_too_much_becomes_an_error(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, {}, "unmerged")
    request = Request("row", (5, 6), None, SamplingParams(max_tokens=2))
    engine.import_rows([ExportedRow(request, (7, 8))])
    (finished,) = engine.step()
    engine.import_rows([ExportedRow(request, (10**6,))])
    (outside,) = engine.step()
    engine.import_rows([ExportedRow(request, (7,), (-0.1,))])
    (unasked,) = engine.step()
    for result, words in ((finished, "max_tokens"), (outside, "prompt_token_ids"), (unasked, "log-probabilities")):
        assert result.finish_reason == "error"
        assert words in (result.error or "")
