"""The command line: parse, one call, print, exit code.

Heavy packages (torch, dask, pyarrow) are imported inside the commands that need them, so that `--help` and `status`
answer at once. Exit codes: 0 done; 1 the job failed or its error budget ran out; 2 the request itself was wrong;
130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console.ending import Ending, errors_as_exit_codes
from .console.options import Commands, shared_option
from .version import __version__

if TYPE_CHECKING:
    from .jobs.spec import JobSpec
    from .jobs.store import JobStore

app = Commands(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Offline batch inference for many LoRA adapters over one base model, on Dask.",
)
bench_app = Commands(no_args_is_help=True, help="Benchmarks, beside peers when they are installed.")
app.add_typer(bench_app, name="bench")

OutputArgument = Annotated[str, typer.Argument(metavar="OUTPUT", help="The job's output folder or URL.")]
ModelOption = Annotated[str, shared_option("model")]
StorageOption = Annotated[str | None, shared_option("storage_options")]
ClusterOption = Annotated[str | None, shared_option("cluster")]
ClusterOptionsOption = Annotated[str | None, shared_option("cluster_options")]
SchedulerFileOption = Annotated[str | None, shared_option("scheduler_file")]
TlsCaOption = Annotated[str | None, shared_option("tls_ca")]
TlsCertOption = Annotated[str | None, shared_option("tls_cert")]
TlsKeyOption = Annotated[str | None, shared_option("tls_key")]
PriceOption = Annotated[
    str | None,
    typer.Option(metavar="2.5 EUR", help="Price of one worker for an hour, and its currency: adds the job's cost."),
]
SpeedsOption = Annotated[
    str | None,
    typer.Option(metavar="1,0.5,…", help="Speed of each worker over the cost model's; by default all are 1."),
]
JsonEndOption = Annotated[bool, typer.Option("--json", help="End with one line of JSON, the only one on stdout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def main() -> None:
    """Entry point of the console script. SIGTERM, as batch systems and Kubernetes send it, acts as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for them reads every installed package
    if "_LORABATCH_COMPLETE" in os.environ:
        os.environ["COLUMNS"] = "10000"  # typer would wrap the texts of options, and shells complete words by line
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C would print a trace into the line that is typed
    app()


def audit_main() -> None:
    """Entry point of `lorabatch-audit`, which is installed without torch: the command `audit` alone."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    alone = Commands(add_completion=False, pretty_exceptions_enable=False)
    alone.command("audit")(audit)
    try:
        alone()
    except ModuleNotFoundError as error:
        typer.echo(
            f"lorabatch-audit: {error}. What was asked needs the whole of lorabatch: `lorabatch audit`.", err=True
        )
        raise SystemExit(2) from None


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.job_command("run")
def run(job_file: Path | None, options: dict[str, Any], as_json: JsonEndOption = False) -> None:
    """Run a job in the foreground with live progress. The same command again resumes it."""
    with errors_as_exit_codes(as_json=as_json) as ending:
        from .jobs.opening.validation import requested_job

        _run(requested_job(options, job_file), ending)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the answers.")] = Path("demo-output"),
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Workers of the embedded cluster.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over if the folder holds a run.")] = False,
) -> None:
    """The main job on a small real model: trained adapters, a Parquet file of prompts, two workers."""
    with errors_as_exit_codes() as ending:
        from .console.tables import print_counts
        from .demo.job import demo_spec

        _run(demo_spec(output, workers=workers, overwrite=overwrite), ending)
        print_counts(output)


@app.job_command("plan")
def plan(
    job_file: Path | None,
    options: dict[str, Any],
    speeds: SpeedsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Dry run: adapters, rows and tokens, waves, placement, memory, predicted seconds and money. Runs nothing."""
    with errors_as_exit_codes():
        from .console.plan_tables import print_plan
        from .jobs.input.without_pandas import leave_out_pandas
        from .pipeline.planning.dry_run import dry_run

        leave_out_pandas()
        found = dry_run(options, job_file, speeds)
        print_plan(found, found.spec.gpu_hour_price, as_json=as_json)


