"""Mode `exact` by GPU kernels: a row has the same bits alone, in company, with its prompt cut into steps, and after a
move. On a CPU in Triton's interpreter; on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import register_all

from lorabatch.benchmarks.gpu.engine_checks import check_exact
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.kernels.launch import is_interpreted
from lorabatch.kernels.sampling.largest import in_order

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")


@pytest.fixture(autouse=True)
def restored_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in mode `exact` change the interpreter for the whole process."""
    if is_interpreted():
        from triton.runtime.interpreter import interpreter_builder

        builder = type(interpreter_builder)
        monkeypatch.setattr(builder, "create_dot", builder.create_dot)


def make_engine(folder: Path, max_step_tokens: int) -> Engine:
    config = EngineConfig(
        device=DEVICE.type, dtype="float32", kernels="triton" if DEVICE.type == "cpu" else "auto", mode="exact",
        pool_bytes=4 << 20, max_batch_rows=8, max_step_tokens=max_step_tokens,
    )  # fmt: skip
    return Engine(folder, config)


@pytest.mark.long
def test_rows_cut_moved_and_in_company_have_the_bits_of_rows_alone(
    tmp_path: Path, make_model: Any, make_adapter: Any
) -> None:
    """A prompt begins as another one, so that its first page is computed once."""
    model = make_model(tmp_path / "model", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    adapter = make_adapter(tmp_path / "rank20", model, r=20)
    engines = [make_engine(model, max_step_tokens) for max_step_tokens in (100, 13, 64)]
    for engine in engines:
        (adapter_id,) = register_all(engine, {"rank20": adapter}).values()
    sampling = SamplingParams(3, ignore_eos=True, logprobs=True, top_logprobs=2)
    beginning = tuple(range(3, 21))
    prompts = [(beginning, adapter_id), ((*beginning, 40), adapter_id), ((5, 6), None)]
    rows = [Request(f"{i}", prompt, chosen, sampling, i) for i, (prompt, chosen) in enumerate(prompts)]
    alone, first, second = engines
    expected = {row.request_id: result for row in rows for result in alone.run([row])}
    first.add(rows)
    results = [result for _ in range(4) for result in first.step()]
    moved = first.export_rows([row.request_id for row in rows if row.request_id not in {r.request_id for r in results}])
    assert any(row.token_ids for row in moved), "no row was moved in the middle of its answer"
    second.import_rows(moved)
    while second.num_unfinished:
        results += second.step()
    assert len(results) == len(rows)
    for result in results:
        assert result.error is None
        one = expected[result.request_id]
        assert (result.token_ids, result.token_logprobs) == (one.token_ids, one.token_logprobs)
        assert result.top_logprobs == one.top_logprobs


@pytest.mark.long
def test_the_check_of_the_gpu_benchmark_finds_nothing() -> None:
    assert check_exact(DEVICE, 3) == []


def test_of_equal_logits_the_first_is_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, -0.0, -torch.inf, -1.0]], dtype=torch.float16)
    order = in_order(logits)[0].argsort(descending=True)
    assert order.tolist() == [1, 3, 0, 4, 2, 6, 5]
