"""The sections of the benchmark: what each measures, and its share of the time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.ceilings import measure_ceilings, measured_peaks
from lorabatch.benchmarks.gpu.checks import run_checks
from lorabatch.benchmarks.gpu.device import Peaks, describe, peaks_of
from lorabatch.benchmarks.gpu.engine_matrix import measure_engine
from lorabatch.benchmarks.gpu.loading import measure_loading
from lorabatch.benchmarks.gpu.measure import Matrix, measure_kernels, measure_layer, measure_switches
from lorabatch.benchmarks.gpu.model_folder import write_model_folder
from lorabatch.benchmarks.gpu.ours import PeerWorkload, measure_ours
from lorabatch.benchmarks.gpu.peers import measure_peft
from lorabatch.benchmarks.gpu.points import EngineMatrix, exact_matrix, full_matrix, tiny_exact_matrix, tiny_matrix
from lorabatch.benchmarks.gpu.probe import measure_probe
from lorabatch.benchmarks.gpu.reading import Reading, measure_reading
from lorabatch.benchmarks.gpu.sanitizer import run_sanitizer
from lorabatch.benchmarks.gpu.shapes import TINY, ModelShape
from lorabatch.benchmarks.gpu.steady import SteadyMatrix, full_jobs, measure_steady, tiny_jobs
from lorabatch.benchmarks.gpu.variants import VARIANT_S, VariantSizes, measure_variant, tiny_variants, variant_sizes
from lorabatch.benchmarks.gpu.vllm_peer import measure_vllm
from lorabatch.benchmarks.gpu.warm_up import compile_all

_H200 = Peaks(4.8e12, 989e12)

Save = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of all sections."""

    #: Model whose shapes are measured.
    shape: ModelShape
    #: Number formats in which kernels are compiled and checked; the first is the measured one.
    dtypes: tuple[torch.dtype, ...]
    #: Sizes of sections `kernels` and `layer`.
    kernels: Matrix
    #: Measurements of section `engine`.
    engine: EngineMatrix
    #: Measurements of section `exact`.
    exact: EngineMatrix
    #: Jobs of section `steady`.
    steady: SteadyMatrix
    #: Sizes of section `variant`.
    variant: VariantSizes
    #: Adapters that section `loading` reads part by part.
    reading: Reading
    #: Workloads of section `ours`: those of the peers.
    ours: tuple[PeerWorkload, ...]
    #: Rows of section `peft`.
    peer_batch: int
    #: Adapters of section `peft`.
    peer_adapters: int
    #: Tokens of each answer in section `peft`.
    peer_tokens: int
    #: Most tokens of an answer in section `problems`.
    check_tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """Surroundings of a section. `save`: called with its results so far. `folder`: of its other files and of earlier
    sections' results; None: there is none.
    """

    device: torch.device
    deadline: Deadline
    save: Save
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the benchmark, which runs in a process of its own. `seconds`: most that it may take."""

    name: str
    seconds: float
    measure: Callable[[Scale, Place], Any]


def full_scale(shape: ModelShape) -> Scale:
    """Sizes for a GPU."""
    return Scale(
        shape,
        (torch.bfloat16, torch.float32, torch.float16),
        Matrix(),
        full_matrix(),
        exact_matrix(),
        full_jobs(),
        variant_sizes(),
        Reading(num_adapters=8, threads=(1, 4, 8), repeats=2),
        # PEFT's and vLLM's
        (*_peers("peft", 256, 32, 32, 16), *_peers("vllm", 256, 128, 64, 16)),
        peer_batch=256,
        peer_adapters=16,
        peer_tokens=32,
        check_tokens=12,
    )


def _peers(peer: str, batch: int, prompt_tokens: int, num_tokens: int, adapters: int) -> list[PeerWorkload]:
    return [PeerWorkload(peer, batch, prompt_tokens, num_tokens, count) for count in (0, adapters)]


def tiny_scale() -> Scale:
    """Sizes for a CPU and Triton's interpreter, whose numbers mean nothing."""
    kernels = Matrix(batches=(2,), adapters=(1, 2), prompts=((2, 5),), ranks=(8,), context=20)
    ours = tuple(_peers("peft", 2, 4, 3, 2))
    reading = Reading(num_adapters=2, repeats=1)
    return Scale(
        TINY,
        (torch.float32,),
        kernels,
        tiny_matrix(),
        tiny_exact_matrix(),
        tiny_jobs(),
        tiny_variants(),
        reading,
        ours,
        2,
        2,
        3,
        2,
    )


def _probe(scale: Scale, place: Place) -> dict[str, str]:
    return measure_probe(place.device, place.deadline, place.save)


