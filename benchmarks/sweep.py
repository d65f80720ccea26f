"""A sweep of checkpoints beside as many single jobs, and beside PEFT.

python -m lorabatch.benchmarks.sweep [--prompts 1000] [--checkpoints 20] [--peft-prompts 100] [--save FILE]

The checkpoints are the demo's sentiment adapter with its B matrices times 1/20, 2/20, …, as if it had been saved while
it was trained; prompts and right answers are held-out ones of its task. Two of the single jobs are timed, and PEFT on
two checkpoints and fewer prompts; both are scaled to all, and the result says so. Then a further checkpoint is added,
and the output gets wide shape. `--save` is written after each of these steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save_file

import lorabatch
from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.job import DEMO_FOLDER
from lorabatch.demo.tasks.sentiment import SENTIMENT
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.jobs.report.page import save_report, write_report
from lorabatch.jobs.store import JobStore

_MAX_TOKENS = 6
_SEED = 7
_PEFT_BATCH = 25
_WEIGHTS = "adapter_model.safetensors"


def checkpoint(number: int) -> str:
    """Name of a checkpoint by its number, from 1."""
    return f"checkpoint-{number * 50:04d}"


def write_checkpoint(folder: Path, number: int, of: int) -> None:
    """A copy of the demo's adapter whose B matrices are `number / of` of what they are at the end."""
    source, target = DEMO_FOLDER / "adapters" / SENTIMENT.name, folder / checkpoint(number)
    shutil.copytree(source, target)
    tensors = load_file(source / _WEIGHTS)
    save_file({n: t * (number / of if "lora_B" in n else 1) for n, t in tensors.items()}, target / _WEIGHTS)


def write_questions(path: Path, count: int) -> list[list[dict[str, str]]]:
    """Prompts with right answers as the input of a job; returns the conversations."""
    examples = SENTIMENT.examples("held_out", count, _SEED)
    messages = [SENTIMENT.messages(example.prompt) for example in examples]
    labels = [example.answer for example in examples]
    pq.write_table(pa.table({"id": range(count), "messages": messages, "label": labels}), path)
    return messages


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended: other programs on the machine do not count."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job; returns its seconds and counts, and the table of its scores."""
    started_s, started_cpu_s = time.perf_counter(), cpu_seconds()
    result = lorabatch.run(**options)
    facts: dict[str, Any] = {"seconds": round(time.perf_counter() - started_s, 2)}
    facts |= {"cpu_s": round(cpu_seconds() - started_cpu_s, 2)}
    facts |= {"working_s": result.working_s, "num_rows": result.num_rows}
    facts |= {"num_reused": result.num_reused, "prompt_tokens": result.prompt_tokens, "phases_s": dict(result.phases_s)}
    facts["completion_tokens"] = result.completion_tokens
    facts["scores"] = {count.adapter: count.score for count in result.adapters if count.score}
    print(result.to_text(), flush=True)
    return facts


def tokenised_texts(options: Mapping[str, Any]) -> int:
    """Texts that are tokenised while a job is planned in this process."""
    count = 0
    encode = Tokenizer.encode_messages_each

    def counting(self: Tokenizer, rendered: Sequence[Any], **given: Any) -> Any:
        nonlocal count
        count += len(rendered)
        return encode(self, rendered, **given)

    with patch.object(Tokenizer, "encode_messages_each", counting):
        lorabatch.plan(**options)
    return count


