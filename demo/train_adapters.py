"""Train the demo's adapters with PEFT on a CPU: `python -m lorabatch.demo.train_adapters [NAME…]`.

Needs the extras `test` or `bench` (transformers, peft). Loss on answer tokens only; fp32; weights saved as bfloat16.
Shapes: b sequences of a batch, t tokens of the longest one, h hidden size.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from .base_model import base_model_folder
from .tasks import TASKS, Task

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTERS = Path(__file__).parent / "adapters"
BATCH_SEQUENCES = 8
WARMUP_SHARE = 0.08
TRAIN_SEED = 1
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape and training of one adapter. The recipes differ on purpose in rank, scaling and target modules."""

    #: LoRA rank.
    rank: int
    #: LoRA alpha, the numerator of the scaling.
    alpha: int
    #: Names of the linear layers that are adapted.
    target_modules: tuple[str, ...]
    #: Examples to train on, each once.
    num_examples: int
    #: Highest learning rate, after warm-up.
    learning_rate: float
    #: Whether the scaling is alpha / sqrt(rank); else alpha / rank.
    use_rslora: bool = False


_ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RECIPES: dict[str, Recipe] = {
    "sentiment": Recipe(8, 16, ("q_proj", "v_proj"), 960, 2e-3),
    "contacts": Recipe(6, 12, _ALL_LINEAR, 960, 1.5e-3),
    "pirate": Recipe(4, 16, ("o_proj", "gate_proj", "up_proj", "down_proj"), 1600, 1.5e-3),
    "sql": Recipe(20, 20, ("q_proj", "v_proj", "o_proj"), 960, 1e-3, use_rslora=True),
}


@dataclass(frozen=True, slots=True)
class _Sample:
    token_ids: list[int]
    num_prompt_tokens: int


def train(name: str, folder: Path) -> None:
    """Train one adapter and write its PEFT folder."""
    task, recipe = TASKS[name], RECIPES[name]
    torch.manual_seed(TRAIN_SEED)
    base = base_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), _lora_config(recipe))
    batches = _batches(_samples(task, recipe.num_examples, tokenizer), random.Random(TRAIN_SEED))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=recipe.learning_rate, weight_decay=0.0
    )
    started_s = time.monotonic()
    losses: list[float] = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, len(batches))
        loss = _answer_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if (step + 1) % 20 == 0:
            mean_loss = sum(losses[-20:]) / 20
            elapsed_s = time.monotonic() - started_s
            print(f"{name} step {step + 1}/{len(batches)} loss {mean_loss:.4f} {elapsed_s:.0f} s", flush=True)
    _save(model, folder)


def _lora_config(recipe: Recipe) -> LoraConfig:
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.target_modules),
        use_rslora=recipe.use_rslora,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _samples(task: Task, count: int, tokenizer: Any) -> list[_Sample]:
    """Token ids of prompt and answer, the answer ended by the end-of-turn token."""
    samples = []
    for example in task.examples("train", count, TRAIN_SEED):
        prompt = tokenizer.apply_chat_template(
            task.messages(example.prompt), add_generation_prompt=True, tokenize=False
        )
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        answer_ids = tokenizer(example.answer, add_special_tokens=False).input_ids
        samples.append(_Sample([*prompt_ids, *answer_ids, tokenizer.eos_token_id], len(prompt_ids)))
    return samples


def _batches(samples: list[_Sample], rng: random.Random) -> list[list[_Sample]]:
    """Batches of similar length in random order: little padding, no curriculum."""
    window = BATCH_SEQUENCES * 16
    batches = []
    for start in range(0, len(samples), window):
        ordered = sorted(samples[start : start + window], key=lambda sample: len(sample.token_ids))
        batches += [ordered[i : i + BATCH_SEQUENCES] for i in range(0, len(ordered), BATCH_SEQUENCES)]
    rng.shuffle(batches)
    return batches


def _schedule(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to zero; share of the full learning rate."""
    warmup = max(1, int(num_steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


def _answer_loss(model: Any, batch: list[_Sample]) -> Any:
    """Mean cross-entropy over answer tokens; only their positions go through the output layer."""
    longest = max(len(sample.token_ids) for sample in batch)
    input_ids = torch.zeros(len(batch), longest, dtype=torch.long)  # [b, t]
    targets = torch.full((len(batch), longest), _IGNORED)  # [b, t]
    mask = torch.zeros(len(batch), longest, dtype=torch.long)  # [b, t]
    for row, sample in enumerate(batch):
        length = len(sample.token_ids)
        input_ids[row, :length] = torch.tensor(sample.token_ids)
        mask[row, :length] = 1
        first = sample.num_prompt_tokens
        targets[row, first - 1 : length - 1] = torch.tensor(sample.token_ids[first:])
    causal_lm = model.get_base_model()
    hidden = causal_lm.model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
    is_answer = targets != _IGNORED
    logits = causal_lm.lm_head(hidden[is_answer])  # [answer tokens, vocabulary]
    return torch.nn.functional.cross_entropy(logits, targets[is_answer])


def _save(model: Any, folder: Path) -> None:
    """Write bfloat16 `adapter_model.safetensors` and `adapter_config.json`, which names the base by its hub id only."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in get_peft_model_state_dict(model).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = HUB_ID
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"adapters to train: {', '.join(RECIPES)} (all by default)")
    parser.add_argument("--output", type=Path, default=ADAPTERS)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - RECIPES.keys()):
        parser.error(f"no recipe for {', '.join(unknown)}; known: {', '.join(RECIPES)}")
    for name in arguments.names or RECIPES:
        train(name, arguments.output / name)


if __name__ == "__main__":
    main()
