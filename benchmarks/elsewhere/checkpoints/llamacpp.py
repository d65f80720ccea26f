# Not run.
import pandas
import requests

prompts = pandas.read_csv("prompts.csv")
url = "http://127.0.0.1:8080/v1/chat/completions"
tables = []
for number, name in enumerate(("base", "checkpoint-500", "checkpoint-1000", "checkpoint-1500")):
    loras = [{"id": other, "scale": float(other == number - 1)} for other in range(3)]
    texts = []
    for prompt in prompts["prompt"]:
        chat = [{"role": "user", "content": prompt}]
        asked = {"messages": chat, "temperature": 0, "max_tokens": 128, "lora": loras}
        reply = requests.post(url, json=asked, timeout=600)
        texts.append(reply.json()["choices"][0]["message"]["content"])
    tables.append(prompts.assign(adapter=name, completion=texts))
pandas.concat(tables).to_parquet("answers.parquet")
