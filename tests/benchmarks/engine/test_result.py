"""What the engine benchmark makes of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lorabatch.benchmarks.engine.bench import main, peers_of
from lorabatch.benchmarks.engine.result import (
    CEILING,
    MERGED,
    MERGED_ONE,
    NO_LORA,
    OPENVINO,
    OPENVINO_FUSED,
    TORCH_CEILING,
    UNMERGED,
    Run,
    as_json,
    ratios,
    tables,
)
from lorabatch.benchmarks.engine.workload import BenchRow, EngineWorkload

WORKLOAD = EngineWorkload("folder", {"a": "a"}, [BenchRow([1, 2], "a", 2), BenchRow([3], "a", 1)])


def runs_of(*seconds: float, switching_s: float = 0.0) -> list[Run]:
    return [Run(s, 10, [[5, 6], [7]], switching_s) for s in seconds]


def test_ratios_are_taken_within_a_repeat() -> None:
    # the second repeat was slow for everyone: medians of seconds would compare different machines
    runs = {NO_LORA: runs_of(9, 90, 9), UNMERGED: runs_of(10, 100, 10), "PEFT merged": runs_of(40, 400, 50)}
    found = {ratio.name: ratio.median for ratio in ratios(runs)}
    assert found["unmerged against PEFT merged"] == 4
    assert found["unmerged, share of no-LoRA speed"] == pytest.approx(0.9)
    assert len(found) == 2, "systems that did not run are not compared"


def test_steps_of_merged_rows_are_compared_without_the_switch() -> None:
    runs = {NO_LORA: runs_of(9.8), UNMERGED: runs_of(11), MERGED_ONE: runs_of(11, switching_s=1)}
    (found,) = (ratio for ratio in ratios(runs) if "merged, steps alone" in ratio.name)
    assert found.median == pytest.approx(0.98)


def test_one_adapter_is_compared_with_a_fused_one_and_has_another_goal() -> None:
    runs = {
        UNMERGED: runs_of(3),
        MERGED: runs_of(3, switching_s=1),
        OPENVINO: runs_of(6),
        OPENVINO_FUSED: runs_of(4),
    }
    found = {ratio.name: (ratio.median, ratio.goal) for ratio in ratios(runs, num_adapters=1)}
    assert found["unmerged against OpenVINO"] == (2, 1.0)
    assert found["merged, steps alone, against OpenVINO fused"] == (2, 1.0)


def test_both_ceilings_are_compared_with_unmerged() -> None:
    runs = {UNMERGED: runs_of(10), CEILING: [Run(7, 10, [])], TORCH_CEILING: [Run(8, 10, [])]}
    found = {ratio.name: ratio.median for ratio in ratios(runs)}
    ceiling = "unmerged, share of the GEMM ceiling"
    assert found == {ceiling: pytest.approx(0.7), f"{ceiling} of torch's linear": pytest.approx(0.8)}


def test_the_result_names_what_did_not_run_and_prints() -> None:
    runs = {NO_LORA: runs_of(1), UNMERGED: runs_of(2, 4), CEILING: [Run(1, 10, [])]}
    result = as_json(WORKLOAD, runs, {"vLLM": "vllm is not installed"})
    assert json.loads(json.dumps(result)) == result
    assert result["systems"][UNMERGED]["output_tokens_per_s"] == 1.0
    assert result["systems"][NO_LORA]["rows_equal_to_unmerged"] == 2
    assert result["repeats"] == 2
    systems, _ = tables("uniform", result)
    assert systems.row_count == 4


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tgi: unknown peer\. Known: peft, vllm, llamacpp, openvino, or none"):
        main(vs=("tgi",))


def test_peers_are_those_installed_unless_named() -> None:
    # transformers and PEFT come with the tests
    assert "peft" in peers_of(None)
    assert peers_of(["none"]) == ()
    assert peers_of(["vllm"]) == ("vllm",)


def test_unknown_lengths_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"--lengths short: expected uniform or long-tailed"):
        main(vs=(), lengths=("short",))


def test_unknown_prompts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"--prompts huge: expected short or long"):
        main(vs=(), prompts="huge")


def test_runs_of_another_workload_are_not_joined(tiny_llama: Path, tmp_path: Path) -> None:
    kept = tmp_path / "runs.json"
    kept.write_text(json.dumps({"of": {"rows": 3}, "runs": {}}))
    with pytest.raises(ValueError, match="another commit, machine or workload"):
        main(tiny_llama, vs=(), num_rows=2, num_adapters=1, runs_path=kept)
