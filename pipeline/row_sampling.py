"""How one row's sampling differs from the job's: the form it travels in between index and engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ..engine.request import SamplingParams
from ..jobs.spec import SAMPLING_FIELDS


def row_sampling(job: SamplingParams, overrides: str | None) -> SamplingParams:
    """The job's sampling with what one row says instead (a JSON object, or None)."""
    if overrides is None:
        return job
    values: dict[str, Any] = json.loads(overrides)
    if "stop" in values:
        values["stop"] = tuple(values["stop"])
    return replace(job, **values)


def sampling_overrides(job: SamplingParams, row: SamplingParams) -> str | None:
    """What `row` says differently, as `row_sampling` reads it; None when it says nothing."""
    if row == job:
        return None
    return json.dumps(
        {name: getattr(row, name) for name in SAMPLING_FIELDS if getattr(row, name) != getattr(job, name)}
    )
