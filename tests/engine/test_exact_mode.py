"""Mode `exact`: a row's tokens and log-probabilities have the same bits alone, in company, and after a move."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from peft_oracle import make_engine, prompts, register_all, serve

from lorabatch.engine.request import Request, SamplingParams


@pytest.mark.parametrize("seed", range(3))
def test_log_probabilities_have_the_same_bits_alone_in_company_and_after_a_move(
    tiny_llama: Path, tiny_adapters: dict[str, Path], seed: int
) -> None:
    rng = random.Random(seed)
    engines = [
        make_engine(tiny_llama, "exact", max_batch_rows=1, max_step_tokens=7),
        make_engine(tiny_llama, "exact"),
        make_engine(tiny_llama, "exact", max_batch_rows=20, max_step_tokens=100),
    ]
    for engine in engines:
        ids = [None, *register_all(engine, tiny_adapters).values()]
    sampling = SamplingParams(max_tokens=10, temperature=0.7, logprobs=True, ignore_eos=True)
    requests = [
        Request(f"row-{i}", prompt, rng.choice(ids), sampling, stream_id=i)
        for i, prompt in enumerate(prompts(16, engines[0].model.vocab_size, seed=seed))
    ]
    alone, together = serve(engines[0], requests), serve(engines[1], requests)
    assert alone == together
    engines[1].add(requests)
    moved = {}
    while engines[1].num_unfinished or engines[2].num_unfinished:
        for engine in engines[1:]:
            moved.update({result.request_id: result for result in engine.step()})
        names = rng.sample([request.request_id for request in requests], 3)
        engines[2].import_rows(engines[1].export_rows(names))
    assert moved == alone
