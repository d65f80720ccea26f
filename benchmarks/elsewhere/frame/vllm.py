# Not run.
import pandas
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

rows = pandas.read_csv("tickets.csv")
ask = "Is the sentiment of this text positive or negative?\n\n"
chats = [[{"role": "user", "content": ask + body}] for body in rows["body"]]
llm = LLM(model="base", enable_lora=True)
sampling = SamplingParams(temperature=0, max_tokens=128)
adapter = LoRARequest("sentiment", 1, "adapters/sentiment")
outputs = llm.chat(chats, sampling, lora_request=adapter)
rows["completion"] = [output.outputs[0].text for output in outputs]
