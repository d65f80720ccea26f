"""Connects a client to the Dask cluster of a job: one embedded in this process, or one that runs already."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from typing import Any

import dask
from distributed import Client
from distributed.comm.core import CommClosedError
from distributed.core import Status
from distributed.deploy.spec import SpecCluster
from distributed.security import Security

from ...jobs.errors import JobError, JobFailedError, JobRequestError
from ...jobs.spec import JobSpec
from ...system.local_cache import scratch_folder, temporary_folder
from ...system.long_work import listener
from .background_state import background_security
from .class_cluster import class_cluster, scheduler_address
from .clock import follow_clock_of_client
from .devices import device_kind
from .embedded_cluster import EmbeddedCluster
from .security import security_of
from .versions import check_versions
from .worker_process import GPUS_EACH, SPARE_THREADS, VISIBLE_DEVICES, visible_gpus

logger = logging.getLogger(__name__)


DEFAULT_WORKERS = 2
CONNECT_TIMEOUT = "10s"
_CLUSTER_STARTS = 3
WORKER_START_LIMIT_S = 60.0
# Beginning of the name that Dask gives to processes of workers.
_WORKER_PROCESS = "Dask Worker process"
# Errors of Dask when workers die or hang while they start. `AssertionError`: a nanny has to end a worker that has not
# started yet.
_NANNY_ERRORS = (RuntimeError, TimeoutError, AssertionError)
# Python's error where the system starts no thread for it.
_NO_THREAD = "can't start new thread"
_THREADS_REFUSED = (
    f"The system has refused a thread ({_NO_THREAD}): a limit of processes (`ulimit -u`, a container's limit of pids) "
    "or of memory. Finished rows are kept; raise the limit or take fewer --workers, and run the same command to go on."
)
# A worker whose last heartbeat is that much older than the latest of all workers counts as hung. Workers send
# heartbeats every few seconds, in big clusters less often.
_ALIVE_WITHIN_S = 10.0
# A scheduler that has not answered a question within this limit is stopped, hung or cut off.
_ANSWER_LIMIT_S = 10.0
# Seconds between two questions to a scheduler, until a start counts as late, and until either is said again.
_ASK_INTERVAL_S, _LATE_S, _REPEAT_S = 5.0, 15.0, 45.0
_NOT_STARTED = "The workers of the local cluster have not started yet. Those that do not start are started again."
_NO_ANSWER = (
    "The Dask scheduler at {} does not answer. This command waits for it. Where it is gone for good, stop the command "
    "and run it again on another cluster: finished rows are kept."
)
# Dask's configuration of embedded clusters. Stealing would move shards behind the scheduler's back; a shard whose
# workers died is not to blame; a job without workers must end some day.
_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.allowed-failures": 100,
    "distributed.scheduler.worker-ttl": "60s",
    "distributed.scheduler.no-workers-timeout": "10m",
    # A nanny on a busy machine takes longer than the default of 15 s to start a worker again, which must not be closed
    # as lost for good.
    "distributed.deploy.lost-worker-timeout": "10m",
    "distributed.comm.timeouts.connect": CONNECT_TIMEOUT,
    # The scheduler's dashboard is enough, and has a token.
    "distributed.worker.http.routes": [],
    "distributed.worker.preload": ["lorabatch.pipeline.cluster.worker_process"],
    # Engines want the cores. Dask's own looking after itself, idle, takes 2 % of one for each of its processes.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
}
_SPARE_MODULE = "lorabatch.pipeline.worker.spare"
# Worker processes read this when they import distributed, before `embedded_worker` has taken them off the terminal.
_WORKER_LOGGING = ("DASK_DISTRIBUTED__LOGGING", repr({"distributed": "warning", "distributed.preloading": "error"}))


def scheduler_lost(output: str, cause: str = "") -> JobFailedError:
    """The error of a job whose Dask scheduler is gone. `output`: the job's output folder, as it may be shown."""
    return JobFailedError(
        f"The Dask scheduler is gone{f' ({cause})' if cause else ''}. Finished rows are kept. The same command goes "
        f"on; on another cluster, `lorabatch resume {output} --cluster ADDRESS` does."
    )