@app.command()
def simulate(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="A job; its rows are indexed.")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV with ContextTokens and GeneratedTokens per row.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to draw, without a job file.")] = 2000,
    adapters: Annotated[int, typer.Option(min=0, help="Adapters to draw, without a job file.")] = 32,
    skew: Annotated[float, typer.Option(min=0, help="Exponent of their popularity; 0 is even.")] = 1.0,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Simulated workers.")] = 4,
    speeds: SpeedsOption = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies to compare; by default all. Repeatable.")] = None,
    placement: Annotated[str, shared_option("placement")] = "planner",
    cost_model: Annotated[
        str | None, typer.Option(help="A file of `profile`, or a known machine; by default the job's, or an H200.")
    ] = None,
    batch_rows: Annotated[int | None, typer.Option(min=1, help="Rows at once; by default the engine's choice.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for table and plots.")] = Path("simulation"),
) -> None:
    """The scheduler's own code on simulated workers: policies compared on one job, as a table and as plots.

    Without a job file rows are drawn and workers are H200s. The smallest example needs no files and takes seconds:
    lorabatch simulate --rows 200 --adapters 4 --workers 2 --policy planner --policy dlora
    """
    with errors_as_exit_codes():
        from .console.tables import print_simulation
        from .pipeline.planning.simulate import SimulationRequest, simulate_job

        wanted = tuple(policy or ())
        request = SimulationRequest(
            job_file,
            trace,
            rows,
            adapters,
            skew,
            workers,
            wanted,
            cost_model,
            batch_rows,
            seed,
            output,
            speeds,
            placement,
        )
        print_simulation(simulate_job(request))


@app.command()
def profile(
    model: ModelOption,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", min=1, help="Engines at once; 2, or 1 on a GPU.")
    ] = None,
    engine_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each; shared out.")] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows that an engine decodes together.")] = 64,
    step_tokens: Annotated[int, typer.Option(min=16, help="Most tokens of one forward pass.")] = 512,
    max_seconds: Annotated[float, typer.Option(min=1, help="Nothing new is measured after so long.")] = 120.0,
    dtype: Annotated[str, shared_option("dtype")] = "auto",
    base_quantization: Annotated[str, shared_option("base_quantization")] = "none",
    tensor_parallel: Annotated[int, shared_option("tensor_parallel")] = 1,
    save: Annotated[Path | None, typer.Option(help="JSON file; by default where jobs find it.")] = None,
) -> None:
    """Measure this machine's cost model: prefill, decode, LoRA by rank, merge, adapter load. About two minutes."""
    with errors_as_exit_codes():
        from .console.tables import print_profile
        from .jobs.spec import JobSpec
        from .pipeline.planning.profile import profile_model

        given: dict[str, Any] = {
            "workers": workers,
            "engine_threads": engine_threads,
            "batch_rows": batch_rows,
            "step_tokens": step_tokens,
            "dtype": dtype,
            "base_quantization": base_quantization,
            "tensor_parallel": tensor_parallel,
        }
        spec = JobSpec(model=model, input="-", output="-", **given)
        print_profile(*profile_model(spec, max_seconds, save))


@app.command()
def audit(
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER", help="Adapter folders, or folders of them; paths or URLs.")
    ],
    model: ModelOption,
    storage_options: StorageOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every key and tensor as JSON.")] = False,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Do not read weights: no check for NaN, no hash.")
    ] = False,
) -> None:
    """Say of each adapter whether it is applied exactly, exactly when merged, or refused, and why.

    With --base-quantization a job rounds the base's weights, not the adapter's: verdicts are of the adapter, and hold.

    Exit code 1 when any is refused.
    """
    with errors_as_exit_codes():
        from .console.tables import print_audits
        from .jobs.opening.adapters import audit_folders

        audits = audit_folders(adapters, model, _storage_options(storage_options), check_values=not headers_only)
        print_audits(audits, as_json=as_json)
    if any(found.verdict == "refused" for found in audits):
        raise typer.Exit(1)


@app.command()
def status(output: OutputArgument, storage_options: StorageOption = None, as_json: JsonOption = False) -> None:
    """Show how far a job is, from its output location alone.

    With --json the exit code says it too: 0 done, 1 failed, 3 running or waiting, 4 silent, 130 stopped; 2 no job.
    """
    with errors_as_exit_codes():
        from .console.progress import print_status
        from .jobs.status.job_status import read_status

        found = read_status(_store(output, storage_options).latest())
        print_status(found, as_json=as_json)
    if as_json:
        raise typer.Exit(found.exit_code)


