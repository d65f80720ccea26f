# Not run.
import os

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

config = vLLMEngineProcessorConfig(
    model_source="base",
    engine_kwargs={"enable_lora": True, "max_lora_rank": 16},
    concurrency=1,
    batch_size=64,
)
draft = build_processor(
    config,
    preprocess=lambda row: {
        "model": os.path.abspath("adapters/pirate"),
        "messages": [{"role": "user", "content": row["prompt"]}],
        "sampling_params": {"temperature": 0, "max_tokens": 128},
    },
    postprocess=lambda row: {**row, "completion": row["generated_text"]},
)
judge = build_processor(
    config,
    preprocess=lambda row: {
        "messages": [{"role": "user", "content": "Does a pirate say this?\n\n" + row["completion"]}],
        "sampling_params": {"temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}},
    },
    postprocess=lambda row: {**row, "judge_completion": row["generated_text"]},
)
judge(draft(ray.data.read_csv("prompts.csv"))).write_parquet("judged")
