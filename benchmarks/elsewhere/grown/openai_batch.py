# Not run. Adapters of one's own cannot be named: `model` is one that OpenAI has fine-tuned.
import json
import time

import pandas
from openai import OpenAI

old = pandas.read_parquet("answers.parquet")
rows = pandas.read_csv("tickets.csv")
rows = rows[~rows["ticket_id"].isin(old["ticket_id"])].reset_index(drop=True)
ask = "Is the sentiment of this text positive or negative?\n\n"
with open("requests.jsonl", "w") as file:
    for number, body in enumerate(rows["body"]):
        chat = [{"role": "user", "content": ask + body}]
        asked = {"model": "ft:gpt-4o-mini:team:sentiment", "messages": chat, "max_tokens": 128, "temperature": 0}
        request = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": asked}
        file.write(json.dumps(request) + "\n")
client = OpenAI()
uploaded = client.files.create(file=open("requests.jsonl", "rb"), purpose="batch")
batch = client.batches.create(
    input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(60)
    batch = client.batches.retrieve(batch.id)
answers = {}
for line in client.files.content(batch.output_file_id).text.splitlines():
    found = json.loads(line)
    answers[int(found["custom_id"])] = found["response"]["body"]["choices"][0]["message"]["content"]
rows["completion"] = rows.index.map(answers)
pandas.concat([old, rows]).to_parquet("answers.parquet")
