"""Answers as a Dagster asset with a partition for each day. Dagster and lorabatch share one Python environment.

A retry goes on where the job stopped; a wrong request is not tried again. `job.yaml` names model, adapters and cluster;
see `docs/reference/keys.md`.
"""

import os

import dagster as dg

import lorabatch

DATA = os.environ.get("LORABATCH_DATA", "/shared/lorabatch")


class LoggedProgress:
    """Writes the phases of a job to the run's log."""

    def __init__(self, log) -> None:
        self._log = log
        self._phase = ""

    def update(self, state) -> None:
        if state.phase != self._phase:
            self._phase = state.phase
            self._log.info(f"{state.phase}: {state.rows_done} of {state.rows} rows")

    def note(self, text: str) -> None:
        self._log.info(text)


@dg.asset(
    partitions_def=dg.DailyPartitionsDefinition(start_date="2026-11-01"),
    retry_policy=dg.RetryPolicy(max_retries=2, delay=60),
)
def answers(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    day = context.partition_key
    try:
        result = lorabatch.run(
            f"{DATA}/job.yaml",
            input=f"{DATA}/prompts/{day}",
            output=f"{DATA}/answers/{day}",
            progress=LoggedProgress(context.log),
        )
    except lorabatch.JobRequestError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    return dg.MaterializeResult(
        metadata={
            "output": dg.MetadataValue.path(result.output),
            "rows": result.num_rows,
            "errors": result.num_errors,
            "generated tokens": result.completion_tokens,
        }
    )


defs = dg.Definitions(assets=[answers])
