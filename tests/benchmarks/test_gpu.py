"""The parts of the GPU benchmark that need no GPU: its checks, its arithmetic, its report, and all of it when tiny."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorabatch.benchmarks.gpu import __main__ as command
from lorabatch.benchmarks.gpu import correctness
from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.device import Peaks, peaks_of
from lorabatch.benchmarks.gpu.engine_matrix import full_matrix
from lorabatch.benchmarks.gpu.measure import MIXED, ranks_for
from lorabatch.benchmarks.gpu.report import as_table
from lorabatch.benchmarks.gpu.run import run_sections, tiny_scale
from lorabatch.benchmarks.gpu.shapes import LLAMA_3_8B

CPU = torch.device("cpu")


def test_the_checks_pass_on_right_kernels() -> None:
    assert correctness.check_all([torch.float32], CPU) == []


def test_the_checks_see_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "_KERNEL_LIMITS", {torch.float32: 0.0})
    problems = correctness.check_all([torch.float32], CPU)
    assert any("attention decode" in problem for problem in problems)


def test_sizes_are_those_of_the_model() -> None:
    """Llama-3-8B: 218 million weights per layer in its linear layers, 41.9 million numbers in a rank-16 adapter."""
    assert LLAMA_3_8B.layer_weights == 218_103_808
    assert LLAMA_3_8B.adapter_numbers(16) * LLAMA_3_8B.num_layers == 41_943_040


def test_a_floor_is_the_slower_of_bytes_and_flops() -> None:
    peaks = Peaks(bytes_per_s=10.0, flops_per_s=100.0)
    assert peaks.floor_s(20.0, 10.0) == 2.0
    assert peaks.floor_s(1.0, 500.0) == 5.0
    assert peaks_of("NVIDIA H200") == Peaks(4.8e12, 989e12)
    assert peaks_of("abacus") is None


def test_mixed_ranks_come_in_turn() -> None:
    assert ranks_for(MIXED, 4) == [8, 16, 64, 8]
    assert ranks_for(8, 2) == [8, 8]


def test_a_whole_run_at_the_smallest_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one command, on a CPU: every section is there, and so is its line in the table."""
    assert command.main(["--tiny", "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    failed = {name: part for name, part in result.items() if isinstance(part, dict) and "failed" in part}
    assert not failed
    assert result["problems"] == []
    assert {row["kernel"] for row in result["kernels"]} >= {"attention decode", "LoRA shrink qkv"}
    assert [row["mode"] for row in result["engine"]["points"]] == [
        "unmerged", "unmerged", "merged", "mixture", "unmerged"
    ]  # fmt: skip
    assert all(row["decode_tokens_per_s"] > 0 for row in result["engine"]["points"])
    assert "decode_of_base" in result["engine"]["points"][1]
    assert result["peft"].keys() >= {"base_tokens_per_s", "mixed_2_adapters_tokens_per_s", "merged_tokens_per_s"}
    assert [(row["adapters"], row["rank"]) for row in result["layer"]] == [(0, None), (1, 8), (2, 8)]
    table = capsys.readouterr().out
    assert "attention decode" in table
    assert len([line for line in table.splitlines() if "  unmerged" in line or "  merged" in line]) == 4
    assert "mixture" in table


def test_without_time_it_ends_with_what_it_has() -> None:
    written: list[dict[str, object]] = []
    scale = replace(tiny_scale(), dtypes=())
    result = run_sections(scale, CPU, 0.0, lambda partial: written.append(dict(partial)))
    assert result["engine"]["points"] == []
    assert len(result["engine"]["left_out"]) == len(scale.engine.points)
    assert (result["kernels"], result["layer"], result["peft"]) == ([], [], {"skipped": "no time left"})
    assert len(written) == 6, "the result is written after the checks and after every section"
    assert "points left out" in as_table(result)


def test_the_matrix_covers_what_was_asked_of_it() -> None:
    points = full_matrix().points
    assert {p.batch for p in points} == {64, 128, 256, 512}
    assert {p.adapters for p in points} == {0, 1, 16, 64, 256}
    assert {p.rank for p in points} == {None, 8, 16, 64, MIXED}
    assert {p.mode for p in points} == {"unmerged", "merged", "mixture"}
    assert len({p.prompt_tokens for p in points}) == 2
    assert len(points) == len(set(points))
    bases = {(p.batch, p.prompt_tokens) for p in points if p.adapters == 0}
    assert all((p.batch, p.prompt_tokens) in bases for p in points), "every point has a base beside it"
    assert all(p.adapters <= p.batch for p in points)


def test_deadlines_pass() -> None:
    now = [10.0]
    deadline = Deadline.after(5.0, lambda: now[0])
    assert deadline.within(2.0).left_s == 2.0
    assert deadline.within(9.0).left_s == 5.0
    now[0] = 16.0
    assert deadline.has_passed
    assert deadline.left_s == 0.0


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
