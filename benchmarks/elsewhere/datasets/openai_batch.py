# Not run.
import json
import time

import pandas
from openai import OpenAI

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def chat_of(row):
    if "conversations" in row:
        turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        return turns[:-1] if turns[-1]["role"] == "assistant" else turns
    text = row.get("prompt") or row["instruction"]
    text += f"\n\n{row['input']}" if row.get("input") else ""
    return [{"role": "user", "content": text}]


tables = {"trl": [json.loads(line) for line in open("trl.jsonl")]}
tables |= {name: json.load(open(f"{name}.json")) for name in ("alpaca", "sharegpt")}
with open("requests.jsonl", "w") as file:
    for name, rows in tables.items():
        for number, row in enumerate(rows):
            asked = {"model": "gpt-4o-mini", "messages": chat_of(row), "max_tokens": 128, "temperature": 0}
            request = {"custom_id": f"{name} {number}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(request | {"body": asked}) + "\n")
client = OpenAI()
uploaded = client.files.create(file=open("requests.jsonl", "rb"), purpose="batch")
batch = client.batches.create(
    input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(60)
    batch = client.batches.retrieve(batch.id)
for line in client.files.content(batch.output_file_id).text.splitlines():
    found = json.loads(line)
    name, number = found["custom_id"].split()
    answer = found["response"]["body"]["choices"][0]["message"]["content"]
    tables[name][int(number)]["answer_completion"] = answer
for name, rows in tables.items():
    pandas.DataFrame(rows).to_parquet(f"{name}.parquet")
