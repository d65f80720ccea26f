from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from lorabatch.console.tables import print_profile
from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.jobs.cost_profile import profile_path, read_profile
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.storage.local_copy import model_sha256
from lorabatch.pipeline.planning import profile
from lorabatch.pipeline.planning.profile import probe_grid, profile_engine, profile_model
from lorabatch.pipeline.planning.step_prices import choose_cost
from lorabatch.scheduler.costs.cost import StepLoad
from lorabatch.scheduler.costs.fitting import fit
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B
from lorabatch.tests.engine.stub_device import StubDevice, backend_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def spec(model: Path, **more: object) -> JobSpec:
    return JobSpec(model=str(model), input="/in", output="/out", **more)


@pytest.mark.long
def test_a_measured_machine_is_found_by_jobs_of_that_model_and_those_threads(tiny_llama: Path) -> None:
    small = {"workers": 1, "engine_threads": 1, "batch_rows": 4, "step_tokens": 32}
    profile, path = profile_model(spec(tiny_llama, **small))
    assert read_profile(path) == profile
    assert profile.quality.keys() == {"prefill", "decode", "unmerged"}
    sha256, config = model_sha256(tiny_llama, with_weights=True), read_model_config(tiny_llama)
    cost, origin, is_guess = choose_cost(spec(tiny_llama), sha256, config, "cpu", 1)
    assert (cost, str(path) in origin, is_guess) == (profile.cost, True, False)
    others = [
        choose_cost(spec(tiny_llama), sha256, config, "cpu", 2),
        choose_cost(spec(tiny_llama), "0" * 64, config, "cpu", 1),
    ]
    assert all("a guess from a 135M model" in origin and is_guess for _, origin, is_guess in others)
    console = Console(width=120, record=True)
    print_profile(profile, path, console)
    text = console.export_text()
    assert all(word in text for word in ("R²", "decode_row_s", "merge_s", "1 engines at once on cpu"))


@pytest.mark.long
def test_a_profile_given_by_name_is_used_whatever_it_was_measured_for(tiny_llama: Path, tmp_path: Path) -> None:
    small = {"workers": 1, "engine_threads": 1, "batch_rows": 4, "step_tokens": 32}
    profile, path = profile_model(spec(tiny_llama, **small), 0.0, tmp_path / "mine.json")
    assert path == tmp_path / "mine.json"
    cost, _, _ = choose_cost(spec(tiny_llama, cost_model=str(path)), "", read_model_config(tiny_llama), "cpu", None)
    assert cost == profile.cost


def test_a_guess_grows_with_the_model_and_shrinks_with_threads(tiny_llama: Path) -> None:
    config = read_model_config(tiny_llama)
    one, four = (choose_cost(spec(tiny_llama), "", config, "cpu", threads)[0] for threads in (1, 4))
    assert one.decode_row_s == pytest.approx(4 * four.decode_row_s)
    _, origin, _ = choose_cost(spec(tiny_llama), "", config, "cuda", None)
    assert "H200" in origin


def test_a_guess_counts_the_meetings_of_processes_and_a_profile_is_of_as_many(tiny_llama: Path) -> None:
    config = read_model_config(tiny_llama)
    one, two, three = (choose_cost(spec(tiny_llama, tensor_parallel=n), "", config, "cpu", 2)[0] for n in (1, 2, 3))
    assert two.step_s > one.step_s
    assert two.decode_row_s == one.decode_row_s
    assert three.decode_row_s > one.decode_row_s, "three members are filled up"
    assert profile_path("0" * 64, "cpu", "float32", 2) != profile_path("0" * 64, "cpu", "float32", 2, 2)


CONFIG = EngineConfig(max_batch_rows=8, max_step_tokens=64, pool_bytes=1 << 24, num_threads=1)


def total(steps: list[StepLoad], name: str) -> float:
    return sum(getattr(load, name) for load in steps)


def test_the_grid_exercises_every_term_and_stays_within_the_engines_limits() -> None:
    grid = probe_grid(64, 512, 8192)
    assert {probe.num_rows for probe in grid} >= {1, 16, 32, 64}
    assert {len(probe.ranks) for probe in grid} >= {0, 1, 4, 8}
    assert sorted({probe.prompt_tokens for probe in grid})[-2:] == [512, 3 * 512]  # one prompt of several steps
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
    assert total(loads, "drawn_tokens") == sum(p.num_rows * p.output_tokens for p in grid if p.is_drawn) > 0
    assert any(load.prefill_tokens and load.decode_rows for load in loads)
    assert all(sample.seconds > 0 for _, sample in found.steps)
    assert len(found.merge_s) == 5
    assert len({weight_bytes for weight_bytes, _ in found.loads}) == 3
    assert (found.device, found.dtype) == ("cpu", "float32")


def test_a_device_that_runs_one_step_ahead_is_measured_step_by_step(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt token takes 40 units, a row that decodes 1: a step with prompts is not taken for the one behind it."""
    devices: list[StubDevice] = []

    def make_engine(folder: Path, config: EngineConfig) -> Engine:
        devices.append(StubDevice(lambda entries: sum(1.0 if e.is_decode else 40.0 * e.num_tokens for e in entries)))
        return Engine(folder, config, None, backend_of(devices[-1]), devices[-1].clock)

    monkeypatch.setattr(profile, "Engine", make_engine)
    samples = [sample for _, sample in profile_engine(tiny_llama, CONFIG).steps]
    assert [s.seconds for s in samples] == [40.0 * s.load.prefill_tokens + s.load.decode_rows for s in samples]
    assert total([s.load for s in samples], "prefill_tokens") == sum(
        probe.num_rows * probe.prompt_tokens for probe in probe_grid(8, 64, 256)
    )
    cost = fit(samples, H200_LLAMA_3_8B)
    assert (cost.prefill_token_s, cost.decode_row_s) == pytest.approx((40.0, 1.0))


def test_time_that_is_up_leaves_the_dear_probes_out(tiny_llama: Path) -> None:
    found = profile_engine(tiny_llama, CONFIG, max_seconds=0.0)
    assert 0 < sum(sample.load.prefill_tokens for _, sample in found.steps) <= 24