def peft_answers(messages: list[list[dict[str, str]]], adapters: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Seconds, CPU seconds and texts with which PEFT answers these prompts with each adapter, in batches, greedily, in
    fp32. Loading is not timed.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = base_model_folder()
    tokenizer: Any = AutoTokenizer.from_pretrained(base, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapters / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(adapters / name, adapter_name=name)
    model.eval()
    found = []
    for name in names:
        model.set_adapter(name)
        started_s, started_cpu_s = time.perf_counter(), cpu_seconds()
        texts: list[str] = []
        for start in range(0, len(messages), _PEFT_BATCH):
            given = tokenizer.apply_chat_template(
                messages[start : start + _PEFT_BATCH],
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
            )
            with torch.inference_mode():
                tokens = model.generate(**given, max_new_tokens=_MAX_TOKENS, do_sample=False)
            texts += tokenizer.batch_decode(tokens[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        seconds, cpu_s = time.perf_counter() - started_s, cpu_seconds() - started_cpu_s
        found.append({"adapter": name, "seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "texts": texts})
    return found


def num_equal(output: Path, peft: Sequence[dict[str, Any]]) -> int:
    """Answers of the sweep that are PEFT's; the texts are taken out of `peft`."""
    table = lorabatch.Job(output).to_arrow(wide=False).select(["id", "adapter", "completion"])
    ours = {(row["id"], row["adapter"]): row["completion"] for row in table.to_pylist()}
    texts = [(one["adapter"], one.pop("texts")) for one in peft]
    return sum(ours[i, name].strip() == text.strip() for name, of_one in texts for i, text in enumerate(of_one))


def scaled(measured: Sequence[Mapping[str, Any]], factor: float) -> dict[str, float]:
    """The mean seconds and CPU seconds of some measurements, times `factor`."""
    return {
        name: round(sum(one[name] for one in measured) / len(measured) * factor, 1) for name in ("seconds", "cpu_s")
    }


def measure(given: argparse.Namespace, folder: Path, save: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """All figures of the result. `save`: called with those so far."""
    adapters, questions = folder / "checkpoints", folder / "questions.parquet"
    for number in range(1, given.checkpoints + 1):
        write_checkpoint(adapters, number, given.checkpoints)
    messages = write_questions(questions, given.prompts)
    job: dict[str, Any] = {"model": base_model_folder(), "input": questions, "max_tokens": _MAX_TOKENS, "workers": 1}
    job |= {"expected": "label", "dtype": given.dtype}
    sweep = job | {"adapters": adapters, "for_each_adapter": "all", "include_base": True}
    found: dict[str, Any] = {"prompts": given.prompts, "checkpoints": given.checkpoints}
    found |= {"peft_prompts": given.peft_prompts, "dtype": given.dtype, "load_before": os.getloadavg()}
    found["texts_tokenised"] = tokenised_texts(sweep)
    output = folder / "sweep"
    found["sweep"] = timed(sweep | {"output": output})
    save(found)
    singles = []
    for number in range(1, given.singles + 1):
        one = job | {"adapters": adapters / checkpoint(number), "output": folder / f"single-{number}"}
        singles.append(timed(one))
    found["singles"] = singles
    found["singles_scaled"] = scaled(singles, given.checkpoints)
    save(found)
    names = [checkpoint(1), checkpoint(given.checkpoints)]
    peft = peft_answers(messages[: given.peft_prompts], adapters, names)
    found["equal_to_peft"] = num_equal(output, peft)
    found["peft"] = peft
    found["peft_scaled"] = scaled(peft, given.prompts / given.peft_prompts * given.checkpoints)
    save(found)
    write_checkpoint(adapters, given.checkpoints + 1, given.checkpoints)
    update = sweep | {"output": output, "update": True}
    found["plan_of_update"] = lorabatch.plan(**update).to_json()["update"]
    found["update"] = timed(update)
    save(found)
    found["wide"] = timed(update | {"shape": "wide"})
    if given.keep:
        shutil.copytree(output, given.keep, dirs_exist_ok=True)
        save_report(write_report(JobStore(str(output)), "2.5 EUR"), given.keep.parent / "report.html")
    found |= {"parts": len(JobStore(str(output)).committed_parts()), "load_after": os.getloadavg()}
    return found


def table(found: Mapping[str, Any]) -> str:
    """The figures as a table, each with where it comes from."""
    checkpoints, prompts, peft_prompts = found["checkpoints"], found["prompts"], found["peft_prompts"]
    sweep_s = found["sweep"]["seconds"]
    singles, peft = found["singles_scaled"]["seconds"], found["peft_scaled"]["seconds"]
    of_singles = ", ".join(f"{one['seconds']:,.0f}" for one in found["singles"])
    of_peft = ", ".join(f"{one['seconds']:,.0f}" for one in found["peft"])
    rows = [
        (f"sweep of {checkpoints} checkpoints and the base model, {prompts:,} prompts", sweep_s, "measured"),
        (
            f"{checkpoints} jobs of one checkpoint each, {singles / sweep_s:.2f} times as long",
            singles,
            f"{len(found['singles'])} measured ({of_singles} s), scaled",
        ),
        (
            f"PEFT, {checkpoints} checkpoints without the base model, {peft / sweep_s:.2f} times as long",
            peft,
            f"2 checkpoints of {peft_prompts} prompts measured ({of_peft} s), scaled",
        ),
        (
            f"a further checkpoint with --update, {found['update']['num_reused']:,} of "
            f"{found['update']['num_rows']:,} answers kept",
            found["update"]["seconds"],
            "measured",
        ),
        ("the output in wide shape with --update, all answers kept", found["wide"]["seconds"], "measured"),
    ]
    lines = ["| | seconds | |", "|---|---|---|", *(f"| {what} | {s:,.0f} | {how} |" for what, s, how in rows)]
    lines += [
        "",
        f"Texts tokenised for {found['sweep']['num_rows']:,} answers: {found['texts_tokenised']:,} (one: an example).",
    ]
    lines.append(f"Answers that are PEFT's: {found['equal_to_peft']:,} of {2 * peft_prompts:,}.")
    loads = (", ".join(f"{load:.1f}" for load in found[name]) for name in ("load_before", "load_after"))
    lines.append(f"Load of the machine (1, 5, 15 minutes): {next(loads)} before, {next(loads)} after.")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, default=20)
    parser.add_argument("--singles", type=int, default=2)
    parser.add_argument("--peft-prompts", type=int, default=100)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--keep", type=Path, help="a folder for a copy of the output, with the report beside it")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    given.peft_prompts = min(given.peft_prompts, given.prompts)
    about = provenance(("torch", "transformers", "peft"))

    def save(found: Mapping[str, Any]) -> None:
        if given.save:
            given.save.write_text(json.dumps({**found, **about}, indent=1, default=str) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        found = measure(given, Path(folder), save)
    save(found)
    print(json.dumps({**found, **about}, indent=1, default=str))
    print(table(found))


if __name__ == "__main__":
    main()
