"""The functions of `import lorabatch`: the commands of the command line, for programs and notebooks.

Options have the names, meanings and defaults that they have on the command line: they are the fields of `JobSpec`.
Errors are the command line's too, as exceptions; `jobs/errors.py` lists them. Only progress is printed.

Heavy packages are imported inside the functions that need them, as in `cli.py`.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from .jobs.contents import part_name
from .jobs.options.types import JobOptions
from .jobs.progress import counted
from .jobs.spec import JobSpec
from .jobs.status.job_status import JobStatus, read_status, request_cancel, wait_for_end, wait_interval_s
from .jobs.status.logs import log_lines
from .jobs.status.rows import follow_rows
from .jobs.storage.limits import waits_said
from .jobs.storage.redaction import redacted_url
from .jobs.storage.urls import absolute
from .jobs.store import JobStore
from .system.html import facts_table
from .system.long_work import listening

if TYPE_CHECKING:
    import dask.dataframe as dd
    import pandas as pd
    import pyarrow as pa
    from distributed import Client

    from .engine.peft.audit import AdapterAudit
    from .jobs.agreement import Agreement
    from .jobs.comparison import Comparison
    from .pipeline.planning.dry_run import DryRun
    from .pipeline.result import JobResult
    from .pipeline.run import Progress

_Function = TypeVar("_Function", bound=Callable[..., Any])
# A job as a program gives it: a `JobSpec`, or the path of a job file; None: options alone.
JobSource = JobSpec | str | os.PathLike[str] | None


def _with_job_options(function: _Function) -> _Function:
    """Adds the options of a job, with their defaults and help, to the signature and docstring of a function."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields = JobSpec.model_fields
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if field.is_required() else field.default,
            annotation=field.annotation,
        )
        for name, field in fields.items()
    ]
    function.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    lines = [f"    {name}: {field.description}" for name, field in fields.items()]
    function.__doc__ = inspect.cleandoc(function.__doc__ or "") + "\n\nOptions of a job:\n" + "\n".join(lines) + "\n"
    return function


@_with_job_options
def run(
    job: JobSource = None,
    *,
    client: Client | None = None,
    progress: bool | Progress = True,
    **options: Unpack[JobOptions],
) -> JobResult:
    """Run a job to its end, or go on with it where it stopped.

    >>> result = lorabatch.run(
    ...     model="base", adapters="adapters", input="prompts.parquet", output="answers", max_tokens=8, workers=1
    ... )
    >>> result.num_rows, result.num_errors
    (12, 0)

    job: a `JobSpec`, or the path of a job file; options given beside it take precedence.
    client: client of the Dask cluster to use instead of the one that `cluster` names.
    progress: False shows none; or an object with `update(state)` and `note(text)`.

    Raises `JobRequestError` with all problems of the request before anything is written; `ErrorBudgetError` when too
    many rows are wrong; `JobFailedError` or `StorageError` when the job cannot go on; `JobInterruptedError` on Ctrl-C
    or a request to cancel. Whatever is finished by then is kept: running the job again goes on from there.
    """
    from .pipeline.run import run as run_job

    spec = _spec(job, options, client)
    with _shown(progress) as shown, _waits_noted(shown):
        return run_job(spec, client=client, progress=shown)


@_with_job_options
def submit(job: JobSource = None, *, client: Client | None = None, **options: Unpack[JobOptions]) -> Job:
    """Start a job that goes on without this process: on a cluster, or on one in the background of this machine.

    >>> job = lorabatch.submit(
    ...     model="base", adapters="adapters", input="prompts.parquet", output="answers", max_tokens=8, workers=1
    ... )
    >>> job.result().num_rows
    12

    job: a `JobSpec`, or the path of a job file; options given beside it take precedence.
    client: client of the Dask cluster to use instead of the one that `cluster` names.

    Raises what `run` raises before work starts. What happens later is in the job's status, and `Job.result` raises it.
    """
    from .pipeline.submit import submit as submit_job

    spec = _spec(job, options, client).with_absolute_paths()
    submitted = submit_job(spec, client=client)
    return Job(spec.output, spec.storage_options, cluster=submitted.cluster, dashboard=submitted.dashboard)