@contextmanager
def cluster_errors_named(client: Client, output: str) -> Iterator[None]:
    """Turn any error of the block into `scheduler_lost` with its cause, if the Dask scheduler is gone, and the error of
    a system that refuses a thread into `JobFailedError`.
    """
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
            raise JobFailedError(_THREADS_REFUSED) from None
        # One of the client's connections may break before it notices that all have.
        if client.status == "running" and not isinstance(error, CommClosedError):
            raise
        raise scheduler_lost(output, str(error) or type(error).__name__) from error


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep Dask's client from logging tracebacks of a broken connection, which `scheduler_lost` reports."""
    log = logging.getLogger("distributed.client")
    log.addFilter(_has_no_traceback)
    try:
        yield
    finally:
        log.removeFilter(_has_no_traceback)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def page_address(client: Client) -> str:
    """The address of the dashboard's page about jobs; "" when the cluster has no dashboard."""
    link = client.dashboard_link
    return f"{link.removesuffix('/status')}/lora" if link else ""


def known_workers(client: Client) -> dict[str, Any] | None:
    """Ask the scheduler for its workers: address -> facts; None when it does not answer within 10 s.

    `Client.scheduler_info` does not ask: it returns the client's last copy, which a poll of its own replaces by an
    identity without workers, and which stays when the scheduler is gone.
    """
    scheduler = client.scheduler
    if scheduler is None:
        return None
    try:
        found: dict[str, Any] = client.sync(scheduler.identity, n_workers=-1, callback_timeout=_ANSWER_LIMIT_S)
    except OSError:  # timeouts and broken connections
        return None
    return found["workers"]  # type: ignore[no-any-return]


def count_workers(client: Client) -> int:
    """Number of workers connected now; at least 1, for a cluster that is still growing."""
    return max(1, len(known_workers(client) or ()))


def hung_workers(client: Client) -> set[str]:
    """Workers that have sent no heartbeat for a while. Dask itself notices after minutes only."""
    workers = known_workers(client) or {}
    # Compared with one another: all of these times are by the scheduler's clock.
    latest_s = max((worker["last_seen"] for worker in workers.values()), default=0.0)
    return {address for address, worker in workers.items() if latest_s - worker["last_seen"] > _ALIVE_WITHIN_S}


def placement_of_tasks(client: Client, busy: Collection[str] = ()) -> dict[str, Any]:
    """Options for tasks that any worker may run, except those that hang or are `busy`."""
    avoided = hung_workers(client) | set(busy)
    others = set(known_workers(client) or ()) - avoided
    if not avoided or not others:
        return {}
    return {"workers": sorted(others), "allow_other_workers": True}


@contextmanager
def connected(spec: JobSpec, client: Client | None = None, *, has_spares: bool = False) -> Iterator[Client]:
    """A client of its own for one job, connected to the cluster of `client`, else to the one that `spec.cluster` names:
    `local` and the name of a class start one and end it afterwards. `has_spares`: workers of a local cluster start a
    spare engine process as they start.

    Raises `JobRequestError` when no scheduler answers, or a GPU is asked for and the machine has none; `JobFailedError`
    when the cluster's scheduler or workers do not have this version of lorabatch.
    """
    if client is None and spec.is_embedded:
        num_workers = num_embedded_workers(spec)
        spare_threads = threads_per_engine(spec, num_workers) if has_spares else None
        with embedded(num_workers, spare_threads=spare_threads, gpus_each=gpus_each(spec)) as own:
            yield own
        return
    if client is None and spec.is_cluster_class:
        connection = class_cluster(spec, open_client)
    elif client is None:
        address = scheduler_address(spec)
        connection = existing(address, security_of(spec.tls_files) or background_security(address))
    else:
        connection = existing(client.scheduler_info(n_workers=0)["address"], client.security)
    with _without_tracebacks(), connection as own:
        check_versions(own)
        yield own


