"""Whatever comes in whatever order: each row answers as if it were alone, and the engine's books are right throughout.

Scenarios (`scenarios`) are drawn by hypothesis, down to a batcher that switches weights, pauses rows and admits as it
pleases.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from peft_oracle import weights_sha256
from scenarios import (
    ANYTHING,
    PAGE_BYTES,
    Alone,
    AnyBatcher,
    Scenario,
    assert_same_answers,
    make_engine,
    play,
    renamed,
    scenarios,
)

from lorabatch.engine.config import Mode, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> dict[str, Path]:
    """Adapters by content hash."""
    model = read_model_config(tiny_llama)
    found = {audit_adapter(folder, model, name).identity_sha256: folder for name, folder in tiny_adapters.items()}
    return {identity: folder for identity, folder in found.items() if identity is not None}


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, folders: dict[str, Path]) -> Alone:
    return Alone(make_engine(tiny_llama, folders, "unmerged", pool_bytes=4 << 20, uses_prefix_cache=False))


@pytest.mark.parametrize("mode", ["unmerged", "merged", "auto"])
@ANYTHING
@given(scenario=scenarios())
def test_rows_answer_as_if_alone(
    tiny_llama: Path, folders: dict[str, Path], alone: Alone, mode: Mode, scenario: Scenario
) -> None:
    ids = list(folders)
    engines = [make_engine(tiny_llama, folders, mode, **scenario.config) for _ in range(2)]
    before = weights_sha256(engines[0])
    results = play(engines, scenario, ids)
    assert_same_answers(results, alone, (renamed(request, ids) for _, request in scenario.arrivals))
    for engine in engines:
        serve_a_base_row(engine)
        assert weights_sha256(engine) == before


@ANYTHING
@given(scenario=scenarios())
def test_a_batcher_may_switch_pause_and_admit_as_it_pleases(
    tiny_llama: Path, folders: dict[str, Path], alone: Alone, scenario: Scenario
) -> None:
    ids = list(folders)
    # room for a large adapter beside every row's own
    config = scenario.config | {"pool_bytes": PAGE_BYTES * 400}
    engines = [
        make_engine(tiny_llama, folders, "auto", AnyBatcher(random.Random(scenario.seed + i)), **config)
        for i in range(2)
    ]
    before = weights_sha256(engines[0])
    results = play(engines, scenario, ids)
    assert_same_answers(results, alone, (renamed(request, ids) for _, request in scenario.arrivals))
    for engine in engines:
        engine.switch_weights(None)
        assert weights_sha256(engine) == before


def serve_a_base_row(engine: Engine) -> None:
    """Afterwards nothing is merged, in the modes that do not mix."""
    list(engine.run([Request("base", (5, 6), None, SamplingParams(max_tokens=1))]))
