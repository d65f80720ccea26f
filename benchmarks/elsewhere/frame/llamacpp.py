# Not run.
import pandas
import requests

rows = pandas.read_csv("tickets.csv")
ask = "Is the sentiment of this text positive or negative?\n\n"
url = "http://127.0.0.1:8080/v1/chat/completions"
answers = []
for body in rows["body"]:
    chat = [{"role": "user", "content": ask + body}]
    reply = requests.post(url, json={"messages": chat, "temperature": 0, "max_tokens": 128}, timeout=600)
    answers.append(reply.json()["choices"][0]["message"]["content"])
rows["completion"] = answers
