"""`WatchedEngine`: an engine that notes, in a file, the messages it gets and gives and the rows of its steps."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.memory.pool import PageRange
from lorabatch.engine.models.step_batch import StepEntry
from lorabatch.engine.request import ExportedRow, Result
from lorabatch.engine.sequence import Sequence as RowSequence
from lorabatch.engine.server.frames import AddRows, ExpectRows, RegisterAdapter, Results
from lorabatch.scheduler.costs.fitting import StepSample

#: Environment variable that names the folder for the notes of all engines.
FOLDER = "LORABATCH_JOURNEY_FOLDER"
#: Name of the engine's factory, as `pipeline.run.run` takes it.
FACTORY = f"{__name__}:WatchedEngine"


@dataclass(frozen=True, slots=True)
class WatchedRow:
    """A row in a step: its sequence after the step, the tokens that the step computed for it, and its pages."""

    sequence: RowSequence
    num_tokens: int
    run: PageRange


Note = RegisterAdapter | ExpectRows | AddRows | Results | tuple[WatchedRow, ...]


class WatchedEngine(Engine):
    """Engine of the demo's job. Its notes are messages, and one tuple of rows for each step."""

    def __init__(self, model_folder: Path, config: EngineConfig) -> None:
        self._notes = (Path(os.environ[FOLDER]) / f"{os.getpid()}.notes").open("ab")
        super().__init__(model_folder, config)
        self.observe_step = self._note_step

    def register_adapter(self, adapter_id: str, folder: Path, name: str = "", content_sha256: str = "") -> None:
        """Note the message, and register the adapter."""
        self._note(RegisterAdapter(adapter_id, str(folder), name))
        super().register_adapter(adapter_id, folder, name, content_sha256)

    def expect_rows(self, adapter_id: str, num_rows: int) -> None:
        """Note the message, and expect the rows."""
        self._note(ExpectRows(adapter_id, num_rows))
        super().expect_rows(adapter_id, num_rows)

    def import_rows(self, rows: Iterable[ExportedRow]) -> None:
        """Note the message, and queue its rows."""
        message = AddRows(tuple(rows))
        self._note(message)
        super().import_rows(message.rows)

    def step(self) -> list[Result]:
        """Compute a step, and note the message with its results."""
        results = super().step()
        if results:
            self._note(Results(tuple(results)))
        return results

    def _note_step(self, sample: StepSample, entries: Sequence[StepEntry]) -> None:
        self._note(tuple(WatchedRow(entry.sequence, entry.num_tokens, entry.pages) for entry in entries))

    def _note(self, note: Note) -> None:
        pickle.dump(note, self._notes)
        self._notes.flush()


def read_notes(path: Path) -> Iterator[Note]:
    """The notes of one engine, in the order of time."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return
