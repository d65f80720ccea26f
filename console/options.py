"""A command that takes a job: the job file, and every option of a job beside it.

The options of a job on the command line. Each is a key of the job file too, and `JobSpec` checks the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def job_command(
    call: Callable[[Path | None, dict[str, Any]], None], *, more: Mapping[str, tuple[Any, str]] | None = None
) -> Callable[..., None]:
    """Give a command the job file argument, all job options and `more`; it gets those that were given."""

    def command(job_file: Path | None = None, **options: Any) -> None:
        call(job_file, {name: value for name, value in options.items() if value not in (None, [])})

    keyword = inspect.Parameter.KEYWORD_ONLY
    argument = Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]", help="Job file; options take precedence.")]
    parameters = [inspect.Parameter("job_file", keyword, default=None, annotation=argument)]
    for name, (kind, text) in (JOB_OPTIONS | dict(more or {})).items():
        shown = text.replace("[", r"\[")  # square brackets are markup to the printer of helps
        annotation = Annotated[kind | None, typer.Option(help=shown, show_default=False)]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__name__, command.__doc__ = call.__name__, call.__doc__
    return command


# Name -> type and help.
JOB_OPTIONS: dict[str, tuple[Any, str]] = {
    "model": (str, "Base model: local folder, GGUF file, Hugging Face hub id or fsspec URL."),
    "adapters": (list[str], "Folder or URL with one PEFT folder per adapter; or NAME=URL, repeated."),
    "input": (str, "Parquet file, folder or glob; any fsspec URL."),
    "output": (str, "Folder or fsspec URL for the answers."),
    "name": (str, "A name for the job, shown by the dashboard."),
    "column": (list[str], "role=name: an input column under another name. Repeatable."),
    "cluster": (str, "local, local-cuda (fails without a GPU), or the address of a Dask scheduler.  [default: local]"),
    "workers": (int, "Workers of a local cluster; by default one per GPU, or two."),
    "tls_ca": (str, "PEM file of the authority that signed the cluster's certificates, for a tls:// address."),
    "tls_cert": (str, "PEM file of this client's certificate."),
    "tls_key": (str, "PEM file of this client's key."),
    "mode": (str, "auto, unmerged, merged or exact.  [default: auto]"),
    "max_tokens": (int, "Most tokens to generate per row.  [default: 128]"),
    "min_tokens": (int, "Fewest tokens to generate per row.  [default: 0]"),
    "temperature": (float, "0 is greedy.  [default: 0]"),
    "top_p": (float, "Draw from the likeliest tokens that reach this probability.  [default: 1]"),
    "top_k": (int, "Draw from this many likeliest tokens; 0 is all.  [default: 0]"),
    "seed": (int, "Seed of the rows' random streams.  [default: 0]"),
    "stop": (list[str], "A string that ends a completion. Repeatable."),
    "logprobs": (bool, "Add token ids and their log-probabilities to the output."),
    "ignore_eos": (bool, "Go on after the model's stop token, up to max-tokens."),
    "max_errors": (str, "Rows, as a count or a percentage, that may end in errors.  [default: 10%]"),
    "storage_options": (str, "JSON object for fsspec (keys, endpoint); never recorded."),
    "cost_model": (str, "File that `lorabatch profile` wrote, to plan with; found by itself on its machine."),
    "migration": (bool, "Lend running rows of slow workers to idle ones; on by default."),
    "rows_per_shard": (int, "Rows per part file; chosen by default."),
    "batch_rows": (int, "Rows an engine decodes together.  [default: 64; on a GPU by its memory]"),
    "step_tokens": (int, "Tokens of one forward pass at most.  [default: 512; on a GPU by its memory]"),
    "pool_bytes": (int, "Memory of an engine's page pool; chosen by default."),
    "engine_threads": (int, "CPU threads of an engine; shared out by default."),
    "dtype": (str, "auto, float32, bfloat16 or float16.  [default: auto]"),
    "tensor_parallel": (int, "Devices per engine; only 1 is served yet.  [default: 1]"),
    "overwrite": (bool, "Remove the job that is in the output and start over."),
}
# Of `plan`, beside those of a job.
PLAN_OPTIONS: dict[str, tuple[Any, str]] = {
    "gpu_hour_price": (float, "Price of one worker for an hour: the plan then says what the job costs."),
    "json": (bool, "Print everything as JSON."),
}
