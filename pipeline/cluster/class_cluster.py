"""Starts a Dask cluster of a class that the job names, such as `dask_jobqueue.SLURMCluster`, and finds the scheduler
that a scheduler file names.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import dask
from distributed import Client
from distributed.deploy.cluster import Cluster

from ...jobs.errors import JobRequestError
from ...jobs.spec import JobSpec
from ...jobs.storage.redaction import scrubbed
from ...system.long_work import listener
from ...system.untrusted import MALFORMED, parse_json, printable, read_regular

#: Workers of a cluster class where neither `workers` nor the class's options give a number.
DEFAULT_CLASS_WORKERS = 2
_MAX_FILE_BYTES = 4 << 20
_FILE_WAIT_S, _FILE_POLL_S = 10.0, 0.1
_NOTE_AFTER_S = 10.0
_WORKER_POLL_S = 0.2
# Dask's configuration of a scheduler that is started for one job, as of embedded clusters: stealing would move shards
# behind lorabatch's scheduler, and a shard is not to blame for workers that were lost.
_SETTINGS = {
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.allowed-failures": 100,
    "distributed.deploy.lost-worker-timeout": "10m",
}
# Argument of cluster classes that says how many workers there are.
_COUNT = "n_workers"


@contextmanager
def class_cluster(spec: JobSpec, open_client: Callable[[Any], Client]) -> Iterator[Client]:
    """A client of a cluster of the job's class, with at least one worker; the cluster is closed after the block.

    `open_client`: makes a client of a cluster. Raises `JobRequestError` for a name that is no class of clusters, and
    with what the class says about its arguments.
    """
    problems = class_problems(spec)
    if problems:
        raise JobRequestError(*problems)
    made = cluster_class(spec.cluster)
    with dask.config.set(_SETTINGS):
        cluster = _made(made, spec)
        with cluster, open_client(cluster) as client:
            if spec.workers is not None or not getattr(cluster, "worker_spec", None):
                cluster.scale(spec.workers or DEFAULT_CLASS_WORKERS)
            _wait_for_worker(client, spec)
            yield client


def planned_workers(spec: JobSpec) -> int:
    """Number of workers that a cluster of the job's class is asked for, without starting it."""
    count = spec.cluster_options.get(_COUNT)
    return spec.workers or (count if isinstance(count, int) and count > 0 else DEFAULT_CLASS_WORKERS)


def class_problems(spec: JobSpec, *, is_installed: bool = True) -> list[str]:
    """Problems of the job's cluster class and of the options for it, as sentences. `is_installed`: whether the class
    has to be there.
    """
    problems = []
    if _COUNT in spec.cluster_options and spec.workers is not None:
        problems.append(
            f"workers={spec.workers}, cluster_options {_COUNT}={spec.cluster_options[_COUNT]!r}: each is the number of "
            "workers. Give one of them."
        )
    if spec.cluster_options.get("asynchronous"):
        problems.append("cluster_options asynchronous: a job waits for its cluster. Leave it out.")
    if is_installed:
        try:
            cluster_class(spec.cluster)
        except JobRequestError as error:
            problems += error.problems
    return problems


def cluster_class(name: str) -> type[Cluster]:
    """The class of Dask clusters with this name. Raises `JobRequestError` when there is none."""
    module_name, _, class_name = name.rpartition(".")
    try:
        module = import_module(module_name)
    except ImportError as error:
        package = module_name.partition(".")[0].replace("_", "-")
        raise JobRequestError(
            f"cluster={name!r}: module {module_name!r} cannot be imported ({printable(str(error))}). Install it where "
            f"this command runs, for example with `pip install {package}`, or correct the name."
        ) from None
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Cluster)):
        close = difflib.get_close_matches(class_name, dir(module), n=1, cutoff=0.5)
        hint = f"; did you mean '{module_name}.{close[0]}'?" if found is None and close else "."
        said = f"{module_name} has no {class_name}" if found is None else "this is no class of Dask clusters"
        raise JobRequestError(
            f"cluster={name!r}: {said}{hint} Expected a class of clusters, such as dask_jobqueue.SLURMCluster."
        )
    return found


def _made(made: type[Cluster], spec: JobSpec) -> Cluster:
    try:
        return made(**spec.cluster_options)
    except Exception as error:  # these classes raise errors of every kind
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__  # the first error: "Nanny failed to start" comes of what a worker has raised
        reason = printable(scrubbed(str(cause), spec.cluster_options)) or "no reason given"
        raise JobRequestError(
            f"cluster={spec.cluster!r}: it could not be started ({type(cause).__name__}: {reason}). Correct "
            "cluster_options in the job file, or Dask's configuration of this class."
        ) from None


def _wait_for_worker(client: Client, spec: JobSpec) -> None:
    """Wait for the first worker, since the plan follows from its device. A queue may take hours: Ctrl-C ends it."""
    say = listener()
    begun_s, has_said = time.monotonic(), False
    while not client.scheduler_info(n_workers=-1)["workers"]:
        if not has_said and time.monotonic() - begun_s > _NOTE_AFTER_S:
            has_said = True
            say(
                f"cluster={spec.cluster!r}: waiting for its first worker, which may be in a queue. Ctrl-C ends the job."
            )
        time.sleep(_WORKER_POLL_S)


def scheduler_address(spec: JobSpec) -> str:
    """Address of the running scheduler that the job names: `cluster`, or what its scheduler file says. Waits some
    seconds for the file, which a scheduler writes as it starts. Raises `JobRequestError` for one that cannot be read.
    """
    return spec.cluster if spec.scheduler_file is None else address_in_file(spec.scheduler_file)


def address_in_file(path: str, patience_s: float = _FILE_WAIT_S) -> str:
    """Address in a file that `dask scheduler --scheduler-file` writes. Raises `JobRequestError`."""
    give_up_s = time.monotonic() + patience_s
    while True:
        try:
            return _address(path)
        except (OSError, *MALFORMED) as error:  # also while the file is written
            if time.monotonic() < give_up_s and not isinstance(error, IsADirectoryError):
                time.sleep(_FILE_POLL_S)
                continue
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise JobRequestError(
                f"scheduler_file={path!r}: no address of a Dask scheduler can be read there ({printable(reason)}). "
                "Expected the file that `dask scheduler --scheduler-file` writes, on a disk that this machine sees."
            ) from None


def _address(path: str) -> str:
    found: Any = parse_json(read_regular(Path(path), _MAX_FILE_BYTES))
    address = found["address"]
    if not isinstance(address, str) or "://" not in address:
        raise ValueError(f"its key address is {json.dumps(address)[:80]}")
    return address
