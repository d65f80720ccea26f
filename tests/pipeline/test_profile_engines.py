from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from lorabatch.engine.config import read_model_config
from lorabatch.jobs.cost_profile import read_profile
from lorabatch.jobs.model_content import model_sha256
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.cost_models import choose_cost
from lorabatch.pipeline.profile_engines import ProfileRequest, print_profile, profile_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def spec(model: Path, **more: object) -> JobSpec:
    return JobSpec(model=str(model), input="/in", output="/out", **more)


def test_a_measured_machine_is_found_by_jobs_of_that_model_and_those_threads(tiny_llama: Path) -> None:
    request = ProfileRequest(str(tiny_llama), num_engines=1, engine_threads=1, batch_rows=4, step_tokens=32)
    profile, path = profile_model(request)
    assert read_profile(path) == profile
    assert profile.quality.keys() == {"prefill", "decode", "unmerged"}
    sha256, config = model_sha256(tiny_llama, with_weights=True), read_model_config(tiny_llama)
    found = choose_cost(spec(tiny_llama), sha256, config, 1)
    assert (found.cost, str(path) in found.origin) == (profile.cost, True)
    others = [choose_cost(spec(tiny_llama), sha256, config, 2), choose_cost(spec(tiny_llama), "0" * 64, config, 1)]
    assert all("a guess from a 135M model" in other.origin for other in others)
    console = Console(width=120, record=True)
    print_profile(profile, path, console)
    text = console.export_text()
    assert all(word in text for word in ("R²", "decode_row_s", "merge_s", "1 engines at once on cpu"))


def test_a_profile_given_by_name_is_used_whatever_it_was_measured_for(tiny_llama: Path, tmp_path: Path) -> None:
    request = ProfileRequest(str(tiny_llama), 1, 1, batch_rows=4, step_tokens=32, max_seconds=0.0)
    profile, path = profile_model(request, tmp_path / "mine.json")
    assert path == tmp_path / "mine.json"
    chosen = choose_cost(spec(tiny_llama, cost_model=str(path)), "", read_model_config(tiny_llama), None)
    assert chosen.cost == profile.cost


def test_a_guess_grows_with_the_model_and_shrinks_with_threads(tiny_llama: Path) -> None:
    config = read_model_config(tiny_llama)
    one, four = (choose_cost(spec(tiny_llama), "", config, threads).cost for threads in (1, 4))
    assert one.decode_row_s == pytest.approx(4 * four.decode_row_s)
    gpu = choose_cost(spec(tiny_llama, device="cuda:1"), "", config, None)
    assert "H200" in gpu.origin