def num_embedded_workers(spec: JobSpec) -> int:
    """Number of workers of an embedded cluster: `spec.workers`, else one for each engine that the GPUs suffice for,
    else two.

    Raises `JobRequestError` for `local-cuda` on a machine without GPUs, and for more workers than GPUs: each process of
    an engine takes the whole memory of a GPU.
    """
    gpus = visible_gpus(os.environ)
    if spec.cluster == "local-cuda" and not gpus:
        raise JobRequestError(
            f"cluster={spec.cluster!r}: this machine shows no NVIDIA GPU (/dev/nvidia*, {VISIBLE_DEVICES}). Take "
            "--cluster local for engines on its processor."
        )
    each = gpus_each(spec)
    if gpus and device_kind(spec.device) == "cuda" and (spec.workers or 1) * each > len(gpus):
        shown = f"this machine shows {len(gpus)} GPU{'s' * (len(gpus) > 1)}"
        if each > len(gpus):
            raise JobRequestError(
                f"tensor_parallel={each}: {shown}, and each process of an engine takes one. Take at most "
                f"--tensor-parallel {len(gpus)}, or --device cpu."
            )
        memory = "the memory of a whole one" if each == 1 else f"{each} of them (tensor_parallel={each})"
        raise JobRequestError(
            f"workers={spec.workers}: {shown}, and an engine takes {memory}. Take at most --workers "
            f"{len(gpus) // each}, or --device cpu."
        )
    return spec.workers or len(gpus) // each or DEFAULT_WORKERS


def gpus_each(spec: JobSpec) -> int:
    """Number of GPUs of each worker of an embedded cluster on GPUs: one for each process of an engine."""
    return spec.tensor_parallel if device_kind(spec.device) == "cuda" else 1


