# Not run.
import pandas
import requests

URL = "http://127.0.0.1:8080/v1/chat/completions"


def ask(text, scale, **options):
    asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 128}
    asked |= {"lora": [{"id": 0, "scale": scale}], **options}
    return requests.post(URL, json=asked, timeout=600).json()["choices"][0]["message"]["content"]


rows = pandas.read_csv("prompts.csv")
rows["completion"] = [ask(prompt, 1.0) for prompt in rows["prompt"]]
grammar = 'root ::= "yes" | "no"'
rows["judge_completion"] = [
    ask(f"Does a pirate say this?\n\n{text}", 0.0, grammar=grammar) for text in rows["completion"]
]
rows.to_parquet("judged.parquet")