@app.command()
def wait(
    output: OutputArgument,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds; by default until the job ends.")] = None,
    storage_options: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until a job ends, and print where it stands.

    Exit code: 0 done, 1 failed, 130 stopped, 3 still running or waiting after the timeout, 4 silent; 2 no job.
    """
    with errors_as_exit_codes():
        from .console.progress import print_status
        from .jobs.status.job_status import wait_for_end

        found = wait_for_end(_store(output, storage_options), timeout)
        print_status(found, as_json=as_json)
    raise typer.Exit(found.exit_code)


@app.job_command("submit")
def submit(job_file: Path | None, options: dict[str, Any]) -> None:
    """Start a job that goes on without this command: on a cluster, or on one in the background of this machine."""
    with errors_as_exit_codes():
        from .console.terminal import echo
        from .jobs.input.without_pandas import leave_out_pandas
        from .jobs.opening.validation import requested_job
        from .pipeline.submit import submit as submit_job

        leave_out_pandas()
        echo(submit_job(requested_job(options, job_file)).to_text())


@app.command()
def resume(
    output: OutputArgument,
    cluster: ClusterOption = None,
    cluster_options: ClusterOptionsOption = None,
    scheduler_file: SchedulerFileOption = None,
    workers: Annotated[str | None, shared_option("workers", "<int>")] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    max_errors: Annotated[str | None, shared_option("max_errors")] = None,
    stop_if: Annotated[list[str] | None, shared_option("stop_if")] = None,
    max_seconds: Annotated[str | None, shared_option("max_seconds", "<float>")] = None,
    max_cost: Annotated[str | None, shared_option("max_cost")] = None,
    gpu_hour_price: Annotated[str | None, shared_option("gpu_hour_price")] = None,
    storage_options: StorageOption = None,
    as_json: JsonEndOption = False,
) -> None:
    """Go on with a job from its output alone, as it last ran but for what is given. Changed adapters answer anew."""
    given: dict[str, Any] = {"cluster": cluster, "scheduler_file": scheduler_file, "workers": workers}
    given |= {"output": output, "cluster_options": cluster_options}
    given |= {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "max_errors": max_errors}
    given |= {"stop_if": stop_if or None, "max_seconds": max_seconds}
    given |= {"max_cost": max_cost, "gpu_hour_price": gpu_hour_price}
    with errors_as_exit_codes(as_json=as_json) as ending:
        from .jobs.status.job_status import read_status

        store = _store(output, storage_options).latest()
        record = read_status(store).record
        options = _storage_options(storage_options)
        _run(record.job_spec(options, update=bool(store.update) or None, **given), ending)


@app.command()
def compare(
    output: OutputArgument,
    other: Annotated[str | None, typer.Argument(help="Output of a second job. Without: float32.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="Compare rows of this adapter; given twice: of one on each side.")
    ] = None,
    on: Annotated[str | None, typer.Option(help="Column that names rows on both sides; by default their id.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows that are answered in float32; by default 32.")] = None,
    cluster: ClusterOption = None,
    storage_options: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare answers: of two jobs or adapters, as they are; of one job, some of them with those in float32."""
    if other is not None or adapter or on is not None:
        for_float32 = [name for name, value in (("--rows", rows), ("--cluster", cluster)) if value is not None]
        with errors_as_exit_codes():
            from .console.comparison import compare_outputs

            second = None if other is None else _store(other, storage_options)
            sides = _store(output, storage_options), second
            is_equal = compare_outputs(*sides, adapter or [], on, for_float32, as_json=as_json)
        raise typer.Exit(0 if is_equal else 1)
    with errors_as_exit_codes():
        from .console.progress import ConsoleProgress, print_agreement
        from .jobs.status.job_status import read_status
        from .pipeline.compare import compare as compare_rows

        store = _store(output, storage_options)
        spec = read_status(store).record.job_spec(_storage_options(storage_options), cluster=cluster)
        with ConsoleProgress() as progress:
            found = compare_rows(store, spec, rows or 32, progress=progress)
        print_agreement(found, as_json=as_json)


@app.command()
def cancel(output: OutputArgument, storage_options: StorageOption = None) -> None:
    """Ask the run of a job to stop. Finished rows are kept; `resume` goes on."""
    with errors_as_exit_codes():
        from .jobs.status.job_status import request_cancel

        is_running = request_cancel(_store(output, storage_options))
        typer.echo(
            "Asked to stop. `lorabatch status` says when it has."
            if is_running
            else "No run to stop: the job has ended. `lorabatch status` says how."
        )


@app.command()
def logs(
    output: OutputArgument,
    storage_options: StorageOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """Events and log lines by time: plan, starts, losses, moves, retries; warnings of client, workers and engines."""
    with errors_as_exit_codes():
        from .console.terminal import echo
        from .jobs.status.logs import log_lines

        for line in log_lines(_store(output, storage_options), follow=follow):
            echo(line)


@app.command("list")
def list_jobs(
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Address of a Dask scheduler; by default the background's.")
    ] = None,
    scheduler_file: SchedulerFileOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Jobs that a cluster runs or keeps."""
    with errors_as_exit_codes():
        from .console.terminal import echo
        from .jobs.options.values import TlsFiles
        from .pipeline.listing import list_jobs as jobs_of

        found = jobs_of(cluster, tls_files=TlsFiles(tls_ca, tls_cert, tls_key), scheduler_file=scheduler_file)
        echo("\n".join(found) if found else "No jobs.")


@app.command()
def report(
    output: OutputArgument,
    save: Annotated[Path, typer.Option(help="Where to put the page.")] = Path("report.html"),
    gpu_hour_price: PriceOption = None,
    storage_options: StorageOption = None,
) -> None:
    """One HTML file about a job: timeline of workers, modes and migrations, throughput, adapters, cost, errors."""
    with errors_as_exit_codes():
        from .jobs.report.page import save_report, write_report

        save_report(write_report(_store(output, storage_options), gpu_hour_price), save)
        typer.echo(f"Report: {save}")


@app.command("import")
def import_batch(
    batches: Annotated[list[str], typer.Argument(metavar="BATCH.jsonl", help="Batch files; paths or URLs.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT.parquet", help="The job's input; path or URL. Replaced.")],
    base: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model name that means the base model; others are adapters. Repeatable."),
    ] = None,
    storage_options: StorageOption = None,
) -> None:
    """Make a job's input of batch files of OpenAI's API: each line a row, each model name an adapter."""
    with errors_as_exit_codes():
        from .console.terminal import echo
        from .jobs.openai_batch.importing import import_batch as import_files

        echo(import_files(batches, output, base or (), _storage_options(storage_options)).to_text())


@app.command("export")
def export_batch(
    output: OutputArgument,
    results: Annotated[str, typer.Argument(metavar="RESULTS.jsonl", help="Path or URL. Replaced.")],
    partial: Annotated[bool, typer.Option("--partial", help="Also of a job that has not finished.")] = False,
    adapter: Annotated[
        str | None, typer.Option(help="Adapter whose rows are written, '' for the base model; one of a sweep's.")
    ] = None,
    storage_options: StorageOption = None,
) -> None:
    """Write a job's output as a batch output file of OpenAI's API: each row a line, keyed by custom_id."""
    with errors_as_exit_codes():
        from .console.terminal import echo
        from .jobs.openai_batch.exporting import export_batch as export_rows

        store, options = _store(output, storage_options), _storage_options(storage_options)
        echo(export_rows(store, results, options, is_partial=partial, adapter=adapter))


@bench_app.command("engine")
def bench_engine(
    model: Annotated[Path | None, typer.Option(help="Model folder; by default the demo's base.")] = None,
    vs: Annotated[
        list[str] | None,
        typer.Option(
            help="Peers beside: peft, vllm, llamacpp, openvino, none; by default those installed. Repeatable."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows that are answered.")] = 64,
    adapters: Annotated[int, typer.Option(min=1, help="Adapters of the rows.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each system.")] = 3,
    save: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
    runs: Annotated[Path | None, typer.Option(help="File that collects the runs of several calls.")] = None,
    lengths: Annotated[list[str] | None, typer.Option(help="uniform or long-tailed answers; by default both.")] = None,
    prompts: Annotated[str, typer.Option(help="short, or long: 1,000 tokens and short answers.")] = "short",
) -> None:
    """The engine on rows over adapters of ranks 8-64, beside peers, in one run."""
    with errors_as_exit_codes():
        from .benchmarks.engine.bench import main as run_benchmark
        from .benchmarks.engine.bench import peers_of
        from .benchmarks.engine.workload import ALL_LENGTHS

        try:
            kinds = tuple(lengths or ALL_LENGTHS)
            run_benchmark(model, peers_of(vs), rows, adapters, repeats, save, runs, kinds, prompts)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


def _run(spec: JobSpec, ending: Ending) -> None:
    """Run a job in the foreground and print its summary, beside the line for machines to standard error."""
    from .console.progress import ConsoleProgress
    from .console.terminal import echo
    from .jobs.input.without_pandas import leave_out_pandas
    from .pipeline.run import run as run_job

    ending.spec = spec
    leave_out_pandas()
    can_ask = sys.stdin.isatty() and sys.stderr.isatty()
    with ConsoleProgress() as progress:
        ending.say = progress.note
        result = run_job(spec, progress=progress, ask=progress.ask if spec.confirm and can_ask else None)
    echo(result.to_text(), err=ending.as_json)
    ending.print()


def _store(output: str, storage_options: str | None) -> JobStore:
    from .jobs.store import JobStore

    return JobStore(output, _storage_options(storage_options))


def _storage_options(text: str | None) -> dict[str, Any]:
    """The value of `--storage-options`. Raises `JobRequestError`."""
    from .jobs.errors import JobRequestError
    from .jobs.options.values import parse_storage_options

    try:
        return parse_storage_options(text)
    except ValueError as error:
        raise JobRequestError(f'storage_options: {error}. Write for example \'{{"profile": "batch"}}\'.') from None
