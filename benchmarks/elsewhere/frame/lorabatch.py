import lorabatch
import pandas

rows = pandas.read_csv("tickets.csv")
ask = "Is the sentiment of this text positive or negative?\n\n{{ body }}"
job = {"model": "base", "adapters": "adapters/sentiment", "prompt_template": ask}
lorabatch.run(**job, input=rows, output="answers")
answers = lorabatch.Job("answers").to_pandas()
