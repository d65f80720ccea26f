# Not run.
import pandas
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

prompts = pandas.read_csv("prompts.csv")
chats = [[{"role": "user", "content": prompt}] for prompt in prompts["prompt"]]
llm = LLM(model="base", enable_lora=True, max_loras=3)
sampling = SamplingParams(temperature=0, max_tokens=128)
tables = []
for number, step in enumerate((None, 500, 1000, 1500)):
    name = step and f"checkpoint-{step}"
    adapter = step and LoRARequest(name, number, f"runs/17/{name}")
    outputs = llm.chat(chats, sampling, lora_request=adapter)
    texts = [output.outputs[0].text for output in outputs]
    tables.append(prompts.assign(adapter=name, completion=texts))
pandas.concat(tables).to_parquet("answers.parquet")
