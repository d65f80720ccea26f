"""Trains a small model of another family on the demo's tasks, from random weights, for `agreement`:
`python -m lorabatch.benchmarks.engine.task_model FOLDER [--family qwen3] [--minutes 5]`.

Needs the extra `bench` (transformers). No package carries a second checkpoint; this one has numbers that were learnt,
and answers that can be judged. The model has six layers of 256 features and a tokenizer of its own.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lorabatch.demo.tasks import TASKS

VOCAB_SIZE = 2048
NUM_EXAMPLES = 4000
BATCH_SEQUENCES = 16
LEARNING_RATE = 1.5e-3
SEED = 1
_END, _PAD = "<|end|>", "<|pad|>"
_IGNORED = -100
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}

Sample = tuple[list[int], list[int]]


def train(folder: Path, family: str, minutes: float) -> None:
    """Train for so long, and write the model's folder."""
    torch.manual_seed(SEED)
    tokenizer = _tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **_SIZES, **ends)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    samples = _samples(tokenizer)
    began_s, step = time.monotonic(), 0
    while (done := (time.monotonic() - began_s) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, 20 * done, 2 * (1 - done))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = _answer_loss(model, next(samples))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(f"{family} step {step}, {done:.0%}: loss {float(loss.detach()):.4f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    texts = [
        f"{message['content']}\n{example.answer}"
        for task in TASKS.values()
        for example in task.examples("train", NUM_EXAMPLES, SEED)
        for message in task.messages(example.prompt)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[_END, _PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD)
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def _samples(tokenizer: Any) -> Iterator[list[Sample]]:
    """Batches of prompts and answers, the answers ended, over and over in random order."""
    samples: list[Sample] = []
    for task in TASKS.values():
        for example in task.examples("train", NUM_EXAMPLES, SEED):
            messages = task.messages(example.prompt)
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt_ids, answer_ids = (tokenizer(text).input_ids for text in (prompt, example.answer))
            samples.append((prompt_ids, [*answer_ids, tokenizer.eos_token_id]))
    generator = random.Random(SEED)
    while True:
        generator.shuffle(samples)
        for start in range(0, len(samples) - BATCH_SEQUENCES, BATCH_SEQUENCES):
            yield samples[start : start + BATCH_SEQUENCES]


def _answer_loss(model: Any, batch: list[Sample]) -> Any:
    """Mean cross-entropy of the answers' tokens."""
    longest = max(len(prompt) + len(answer) for prompt, answer in batch)
    input_ids = torch.zeros(len(batch), longest, dtype=torch.long)
    targets = torch.full((len(batch), longest), _IGNORED)
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor([*prompt, *answer])
        mask[row, :end] = 1
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="qwen3", help="model_type of transformers with the usual settings")
    parser.add_argument("--minutes", type=float, default=5.0)
    options = parser.parse_args()
    train(options.folder, options.family, options.minutes)
