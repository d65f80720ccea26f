"""Chooses the cost model of a job's engines: the job's file, this machine's profile, or a preset.

A preset is scaled from its own model and machine to the job's, and counts as a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...engine.config import DeviceKind, products_format
from ...engine.model_config.model import ModelConfig
from ...engine.model_config.partition import Partition
from ...jobs.cost_profile import profile_path, read_profile
from ...jobs.spec import JobSpec
from ...scheduler.costs.cost import CostModel
from ...scheduler.costs.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B, MACHINES

# Parameters and threads per engine that the presets stand for.
_CPU_PRESET_PARAMETERS, _CPU_PRESET_THREADS = 134.5e6, 1
# Share of the time in float32 that a format takes on a CPU, as `bench engine` has measured it.
_CPU_FORMATS = {"bfloat16": 0.6, "int8": 0.45}
# Share of the time in bfloat16 that a format takes on a GPU, by arithmetic: half the bytes of the linear weights, and
# products at twice the rate.
_GPU_FORMATS = {"fp8": 0.7}
_GPU_PRESET_PARAMETERS = 8.0e9
# Seconds of one meeting of a tensor-parallel group on a CPU, per process of the group. Processes meet twice in a layer,
# at the embedding and at the head. The time of sums among GPUs was never measured.
_MEETING_S = 30e-6


def choose_cost(
    spec: JobSpec, model_sha256: str, model: ModelConfig, kind: DeviceKind, threads: int | None
) -> tuple[CostModel, str, bool]:
    """The cost model for a job's engines: from the file `spec.cost_model`, else as `lorabatch profile` has measured it
    on this machine, else a preset. With it come its origin, a phrase for people, and whether it is a guess, not
    measured. Raises `JobRequestError` for a `cost_model` that cannot be used.
    """
    if spec.cost_model is not None:
        return read_profile(Path(spec.cost_model)).cost, f"measured, {spec.cost_model}", False
    products = products_format(kind, spec.dtype, spec.base_quantization)
    path = profile_path(model_sha256, kind, products, threads if kind == "cpu" else None, spec.tensor_parallel)
    if path.exists():
        return read_profile(path).cost, f"measured on this machine, {path}", False
    cost, origin = _preset(model, spec.tensor_parallel, kind, products, threads)
    if spec.tensor_parallel > 1 and kind == "cpu":
        meetings_s = _MEETING_S * spec.tensor_parallel * (2 * model.num_layers + 2)
        cost = replace(cost, step_s=cost.step_s + meetings_s)
    return cost, origin, True


def _preset(
    model: ModelConfig, num_members: int, kind: DeviceKind, products: str, threads: int | None
) -> tuple[CostModel, str]:
    """The preset for a kind of device, scaled to the model, and its origin. It counts the heads and features that pad a
    member's share too: three key/value heads on two members are four.
    """
    shapes = Partition(model, num_members, 0).shard.linear_shapes().values()
    parameters = num_members * sum(rows * columns for rows, columns in shapes)
    advice = "`lorabatch profile --model …` measures this machine"
    if kind == "cpu":
        factor = parameters / _CPU_PRESET_PARAMETERS * _CPU_PRESET_THREADS / (threads or _CPU_PRESET_THREADS)
        factor *= _CPU_FORMATS.get(products, 1.0)
        return CPU_SMOLLM2_135M.scaled(factor), f"a guess from a 135M model, one core each; {advice}"
    factor = parameters / num_members / _GPU_PRESET_PARAMETERS * _GPU_FORMATS.get(products, 1.0)
    sums = f", without what sums among {num_members} GPUs take" if num_members > 1 else ""
    return H200_LLAMA_3_8B.scaled(factor), f"a guess from an 8B model on an H200{sums}; {advice}"


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": hidden < 1024,
    }


_LLAMA_2_7B = _llama(4096, 32, 32, 32, 11008, 32000)
#: Name of a preset in `MACHINES` -> device, its memory in bytes, and `config.json` of the model it was made for.
MACHINE_MODELS: Mapping[str, tuple[DeviceKind, int, Mapping[str, Any]]] = MappingProxyType(
    {
        "cpu-smollm2-135m": ("cpu", 16 << 30, _llama(576, 30, 9, 3, 1536, 49152)),
        "h200-llama-3-8b": ("cuda", 141 * 10**9, _llama(4096, 32, 32, 8, 14336, 128256)),
        "dlora-a800-llama-2-7b": ("cuda", 80 << 30, _LLAMA_2_7B),
        # Four devices of 40 GB count as one, since they hold the weights once.
        "loraserve-a100-llama-7b": ("cuda", 160 * 10**9, _LLAMA_2_7B),
    }
)
#: Name of a preset -> model and device that its costs were measured or derived for, for people.
MACHINE_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "cpu-smollm2-135m": "SmolLM2-135M in fp32 on one core of an AMD EPYC, 17 GB",
        "h200-llama-3-8b": "Llama-3-8B in bf16 on one H200, 141 GB",
        "dlora-a800-llama-2-7b": "Llama-2-7B on one A800, 86 GB, by the paper of dLoRA",
        "loraserve-a100-llama-7b": "Llama-7B on four A100 that count as one, 160 GB, by the paper of LoRAServe",
    }
)
assert MACHINE_MODELS.keys() == MACHINE_TITLES.keys() == MACHINES.keys(), "a preset cost model without a machine"
