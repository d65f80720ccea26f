"""The account of a finished job: as JSON and back, and as text that names what went wrong."""

from __future__ import annotations

import json
from dataclasses import replace

from lorabatch.jobs.progress import AdapterCount
from lorabatch.pipeline.result import JobResult, KindOfError

RESULT = JobResult(
    output="/out",
    job_id="job-1",
    num_rows=1200,
    num_errors=3,
    num_parts=4,
    prompt_tokens=5000,
    completion_tokens=9000,
    errors=(KindOfError("adapter", 3, "in.parquet:7", "adapter='x': not among\n this job's adapters; " + "y" * 400),),
    adapters=(AdapterCount("", 200, 0, 1000), AdapterCount("a", 1000, 3, 8000)),
    seconds=10.0,
    num_reused=0,
)


def test_it_survives_its_file() -> None:
    assert JobResult.from_json(json.loads(json.dumps(RESULT.to_json()))) == RESULT


def test_its_text_names_each_kind_of_error_and_where_the_first_is() -> None:
    lines = RESULT.to_text().splitlines()
    assert lines[0] == "1,197 of 1,200 rows answered in 4 parts: /out"
    assert "900 generated tokens/s" in lines[1]
    assert lines[2].startswith("3 error rows; select with")
    assert lines[3].startswith("  3 x adapter, first at in.parquet:7: adapter='x': not among this job's adapters; yyy")
    assert len(lines[3]) < 300


def test_what_was_predicted_and_the_bound_stand_beside_what_it_took() -> None:
    found = replace(RESULT, predicted_s=10.0, working_s=8.5, bound_s=5.0)
    assert found.to_text().splitlines()[2] == (
        "from the first shard opened to the last part written: measured 8.5 s, predicted 10.0 s (0.85 times as long), "
        "lower bound 5.0 s (1.70 times as long)"
    )
    corrected = replace(found, corrected_s=8.6).to_text()
    assert "predicted 10.0 s (0.85 times as long), after the first steps 8.6 s (0.99 times as long), lower" in corrected
    assert replace(found, bound_s=None).to_text().splitlines()[2].endswith(", lower bound not known")
    resumed = replace(found, num_reused=1).to_text()
    assert "predicted" not in resumed
    assert "this run's rows, from the first shard opened" in resumed


def test_how_full_batches_were_is_said_where_it_is_known() -> None:
    assert "batches were 97.1% full while shards were queued" in replace(RESULT, batch_fill=0.971).to_text()
    assert "batches" not in RESULT.to_text()


def test_how_much_of_its_prompts_was_not_computed_is_said_where_it_is_known() -> None:
    assert "80.7% of prompt tokens were reused, not computed" in replace(RESULT, prefix_hit_rate=0.807).to_text()
    assert "reused" not in RESULT.to_text()


def test_what_an_older_version_did_not_write_is_not_known() -> None:
    older = {name: value for name, value in RESULT.to_json().items() if name != "prefix_hit_rate"}
    assert JobResult.from_json(older) == RESULT


def test_a_run_that_found_rows_done_claims_no_speed() -> None:
    text = replace(RESULT, num_reused=700).to_text()
    assert "700 of them were done before this run" in text
    assert "tokens/s" not in text
