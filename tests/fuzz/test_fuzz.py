"""The short form of the fuzzer: a few cases of each kind of data, or more under `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_case import Case, run_case
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, given, settings

from lorabatch.engine.peft import patterns
from lorabatch.engine.text.chat import sandbox


@pytest.mark.parametrize("share", [pytest.param(0.05, id="few"), pytest.param(1.0, id="all", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_is_read_ends_with_a_value_or_a_refusal(
    name: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "CPU_S", 1)
    monkeypatch.setattr(sandbox, "CPU_S", 1)
    target = TARGETS[name]

    # The few are the same each time: `make test` fails for what was changed, not by luck.
    @settings(
        max_examples=max(1, int(share * target.num_examples)),
        derandomize=share < 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.cases())
    def read(case: Case) -> None:
        run_case(target, case, tmp_path / "case")

    read()
