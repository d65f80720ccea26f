# Not run.
import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def chat_of(row):
    if "conversations" in row:
        turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        return turns[:-1] if turns[-1]["role"] == "assistant" else turns
    text = row.get("prompt") or row["instruction"]
    text += f"\n\n{row['input']}" if row.get("input") else ""
    return [{"role": "user", "content": text}]


config = vLLMEngineProcessorConfig(model_source="base", concurrency=1, batch_size=64)
processor = build_processor(
    config,
    preprocess=lambda row: {
        "messages": chat_of(row),
        "sampling_params": {"temperature": 0, "max_tokens": 128},
    },
    postprocess=lambda row: {**row, "answer_completion": row["generated_text"]},
)
for name, file in (("trl", "trl.jsonl"), ("alpaca", "alpaca.json"), ("sharegpt", "sharegpt.json")):
    processor(ray.data.read_json(file)).write_parquet(name)
