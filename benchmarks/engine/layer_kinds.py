"""`python -m lorabatch.benchmarks.engine.layer_kinds [RESULT.json]`: what layers of several kinds cost beside products.

Random weights in the shapes of Qwen 3 0.6B (attention in all layers), Qwen 3.5 0.8B (the gated delta rule in three of
four) and a small Gemma 4 (shared keys, inputs of each layer), with a small vocabulary. For steps of one prompt and of
rows that decode: seconds of a step, and the share of it that the step's products take by themselves, which is the
ceiling; the rest is mixers, norms and Python. Steps and products take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.provenance import commit, cpu_name
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.model_config.model import HEAD
from lorabatch.engine.models.layers import Linear
from lorabatch.engine.request import Request, SamplingParams

NUM_TURNS, PROMPT_TOKENS, CONTEXT_TOKENS, NUM_ROWS = 7, 256, 128, 32
_QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 4096}
#: Name of a shape -> what its `config.json` says beside the vocabulary.
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen 3 0.6B": _QWEN
    | {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen 3.5 0.8B": _QWEN
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    "Gemma 4, small": {
        "model_type": "gemma4_text",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 10,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4,
        "max_position_embeddings": 4096,
    },
}


def write_shape(folder: Path, settings: dict[str, Any]) -> Path:
    """A model folder of one shape without weights, with the demo base's tokenizer and vocabulary."""
    base = base_model_folder()
    folder.mkdir()
    for file in base.iterdir():
        if "token" in file.name or file.name == "vocab.json":
            (folder / file.name).write_bytes(file.read_bytes())
    vocab_size = json.loads((base / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    sizes = {"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(settings | sizes), encoding="utf-8")
    return folder


def products(engine: Engine, num_tokens: int, num_sampled: int) -> Callable[[], None]:
    """A function that computes the products of a step of `num_tokens` tokens, `num_sampled` of which get another."""
    decoder = engine.backend.decoder
    linears: list[tuple[Linear, torch.Tensor]] = []
    for layer in decoder.layers:
        # the last layer goes on with the rows that are sampled
        behind = num_sampled if layer is decoder.layers[-1] else num_tokens
        for site, linear in layer.linears.items():
            rows = num_tokens if site in ("qkv", "all_inputs") else behind
            linears.append((linear, torch.randn(rows, linear.shape[1])))
    linears.append((decoder.linears[HEAD], torch.randn(num_sampled, decoder.linears[HEAD].shape[1])))

    def compute() -> None:
        for linear, x in linears:
            linear(x)

    return compute


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def measure(folder: Path) -> dict[str, Any]:
    """Seconds of steps and of their products, in turns."""
    config = EngineConfig(mode="unmerged", load_format="dummy", uses_prefix_cache=False)
    engine = Engine(folder, config)
    prompt = SamplingParams(max_tokens=1, ignore_eos=True)
    answer = SamplingParams(max_tokens=CONTEXT_TOKENS, ignore_eos=True)
    rows = [Request(f"row-{i}", tuple(range(3, 3 + CONTEXT_TOKENS)), None, answer) for i in range(NUM_ROWS)]
    found: dict[str, list[float]] = {"prompt": [], "prompt_products": [], "decode": [], "decode_products": []}
    of_prompt, of_rows = products(engine, PROMPT_TOKENS, 1), products(engine, NUM_ROWS, NUM_ROWS)
    for turn in range(NUM_TURNS + 1):  # the first one warms up
        engine.add([Request(f"prompt-{turn}", tuple(range(3, 3 + PROMPT_TOKENS)), None, prompt)])
        times = {"prompt": seconds(engine.step), "prompt_products": seconds(of_prompt)}
        for key, second in times.items():
            found[key] += [second] * (turn > 0)
    assert engine.num_unfinished == 0, "a prompt took more than one step"
    engine.add(rows)
    while engine.telemetry().prefill_tokens_left:
        engine.step()
    for _ in range(NUM_TURNS):
        found["decode"].append(seconds(engine.step))
        found["decode_products"].append(seconds(of_rows))
    medians = {f"{key}_s": statistics.median(values) for key, values in found.items()}
    return medians | {
        "prompt_share": medians["prompt_products_s"] / medians["prompt_s"],
        "decode_share": medians["decode_products_s"] / medians["decode_s"],
        "parameters": engine.model.layer_elements,
    }


def main() -> None:
    """Measure all shapes, print a line for each, and write the result."""
    result: dict[str, Any] = {
        "commit": commit(),
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "prompt_tokens": PROMPT_TOKENS,
        "rows": NUM_ROWS,
        "shapes": {},
    }
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        for shape, settings in SHAPES.items():
            found = result["shapes"][shape] = measure(write_shape(Path(name) / shape.replace(" ", "-"), settings))
            print(
                f"{shape}: a prompt of {PROMPT_TOKENS} tokens {found['prompt_s']:.3f} s, products "
                f"{found['prompt_share']:.0%} of it; {NUM_ROWS} rows {found['decode_s'] * 1e3:.1f} ms, products "
                f"{found['decode_share']:.0%}",
                flush=True,
            )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
