"""Chunked prefill and decoding, recorded at every position, beside what transformers and PEFT compute in fp32."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bases import with_attention

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.model_config.layer import Attention
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.models.decoder import Decoder
from lorabatch.engine.models.step_batch import StepBatch
from lorabatch.engine.models.weight_cache import Packed
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.backend import CpuBackend

CHUNK_TOKENS = 24
NUM_NEW = 10


@dataclass
class Recorder:
    """Wraps an engine's decoder so that it computes logits at every position; keeps the first of each."""

    engine: Engine
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        forward = type(self.engine.backend.decoder).forward.__get__(self.engine.backend.decoder)

        def record(batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(len(batch.token_ids))
            everywhere = forward(replace(batch, asked=None, sampled_rows=rows), pool)
            self.logits = dict(zip(batch.positions.tolist(), everywhere, strict=True)) | self.logits
            asked = rows if batch.asked is None else batch.asked[0]
            return everywhere[asked[batch.sampled_rows]]

        self.engine.backend.decoder.forward = record  # type: ignore[method-assign]


@dataclass(frozen=True)
class Expected:
    """Greedy tokens of the oracle, and its logits at positions 0 .. last, [num_positions, vocab_size]."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


class Changed(CpuBackend):
    """The same weights under another model configuration."""

    def __init__(self, changes: dict[str, Any], folder: Path, config: EngineConfig, model: ModelConfig) -> None:
        self._changes = changes
        super().__init__(folder, config, model)

    def build_decoder(self, weights: dict[str, torch.Tensor], packed: Packed) -> Decoder:
        of_layers = self._changes.keys() & Attention.__dataclass_fields__.keys()
        model = with_attention(self.model, **{key: self._changes[key] for key in of_layers})
        model = replace(model, **{key: value for key, value in self._changes.items() if key not in of_layers})
        return Decoder(model, weights, self.dtype, products=self.products, packed=packed)


class Comparison:
    """Engines and oracles of one model folder, and what it means for them to agree."""

    def engine(self, folder: Path, mode: Mode = "unmerged", changes: dict[str, Any] | None = None) -> Engine:
        """`changes`: settings of the model, or of attention in all layers, that the decoder computes with, against what
        the folder says.
        """
        config = EngineConfig(max_batch_rows=4, max_step_tokens=CHUNK_TOKENS, pool_bytes=4 << 20, mode=mode)
        return Engine(folder, config, make_backend=partial(Changed, changes or {}))

    def model(self, folder: Path, adapter: Path | None = None) -> Any:
        """The oracle in fp32. Eager attention: transformers' other implementations leave Gemma 2's caps out."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model.generation_config.eos_token_id = None
        return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()

    def prompt(self, num_tokens: int, engine: Engine) -> tuple[int, ...]:
        rng = random.Random(num_tokens)
        return tuple(rng.randrange(3, engine.model.vocab_size) for _ in range(num_tokens))

    def register(self, engine: Engine, adapter: Path) -> str:
        content = audit_adapter(adapter, engine.model, "adapter").content_sha256
        assert content is not None
        engine.register_adapter(content, adapter, "adapter")
        return content

    @torch.no_grad()
    def generate(self, model: Any, prompt: tuple[int, ...]) -> Expected:
        """What transformers generates with its cache, as its users call it."""
        from transformers import GenerationConfig

        ids = torch.tensor([prompt])
        settings = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
        of_prompt = model(input_ids=ids).logits[0]
        out = model.generate(
            input_ids=ids, generation_config=settings, output_logits=True, return_dict_in_generate=True
        )
        tokens = out.sequences[0, len(prompt) :]
        return Expected(tuple(tokens.tolist()), torch.cat([of_prompt[:-1], *out.logits]))

    @torch.no_grad()
    def recompute(self, model: Any, prompt: tuple[int, ...]) -> Expected:
        """Greedy generation without a cache: every token computes the whole row anew."""
        tokens: list[int] = []
        logits = [model(torch.tensor([prompt])).logits[0, :-1]]
        for _ in range(NUM_NEW):
            logits.append(model(torch.tensor([[*prompt, *tokens]])).logits[0, -1:])
            tokens.append(int(logits[-1].argmax()))
        return Expected(tuple(tokens), torch.cat(logits))

    def serve(
        self, engine: Engine, prompts: dict[str, tuple[int, ...]], adapter_id: str | None = None
    ) -> dict[str, Result]:
        """Greedy rows, all in one batch."""
        sampling = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
        requests = [Request(key, prompt, adapter_id, sampling) for key, prompt in prompts.items()]
        results = {result.request_id: result for result in engine.run(requests)}
        engine.check_integrity()
        return results

    def equal_in_one_batch(self, engine: Engine, model: Any) -> None:
        """Tokens of rows of several lengths that share a batch equal those of each row alone."""
        prompts = {f"row-{n}": self.prompt(n, engine) for n in (3, 14, 30, 44, 60)}
        results = self.serve(engine, prompts)
        for key, prompt in prompts.items():
            assert results[key].token_ids == self.generate(model, prompt).tokens, key

    def equal_with_and_without(self, folder: Path, adapter: Path, model: Any, adapted: Any) -> None:
        """The base within every window and beyond, then with the adapter, unmerged and merged. `model`, `adapted`:
        oracles of both.
        """
        engine = self.engine(folder)
        for num_tokens in (5, 70):
            prompt = self.prompt(num_tokens, engine)
            self.equal_everywhere(engine, prompt, self.generate(model, prompt))
        prompt = self.prompt(40, engine)
        expected = self.generate(adapted, prompt)
        assert (expected.logits - self.generate(model, prompt).logits).abs().max() > 0.1
        modes: tuple[Mode, ...] = ("unmerged", "merged")
        for mode in modes:
            engine = self.engine(folder, mode)
            self.equal_everywhere(engine, prompt, expected, self.register(engine, adapter))
            assert engine.telemetry().mode == mode

    def record(
        self, engine: Engine, prompt: tuple[int, ...], adapter_id: str | None = None
    ) -> tuple[Result, torch.Tensor]:
        """The row's result and the logits of all its positions, [num_positions, vocab_size]."""
        recorder = Recorder(engine)
        result = self.serve(engine, {"row": prompt}, adapter_id)["row"]
        assert result.error is None
        positions = sorted(recorder.logits)
        assert positions == list(range(len(prompt) + NUM_NEW - 1))
        return result, torch.stack([recorder.logits[position] for position in positions])

    def equal_everywhere(
        self, engine: Engine, prompt: tuple[int, ...], expected: Expected, adapter_id: str | None = None
    ) -> None:
        """Tokens equal; logits equal at every position of chunked prefill and decoding."""
        result, logits = self.record(engine, prompt, adapter_id)
        distance = (logits - expected.logits).abs().amax(dim=1)
        wrong = (distance >= 1e-3).nonzero().flatten().tolist()
        assert not wrong, f"positions {wrong} differ by up to {distance.max()}"
        assert result.token_ids == expected.tokens


@pytest.fixture(scope="session")
def compare() -> Comparison:
    """See `Comparison`."""
    return Comparison()
