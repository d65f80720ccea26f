"""Which cost model a job is planned with: a file, what `lorabatch profile` has measured here, or a preset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engine.config import ModelConfig
from ..jobs.cost_profile import profile_path, read_profile
from ..jobs.spec import JobSpec
from ..scheduler.cost import CostModel
from ..scheduler.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B

# Parameters and threads per engine that the presets stand for.
_CPU_PRESET_PARAMETERS, _CPU_PRESET_THREADS = 134.5e6, 1
_GPU_PRESET_PARAMETERS = 8.0e9
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class ChosenCost:
    """A cost model and where it comes from, as a phrase for people."""

    cost: CostModel
    origin: str


def choose_cost(spec: JobSpec, model_sha256: str, model: ModelConfig, threads: int | None) -> ChosenCost:
    """The cost model for a job's engines. Raises `JobRequestError` for a `cost_model` that cannot be used."""
    if spec.cost_model is not None:
        return ChosenCost(read_profile(Path(spec.cost_model)).cost, f"measured, {spec.cost_model}")
    device = device_kind(spec.device)
    dtype = spec.dtype if spec.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    path = profile_path(model_sha256, device, dtype, threads if device == "cpu" else None)
    if path.exists():
        return ChosenCost(read_profile(path).cost, f"measured on this machine, {path}")
    return _preset(model, device, threads)


def device_kind(device: str) -> str:
    """`cpu` or `cuda`, as engines of this machine would choose."""
    if device != "auto":
        return device.partition(":")[0]
    return "cuda" if _NVIDIA_DRIVER.exists() else "cpu"


def _preset(model: ModelConfig, device: str, threads: int | None) -> ChosenCost:
    parameters = sum(rows * columns for rows, columns in model.linear_shapes().values())
    advice = "`lorabatch profile --model …` measures this machine"
    if device == "cpu":
        factor = parameters / _CPU_PRESET_PARAMETERS * _CPU_PRESET_THREADS / (threads or _CPU_PRESET_THREADS)
        return ChosenCost(CPU_SMOLLM2_135M.scaled(factor), f"a guess from a 135M model, one core each; {advice}")
    factor = parameters / _GPU_PRESET_PARAMETERS
    return ChosenCost(H200_LLAMA_3_8B.scaled(factor), f"a guess from an 8B model on an H200; {advice}")
