# Not run.
import pandas
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

rows = pandas.read_csv("prompts.csv")
llm = LLM(model="base", enable_lora=True)
chats = [[{"role": "user", "content": prompt}] for prompt in rows["prompt"]]
sampling = SamplingParams(temperature=0, max_tokens=128)
drafts = llm.chat(chats, sampling, lora_request=LoRARequest("pirate", 1, "adapters/pirate"))
rows["completion"] = [output.outputs[0].text for output in drafts]
chats = [[{"role": "user", "content": f"Does a pirate say this?\n\n{text}"}] for text in rows["completion"]]
choice = StructuredOutputsParams(choice=["yes", "no"])
verdicts = llm.chat(chats, SamplingParams(temperature=0, structured_outputs=choice))
rows["judge_completion"] = [output.outputs[0].text for output in verdicts]
rows.to_parquet("judged.parquet")
