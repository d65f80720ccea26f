"""Commands of `lorabatch bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .told_errors import errors_told

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks, beside peers when they are installed.")


@bench_app.command("engine")
def bench_engine(
    model: Annotated[Path | None, typer.Option(help="Model folder; by default the demo's base.")] = None,
    vs: Annotated[
        list[str] | None,
        typer.Option(help="Peers to run beside: peft, vllm, none; by default those installed. Repeatable."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1)] = 64,
    adapters: Annotated[int, typer.Option(min=1)] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    save: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
    runs: Annotated[Path | None, typer.Option(help="File that collects the runs of several calls.")] = None,
    lengths: Annotated[list[str] | None, typer.Option(help="uniform or long-tailed answers; by default both.")] = None,
) -> None:
    """The engine on rows over adapters of ranks 8-64, beside peers, in one run."""
    with errors_told():
        from .benchmarks.engine_bench import main as run_benchmark
        from .benchmarks.engine_bench import peers_of
        from .benchmarks.engine_workload import ALL_LENGTHS

        try:
            kinds = tuple(lengths or ALL_LENGTHS)
            run_benchmark(model, peers_of(vs), rows, adapters, repeats, save, runs, kinds)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
