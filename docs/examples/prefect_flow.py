"""A Prefect flow that submits a job and waits for it. Prefect and lorabatch share one Python environment.

A retry goes on where the job stopped; a wrong request is not tried again. `job.yaml` names model, adapters and cluster;
see `docs/reference/keys.md`.
"""

import os
import sys

from prefect import flow, get_run_logger, task

import lorabatch

DATA = os.environ.get("LORABATCH_DATA", "/shared/lorabatch")


def may_help(task, task_run, state) -> bool:
    """Whether to try again."""
    try:
        state.result()
    except lorabatch.JobRequestError:
        return False
    except Exception:
        return True
    return False


@task(retries=2, retry_delay_seconds=60, retry_condition_fn=may_help)
def answer(day: str) -> str:
    job = lorabatch.submit(f"{DATA}/job.yaml", input=f"{DATA}/prompts/{day}", output=f"{DATA}/answers/{day}")
    get_run_logger().info("%s runs on %s", job.job_id, job.cluster or "no cluster: it is done already")
    result = job.result()
    get_run_logger().info(result.to_text())
    return result.output


@flow
def nightly_answers(day: str) -> str:
    return answer(day)


if __name__ == "__main__":
    print(nightly_answers(sys.argv[1]))
