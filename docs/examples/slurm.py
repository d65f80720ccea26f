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
        # Leave before the walltime does it for you, and not all at once. `memory` is what Slurm gives the whole job; as
        # a limit of Dask's worker it would count what is the engine's, so the last word is 0: none.
        worker_extra_args=["--lifetime", "225m", "--lifetime-stagger", "10m", "--memory-limit", "0"],
    )
    # Dask's own target does not see the work: shards wait outside of Dask's threads.
    cluster.adapt(JobAdaptive, minimum_jobs=1, maximum_jobs=16)
    with cluster, cluster.get_client() as client:
        spec = lorabatch.JobSpec(
            model="/shared/models/Llama-3.1-8B-Instruct",
            adapters="s3://team/adapters",
            input="s3://team/prompts/2026-11-21",
            output="s3://team/answers/2026-11-21",
        )
        print(lorabatch.run(spec, client=client).to_text())
