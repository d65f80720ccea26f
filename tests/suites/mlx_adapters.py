"""Trains adapters with mlx-lm itself, and compares its logits with PEFT's and the engine's over the same weights.

Two steps, since mlx-lm needs another version of some packages than lorabatch:

    python tests/suites/mlx_adapters.py bases WORK                # with lorabatch: tiny random bases
    python -m venv mlx && mlx/bin/pip install 'mlx[cpu]' mlx-lm
    mlx/bin/python tests/suites/mlx_adapters.py train WORK        # mlx-lm trains, saves, loads and computes logits
    python tests/suites/mlx_adapters.py compare WORK              # a line per adapter

mlx-lm runs by its own command line (`mlx_lm lora -c`), in fp32 on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BASES: dict[str, dict[str, Any]] = {
    "tied llama": {"family": "llama", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": False},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
}
#: Kind -> keys of mlx-lm's configuration.
KINDS: dict[str, dict[str, Any]] = {
    "default": {"num_layers": 2},
    "every layer": {"num_layers": -1, "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 10.0}},
    "last layer": {"num_layers": 1, "lora_parameters": {"rank": 3, "dropout": 0.1, "scale": 2.5}},
    "named keys": {
        "num_layers": 2,
        "lora_parameters": {
            "keys": ["self_attn.q_proj", "mlp.down_proj"], "rank": 16, "dropout": 0.0, "scale": 1.0,
        },
    },
    "dora": {"num_layers": 2, "fine_tune_type": "dora", "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 8.0}},
    "embedding": {
        "num_layers": 2,
        "lora_parameters": {
            "keys": ["self_attn.q_proj", "model.embed_tokens"], "rank": 4, "dropout": 0.0, "scale": 4.0,
        },
    },
    "head": {
        "num_layers": 2,
        "lora_parameters": {"keys": ["self_attn.v_proj", "lm_head"], "rank": 4, "dropout": 0.0, "scale": 4.0},
    },
    "dora of embedding": {
        "num_layers": 1,
        "fine_tune_type": "dora",
        "lora_parameters": {"keys": ["model.embed_tokens"], "rank": 2, "dropout": 0.0, "scale": 4.0},
    },
    "full": {"num_layers": 1, "fine_tune_type": "full"},
}  # fmt: skip
PROMPT = (5, 9, 21, 40, 3, 77, 14)


def make_bases(work: Path) -> None:
    """Write the bases and the training data."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from conftest import write_model

    for name, settings in BASES.items():
        config_file = write_model(work / "bases" / name, **settings) / "config.json"
        config = json.loads(config_file.read_text())
        # transformers 4's spelling: mlx-lm takes a default of its own for some families without it
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        config_file.write_text(json.dumps(config))
    rows = [{"prompt": f"the {word} is", "completion": f"a {word}, {i}"} for word in ("sea", "sun") for i in range(8)]
    (work / "data").mkdir(exist_ok=True)
    for part in ("train", "valid"):
        (work / "data" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(work: Path) -> None:
    """Train one adapter of each kind over each base, and write mlx-lm's logits beside it."""
    import mlx.core as mx
    import mlx_lm
    import numpy as np

    for base in BASES:
        model, _ = mlx_lm.load(str(work / "bases" / base))
        plain = np.array(model(mx.array([PROMPT]))[0, -1].astype(mx.float32))
        for kind, settings in KINDS.items():
            folder = work / "adapters" / base / kind
            config: dict[str, Any] = {
                "model": str(work / "bases" / base), "train": True, "data": str(work / "data"), "iters": 20,
                "batch_size": 4, "val_batches": 1, "steps_per_eval": 100, "steps_per_report": 100, "save_every": 10,
                "learning_rate": 1e-2, "adapter_path": str(folder), "fine_tune_type": "lora", "num_layers": 16,
                "seed": 1, **settings,
            }  # fmt: skip
            if (folder / "logits.npy").exists():
                continue
            folder.parent.mkdir(parents=True, exist_ok=True)
            (work / "config.yaml").write_text(json.dumps(config))
            command = [sys.executable, "-m", "mlx_lm", "lora", "-c", str(work / "config.yaml")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                print(base, kind, "mlx-lm:", done.stderr.strip().splitlines()[-1])
                continue
            try:
                adapted, _ = mlx_lm.load(str(work / "bases" / base), adapter_path=str(folder))
            except ValueError as error:
                print(base, kind, "mlx-lm:", " ".join(str(error).split()))
                continue
            logits = np.array(adapted(mx.array([PROMPT]))[0, -1].astype(mx.float32))
            np.save(folder / "logits.npy", logits)
            print(base, kind, f"largest change of a logit {np.abs(logits - plain).max():.3f}")


def compare(work: Path) -> None:
    """Print for each adapter the verdict, and the largest difference of a logit among mlx-lm, PEFT and the engine."""
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "oracle")]
    import numpy as np

    from lorabatch.engine.config import read_model_config
    from lorabatch.engine.peft import audit_adapter

    print("| base | adapter | verdict | mlx-lm and PEFT | mlx-lm and the engine |")
    print("|---|---|---|---|---|")
    for base in BASES:
        model_folder = work / "bases" / base
        for kind in KINDS:
            folder = work / "adapters" / base / kind
            if not (folder / "adapter_config.json").exists():
                print(f"| {base} | {kind} | not trained by mlx-lm | | |")
                continue
            audit = audit_adapter(folder, read_model_config(model_folder), kind)
            if audit.verdict == "refused" or not (folder / "logits.npy").exists():
                why = audit.reasons[0].partition(": ")[2] if audit.reasons else "mlx-lm does not load it"
                print(f"| {base} | {kind} | {audit.verdict}: {why} | | |")
                continue
            expected = np.load(folder / "logits.npy")
            found = _of_engine(model_folder, folder, str(audit.content_sha256))
            peft = _of_peft(model_folder, folder)
            ours = f"{np.abs(found[: len(expected)] - expected).max():.1e}"
            theirs = "" if peft is None else f"{np.abs(peft - expected).max():.1e}"
            print(f"| {base} | {kind} | {audit.verdict} | {theirs} | {ours} |")


