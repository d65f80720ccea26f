# Not run. The models are checkpoints of a fine-tuning job of OpenAI's.
import json
import time

import pandas
from openai import OpenAI

MODELS = ["gpt-4o-mini", *(f"ft:gpt-4o-mini:team:run17:ckpt-step-{step}" for step in (500, 1000, 1500))]
prompts = pandas.read_csv("prompts.csv")
client = OpenAI()
batches = {}
for model in MODELS:
    with open("requests.jsonl", "w") as file:
        for number, prompt in enumerate(prompts["prompt"]):
            chat = [{"role": "user", "content": prompt}]
            asked = {"model": model, "messages": chat, "max_tokens": 128, "temperature": 0}
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": asked}
            file.write(json.dumps(request) + "\n")
    uploaded = client.files.create(file=open("requests.jsonl", "rb"), purpose="batch")
    batches[model] = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
tables = []
for model, batch in batches.items():
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(60)
        batch = client.batches.retrieve(batch.id)
    answers = {}
    for line in client.files.content(batch.output_file_id).text.splitlines():
        found = json.loads(line)
        answers[int(found["custom_id"])] = found["response"]["body"]["choices"][0]["message"]["content"]
    tables.append(prompts.assign(adapter=model, completion=prompts.index.map(answers)))
pandas.concat(tables).to_parquet("answers.parquet")
