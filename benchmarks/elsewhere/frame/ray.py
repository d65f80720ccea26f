# Not run.
import os

import pandas
import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

rows = pandas.read_csv("tickets.csv")
config = vLLMEngineProcessorConfig(
    model_source="base",
    engine_kwargs={"enable_lora": True, "max_lora_rank": 16},
    concurrency=1,
    batch_size=64,
)
ask = "Is the sentiment of this text positive or negative?\n\n"
processor = build_processor(
    config,
    preprocess=lambda row: {
        "model": os.path.abspath("adapters/sentiment"),
        "messages": [{"role": "user", "content": ask + row["body"]}],
        "sampling_params": {"temperature": 0, "max_tokens": 128},
    },
    postprocess=lambda row: {**row, "completion": row["generated_text"]},
)
answers = processor(ray.data.from_pandas(rows)).to_pandas()
