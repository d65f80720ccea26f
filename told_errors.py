"""What a command says when it fails, and its exit code.

0 done; 1 the job failed or its error budget ran out; 2 the request itself was wrong; 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_told() -> Iterator[None]:
    """An error of ours becomes its message and its exit code; anything else is a defect and shows its trace."""
    from .engine.errors import EngineError
    from .jobs.errors import JobError

    try:
        yield
    except JobError as error:
        typer.secho(f"lorabatch: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except EngineError as error:
        typer.secho(f"lorabatch: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.secho("lorabatch: interrupted. Run the same command again to go on.", err=True)
        raise typer.Exit(130) from None
