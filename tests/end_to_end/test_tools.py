"""A job whose rows have tools, with the real command and the real engine, against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_TOKENS = 12
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "é"}}</tool_call>'


@pytest.mark.long
def test_rows_with_tools_are_answered_as_transformers_does_and_their_calls_are_read(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", max_position_embeddings=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    parameters = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "now", "description": "The time", "parameters": parameters}}]
    rows: list[dict[str, Any]] = [
        {
            "id": f"{kind}-{i}",
            "messages": [{"role": "user", "content": f"what time is it {i}"}],
            "tools": tools if i % 2 else None,
            "max_tokens": MAX_TOKENS if kind == "free" else 400,
            "choice": None if kind == "free" else [CALL],
            # A random model writes this letter soon.
            "reasoning_markers": ",e" if kind == "thoughtful" else None,
            "temperature": 1.5 if kind == "thoughtful" else None,
        }
        for kind in ("free", "call", "thoughtful")
        for i in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    command = [sys.executable, "-m", "lorabatch", "run", "--model", str(model), "--workers", "1"]
    command += ["--input", str(tmp_path / "input.parquet"), "--output", str(tmp_path / "output")]
    command += ["--tool-call-parser", "hermes", "--mode", "exact", "--row-settings", "all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    parts = [pq.read_table(part) for part in sorted((tmp_path / "output").glob("part-*.parquet"))]
    found = {row["id"]: row for row in pa.concat_tables(parts).to_pylist()}
    assert {row["id"]: found[row["id"]]["error"] for row in rows} == {row["id"]: None for row in rows}
    expected = greedy_texts(model, rows[:4])
    assert {name: found[name]["completion"] for name in expected} == {
        name: text for name, (text, _) in expected.items()
    }
    assert {name: found[name]["prompt_tokens"] for name in expected} == {name: n for name, (_, n) in expected.items()}
    for row in rows:
        answer = found[row["id"]]
        calls = [(call["name"], json.loads(call["arguments"])) for call in answer["tool_calls"]]
        assert calls == ([("now", {"zone": "é"})] if row["choice"] else [])
        assert answer["completion"] == CALL if row["choice"] else CALL not in answer["completion"]
        assert (answer["reasoning"] is not None) == bool(row["reasoning_markers"])
        assert "e" not in (answer["reasoning"] or "")
    ids = [call["id"] for row in found.values() for call in row["tool_calls"]]
    assert len(set(ids)) == 8
    assert {len(found_id) for found_id in ids} == {9}


def greedy_texts(model_folder: Path, rows: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Completion and tokens of the prompt of each row, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    texts = {}
    for row in rows:
        inputs = tokenizer.apply_chat_template(
            row["messages"], tools=row["tools"], add_generation_prompt=True, return_tensors="pt"
        )
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
        num_prompt = inputs["input_ids"].shape[1]
        texts[row["id"]] = (tokenizer.decode(tokens[0, num_prompt:], skip_special_tokens=True), num_prompt)
    return texts
