"""A job with stages beside the same requests as one job after the other.

python -m lorabatch.benchmarks.stages [--rows 2000] [--workers 2] [--save FILE]

The job drafts four answers of each row, has another adapter judge each, and corrects the best where it is not good
enough: by stages, then by three jobs, of which each reads the output of the one before. Seconds of engines are those of
their steps, as workers report them. `until` and `when` are measured by their tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import lorabatch
from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.job import demo_spec
from lorabatch.jobs.store import JobStore

_NUM_DRAFTS, _DRAFT_TOKENS, _FIX_TOKENS = 4, 12, 8
_CHOICE = ("good", "bad")
_DRAFT = "Answer this ticket: {{ body }}"
_JUDGE = "Ticket: {{ body }}\nAnswer: {{ draft }}\nIs this answer good or bad?"
_FIX = "Shorter, please."


def tickets(num_rows: int) -> list[dict[str, Any]]:
    """Rows of the input."""
    return [
        {"id": i, "body": f"My parcel {i * 37 % 9973} is {i % 14} days late. Where is it now?"} for i in range(num_rows)
    ]


def measured(folder: Path, **options: Any) -> dict[str, float]:
    """Seconds of one job: wall, from the first shard to the last part, and of all engines' steps."""
    began_s = time.monotonic()
    result = lorabatch.run(output=str(folder), **options)
    wall_s = time.monotonic() - began_s
    engines: dict[str, float] = {}
    for event in JobStore(str(folder)).read_events():
        if event["kind"] == "ReplicaReported":
            engines[event["replica_id"]] = event["engine_s"]
    fill = result.batch_fill if result.batch_fill is not None else float("nan")
    return {
        "wall_s": wall_s,
        "working_s": result.working_s or float("nan"),
        "engine_s": sum(engines.values()),
        "tokens": float(result.completion_tokens),
        "batch_fill": fill,
    }


def by_stages(
    folder: Path, rows: Sequence[Mapping[str, Any]], least: float, common: Mapping[str, Any]
) -> dict[str, float]:
    """The job with stages. `least`: probability of "good" from which on a draft is not corrected."""
    stages: dict[str, Any] = {
        "draft": {
            "adapter": "pirate",
            "messages": _DRAFT,
            "n": _NUM_DRAFTS,
            "temperature": 0.8,
            "max_tokens": _DRAFT_TOKENS,
        },
        "judge": {
            "for_each": "draft",
            "adapter": "sentiment",
            "messages": _JUDGE.replace("{{ draft }}", "{{ draft.completion }}"),
            "choice": _CHOICE,
        },
        "best": {"pick": "draft", "by": "judge.probability.good"},
        "fix": {"when": f"best.by < {least}", "continues": "best", "messages": _FIX, "max_tokens": _FIX_TOKENS},
    }
    return measured(folder, input=list(rows), stages=stages, **common)


def by_jobs(
    folder: Path, rows: Sequence[Mapping[str, Any]], least: float | None, common: Mapping[str, Any]
) -> tuple[dict[str, float], float]:
    """Three jobs with these requests. `least`: None for the median of the best drafts. Returns sums, and `least`."""

    def job(name: str, given: Sequence[Mapping[str, Any]], **options: Any) -> tuple[dict[str, float], list[Any]]:
        found = measured(folder / name, input=list(given), **options, **common)
        return found, pq.read_table(folder / name).to_pylist()

    first, drafts = job(
        "draft",
        [{**row, "adapter": "pirate"} for row in rows],
        messages_template=[{"role": "user", "content": _DRAFT}],
        n=_NUM_DRAFTS,
        temperature=0.8,
        max_tokens=_DRAFT_TOKENS,
    )
    judged = [
        {"id": f"{row['id']}:{row['sample']}", "of": row["id"], "body": row["body"], "draft": row["completion"],
         "adapter": "sentiment"}
        for row in drafts
    ]  # fmt: skip
    second, judgements = job("judge", judged, messages_template=[{"role": "user", "content": _JUDGE}], choice=_CHOICE)
    best: dict[int, tuple[float, str, str]] = {}
    for row in judgements:
        good = next(share["probability"] for share in row["choice_probabilities"] if share["choice"] == "good")
        if row["of"] not in best or good > best[row["of"]][0]:
            best[row["of"]] = good, row["draft"], row["body"]
    least = statistics.median(good for good, *_ in best.values()) if least is None else least
    turns = [
        {
            "id": row_id,
            "adapter": "pirate",
            "messages": [
                {"role": "user", "content": _DRAFT.replace("{{ body }}", body)},
                {"role": "assistant", "content": draft},
                {"role": "user", "content": _FIX},
            ],
        }
        for row_id, (good, draft, body) in best.items()
        if good < least
    ]
    third, _ = job("fix", turns, max_tokens=_FIX_TOKENS)
    jobs = (first, second, third)
    return {name: sum(one[name] for one in jobs) for name in ("wall_s", "working_s", "engine_s", "tokens")}, least


def saved_by_conditions(folder: Path, rows: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> dict[str, float]:
    """Tokens with `until`, beside as many drafts drawn and judged at once, where half of the first drafts pass."""
    draft: dict[str, Any] = {"adapter": "pirate", "messages": _DRAFT, "temperature": 0.8, "max_tokens": _DRAFT_TOKENS}
    judge = {
        "adapter": "sentiment",
        "messages": _JUDGE.replace("{{ draft }}", "{{ draft.completion }}"),
        "choice": _CHOICE,
    }
    given = list(rows)
    once = folder / "once"
    measured(once, input=given, stages={"draft": draft, "judge": judge}, **common)
    good = statistics.median(row["judge"]["probability"]["good"] for row in pq.read_table(once).to_pylist())
    until = {"stage": "judge", "is": f"judge.probability.good >= {good}", "rounds": 3}
    again = measured(folder / "until", input=given, stages={"draft": draft, "judge": judge}, until=until, **common)
    stages = {"draft": {**draft, "n": 3}, "judge": {**judge, "for_each": "draft"}}
    at_once = measured(folder / "at_once", input=given, stages=stages, **common)
    return {
        "until_tokens": again["tokens"],
        "at_once_tokens": at_once["tokens"],
        "share": again["tokens"] / at_once["tokens"],
    }


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = demo_spec(folder / "output", workers=options.workers, overwrite=False)
        common = {"model": spec.model, "adapters": spec.adapters, "workers": options.workers, "examples": False}
        rows = tickets(options.rows)
        jobs, least = by_jobs(folder, rows, None, common)
        staged = by_stages(folder / "staged", rows, least, common)
        few = tickets(max(50, options.rows // 10))
        found = {
            "rows": options.rows,
            "workers": options.workers,
            "stages": staged,
            "jobs": jobs,
            "engine_ratio": staged["engine_s"] / jobs["engine_s"],
            "wall_ratio": staged["wall_s"] / jobs["wall_s"],
            "conditions": saved_by_conditions(folder / "conditions", few, common),
            **provenance(("torch", "dask", "pyarrow")),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if options.save:
        options.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
