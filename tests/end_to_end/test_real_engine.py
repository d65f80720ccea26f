"""The real command on real files with the real engine, row by row against transformers and PEFT in fp32."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.cost_profile import CostProfile
from lorabatch.jobs.report.page import write_report
from lorabatch.jobs.store import JobStore
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M

MAX_TOKENS = 12
PROMPTS = ("the quick brown fox", "once upon a midnight dreary, while I", "name: Ada Lovelace, phone", "SELECT id FROM")


@pytest.fixture
def without_triton(tmp_path: Path) -> dict[str, str]:
    """Environment variables with which Triton cannot be imported, as on CPUs, where it is not installed."""
    folder = tmp_path / "without triton"
    folder.mkdir()
    (folder / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_two_workers_answer_as_transformers_and_peft_do(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, without_triton: dict[str, str]
) -> None:
    names = [None, *sorted(tiny_adapters)]
    rows = [
        {"id": f"{name}-{i}", "adapter": name, "prompt": f"{PROMPTS[i % 4]} {i}", "tags": [i, i + 1]}
        for name in names
        for i in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet", row_group_size=16)
    command = [sys.executable, "-m", "lorabatch", "run", "--model", str(tiny_llama), "--workers", "2"]
    command += [
        "--adapters",
        str(next(iter(tiny_adapters.values())).parent),
        "--input",
        str(tmp_path / "input.parquet"),
    ]
    command += ["--output", str(tmp_path / "output"), "--max-tokens", str(MAX_TOKENS), "--rows-per-shard", "8"]
    environment = os.environ | without_triton
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    parts = [pq.read_table(part) for part in sorted((tmp_path / "output").glob("part-*.parquet"))]
    found = {row["id"]: row for row in pa.concat_tables(parts).to_pylist()}
    assert sum(map(len, parts)) == len(rows) == len(found)
    expected = greedy_texts(tiny_llama, tiny_adapters, rows)
    assert {row_id: row["completion"] for row_id, row in found.items()} == expected
    assert all(found[row["id"]]["tags"] == row["tags"] for row in rows)
    assert {found[row["id"]]["mode"] for row in rows if row["adapter"] is None} == {"base"}
    # Engines ran in processes that their workers had started before they knew the job. One may have answered all rows
    # before the other was ready.
    logs = [path.read_text() for path in (tmp_path / "output/_lorabatch/logs").glob("worker-*.log")]
    assert {kind for log in logs for kind in re.findall(r"ready after [\d.]+ s(.*)", log)} == {", a spare one"}


def greedy_texts(model_folder: Path, adapters: dict[str, Path], rows: list[dict[str, Any]]) -> dict[str, str]:
    """Completions by transformers and PEFT, one row at a time."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapters["rank1"]), adapter_name="rank1")
    for name in adapters.keys() - {"rank1"}:
        model.load_adapter(str(adapters[name]), adapter_name=name)
    texts = {}
    for row in rows:
        inputs = tokenizer(row["prompt"], return_tensors="pt")
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            if row["adapter"] is None:
                with model.disable_adapter():
                    tokens = model.generate(**inputs, **options)
            else:
                model.set_adapter(row["adapter"])
                tokens = model.generate(**inputs, **options)
        completion = tokens[0, inputs["input_ids"].shape[1] :]
        texts[row["id"]] = tokenizer.decode(completion, skip_special_tokens=True)
    return texts


@pytest.mark.long
@pytest.mark.parametrize(("merge_s", "modes"), [(0.0, {"merged", "mixture"}), (1e6, {"unmerged"})])
def test_engines_decide_by_the_cost_model_that_the_job_is_planned_with(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, merge_s: float, modes: set[str]
) -> None:
    cost = replace(CPU_SMOLLM2_135M, merge_s=merge_s, lora_step_s=5.0)
    profile = CostProfile("0" * 64, "a machine", "2026-11-21", "cpu", "float32", 1, 1, 64, {}, cost)
    (tmp_path / "cost.json").write_text(json.dumps(profile.to_json()))
    rows = [{"id": str(i), "adapter": "rank8", "prompt": f"{PROMPTS[i % 4]} {i}"} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    command = [sys.executable, "-m", "lorabatch", "run", "--model", str(tiny_llama), "--workers", "1"]
    command += ["--adapters", f"rank8={tiny_adapters['rank8']}", "--input", str(tmp_path / "input.parquet")]
    command += ["--output", str(tmp_path / "output"), "--max-tokens", "8", "--cost-model", str(tmp_path / "cost.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    parts = [pq.read_table(part) for part in (tmp_path / "output").glob("part-*.parquet")]
    found = {row["mode"] for row in pa.concat_tables(parts).to_pylist()}
    assert found <= modes


@pytest.mark.long
def test_prompts_that_begin_alike_are_computed_once_and_the_report_says_how_much_that_saved(
    tiny_llama: Path, tmp_path: Path
) -> None:
    rows = [{"id": str(i), "prompt": f"{' '.join(PROMPTS)} {i}"} for i in range(24)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    command = [sys.executable, "-m", "lorabatch", "run", "--model", str(tiny_llama), "--workers", "1"]
    command += ["--input", str(tmp_path / "input.parquet"), "--output", str(tmp_path / "output")]
    command += ["--max-tokens", "4", "--rows-per-shard", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    store = JobStore(str(tmp_path / "output"))
    state = store.read_state()
    assert state is not None
    assert (state.phase, state.workers) == ("done", ())
    assert state.prefix_hit_rate is not None
    assert 0.5 < state.prefix_hit_rate < 1.0
    assert f"{state.prefix_hit_rate:.1%}" in write_report(store)
    assert (store.read_summary() or {})["prefix_hit_rate"] == state.prefix_hit_rate
    assert f"{state.prefix_hit_rate:.1%} of prompt tokens were reused" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("chat", [True, False])
def test_prompts_of_columns_are_answered_as_transformers_answers_the_rendered_texts(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, chat: bool
) -> None:
    names = [None, "rank8"]
    rows = [
        {"id": f"{name}-{i}", "adapter": name, "prompt": prompt, "hint": None if i % 2 else "fox", "completion": "gold"}
        for name in names
        for i, prompt in enumerate(PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    command = [sys.executable, "-m", "lorabatch", "run", "--model", str(tiny_llama), "--workers", "1"]
    command += [
        "--adapters",
        str(next(iter(tiny_adapters.values())).parent),
        "--input",
        str(tmp_path / "input.parquet"),
    ]
    command += [
        "--prompt-template",
        r"{% if hint %}{{ hint }}\n{% endif %}{{ prompt }}",
        *([] if chat else ["--no-chat"]),
    ]
    command += ["--output", str(tmp_path / "output"), "--max-tokens", str(MAX_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "names of the output's own columns begin with answer_: answer_completion" in done.stderr + done.stdout
    found = pq.read_table(tmp_path / "output").to_pylist()
    texts = {row["id"]: "\n".join(filter(None, (row["hint"], row["prompt"]))) for row in rows}
    if chat:
        start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        texts = {row_id: f"{start}{text}{end}" for row_id, text in texts.items()}
    expected = greedy_texts(tiny_llama, tiny_adapters, [row | {"prompt": texts[row["id"]]} for row in rows])
    assert {row["id"]: row["answer_completion"] for row in found} == expected
    assert {row["completion"] for row in found} == {"gold"}
