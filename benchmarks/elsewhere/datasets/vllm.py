# Not run.
import json

import pandas
from vllm import LLM, SamplingParams

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def chat_of(row):
    if "conversations" in row:
        turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        return turns[:-1] if turns[-1]["role"] == "assistant" else turns
    text = row.get("prompt") or row["instruction"]
    text += f"\n\n{row['input']}" if row.get("input") else ""
    return [{"role": "user", "content": text}]


llm = LLM(model="base")
sampling = SamplingParams(temperature=0, max_tokens=128)
for name in ("trl", "alpaca", "sharegpt"):
    if name == "trl":
        rows = [json.loads(line) for line in open("trl.jsonl")]
    else:
        rows = json.load(open(f"{name}.json"))
    outputs = llm.chat([chat_of(row) for row in rows], sampling)
    for row, output in zip(rows, outputs, strict=True):
        row["answer_completion"] = output.outputs[0].text
    pandas.DataFrame(rows).to_parquet(f"{name}.parquet")
