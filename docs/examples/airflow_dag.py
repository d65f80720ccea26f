"""A nightly job in Airflow. Its task runs in the Python environment in which lorabatch is installed, not in Airflow's.

A retry goes on where the job stopped. `job.yaml` names model, adapters and cluster; see `docs/reference/keys.md`.
"""

import os
from datetime import datetime, timedelta

from airflow.sdk import dag, task

DATA = os.environ.get("LORABATCH_DATA", "/shared/lorabatch")
PYTHON = os.environ.get("LORABATCH_PYTHON", "/opt/lorabatch/bin/python")


@dag(
    schedule="@daily",
    start_date=datetime(2026, 11, 1),
    catchup=False,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=5)},
)
def nightly_answers():
    @task.external_python(python=PYTHON, expect_airflow=False)
    def answer(data: str, day: str) -> dict:
        import lorabatch

        result = lorabatch.run(f"{data}/job.yaml", input=f"{data}/prompts/{day}", output=f"{data}/answers/{day}")
        return {"output": result.output, "rows": result.num_rows, "errors": result.num_errors}

    @task
    def report(answered: dict) -> None:
        print(f"{answered['rows']} rows, {answered['errors']} errors: {answered['output']}")

    report(answer(DATA, "{{ ds }}"))


nightly_answers()
