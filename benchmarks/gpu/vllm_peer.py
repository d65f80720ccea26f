"""vLLM beside it, where it is installed: the same shapes, random weights and decode lengths.

Its default settings are used, except `max_loras` and `max_lora_rank`, which have no fitting default. The base is also
measured by an engine that cannot serve LoRA, in a process of its own. Not run yet (2026-11-28).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.engine.config import read_model_config
from lorabatch.engine.peft.random import write_random_adapter

_BATCH, _PROMPT_TOKENS, _NUM_TOKENS = 256, 128, 64
_RANK = 16
_MEMORY_SHARE = 0.85


def measure_vllm(
    folder: Path,
    shape: ModelShape,
    device: torch.device,
    deadline: Deadline,
    save: Callable[[Any], None],
    has_lora: bool,
) -> dict[str, Any]:
    """Output tokens per second of 256 rows of 128 prompt tokens and 64 answers: the base alone, then, if the engine
    `has_lora`, over 16 adapters of rank 16 (files of 168 MB each, written first)."""
    if device.type != "cuda" or importlib.util.find_spec("vllm") is None:
        return {"skipped": "vllm is not installed" if device.type == "cuda" else "vllm needs a GPU"}
    if not deadline.allows("base_tokens_per_s"):
        return {}
    import vllm
    from vllm.lora.request import LoRARequest

    num_adapters = 16
    settings = {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": _RANK} if has_lora else {}
    rows: dict[str, Any] = {"batch": _BATCH, "prompt_tokens": _PROMPT_TOKENS, "num_tokens": _NUM_TOKENS}
    engine = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        gpu_memory_utilization=_MEMORY_SHARE,
        **settings,
    )
    prompts = [
        {"prompt_token_ids": [(7919 * row + 31 * place) % (shape.vocab - 1) + 1 for place in range(_PROMPT_TOKENS)]}
        for row in range(_BATCH)
    ]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False)

    def tokens_per_s(requests: list[Any] | None) -> float:
        engine.generate(prompts[:8], sampling, lora_request=None if requests is None else requests[:8], use_tqdm=False)
        start = time.perf_counter()
        engine.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
        return _BATCH * _NUM_TOKENS / (time.perf_counter() - start)

    rows["base_tokens_per_s"] = tokens_per_s(None)
    save(rows)
    if has_lora and deadline.allows(f"{num_adapters}_adapters_tokens_per_s"):
        model = read_model_config(folder)
        paths = [write_random_adapter(folder.parent / f"a{i}", model, _RANK, seed=i) for i in range(num_adapters)]
        adapters = [LoRARequest(path.name, number + 1, str(path)) for number, path in enumerate(paths)]
        rows[f"{num_adapters}_adapters_tokens_per_s"] = tokens_per_s(
            [adapters[row % num_adapters] for row in range(_BATCH)]
        )
    return rows
