"""A job on Slurm: workers come and go with the queue. Not run by the tests: needs Slurm and dask-jobqueue."""

from dask_jobqueue import SLURMCluster

import lorabatch
from lorabatch.pipeline.monitoring.scheduler_plugin import JobAdaptive

if __name__ == "__main__":
    cluster = SLURMCluster(
        queue="gpu",
        cores=1,
        processes=1,
        memory="64GB",
        walltime="04:00:00",
        job_extra_directives=["--gres=gpu:1"],
        # Workers leave before the walltime ends them, and not all at once. `memory` is for the whole Slurm job; Dask
        # would apply it as the limit of the worker alone, so that limit is switched off.
        worker_extra_args=["--lifetime", "225m", "--lifetime-stagger", "10m", "--memory-limit", "0"],
    )
    # Dask's own target does not see the work: shards wait outside Dask's threads.
    cluster.adapt(JobAdaptive, minimum_jobs=1, maximum_jobs=16)
    with cluster, cluster.get_client() as client:
        spec = lorabatch.JobSpec(
            model="/shared/models/Llama-3.1-8B-Instruct",
            adapters="s3://team/adapters",
            input="s3://team/prompts/2026-11-21",
            output="s3://team/answers/2026-11-21",
        )
        print(lorabatch.run(spec, client=client).to_text())
