# Not run.
import os

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

config = vLLMEngineProcessorConfig(
    model_source="base",
    engine_kwargs={"enable_lora": True, "max_lora_rank": 16, "max_loras": 3},
    concurrency=1,
    batch_size=64,
)
names = ["base", "checkpoint-500", "checkpoint-1000", "checkpoint-1500"]
models = {name: os.path.abspath(f"runs/17/{name}") for name in names} | {"base": "base"}
processor = build_processor(
    config,
    preprocess=lambda row: {
        "model": models[row["adapter"]],
        "messages": [{"role": "user", "content": row["prompt"]}],
        "sampling_params": {"temperature": 0, "max_tokens": 128},
    },
    postprocess=lambda row: {**row, "completion": row["generated_text"]},
)
rows = ray.data.read_csv("prompts.csv").flat_map(lambda row: [{**row, "adapter": name} for name in names])
processor(rows).write_parquet("answers")
