"""The account of a finished job: as JSON and back, and as text that names what went wrong."""

from __future__ import annotations

import json
from dataclasses import replace

from lorabatch.jobs.outcome import AdapterOutcome
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
    adapters=(AdapterOutcome("", 200, 0, 1000), AdapterOutcome("a", 1000, 3, 8000)),
    seconds=10.0,
    num_reused=0,
)
OF_EARLIER_VERSIONS = ("adapter", "num_rows", "num_errors", "completion_tokens")


def test_it_survives_its_file() -> None:
    assert JobResult.from_json(json.loads(json.dumps(RESULT.to_json()))) == RESULT


def test_its_text_names_each_kind_of_error_and_where_the_first_is() -> None:
    lines = RESULT.to_text().splitlines()
    assert lines[0] == "1,197 of 1,200 rows answered in 4 parts: /out"
    place = lines.index("3 error rows; select with `error IS NOT NULL`:")
    first = lines[place + 1]
    assert first.startswith("  3 x adapter, first at in.parquet:7: adapter='x': not among this job's adapters; yyy")
    assert len(first) < 300


def test_one_duration_has_parts_that_add_up_a_beginning_and_an_end() -> None:
    phases = {"opening": 1.0, "indexing": 0.5, "answering": 8.5}
    found = replace(
        RESULT, phases_s=phases, started_at="2026-11-29T10:00:00+00:00", ended_at="2026-11-29T10:00:10+00:00"
    )
    assert found.to_text().splitlines()[1] == (
        "took 10.0 s (opening 1.0, indexing 0.5, answering 8.5), "
        "from 2026-11-29 10:00:00 UTC to 2026-11-29 10:00:10 UTC"
    )
    assert RESULT.to_text().splitlines()[1] == "took 10.0 s"


def test_rates_are_those_while_rows_were_answered() -> None:
    found = replace(RESULT, rows_per_s=141.2, prompt_tokens_per_s=588.2, completion_tokens_per_s=1058.8)
    assert "; while rows were answered 141 rows/s, 588 prompt tokens/s, 1,059 generated tokens/s" in found.to_text()


def test_prediction_and_bound_say_on_what_they_rest() -> None:
    found = replace(RESULT, predicted_s=10.0, working_s=8.5, bound_s=5.0)
    text = found.to_text()
    assert (
        "answering took 8.5 s, 0.85 times the 10.0 s that the plan predicted (lengths of answers as expected)\n" in text
    )
    assert (
        "with the speed that engines had in this run, and answers as long as they are, no schedule takes less" in text
    )
    assert "less than 5.0 s to answer these rows; this run took 1.70 times that" in text
    corrected = replace(found, corrected_s=8.6, cost_origin="a guess from a 135M model, one core").to_text()
    said = "predicted (lengths of answers as expected; costs of steps: a guess from a 135M model); with the costs of"
    assert f"{said} the run's first steps it was 8.6 s\n" in corrected
    assert "answered these rows are not known" in replace(found, bound_s=None).to_text()
    assert "predicted" not in replace(found, num_reused=1).to_text()


def test_how_full_batches_were_is_said_where_it_is_known() -> None:
    assert "batches were 97.1% full while shards were queued" in replace(RESULT, batch_fill=0.971).to_text()
    assert "batches" not in RESULT.to_text()


def test_how_much_of_its_prompts_was_not_computed_is_said_where_it_is_known() -> None:
    assert "80.7% of prompt tokens were reused, not computed" in replace(RESULT, prefix_hit_rate=0.807).to_text()
    assert "reused" not in RESULT.to_text()


def test_what_an_older_version_did_not_write_is_not_known() -> None:
    older = {name: value for name, value in RESULT.to_json().items() if name != "prefix_hit_rate"}
    older["adapters"] = [{name: count[name] for name in OF_EARLIER_VERSIONS} for count in older["adapters"]]
    assert JobResult.from_json(older) == RESULT
    assert "a             1,000" in RESULT.to_text()


def test_a_run_that_found_rows_done_claims_no_speed() -> None:
    text = replace(RESULT, num_reused=700).to_text()
    assert "700 of them were done before this run" in text
    assert "tokens/s" not in text
    assert "rows/s" not in text
