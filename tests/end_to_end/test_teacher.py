"""Jobs with teacher columns, killed and resumed, and beside transformers on a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from echo_job import wait_until

import lorabatch
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.train_adapters import ADAPTERS

COLUMNS = ["id", "completion", "token_ids", "teacher_token_ids", "teacher_logprobs", "teacher_prompt_token_ids"]


def taught(output: Path) -> list[dict[str, Any]]:
    """The rows of an output by id, without what differs from run to run."""
    table = lorabatch.Job(output).to_arrow()
    assert {*COLUMNS} <= {*table.column_names}, table.column_names
    return sorted(table.select(COLUMNS).to_pylist(), key=lambda row: int(row["id"]))


@pytest.mark.long
@pytest.mark.parametrize("given_texts", [False, True])
def test_a_killed_command_goes_on_to_the_same_columns(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, given_texts: bool
) -> None:
    names = [None, "rank8", "rank20"]
    rows = [{"id": i, "adapter": names[i % 3], "prompt": f"the quick brown fox {i}"} for i in range(96)]
    if given_texts:
        rows = [row | {"continuation": f"once upon a midnight {row['id']}"} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=40)
    job: dict[str, Any] = {"model": str(tiny_llama), "adapters": str(next(iter(tiny_adapters.values())).parent)}
    job |= {"input": str(tmp_path / "rows.parquet"), "max_tokens": 20, "teacher_top_k": 16, "mode": "exact"}
    job |= {"rows_per_shard": 8, "batch_rows": 4, "workers": 1, "logprobs": True, "ignore_eos": True}
    killed = tmp_path / "killed"
    job_file = tmp_path / "job.yaml"
    job_file.write_text(json.dumps(job | {"output": str(killed)}))
    words = [sys.executable, "-m", "lorabatch", "run", str(job_file)]
    client = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(killed.glob("part-*.parquet"))) >= 2 or client.poll() is not None)
    client.kill()
    client.wait(60)
    num_parts = len(list(killed.glob("part-*.parquet")))
    assert 2 <= num_parts < 12, "the command was killed too late for this test"
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = lorabatch.Job(killed).result()
    assert (result.num_rows, result.num_errors) == (96, 0)
    assert result.num_reused >= 8 * num_parts
    lorabatch.run(**job, output=tmp_path / "whole", progress=False)
    assert taught(killed) == taught(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.real_model
def test_columns_of_a_real_model_are_those_of_transformers(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    count, base = 20, base_model_folder()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rows = [{"id": str(i), "adapter": adapter, "messages": question} for i, adapter in enumerate((None, "pirate"))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    result = lorabatch.run(
        model=base, adapters=ADAPTERS, input=tmp_path / "rows.parquet", output=tmp_path / "out", workers=1,
        max_tokens=8, teacher_top_k=count, logprobs=True, dtype="float32", progress=False,
    )  # fmt: skip
    assert (result.num_rows, result.num_errors) == (2, 0)
    for row in taught(tmp_path / "out"):
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapter = rows[int(row["id"])]["adapter"]
        model = model if adapter is None else PeftModel.from_pretrained(model, ADAPTERS / str(adapter))
        start = row["teacher_prompt_token_ids"]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([[*start, *row["token_ids"]]])).logits[0]
        expected = logits[len(start) - 1 : -1].log_softmax(-1)
        best = expected.topk(count)
        assert len(row["teacher_token_ids"]) == len(row["token_ids"]) == len(expected)
        mine = expected.gather(1, torch.tensor(row["teacher_token_ids"]))
        np.testing.assert_allclose(mine.numpy(), best.values.numpy(), atol=1e-3)
        found = np.array(row["teacher_logprobs"], np.float32)
        np.testing.assert_allclose(found, best.values.numpy(), atol=2e-3, rtol=2**-10)
