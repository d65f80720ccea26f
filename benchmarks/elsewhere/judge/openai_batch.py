# Not run.
import json
import time

import pandas
from openai import OpenAI

client = OpenAI()


def ask(texts, model, **options):
    with open("requests.jsonl", "w") as file:
        for number, text in enumerate(texts):
            chat = [{"role": "user", "content": text}]
            asked = {"model": model, "messages": chat, "max_tokens": 128, "temperature": 0, **options}
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": asked}
            file.write(json.dumps(request) + "\n")
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
    return [answers.get(number) for number in range(len(texts))]


rows = pandas.read_csv("prompts.csv")
rows["completion"] = ask(list(rows["prompt"]), "ft:gpt-4o-mini:team:pirate")
schema = {
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
judged = ask([f"Does a pirate say this?\n\n{text}" for text in rows["completion"]], "gpt-4o-mini", response_format=form)
rows["judge_completion"] = [text and json.loads(text)["verdict"] for text in judged]
rows.to_parquet("judged.parquet")
