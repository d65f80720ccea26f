"""Configurations as they are in public repositories, keys and values, each with its verdict; paths are shortened."""

from __future__ import annotations

from typing import Any

import pytest

from lorabatch.engine.peft.dialects import translate
from lorabatch.engine.peft.findings import Ledger
from lorabatch.engine.peft.names import base_layout

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# Keys that PEFT wrote in its versions, each with those of the one before.
PEFT_02: dict[str, Any] = {
    "base_model_name_or_path": "meta-llama/Llama-2-7b-hf", "bias": "none", "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "lora_alpha": 16, "lora_dropout": 0.05, "modules_to_save": None,
    "peft_type": "LORA", "r": 8, "target_modules": ATTENTION, "task_type": "CAUSAL_LM",
}  # fmt: skip
PEFT_05 = PEFT_02 | dict.fromkeys(("auto_mapping", "layers_pattern", "layers_to_transform", "revision"))
PEFT_11: dict[str, Any] = PEFT_05 | {
    "alpha_pattern": {}, "layer_replication": None, "loftq_config": {}, "megatron_config": None,
    "megatron_core": "megatron.core", "rank_pattern": {}, "use_dora": False, "use_rslora": False,
}  # fmt: skip
PEFT_14 = PEFT_11 | {"eva_config": None, "exclude_modules": None, "lora_bias": False}
PEFT_16: dict[str, Any] = PEFT_14 | {
    "corda_config": None, "qalora_group_size": 16, "trainable_token_indices": None, "use_qalora": False,
}  # fmt: skip
PEFT_18: dict[str, Any] = PEFT_16 | {
    "alora_invocation_tokens": None, "arrow_config": None, "ensure_weight_tying": False, "peft_version": "0.18.1",
    "target_parameters": None,
}  # fmt: skip
# Keys that mlx-lm writes, likewise.
MLX_13: dict[str, Any] = {
    "adapter_path": "adapters", "batch_size": 4, "config": "lora_config.yaml", "data": "data", "grad_checkpoint": True,
    "iters": 6000, "learning_rate": 1e-06, "lora_layers": 32, "lr_schedule": None, "max_seq_length": 8192,
    "model": "meta-llama/Meta-Llama-3-8B-Instruct", "resume_adapter_file": "adapters/0000790_adapters.safetensors",
    "save_every": 100, "seed": 0, "steps_per_eval": 100, "steps_per_report": 10, "test": True, "test_batches": 100,
    "train": True, "val_batches": 100,
}  # fmt: skip
MLX_20 = {key: value for key, value in MLX_13.items() if key != "lora_layers"} | {
    "fine_tune_type": "lora",
    "num_layers": 8,
    "lora_parameters": {"rank": 8, "alpha": 16, "dropout": 0.0, "scale": 10.0},
    "model": "microsoft/Phi-3-mini-4k-instruct",
}
MLX_25: dict[str, Any] = MLX_20 | {
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0}, "mask_prompt": False, "num_layers": 16,
    "optimizer": "adam", "optimizer_config": {"adam": {}, "adamw": {}, "muon": {}, "sgd": {}, "adafactor": {}},
    "project_name": None, "report_to": None, "wandb": None, "model": "mlx-community/Qwen2.5-14B-Instruct-4bit",
}  # fmt: skip
MLX_30 = MLX_25 | {"clear_cache_threshold": 0, "grad_accumulation_steps": 1, "model": "Qwen/Qwen3-1.7B-MLX-4bit"}

ALL_OF_QWEN35 = [*LINEAR, "linear_fc1", "linear_fc2", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
PEFT: dict[str, tuple[dict[str, Any], str | None]] = {
    "0.2, with keys of 0.1": (PEFT_02 | {"enable_lora": None, "merge_weights": False}, None),
    "0.5 on Phi-1.5": (PEFT_05 | {"r": 16, "target_modules": ["fc1", "fc2", "Wqkv", "out_proj"]}, None),
    "0.11 on GLM-4": (PEFT_11 | {"target_modules": ["dense", "dense_h_to_4h", "query_key_value"]}, None),
    "Unsloth, 4 bits": (
        PEFT_14
        | {"base_model_name_or_path": "unsloth/qwen2.5-7b-instruct-unsloth-bnb-4bit", "lora_dropout": 0, "r": 32}
        | {"lora_alpha": 32, "target_modules": LINEAR},
        None,
    ),
    "a classifier of BERT": (
        # Its configuration is that of any classifier; its tensors are refused (`test_heads.py`).
        PEFT_16 | {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]},
        None,
    ),
    "0.18": (PEFT_18 | {"r": 32, "lora_alpha": 64, "target_modules": LINEAR}, None),
    "0.18, SEQ_2_SEQ_LM on a decoder": (
        PEFT_18 | {"task_type": "SEQ_2_SEQ_LM", "target_modules": ALL_OF_QWEN35, "r": 16, "lora_alpha": 32},
        None,
    ),
    "0.18 on FLAN-T5": (PEFT_18 | {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "k", "v", "o"]}, None),
    "rank-stabilised": (PEFT_18 | {"use_rslora": True, "r": 32, "lora_alpha": 64}, None),
    "Tinker": (
        {"base_model_name_or_path": "Qwen/Qwen3.5-9B", "peft_type": "LORA", "r": 32, "lora_alpha": 32}
        | {"target_modules": "all-linear", "peft_version": "0.18.1", "use_rslora": False, "use_dora": False}
        | {"lora_dropout": 0},
        None,
    ),
}
MLX: dict[str, tuple[dict[str, Any], str | None]] = {
    "0.14, alpha twice the rank": (
        MLX_13
        | {"use_dora": False}
        | {"lora_parameters": {"keys": ["mlp.gate_proj"], "rank": 128, "alpha": 256, "scale": 10.0, "dropout": 0.05}},
        "alpha differs from rank",
    ),
    "0.20": (MLX_20, None),
    "0.25": (MLX_25, None),
    "0.25, with alpha": (MLX_25 | {"lora_parameters": {"rank": 16, "alpha": 32, "scale": 2.0, "dropout": 0.1}}, None),
    "0.30": (MLX_30, None),
    "written by hand": ({"num_layers": 8, "lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.3}}, None),
    "mlx-lm and PEFT in one": (
        PEFT_02 | {"fine_tune_type": "lora", "num_layers": 48} | {"lora_parameters": {"rank": 8, "scale": 2.0}},
        None,
    ),
    "a full fine-tune": (MLX_30 | {"fine_tune_type": "full"}, "holds whole weights"),
    "mlx-vlm": ({"rank": 8, "alpha": 16, "dropout": 0.1}, "lora_parameters=None: expected an object with rank"),
}


@pytest.mark.parametrize(
    ("dialect", "name"), [*(("peft", name) for name in PEFT), *(("mlx", name) for name in MLX)], ids=str
)
def test_each_configuration_is_served_or_refused_by_name(dialect: Any, name: str, llama: Any) -> None:
    raw, refused = (PEFT if dialect == "peft" else MLX)[name]
    ledger = Ledger()
    config, _ = translate(dialect, raw, (), base_layout(llama.config), ledger)
    reasons = " ".join(ledger.reasons(name))
    assert set(ledger.key_uses) >= set(raw)
    if refused is None:
        assert reasons == ""
        expected = raw["lora_parameters"]["scale"] if dialect == "mlx" else None
        if expected is None:
            expected = raw["lora_alpha"] / raw["r"] ** (0.5 if raw.get("use_rslora") else 1)
        assert config.scalings(["x"])["x"] == pytest.approx(expected)
    else:
        assert refused in reasons
