"""How many tokens of a row another adapter would draft: `python -m lorabatch.benchmarks.engine.sibling_drafts
[--rows 40] [--steps 20] [--tasks NAME …] [--save FILE]`.

Held-out prompts of the demo's tasks are answered greedily by their adapter. Drafters then read each answer: the base
model, the other adapters, and a neighbouring checkpoint, which is the adapter itself after more steps of training.
A run is the number of tokens in a row that the drafter would choose as the adapter did, from the beginning of the
answer or from its latest difference on to the next one, or to the end. It is what a draft of any length would gain.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorabatch.benchmarks.provenance import commit, cpu_name
from lorabatch.demo import train_adapters as training
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.tasks import TASKS
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.teacher import unpack

# Learning rate of the further steps over the highest of an adapter's training.
RATE = 0.25


def train_on(name: str, folder: Path, num_steps: int) -> None:
    """Write the adapter of a task after `num_steps` more steps on other examples."""
    base, recipe = base_model_folder(), training.RECIPES[name]
    torch.manual_seed(2)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), training.ADAPTERS / name, is_trainable=True
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE * recipe.learning_rate, weight_decay=0.0
    )
    samples = training._samples(TASKS[name], recipe.num_examples + num_steps * training.BATCH_SEQUENCES, tokenizer)
    batches = training._batches(samples[recipe.num_examples :], random.Random(2))
    for batch in batches[:num_steps]:
        training._answer_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    training._save(model, folder)


def answer(engine: Engine, rows: list[Request]) -> list[Result]:
    """Results in the order of the rows."""
    found = {result.request_id: result for result in engine.run(rows)}
    return [found[row.request_id] for row in rows]


def runs(answers: list[Result], drafts: list[Result]) -> Iterator[tuple[int, bool]]:
    """Tokens of each run, and whether a difference ends it. An answer that ends with a difference has no run behind."""
    for given, drafted in zip(answers, drafts, strict=True):
        ids, _ = unpack([drafted.teacher or b""], 1)
        length = 0
        for token, draft in zip(given.token_ids, ids[:, 0].tolist(), strict=True):
            if token == draft:
                length += 1
            else:
                yield length, True
                length = 0
        if length:
            yield length, False


def measure(engine: Engine, ids: dict[str, str], names: list[str], num_rows: int) -> list[dict[str, Any]]:
    """A line for each adapter of `names` and drafter. `ids`: content hash of each adapter by name."""
    tokenizer = AutoTokenizer.from_pretrained(base_model_folder())
    lines = []
    for name in names:
        task = TASKS[name]
        prompts = [
            tokenizer.apply_chat_template(task.messages(each.prompt), add_generation_prompt=True, return_dict=False)
            for each in task.examples("held_out", num_rows, 1)
        ]
        sampling = SamplingParams(max_tokens=task.max_tokens)
        rows = [Request(f"{i}", tuple(prompt), ids[name], sampling) for i, prompt in enumerate(prompts)]
        answers = answer(engine, rows)
        num_tokens = sum(result.completion_tokens for result in answers)
        for drafter in (None, *ids):
            if drafter is not None and (drafter == name or ("+" in drafter and not drafter.startswith(name))):
                continue
            given = [
                Request(row.request_id, row.prompt_token_ids, drafter and ids[drafter],
                        SamplingParams(teacher_top_k=1).scoring(result.token_ids))
                for row, result in zip(rows, answers, strict=True)
            ]  # fmt: skip
            found = list(runs(answers, answer(engine, given)))
            lines.append(
                {
                    "adapter": name,
                    "drafter": drafter or "base",
                    "tokens": num_tokens,
                    "agreeing_share": sum(length for length, _ in found) / num_tokens,
                    "mean_run": sum(length for length, _ in found) / max(len(found), 1),
                    "differences": sum(ends for _, ends in found),
                    "tokens_per_answer": num_tokens / len(answers),
                }
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", nargs="*", default=[*TASKS])
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for name in arguments.tasks:
            shutil.copytree(training.ADAPTERS / name, Path(place) / name)
            train_on(name, Path(place) / f"{name}+", arguments.steps)
        engine = Engine(base_model_folder(), EngineConfig(mode="unmerged"))
        ids = {}
        for folder in sorted(Path(place).iterdir()):
            content = audit_adapter(folder, engine.model, folder.name).content_sha256
            assert content is not None, f"{folder.name} is refused"
            engine.register_adapter(content, folder, folder.name)
            ids[folder.name] = content
        lines = measure(engine, ids, arguments.tasks, arguments.rows)
    if arguments.save is not None:
        facts = {"commit": commit(), "cpu": cpu_name(), "rows": arguments.rows, "steps": arguments.steps}
        arguments.save.write_text(json.dumps(facts | {"lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
