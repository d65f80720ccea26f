"""Ends a command: an error becomes its message and its exit code, and `--json` ends with a line for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..jobs.spec import JobSpec


@dataclass(slots=True)
class Ending:
    """How a command that runs a job ends. `spec`: of the job, once known."""

    as_json: bool
    spec: JobSpec | None = None
    #: Says on standard error what the command waits for.
    say: Callable[[str], None] = lambda text: None

    def print(self, message: str = "", exit_code: int = 0) -> None:
        """Print the line for machines, if it is asked for."""
        from .progress import print_end

        if self.as_json:
            print_end(self.spec, message, exit_code)


@contextmanager
def errors_as_exit_codes(*, as_json: bool = False) -> Iterator[Ending]:
    """Turns an error of ours into its message and its exit code; anything else is a defect and shows its trace. What
    takes long before work begins is said on standard error.
    """
    from ..engine.errors import EngineError
    from ..jobs.errors import JobError
    from ..jobs.storage.limits import waits_said
    from ..system.long_work import listening
    from ..system.untrusted import NoProcessError
    from .terminal import echo

    ending = Ending(as_json, say=partial(echo, err=True))
    try:
        with listening(partial(echo, err=True)), waits_said(lambda text: ending.say(text)):
            yield ending
        return
    except JobError as error:
        message, exit_code = str(error), error.exit_code
    except (EngineError, NoProcessError) as error:
        message, exit_code = str(error), 2
    except KeyboardInterrupt:
        message, exit_code = "interrupted. Run the same command again to go on.", 130
    echo(f"lorabatch: {message}", err=True)
    ending.print(message, exit_code)
    raise typer.Exit(exit_code)
