"""The state that storage tells."""

from __future__ import annotations

import json

import pytest

from lorabatch.jobs.errors import DamagedRecordError
from lorabatch.jobs.state import JobState, WorkerState

STATE = JobState(
    phase="running",
    updated_at_s=12.5,
    rows=10,
    rows_done=4,
    eta_s=3.5,
    prefix_hit_rate=0.6,
    workers=(WorkerState("tcp://a", 1.5, 2, 1, "merged", ("x", "y")), WorkerState("tcp://b")),
    message="fine",
)


def test_a_state_read_back_is_the_state() -> None:
    assert JobState.from_json(STATE.to_json()) == STATE


def test_a_newer_versions_keys_are_passed_over() -> None:
    raw = json.loads(STATE.to_json())
    raw["future"] = 1
    raw["workers"][0]["future"] = 1
    assert JobState.from_json(json.dumps(raw).encode()) == STATE


def test_what_an_older_version_did_not_write_is_not_known() -> None:
    raw = json.loads(STATE.to_json())
    del raw["prefix_hit_rate"]
    assert JobState.from_json(json.dumps(raw).encode()).prefix_hit_rate is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"phase": "running"}', b'{"workers": [1]}'])
def test_a_damaged_state_is_said(data: bytes) -> None:
    with pytest.raises(DamagedRecordError, match=r"state\.json"):
        JobState.from_json(data)


@pytest.mark.parametrize(
    ("phase", "is_final"), [("running", False), ("indexing", False), ("done", True), ("cancelled", True)]
)
def test_some_phases_are_the_last(phase: str, is_final: bool) -> None:
    assert JobState(phase, 0.0).is_final == is_final  # type: ignore[arg-type]
