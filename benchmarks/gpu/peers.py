"""Measures transformers with PEFT, which can serve many adapters too, on random weights of the same shapes."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline


def measure_peft(
    folder: Path, batch: int, num_adapters: int, rank: int, num_tokens: int, device: torch.device, deadline: Deadline
) -> dict[str, Any]:
    """Output tokens per second of `generate` on prompts of 32 tokens: the base alone, one adapter merged, and rows of
    many adapters in one batch (`adapter_names`). Each is timed once, after a run of 2 tokens."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("peft") is None:
        return {"skipped": "transformers or peft is not installed"}
    if deadline.has_passed:
        return {"skipped": "no time left"}
    model = _base(folder, device)
    rows: dict[str, Any] = {"batch": batch, "num_tokens": num_tokens}
    rows["base_tokens_per_s"] = _generate_per_s(model, batch, num_tokens, device)
    tuned = _with_adapters(model, num_adapters, rank)
    names = [f"adapter{index % num_adapters}" for index in range(batch)]
    mixed = f"mixed_{num_adapters}_adapters_tokens_per_s"
    if deadline.allows(mixed):
        rows[mixed] = _generate_per_s(tuned, batch, num_tokens, device, adapter_names=names)
    if deadline.allows("merged_tokens_per_s"):
        tuned.merge_adapter(["adapter0"])
        rows["merged_tokens_per_s"] = _generate_per_s(tuned, batch, num_tokens, device)
    return rows


def _base(folder: Path, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**settings)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _with_adapters(model: Any, num_adapters: int, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config, adapter_name="adapter0")
    for index in range(1, num_adapters):
        tuned.add_adapter(f"adapter{index}", config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    return tuned.to(next(model.parameters()).dtype).eval()


def _generate_per_s(model: Any, batch: int, num_tokens: int, device: torch.device, **options: Any) -> float:
    prompts = torch.randint(1, model.config.vocab_size, (batch, 32), device=device)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}

    def run(count: int) -> None:
        with torch.inference_mode():
            model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=count,
                max_new_tokens=count,
                **settings,
            )
        if device.type == "cuda":
            torch.cuda.synchronize()

    run(2)
    start = time.perf_counter()
    run(num_tokens)
    return batch * num_tokens / (time.perf_counter() - start)
