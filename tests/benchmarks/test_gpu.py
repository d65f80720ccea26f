"""The parts of the GPU benchmark that need no GPU: its checks, its arithmetic, its report."""

from __future__ import annotations

import pytest
import torch

from lorabatch.benchmarks.gpu import __main__ as command
from lorabatch.benchmarks.gpu import correctness, measure
from lorabatch.benchmarks.gpu.device import Peaks, peaks_of
from lorabatch.benchmarks.gpu.measure import MIXED, Matrix, ranks_for
from lorabatch.benchmarks.gpu.shapes import LLAMA_3_8B, TINY

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


def test_a_whole_run_fits_into_its_table() -> None:
    peaks = Peaks(4.8e12, 989e12)
    matrix = Matrix(batches=(2,), adapters=(1, 2, 4), ranks=(8,), context=20)
    result = {
        "model": TINY.name,
        "machine": {"device": "cpu"},
        "kernels": measure.measure_kernels(TINY, 2, 2, 20, peaks, CPU),
        "switches": measure.measure_switches(TINY, peaks, CPU),
        "layer": measure.measure_layer(TINY, matrix, CPU),
    }
    measured = [(row["adapters"], row["rank"]) for row in result["layer"]]
    assert measured == [(0, None), (1, 8), (2, 8)], "combinations with more adapters than rows are left out"
    table = command.as_table(result)
    assert "attention decode" in table
    assert len(table.splitlines()) == 3 + 5 + 1 + 4 + 2 + 3


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
