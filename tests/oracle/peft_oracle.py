"""Tiny engines beside their oracle, transformers and PEFT in fp32, row by row."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.text.answers.completion import Completion
from lorabatch.engine.text.answers.token_rules import TokenRules
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer, Tokenizers

POOL_BYTES = 4 << 20


def completion_of(model: Path, own_tokenizer: Callable[[str], Tokenizer | None] = lambda _: None) -> Completion:
    """Watches rows of a model that ends with token 2 for their ends."""
    tokenizers = Tokenizers(model, own_tokenizer, (2,))
    return Completion(tokenizers, TokenRules(tokenizers))


def weights_sha256(engine: Engine) -> str:
    """Hash of the live weights; equal before and after any number of switches."""
    decoder, digest = engine.backend.decoder, hashlib.sha256()
    layers = [linear for layer in decoder.layers for linear in layer.linears.values()]
    linears = [*layers, *decoder.linears.values()]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    for tensor in (*(linear.live for linear in linears), *biases, *decoder.tensors.values()):
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def make_engine(model: Path, mode: Mode = "unmerged", **config: object) -> Engine:
    settings = {"max_batch_rows": 8, "max_step_tokens": 24, "pool_bytes": POOL_BYTES} | config
    return Engine(model, EngineConfig(mode=mode, **settings))  # type: ignore[arg-type]


def register_all(engine: Engine, adapters: dict[str, Path]) -> dict[str, str]:
    """Content hash of each adapter by name."""
    ids = {}
    for name, folder in adapters.items():
        content = audit_adapter(folder, engine.model, name).content_sha256
        assert content is not None
        engine.register_adapter(content, folder, name)
        ids[name] = content
    return ids


def prompts(count: int, vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 40))) for _ in range(count)]


def serve(engine: Engine, requests: Iterable[Request]) -> dict[str, Result]:
    """All results by request id; the engine proves itself after each step."""
    engine.add(requests)
    results: dict[str, Result] = {}
    while engine.num_unfinished:
        for result in engine.step():
            assert result.request_id not in results
            results[result.request_id] = result
        engine.check_integrity()
    return results


def scores_of_continuations(
    model: Path, asked: Sequence[Request], texts: Sequence[str]
) -> dict[str, tuple[float, ...]]:
    """Log-probabilities of each text behind each row's prompt, by rows that are given the text, in mode `exact`."""
    tokens = Tokenizer.from_folder(model).encode_batch(list(texts), is_rendered=True)
    given = [
        Request(f"{row.request_id}/{i}", row.prompt_token_ids, None, row.sampling.scoring(tuple(text)))
        for row in asked
        for i, text in enumerate(tokens)
    ]
    found = serve(make_engine(model, "exact"), given)
    return {
        row.request_id: tuple(math.fsum(found[f"{row.request_id}/{i}"].token_logprobs or ()) for i in range(len(texts)))
        for row in asked
    }


def last_logits(engine: Engine, prompt: tuple[int, ...], adapter_id: str | None) -> torch.Tensor:
    """Logits after a prompt, [vocab_size]."""
    found: list[torch.Tensor] = []
    decoder = engine.backend.decoder
    forward = type(decoder).forward

    def record(*args: Any) -> torch.Tensor:
        logits = forward(decoder, *args)
        found.extend(logits.clone())  # none for steps that only begin a prompt
        return logits

    decoder.forward = record  # type: ignore[method-assign]
    serve(engine, [Request("row", prompt, adapter_id, SamplingParams(max_tokens=1))])
    del decoder.forward
    return found[-1]


class Oracle:
    """Greedy generation by transformers + PEFT, one row at a time, without batching or caching tricks."""

    def __init__(self, model_folder: Path, adapters: dict[str, Path], dtype: torch.dtype = torch.float32) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
        self._model = base
        for name, folder in adapters.items():
            if self._model is base:
                self._model = PeftModel.from_pretrained(base, folder, adapter_name=name)
            else:
                self._model.load_adapter(folder, adapter_name=name)
        self._has_adapters = bool(adapters)
        self._model.eval()
        # For tests that ask the same of several modes.
        self.greedy = cache(self._greedy)

    @torch.no_grad()
    def logits(self, token_ids: Iterable[int], adapter: str | None) -> torch.Tensor:
        """Logits at the last position, [vocab_size]."""
        return self._all_logits(token_ids, adapter)[-1]

    @torch.no_grad()
    def logprobs_of(self, prompt: Iterable[int], tokens: Iterable[int], adapter: str | None) -> torch.Tensor:
        """Log-probabilities of every token at the places of `tokens` behind a prompt, [num_tokens, vocab_size]."""
        behind = list(tokens)
        return self._all_logits([*prompt, *behind], adapter)[-len(behind) - 1 : -1].log_softmax(-1)

    def scores(self, prompt: Iterable[int], tokens: Sequence[int], adapter: str | None) -> list[float]:
        """The log-probability of each of `tokens` behind a prompt."""
        found = self.logprobs_of(prompt, tokens, adapter)
        scores: list[float] = found.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        return scores

    def _all_logits(self, token_ids: Iterable[int], adapter: str | None) -> torch.Tensor:
        inputs = torch.tensor([list(token_ids)])
        if adapter is None and self._has_adapters:
            with self._model.disable_adapter():
                return self._model(inputs).logits[0]
        if adapter is not None:
            self._model.set_adapter(adapter)
        return self._model(inputs).logits[0]

    def _greedy(self, prompt: tuple[int, ...], adapter: str | None, max_tokens: int, stop_id: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while len(tokens) < max_tokens and (not tokens or tokens[-1] != stop_id):
            tokens.append(int(self.logits([*prompt, *tokens], adapter).argmax()))
        return tuple(tokens)