def _of_engine(model: Path, folder: Path, adapter_id: str) -> Any:
    from peft_oracle import last_logits

    from lorabatch.engine.config import EngineConfig
    from lorabatch.engine.engine import Engine

    engine = Engine(model, EngineConfig(mode="auto", dtype="float32", pool_bytes=4 << 20))
    engine.register_adapter(adapter_id, folder, "mlx")
    return last_logits(engine, PROMPT, adapter_id).numpy()


def _of_peft(model: Path, folder: Path) -> Any:
    """Logits of PEFT, whose pairs get mlx-lm's values by hand: `lora_a` and `lora_b` transposed, scaling = scale."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    raw = json.loads((folder / "adapter_config.json").read_text())
    stored, parameters = load_file(folder / "adapters.safetensors"), raw["lora_parameters"]
    modules = sorted({key.rpartition(".")[0] for key in stored})
    is_tied = any("embed_tokens" in name for name in modules)
    config = LoraConfig(
        r=parameters["rank"],
        lora_alpha=parameters["scale"] * parameters["rank"],
        target_modules=modules,
        use_dora=raw["fine_tune_type"] == "dora",
        ensure_weight_tying=is_tied and BASES[model.name]["tie_word_embeddings"],
    )
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, config).eval()
    parts = dict(adapted.named_parameters())
    with torch.no_grad():
        for key, value in stored.items():
            module, _, part = key.rpartition(".")
            for name, parameter in parts.items():
                if not name.startswith(f"base_model.model.{module}."):
                    continue
                kind = {"lora_a": ("lora_A.", "lora_embedding_A."), "lora_b": ("lora_B.", "lora_embedding_B.")}
                wanted = kind.get(part, ("lora_magnitude_vector.",))
                if any(word in name for word in wanted):
                    parameter.copy_(value if part == "m" else value.T)
        return adapted(torch.tensor([PROMPT])).logits[0, -1].numpy()


if __name__ == "__main__":
    step, place = sys.argv[1:]
    {"bases": make_bases, "train": train, "compare": compare}[step](Path(place).absolute())
