"""Random adapters beside random weights: served like adapters from files, and refused beside real weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft.random import dummy_adapter_weights, dummy_audit
from lorabatch.engine.request import Request, SamplingParams

SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)


def test_they_are_served_unmerged_and_merged_with_the_same_tokens(weightless_model: Path) -> None:
    answers = []
    for mode in ("unmerged", "merged"):
        config = EngineConfig(load_format="dummy", mode=mode, pool_bytes=1 << 20)  # type: ignore[arg-type]
        engine = Engine(weightless_model, config)
        ids = [None, *(engine.register_dummy_adapter(f"random {rank}", rank) for rank in (1, 8, 20))]
        rows = [Request(str(i), (5, 6, 7), adapter_id, SAMPLING) for i, adapter_id in enumerate(ids)]
        results = sorted(engine.run(rows), key=lambda r: r.request_id)
        assert [r.error for r in results] == [None] * 4
        answers.append([r.token_ids for r in results])
    assert answers[0] == answers[1]


def test_one_name_and_rank_are_one_adapter(weightless_model: Path) -> None:
    model = read_model_config(weightless_model)
    audit, again, other = (dummy_audit(model, rank, "x") for rank in (4, 4, 8))
    assert audit.content_sha256 == again.content_sha256 != other.content_sha256
    cpu = torch.device("cpu")
    first, second = (dummy_adapter_weights(a, torch.float32, cpu) for a in (audit, again))
    module = audit.sites[0].module
    assert first.pairs[module].a.equal(second.pairs[module].a)
    assert first.pairs[module].a.shape == (4, model.hidden_size)


def test_real_weights_and_impossible_ranks_are_refused(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, EngineConfig(pool_bytes=1 << 20))
    with pytest.raises(ValueError, match="load_format='auto': random adapters belong to random weights"):
        engine.register_dummy_adapter("x", 8)
    with pytest.raises(ValueError, match="rank=0: a LoRA rank is at least 1"):
        dummy_audit(engine.model, 0, "x")
