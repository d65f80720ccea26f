"""Adapters that are exact only when merged share an engine with all others and still equal PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import register_all, weights_sha256

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.models.layers import Linear
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams

MERGED_ONLY: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
    "bias": {"target_modules": ["q_proj", "down_proj"], "lora_bias": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 11]},
}
PROMPT = (5, 7, 11, 13, 40, 41)


def peft_greedy(model_folder: Path, adapter: Path, max_tokens: int) -> tuple[int, ...]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).eval()
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(max_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(PROMPT) :])


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_of_merged_only_adapters_equal_peft_in_a_batch_with_others(
    make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path, is_tied: bool
) -> None:
    base = make_model(tmp_path / "base", tie_word_embeddings=is_tied, num_hidden_layers=1)
    settings = {"plain": {"target_modules": ["q_proj", "up_proj"]}, **MERGED_ONLY}
    engine = Engine(base, EngineConfig(mode="unmerged", pool_bytes=2 << 20, max_batch_rows=8))
    requests, expected, before = [], {}, weights_sha256(engine)
    for seed, (name, lora) in enumerate(settings.items()):
        folder = make_adapter(tmp_path / name, base, seed=seed, **lora)
        audit = audit_adapter(folder, engine.model, name)
        if audit.verdict == "refused":
            # what PEFT leaves ambiguous on tied weights is refused, never guessed
            assert is_tied, audit.reasons
            continue
        assert audit.verdict == ("exact" if name == "plain" else "exact-by-merge"), audit.reasons
        assert audit.content_sha256 is not None
        engine.register_adapter(audit.content_sha256, folder, name)
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        requests += [Request(f"{name}/{i}", PROMPT, audit.content_sha256, sampling) for i in range(2)]
        expected[name] = peft_greedy(base, folder, 6)
    requests.insert(3, Request("base/0", PROMPT, None, SamplingParams(max_tokens=6, ignore_eos=True)))
    results = {result.request_id: result for result in engine.run(requests)}
    for request in requests[:3] + requests[4:]:
        name = request.request_id.partition("/")[0]
        assert results[request.request_id].token_ids == expected[name], name
        assert results[request.request_id].mode == ("unmerged" if name == "plain" else "merged")
    assert results["base/0"].mode == "base"
    assert len(set(expected.values())) > 2
    while engine.num_unfinished:
        engine.step()
    list(engine.run([Request("after", PROMPT, None, SamplingParams(max_tokens=1))]))
    assert weights_sha256(engine) == before


def test_mode_merged_needs_no_room_in_the_pool_for_adapters(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    """An adapter of rank 64 takes 58 pages of 8 KiB, the row one."""
    results = {}
    for mode, pool_bytes in (("merged", 4 * 8192), ("unmerged", 4 * 8192), ("merged", 4 << 20)):
        engine = Engine(tiny_llama, EngineConfig(mode=mode, pool_bytes=pool_bytes))  # type: ignore[arg-type]
        (adapter_id,) = register_all(engine, {"rank64": tiny_adapters["rank64"]}).values()
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        rows = [Request(f"{a}", PROMPT, a, sampling) for a in (adapter_id, None)]
        results[mode, pool_bytes] = {result.request_id: result for result in engine.run(rows)}
        engine.check_integrity()
    small, refused, large = results.values()
    assert small == large
    assert small[adapter_id].mode == "merged"
    assert "raise pool_bytes" in (refused[adapter_id].error or "")
    assert refused["None"] == small["None"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_without_memory_for_merged_weights_only_rows_that_need_them_are_errors(
    make_adapter: Callable[..., Path], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modes that choose to merge keep that memory: there it is the engine that fails, not an adapter."""
    folders = {
        "dora": make_adapter(tmp_path / "dora", tiny_llama, use_dora=True),
        "plain": make_adapter(tmp_path / "plain", tiny_llama, seed=1),
    }
    replace, merged = Linear.replace, []

    def replace_some(linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        merged.append(linear)
        if len(merged) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        replace(linear, weight, bias)

    monkeypatch.setattr(Linear, "replace", replace_some)
    engine = Engine(tiny_llama, EngineConfig(mode="unmerged", pool_bytes=4 << 20))
    before, ids = weights_sha256(engine), register_all(engine, folders)
    rows = [Request(name, PROMPT, ids[name], SamplingParams(max_tokens=3, ignore_eos=True)) for name in folders]
    results = {result.request_id: result for result in engine.run(rows)}
    assert "no memory for merged weights" in (results["dora"].error or "")
    assert (results["plain"].error, results["plain"].mode) == (None, "unmerged")
    assert weights_sha256(engine) == before
    merged.clear()
    engine = Engine(tiny_llama, EngineConfig(mode="merged", pool_bytes=4 << 20))
    ids = register_all(engine, folders)
    with pytest.raises(torch.OutOfMemoryError):
        list(engine.run([Request("dora", PROMPT, ids["dora"], SamplingParams(max_tokens=3))]))