@_with_job_options
def plan(
    job: JobSource = None,
    *,
    speeds: str | Sequence[float] | None = None,
    **options: Unpack[JobOptions],
) -> JobPlan:
    """Plan a job without running it: adapters, rows and tokens, waves, placement, memory, seconds and money.

    >>> found = lorabatch.plan(model="base", adapters="adapters", input="prompts.parquet", max_tokens=8)
    >>> found.num_rows
    12

    job: a `JobSpec`, or the path of a job file; options given beside it take precedence. An output is not needed.
    speeds: speed of each worker, relative to the cost model's.

    Raises what `run` raises before work starts.
    """
    from .pipeline.planning.dry_run import dry_run

    values, job_file = _values(job, options)
    text = speeds if speeds is None or isinstance(speeds, str) else ",".join(map(str, speeds))
    found = dry_run(values, job_file, text)
    return JobPlan(found, found.spec.gpu_hour_price)


def status(output: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> JobStatus:
    """Read the status of a job from its output alone.

    >>> lorabatch.status("answers").headline
    'done'

    Raises `JobRequestError` when the output holds no job, `StorageError` when it cannot be read.
    """
    return Job(output, storage_options).status()


def audit(
    adapters: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    model: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    headers_only: bool = False,
) -> list[AdapterAudit]:
    """Check for each adapter whether it is applied exactly, exactly when merged, or refused, and why.

    >>> [(found.name, found.verdict) for found in lorabatch.audit("adapters", model="base")]
    [('formal', 'exact'), ('pirate', 'exact')]

    adapters: folders or URLs of adapters, or of folders of them.
    headers_only: weights are not read: no check for NaN, no hash.

    Raises `JobRequestError` naming the folders in which no adapter was found, `StorageError` for what cannot be
    fetched, and `EngineError` for a model that cannot be read or a machine that can start no process to read adapters.
    """
    from .engine.errors import EngineError
    from .jobs.opening.adapters import audit_folders
    from .system.untrusted import NoProcessError

    urls = [adapters] if isinstance(adapters, str | os.PathLike) else adapters
    try:
        return audit_folders(
            [os.fspath(url) for url in urls], os.fspath(model), storage_options or {}, check_values=not headers_only
        )
    except NoProcessError as error:
        raise EngineError(str(error)) from None


class Job:
    """A job, known by its output: what `submit` returns, or `Job(output)` for a job that was started anywhere.

    >>> job = lorabatch.Job("answers")
    >>> job.status().headline
    'done'
    >>> sorted(job.to_pandas()["finish_reason"].unique())
    ['length']

    It reads storage only, so that it works from any machine. `cluster`, `dashboard`: addresses at which `submit` has
    started the job; "" when they are not known, or all answers were there already.
    """

    def __init__(
        self,
        output: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        cluster: str = "",
        dashboard: str = "",
    ) -> None:
        self._store = JobStore(absolute(os.fspath(output)), storage_options)
        self.cluster = cluster
        self.dashboard = dashboard

    def __repr__(self) -> str:
        return f"<Job: {self.output}>"

    def _repr_html_(self) -> str:
        # what the output says is not read: a store may be slow or away
        return facts_table("Job", {"output": self.output, "cluster": self.cluster, "dashboard": self.dashboard})

    def __await__(self) -> Generator[Any, None, JobResult]:
        """Wait for the job without blocking the event loop: `await job` is `job.result()`."""
        return self._awaited().__await__()

    @property
    def output(self) -> str:
        """The output folder or URL, without passwords and signatures."""
        return redacted_url(self._store.url)

    @property
    def job_id(self) -> str:
        """The job's id. Raises what `status` raises."""
        return self.status().record.job_id

    def status(self) -> JobStatus:
        """The present status of the job.

        Raises `JobRequestError` when the output holds no job, `StorageError` when it cannot be read.
        """
        return read_status(self._store.latest())

    def wait(self, timeout_s: float | None = None, *, progress: bool | Progress = False) -> JobStatus:
        """Wait until the job's run has ended, well or not; returns its status. `progress`: see `run`.

        Raises `TimeoutError` when the run has not ended after `timeout_s`, and what `status` raises.
        """
        with _shown(progress) as shown:
            found = wait_for_end(self._store, timeout_s, *([shown.update] if shown else []))
        if not found.has_ended:
            raise TimeoutError(f"output={self.output!r}: the job has not ended in {timeout_s:g} s")
        return found

    def result(self, timeout_s: float | None = None, *, progress: bool | Progress = False) -> JobResult:
        """Wait for the job; returns its result. Raises the error that ended the job, and what `wait` raises."""
        return _result_of(self.wait(timeout_s, progress=progress))

    async def _awaited(self) -> JobResult:
        import asyncio

        began_s = time.monotonic()
        while not (found := await asyncio.to_thread(self.status)).has_ended:
            await asyncio.sleep(wait_interval_s(self._store, time.monotonic() - began_s))
        return _result_of(found)

    def cancel(self) -> bool:
        """Ask the job to stop; False when it has ended already. Finished rows are kept. Raises what `status` raises."""
        return request_cancel(self._store)

    def compare(self, rows: int = 32, *, client: Client | None = None, progress: bool | Progress = False) -> Agreement:
        """Answer some rows of the finished job in its number format and in float32; returns how the answers agree.

        rows: number of rows, spread evenly over the job.
        client, progress: see `run`, which runs both small jobs.

        Raises `JobRequestError` for a job that has not finished or was computed in float32, and what `run` raises.
        """
        from .pipeline.compare import compare

        spec = read_status(self._store).record.job_spec(dict(self._store.location.storage_options))
        with _shown(progress) as shown:
            return compare(self._store, spec, rows, client=client, progress=shown)

    def compare_with(
        self, other: Job, *, adapters: tuple[str | None, str | None] = (None, None), on: str | None = None
    ) -> Comparison:
        """Join the answers of this finished job with those of another, by row; returns how they differ.

        >>> job = lorabatch.Job("answers")
        >>> job.compare_with(job).is_equal
        True

        other: the other job; this job itself for two of its adapters.
        adapters: for each side the adapter ("": base model) whose rows are taken; None for all rows.
        on: column of both outputs that names rows; None for their ids.

        Raises `JobRequestError` for jobs that have not finished and rows that cannot be joined, and `StorageError`.
        """
        from .jobs.comparison import compare_answers

        return compare_answers(self._store, other._store, adapters=adapters, on=on)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Events and log lines in order of time, as `lorabatch logs` prints them; with `follow`, until the job ends."""
        return log_lines(self._store, follow=follow)

    def iter_rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Each row of the output once, as a dictionary, part by part as the job writes them; ends when the job does.
        A job of wide shape writes them at its end.

        >>> len(list(lorabatch.Job("answers").iter_rows(["id", "completion"])))
        12

        columns: names of the columns to read; by default all.

        Raises the error that ended the job, after the rows of its parts; `JobRequestError` for a column that the output
        does not have; `JobFailedError` when another run computes a part again that was read; and what `status` raises.
        """
        return follow_rows(self._store, columns)

    def to_arrow(self, *, wide: bool | None = None) -> pa.Table:
        """All rows of the output as an Arrow table, in the order of its files. Waits and raises as `result` does.

        wide: True for the table of a sweep with a row for each row of the input, and a struct column for each adapter;
            False for a row for each of both; by default as the job's `shape`.

        Raises `JobRequestError` for a wide table of a job that is no sweep.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        from .pipeline.dataset.writer import output_schema

        self.result()
        record, location = self.status().record, self._store.location
        contents = self._store.contents()
        if record.is_wide and wide is False:
            names = [self._store.part_path(shard_id) for shard_id in sorted(contents.parts)]
        else:
            names = [part_name(number) for number in sorted(contents.files)]
        if not names:
            table = pa.Table.from_batches([], output_schema(record))
        else:
            fs = None if location.is_local else location.fs.store
            table = pa.concat_tables([pq.read_table(location.path(name), filesystem=fs) for name in names])
        if record.is_wide or not wide:
            return table
        from .jobs.input.wide import wide_table

        return wide_table(table, record)

    def to_pandas(self) -> pd.DataFrame:
        """All rows of the output as a pandas data frame. Needs pandas. Waits and raises as `result` does."""
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install pandas") from None
        return self.to_arrow().to_pandas()

    def to_dask_dataframe(self) -> dd.DataFrame:
        """The output as a Dask data frame of one partition per part. Waits and raises as `result` does.

        Needs `dask[dataframe]`.
        """
        try:
            import dask.dataframe as dd
        except ImportError:
            raise ImportError("to_dask_dataframe needs dask[dataframe]: pip install 'dask[dataframe]' pandas") from None
        from .jobs.storage.stores import without_limit

        self.result()
        names, location = [part_name(number) for number in sorted(self._store.contents().files)], self._store.location
        if not names:
            return dd.from_pandas(self.to_pandas(), npartitions=1)
        urls = [f"{location.url}/{name}" for name in names]
        return dd.read_parquet(urls, storage_options=without_limit(location.storage_options))


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The plan of a job, as `plan` returns it."""

    #: The whole plan.
    details: DryRun
    #: Price of one worker's hour; None when no price was given.
    gpu_hour_price: str | float | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the input, including rows that cannot be answered."""
        return self.details.workload.num_rows

    @property
    def num_errors(self) -> int:
        """Rows that are known before the run to be unanswerable."""
        return sum(kind.num_rows for kind in self.details.errors)

    @property
    def num_workers(self) -> int:
        """Workers that the job is planned for."""
        return self.details.num_workers

    @property
    def predicted_s(self) -> float:
        """Predicted seconds, without the start of the engines."""
        return self.details.forecast.predicted_s

    @property
    def price(self) -> float | None:
        """Predicted cost of all workers for the job; None when no price was given."""
        from .console.plan_tables import price

        return price(self.details, self.gpu_hour_price)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for users on adapters, files and rows, one sentence each."""
        return self.details.notes

    def to_json(self) -> dict[str, Any]:
        """The plan as `lorabatch plan --json` prints it."""
        from .console.plan_tables import plan_json

        return plan_json(self.details, self.gpu_hour_price)

    def to_text(self) -> str:
        """The plan as `lorabatch plan` prints it."""
        from .console.plan_tables import print_plan
        from .console.terminal import plain_console

        text = StringIO()
        print_plan(self.details, self.gpu_hour_price, plain_console(file=text, width=120, force_jupyter=False))
        return text.getvalue()

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        counts = f"{counted(self.num_rows, 'row')}, {counted(self.num_workers, 'worker')}"
        return f"<JobPlan: {counts}, {self.predicted_s:,.1f} s predicted>"

    def _repr_html_(self) -> str:
        facts = {
            "rows": self.num_rows,
            "rows known to be wrong": self.num_errors,
            "workers": self.num_workers,
            "predicted seconds": f"{self.predicted_s:,.1f}",
            "price": None if self.price is None else f"{self.price:,.2f}",
            "notes": "\n".join(self.notes),
        }
        return facts_table("Plan", facts)


def _result_of(status: JobStatus) -> JobResult:
    """The result of a job that has ended. Raises the error that ended it."""
    from .pipeline.result import JobResult

    if (error := status.error) is not None:
        raise error
    assert status.summary is not None, "_SUCCESS is there, summary.json is not"
    return JobResult.from_json(status.summary)


def _values(job: JobSource, options: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The given options of a job, and its job file."""
    if isinstance(job, JobSpec):
        return {name: getattr(job, name) for name in job.model_fields_set} | dict(options), None
    return dict(options), None if job is None else Path(job)


def _spec(job: JobSource, options: Mapping[str, Any], client: Client | None) -> JobSpec:
    """The job as asked, on the cluster of `client` if one is given.

    Raises `JobRequestError` with every problem of the values, and of the files that the valid values name.
    """
    from .jobs.opening.validation import requested_job

    spec = job if isinstance(job, JobSpec) and not options else requested_job(*_values(job, options))
    # A cluster by address, so that devices are asked of its workers, not of this machine.
    return (
        spec
        if client is None
        else spec.model_copy(
            update={
                "cluster": client.scheduler_info(n_workers=0)["address"],
                "scheduler_file": None,
                "cluster_options": {},
            }
        )
    )


@contextmanager
def _waits_noted(shown: Progress | None) -> Iterator[None]:
    """Within the block, a progress display shows notes about long work before the job's work, and waits for storage."""
    if shown is None:
        yield
        return
    with listening(shown.note), waits_said(shown.note):
        yield


def _shown(progress: bool | Progress) -> AbstractContextManager[Progress | None]:
    if not isinstance(progress, bool):
        return nullcontext(progress)
    if not progress:
        return nullcontext(None)
    from .console.progress import ConsoleProgress

    return ConsoleProgress()
