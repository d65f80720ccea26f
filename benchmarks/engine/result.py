"""Results of the engine benchmark as JSON and as tables: medians, ratios within a repeat, memory.

Ratios are taken between systems of the same repeat, then their median: a machine that slows down slows all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lorabatch.benchmarks.engine.workload import EngineWorkload
from lorabatch.kernels.packed_weight import Products

NO_LORA, UNMERGED, MERGED = "lorabatch no LoRA", "lorabatch unmerged", "lorabatch merged"
MERGED_ONE = "lorabatch merged, all rows of one adapter"
#: Number formats of products beside fp32, and how much faster whole runs should be: all adapters, and without LoRA.
FORMATS: Mapping[Products, tuple[float, float]] = {"bfloat16": (1.5, 1.5), "int8": (2.0, 1.9)}
PRODUCTS: tuple[Products, ...] = ("float32", *FORMATS)
#: Options of an engine or a job that multiplies in a format.
FORMAT_OPTIONS: Mapping[Products, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"base_quantization": "int8"},
}
LLAMA_CPP, LLAMA_CPP_NO_LORA = "llama.cpp", "llama.cpp no LoRA"
OPENVINO, OPENVINO_NO_LORA, OPENVINO_FUSED = "OpenVINO", "OpenVINO no LoRA", "OpenVINO fused"
CEILING, TORCH_CEILING = "GEMM ceiling", "GEMM ceiling, torch's linear"


def in_format(system: str, products: Products) -> str:
    """A system with products in another format than fp32."""
    return system if products == "float32" else f"{system}, {products}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one system. `switching_s`: of `seconds`, what went into merging weights."""

    seconds: float
    peak_bytes: int
    tokens: list[list[int]]
    switching_s: float = 0.0

    @property
    def stepping_s(self) -> float:
        return self.seconds - self.switching_s


Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How two systems compare, and what is aimed at."""

    name: str
    goal: float
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def ratios(runs: Runs, num_adapters: int = 8) -> list[Ratio]:
    """The comparisons that the systems which ran allow."""
    peer_goal = 2.0 if num_adapters > 1 else 1.0

    def over(upper: str, lower: str, *, without_switches: bool = False) -> list[float]:
        pairs = zip(runs.get(upper, ()), runs.get(lower, ()), strict=False)
        if without_switches:
            return [a.stepping_s / b.stepping_s for a, b in pairs]
        return [a.seconds / b.seconds for a, b in pairs]

    all_ratios = [
        Ratio("unmerged against PEFT merged", 4.0, over("PEFT merged", UNMERGED)),
        Ratio("unmerged against PEFT mixed", 6.0, over("PEFT mixed", UNMERGED)),
        Ratio("merged, steps alone, share of no-LoRA speed", 0.98, over(NO_LORA, MERGED_ONE, without_switches=True)),
        Ratio("unmerged, share of the GEMM ceiling", 0.70, over(CEILING, UNMERGED)),
        Ratio("unmerged, share of the GEMM ceiling of torch's linear", 0.70, over(TORCH_CEILING, UNMERGED)),
    ]
    for products in PRODUCTS:
        label = "" if products == "float32" else f"{products} "
        lora, no_lora = in_format(UNMERGED, products), in_format(NO_LORA, products)
        if products != "float32":
            goal, no_lora_goal = FORMATS[products]
            all_ratios += [
                Ratio(f"{label}against float32, unmerged", goal, over(UNMERGED, lora)),
                Ratio(f"{label}against float32, no LoRA", no_lora_goal, over(NO_LORA, no_lora)),
            ]
        # it adds its one adapter to the weights while it loads them
        fused, merged = in_format(OPENVINO_FUSED, products), in_format(MERGED, products)
        of_fused = over(fused, merged, without_switches=True)
        all_ratios += [
            Ratio(f"{label}unmerged, share of no-LoRA speed", 0.85, over(no_lora, lora)),
            Ratio(f"{label}unmerged against llama.cpp", peer_goal, over(in_format(LLAMA_CPP, products), lora)),
            Ratio(f"{label}no LoRA against llama.cpp", 1.0, over(in_format(LLAMA_CPP_NO_LORA, products), no_lora)),
            Ratio(f"{label}unmerged against OpenVINO", peer_goal, over(in_format(OPENVINO, products), lora)),
            Ratio(f"{label}no LoRA against OpenVINO", 1.0, over(in_format(OPENVINO_NO_LORA, products), no_lora)),
            Ratio(f"{label}merged, steps alone, against OpenVINO fused", 1.0, of_fused),
        ]
    return [ratio for ratio in all_ratios if ratio.values]


def as_json(workload: EngineWorkload, runs: Runs, not_run: Mapping[str, str]) -> dict[str, Any]:
    """The result file's content beside its provenance. `not_run`: systems and why they did not run."""
    reference = runs[UNMERGED][-1].tokens
    return {
        "workload": {
            "rows": len(workload.rows),
            "adapters": len(workload.adapters),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "repeats": len(runs[UNMERGED]),
        "ratios": {
            r.name: {"median": round(r.median, 3), "goal": r.goal, "values": [round(v, 3) for v in r.values]}
            for r in ratios(runs, len(workload.adapters))
        },
        "systems": {name: _system(workload, many, reference) for name, many in runs.items()},
        "not_run": dict(not_run),
    }


def _system(workload: EngineWorkload, many: Sequence[Run], reference: list[list[int]]) -> dict[str, Any]:
    median_s = statistics.median(run.seconds for run in many)
    return {
        "median_s": round(median_s, 3),
        "seconds": [round(run.seconds, 3) for run in many],
        "switching_s": [round(run.switching_s, 3) for run in many],
        "output_tokens_per_s": round(workload.output_tokens / median_s, 1),
        "peak_bytes": max(run.peak_bytes for run in many),
        "rows_equal_to_unmerged": sum(a == b for a, b in zip(many[-1].tokens, reference, strict=False)),
    }


def tables(lengths: str, result: Mapping[str, Any]) -> list[Table]:
    """Systems, then ratios, of one workload."""
    w = result["workload"]
    systems = Table(title=f"{lengths} lengths: {w['rows']} rows, {w['adapters']} adapters, {w['output_tokens']} out")
    for column in ("system", "median s", "of it switching", "tokens/s", "peak GB", "rows equal"):
        systems.add_column(column, justify="left" if column == "system" else "right")
    for name, of in result["systems"].items():
        switching_s = statistics.median(of["switching_s"])
        has_same_rows = name not in (CEILING, TORCH_CEILING, MERGED_ONE) and "no LoRA" not in name
        systems.add_row(
            name,
            f"{of['median_s']:.2f}",
            f"{switching_s:.2f}" if switching_s else "",
            f"{of['output_tokens_per_s']:.0f}",
            f"{of['peak_bytes'] / 1e9:.2f}",
            f"{of['rows_equal_to_unmerged']}/{w['rows']}" if has_same_rows else "",
        )
    for name, reason in result["not_run"].items():
        systems.add_row(name, f"not run: {reason}")
    compared = Table(title=f"{lengths} lengths: ratios within a repeat")
    for column in ("", "median", "goal"):
        compared.add_column(column, justify="right" if column else "left")
    for name, of in result["ratios"].items():
        compared.add_row(name, f"{of['median']:.2f}", f"{of['goal']:.2f}")
    return [systems, compared]
