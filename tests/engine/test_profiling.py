from __future__ import annotations

from pathlib import Path

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.profiling import probe_grid, profile_engine
from lorabatch.scheduler.cost import StepLoad

CONFIG = EngineConfig(max_batch_rows=8, max_step_tokens=64, pool_bytes=1 << 24, num_threads=1)


def total(steps: list[StepLoad], name: str) -> float:
    return sum(getattr(load, name) for load in steps)


def test_the_grid_exercises_every_term_and_stays_within_the_engines_limits() -> None:
    grid = probe_grid(64, 512, 8192)
    assert {probe.num_rows for probe in grid} >= {1, 16, 32, 64}
    assert {len(probe.ranks) for probe in grid} >= {0, 1, 4, 8}
    assert max(probe.prompt_tokens for probe in grid) == 512
    assert max(probe.prompt_tokens + probe.output_tokens for probe in probe_grid(4, 512, 100)) <= 100


def test_every_token_of_every_probe_is_in_some_measured_step(tiny_llama: Path) -> None:
    found = profile_engine(tiny_llama, CONFIG)
    loads = [sample.load for _, sample in found.steps]
    grid = probe_grid(8, 64, 256)
    assert total(loads, "prefill_tokens") == sum(probe.num_rows * probe.prompt_tokens for probe in grid)
    assert total(loads, "decode_rows") == sum(probe.num_rows * (probe.output_tokens - 1) for probe in grid)
    assert {kind for kind, _ in found.steps} == {"prefill", "decode", "unmerged"}
    assert max(load.rank_sum for load in loads) == 128
    pairs = sum(probe.num_rows * probe.prompt_tokens * (probe.prompt_tokens + 1) / 2 for probe in grid)
    assert total(loads, "prefill_pairs") == pairs
    tokens = sum(p.num_rows * (p.prompt_tokens + p.output_tokens - 1) for p in grid if p.ranks)
    assert total(loads, "lora_tokens") == tokens
    assert any(load.prefill_tokens and load.decode_rows for load in loads)
    assert all(sample.seconds > 0 for _, sample in found.steps)
    assert len(found.merge_s) == 5
    assert len({weight_bytes for weight_bytes, _ in found.loads}) == 2
    assert (found.device, found.dtype) == ("cpu", "float32")


def test_time_that_is_up_leaves_the_dear_probes_out(tiny_llama: Path) -> None:
    found = profile_engine(tiny_llama, CONFIG, max_seconds=0.0)
    assert 0 < sum(sample.load.prefill_tokens for _, sample in found.steps) <= 24
