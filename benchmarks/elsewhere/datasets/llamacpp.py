# Not run.
import json

import pandas
import requests

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def chat_of(row):
    if "conversations" in row:
        turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        return turns[:-1] if turns[-1]["role"] == "assistant" else turns
    text = row.get("prompt") or row["instruction"]
    text += f"\n\n{row['input']}" if row.get("input") else ""
    return [{"role": "user", "content": text}]


url = "http://127.0.0.1:8080/v1/chat/completions"
for name in ("trl", "alpaca", "sharegpt"):
    if name == "trl":
        rows = [json.loads(line) for line in open("trl.jsonl")]
    else:
        rows = json.load(open(f"{name}.json"))
    for row in rows:
        asked = {"messages": chat_of(row), "temperature": 0, "max_tokens": 128}
        reply = requests.post(url, json=asked, timeout=600)
        row["answer_completion"] = reply.json()["choices"][0]["message"]["content"]
    pandas.DataFrame(rows).to_parquet(f"{name}.parquet")