def threads_per_engine(spec: JobSpec, num_workers: int) -> int | None:
    """CPU threads of one engine: `spec.engine_threads`, else a worker's share of this machine's cores on an embedded
    cluster. None on other clusters, on which engines choose.
    """
    if spec.engine_threads is not None:
        return spec.engine_threads
    if not spec.is_embedded:
        return None
    return max(1, usable_cores() // num_workers)


@contextmanager
def embedded(
    num_workers: int,
    worker_start_limit_s: float = WORKER_START_LIMIT_S,
    spare_threads: int | None = None,
    gpus_each: int = 1,
) -> Iterator[Client]:
    """A client of an embedded cluster that lives as long as the block. `spare_threads`: CPU threads of the spare engine
    process that each worker starts; None for no such process. `gpus_each`: GPUs of a worker, on a machine with GPUs.
    Raises `JobFailedError` when the cluster cannot be started.
    """
    parent = scratch_folder(dask.config.get("temporary-directory"))
    settings = dask.config.set(_settings(spare_threads) | {GPUS_EACH: gpus_each})
    with settings, _environment(_WORKER_LOGGING), temporary_folder(parent) as folder:
        before = _child_pids()
        cluster = start_local_cluster(EmbeddedCluster, num_workers, worker_start_limit_s, folder)
        is_done = False
        try:
            with open_client(cluster) as client:
                yield client
            is_done = True
        finally:
            if is_done:
                _let_go(cluster, before)
            _end(cluster, before)


def _settings(spare_threads: int | None) -> dict[str, Any]:
    if spare_threads is None:
        return _SETTINGS
    preload = [*_SETTINGS["distributed.worker.preload"], _SPARE_MODULE]
    return _SETTINGS | {"distributed.worker.preload": preload, SPARE_THREADS: spare_threads}


def start_local_cluster(cluster_type: type[SpecCluster], *arguments: Any) -> SpecCluster:
    """Start the workers' processes; one that dies or hangs while it starts fails the whole cluster, so try again."""
    reason = ""
    for _ in range(_CLUSTER_STARTS):
        before = _child_pids()
        cluster = cluster_type.__new__(cluster_type)
        try:
            with _said_while_late(_NOT_STARTED):
                cluster_type.__init__(cluster, *arguments)
            return cluster
        except _NANNY_ERRORS as error:
            reason = str(error) if isinstance(error, RuntimeError) else "one did not start in time"
            _kill_workers(before)
            # The cluster has ended itself as far as it could. Unless marked as closed it would log that it was not.
            cluster.status = Status.closed
            logger.warning("the embedded cluster could not be started: %s", reason)
    raise JobFailedError(
        f"cluster='local': its workers could not be started ({reason}). Check free memory and the number of "
        "--workers, and run the same command again."
    )


def _let_go(cluster: SpecCluster, before: set[int | None]) -> None:
    """Kill workers that have nothing left to do: ending their interpreters takes longer than all else at the end."""
    for nanny in cluster.workers.values():
        nanny.close_gracefully()  # so that it starts no other worker
    _kill_workers(before)


def _end(cluster: SpecCluster, before: set[int | None]) -> None:
    """Close the cluster. What happens to its workers meanwhile is no error of the job, which has ended."""
    try:
        cluster.close()
    except _NANNY_ERRORS as error:
        cluster.status = Status.closed
        logger.warning("the embedded cluster did not end in order: %s", str(error) or type(error).__name__)
    finally:
        _kill_workers(before)


def _child_pids() -> set[int | None]:
    return {child.pid for child in active_children()}


def _kill_workers(before: set[int | None]) -> None:
    """Kill workers that were started since: one that is stopped would keep this process from ending."""
    for child in active_children():
        if child.pid not in before and child.name.startswith(_WORKER_PROCESS):
            child.kill()


@contextmanager
def _environment(variable: tuple[str, str]) -> Iterator[None]:
    """Set an environment variable (name, value) for the processes that the block starts."""
    name, value = variable
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def existing(address: str, security: Security | None = None, timeout: str = CONNECT_TIMEOUT) -> Iterator[Client]:
    """A client of a running cluster. Raises `JobRequestError` when no scheduler answers at the address."""
    try:
        with _said_while_late(_NO_ANSWER.format(address)):
            client = open_client(address, timeout=timeout, security=security)
    except (OSError, ValueError, TimeoutError, TypeError) as error:
        tls = " and, for tls://, that --tls-ca, --tls-cert and --tls-key are the cluster's"
        raise JobRequestError(
            f"cluster={address!r}: no Dask scheduler answers there ({str(error) or type(error).__name__}). Expected "
            "local or an address such as tcp://10.0.0.5:8786; check that the scheduler runs and can be reached"
            f"{tls if address.startswith('tls') else ''}, or name another one with --cluster."
        ) from None
    with client, _silence_said(client):
        yield client


@contextmanager
def _silence_said(client: Client) -> Iterator[None]:
    """Say to this thread's listener when the scheduler stops answering within the block, and when it answers again."""
    loop = client.loop.asyncio_loop  # type: ignore[union-attr]
    watch = asyncio.run_coroutine_threadsafe(_watch(client, listener()), loop)
    try:
        yield
    finally:
        watch.cancel()


async def _watch(client: Client, say: Callable[[str], None]) -> None:
    say_at_s = 0.0  # 0 while the scheduler answers
    while True:
        await asyncio.sleep(_ASK_INTERVAL_S)
        scheduler = client.scheduler
        if client.status != "running" or scheduler is None:
            continue  # the client connects again, or gives up
        try:
            await asyncio.wait_for(scheduler.identity(n_workers=0), _ANSWER_LIMIT_S)
        except CommClosedError:
            continue  # which the client notices soon
        except OSError:  # no answer, or no connection to ask by
            if time.monotonic() >= say_at_s:
                say(_NO_ANSWER.format(scheduler.address))
                say_at_s = time.monotonic() + _REPEAT_S
        else:
            if say_at_s:
                say("The Dask scheduler answers again.")
            say_at_s = 0.0


@contextmanager
def _said_while_late(sentence: str) -> Iterator[None]:
    """Say a sentence to this thread's listener when the block takes long, and now and then until its end."""
    say, is_over = listener(), threading.Event()

    def watch() -> None:
        wait_s = _LATE_S
        while not is_over.wait(wait_s):
            say(sentence)
            wait_s = _REPEAT_S

    threading.Thread(target=watch, name="late start", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def usable_cores() -> int:
    """Cores of this machine that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_ATTEMPTS = 5


def open_client(target: Any, **options: Any) -> Client:
    """A `distributed.Client(target, **options)` that is not the process's default client. Raises what `Client` raises.

    A client asserts that the scheduler's greeting arrives alone. The scheduler sends what falls due within 2 ms as one
    message, so that anything it sends to all its clients at that moment (a worker was lost) makes the assertion fail.
    The client then connects again.
    """
    for left in reversed(range(_ATTEMPTS)):
        client = Client.__new__(Client)
        try:
            Client.__init__(client, target, set_as_default=False, **options)
        except BaseException as error:
            # The client's finaliser would close it whenever garbage is collected, also while this thread starts another
            # client's event loop, and would wait for a lock that this thread holds.
            client.close()
            if not (left and isinstance(error, AssertionError)):
                raise
            logger.info("the scheduler's greeting did not arrive alone; connecting again")
        else:
            follow_clock_of_client(client)
            return client
    raise AssertionError("unreachable")
