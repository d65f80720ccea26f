"""Measure the demo's adapters on held-out prompts: `python -m lorabatch.demo.evaluate_adapters [NAME…]`.

Each prompt is answered by the bare base model and by the adapter, greedily, with transformers and PEFT in fp32 (the
oracle, not this project's engine). Prints the table that stands in `demo/README.md`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from .base_model import base_model_folder
from .tasks import TASKS, Task
from .train_adapters import ADAPTERS

BATCH_SEQUENCES = 25
HELD_OUT_SEED = 2


@dataclass(frozen=True, slots=True)
class Figure:
    """The result of one measure over held-out prompts, without and with the adapter."""

    #: Name of the task, and of its adapter.
    task: str
    #: Name of the measure.
    measure: str
    #: Prompts that were answered.
    num_prompts: int
    #: Share of the base model's answers for which the measure holds, from 0 to 1.
    base_share: float
    #: Share of the adapter's answers for which the measure holds, from 0 to 1.
    adapter_share: float


class Evaluator:
    """The base model with the demo's adapters on it, ready to answer."""

    def __init__(self, adapters: Path, names: list[str]) -> None:
        base = base_model_folder()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._model: Any = PeftModel.from_pretrained(model, adapters / names[0], adapter_name=names[0])
        for name in names[1:]:
            self._model.load_adapter(adapters / name, adapter_name=name)
        self._model.eval()

    def figures(self, task: Task, num_prompts: int, num_shown: int) -> Iterator[Figure]:
        """Every measure of the task over the same prompts; prints `num_shown` answers."""
        examples = task.examples("held_out", num_prompts, HELD_OUT_SEED)
        prompts = [task.messages(example.prompt) for example in examples]
        self._model.set_adapter(task.name)
        adapted = self._answers(prompts, task.max_tokens)
        with self._model.disable_adapter():
            base = self._answers(prompts, task.max_tokens)
        for example, base_answer, answer in list(zip(examples, base, adapted, strict=True))[:num_shown]:
            print(f"{example.prompt!r}\n  base     {base_answer!r}\n  {task.name:<8} {answer!r}", flush=True)
        for measure, holds in task.measures.items():
            shares = [
                sum(holds(answer, example) for answer, example in zip(answers, examples, strict=True)) / len(examples)
                for answers in (base, adapted)
            ]
            yield Figure(task.name, measure, len(examples), *shares)

    @torch.inference_mode()
    def _answers(self, prompts: list[list[dict[str, str]]], max_tokens: int) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(prompts), BATCH_SEQUENCES):
            batch = self._tokenizer.apply_chat_template(
                prompts[start : start + BATCH_SEQUENCES],
                add_generation_prompt=True,
                padding=True,
                return_dict=True,
                return_tensors="pt",
            )
            output = self._model.generate(**batch, max_new_tokens=max_tokens, do_sample=False)
            completions = output[:, batch["input_ids"].shape[1] :]
            answers += self._tokenizer.batch_decode(completions, skip_special_tokens=True)
        return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"tasks to measure: {', '.join(TASKS)} (all by default)")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS)
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts per task")
    parser.add_argument("--show", type=int, default=0, help="answers to print per task")
    arguments = parser.parse_args()
    names = arguments.names or list(TASKS)
    if unknown := sorted(set(names) - TASKS.keys()):
        parser.error(f"no task named {', '.join(unknown)}; known: {', '.join(TASKS)}")
    started_s = time.monotonic()
    evaluator = Evaluator(arguments.adapters, names)
    rows = [f for name in names for f in evaluator.figures(TASKS[name], arguments.prompts, arguments.show)]
    print("| adapter | measure on held-out prompts | base | adapter |\n|---|---|---:|---:|")
    for row in rows:
        print(f"| `{row.task}` | {row.measure} | {row.base_share:.0%} | {row.adapter_share:.0%} |")
    print(f"\n{arguments.prompts} prompts per task, {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