def _compile(scale: Scale, place: Place) -> dict[str, Any]:
    return compile_all(scale.shape, scale.dtypes, place.device, place.deadline, place.save)


def _ceilings(scale: Scale, place: Place) -> dict[str, Any]:
    return measure_ceilings(scale.shape, place.device, place.deadline, place.save)


def _checks(scale: Scale, place: Place) -> list[str]:
    sizes = list(scale.dtypes), scale.check_tokens, scale.shape
    return run_checks(*sizes, place.device, place.deadline, place.save)


def _kernels(scale: Scale, place: Place) -> list[dict[str, Any]]:
    return measure_kernels(scale.shape, scale.kernels, _peaks(place), place.device, place.deadline, place.save)


def _switches(scale: Scale, place: Place) -> dict[str, float]:
    return measure_switches(scale.shape, _peaks(place), place.device)


def _engine(scale: Scale, place: Place) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", scale.shape)
        pool_bytes = _pool_bytes(place.device)
        return measure_engine(folder, scale.engine, place.device, pool_bytes, place.deadline, place.save)


def _exact(scale: Scale, place: Place) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", scale.shape)
        sizes = scale.exact, place.device, _pool_bytes(place.device)
        return measure_engine(folder, *sizes, place.deadline, place.save, is_exact=True)


def _steady(scale: Scale, place: Place) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", scale.shape)
        pool_bytes = _pool_bytes(place.device)
        return measure_steady(folder, scale.steady, place.device, pool_bytes, place.deadline, place.save, place.folder)


def _loading(scale: Scale, place: Place) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", scale.shape)
        found = measure_loading(folder, place.device, place.deadline, place.save)
        reading = measure_reading(folder, scale.reading, place.device, place.deadline, lambda _: None)
        return found | {f"reading_{name}": value for name, value in reading.items()}


def _ours(scale: Scale, place: Place) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", scale.shape)
        pool_bytes = _pool_bytes(place.device)
        return measure_ours(folder, scale.ours, place.device, pool_bytes, place.deadline, place.save)


def _sanitizer(scale: Scale, place: Place) -> dict[str, Any]:
    return run_sanitizer(place.device, place.deadline, place.save)


def _variant(scale: Scale, place: Place) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", scale.shape)
        sizes = scale.shape, scale.variant, _peaks(place), scale.dtypes[0]
        return measure_variant(folder, *sizes, place.device, _pool_bytes(place.device), place.deadline, place.save)


def _peft(scale: Scale, place: Place) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", scale.shape)
        sizes = scale.peer_batch, scale.peer_adapters, 16, scale.peer_tokens
        return measure_peft(folder, *sizes, place.device, place.deadline)


def _vllm(scale: Scale, place: Place, has_lora: bool = True) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", scale.shape)
        return measure_vllm(folder, scale.shape, place.device, place.deadline, place.save, has_lora)


def _vllm_base(scale: Scale, place: Place) -> dict[str, Any]:
    return _vllm(scale, place, has_lora=False)


def _layer(scale: Scale, place: Place) -> list[dict[str, Any]]:
    return measure_layer(scale.shape, scale.kernels, place.device, place.deadline, place.save)


SECTIONS = (
    Section("probe", 25.0, _probe),
    Section("compile", 60.0, _compile),
    Section("problems", 90.0, _checks),
    Section("ceilings", 20.0, _ceilings),
    Section("engine", 140.0, _engine),
    Section("ours", 30.0, _ours),
    Section("peft", 40.0, _peft),
    Section("steady", 100.0, _steady),
    Section("kernels", 40.0, _kernels),
    Section("switches", 15.0, _switches),
    Section("exact", 50.0, _exact),
    Section("loading", 35.0, _loading),
    Section("sanitizer", 30.0, _sanitizer),
    Section("vllm", 100.0, _vllm),
    Section("layer", 40.0, _layer),
    Section("vllm_base", 80.0, _vllm_base),
)
#: Section that is measured for each variant, and in no other run.
VARIANT = Section("variant", VARIANT_S, _variant)


def _peaks(place: Place) -> Peaks:
    """Rates of the device as section `ceilings` has measured them, else those of its data sheet, or an H200's for a
    device that is not listed."""
    listed = peaks_of(describe(place.device)["device"]) or _H200
    path = None if place.folder is None else place.folder / "ceilings.json"
    if path is None or not path.exists():
        return listed
    return measured_peaks(json.loads(path.read_text(encoding="utf-8")).get("value"), listed)


def _pool_bytes(device: torch.device) -> int | None:
    """None on a GPU: engines give the pool what weights, merged copies and the largest step leave."""
    return None if device.type == "cuda" else 8 << 20
