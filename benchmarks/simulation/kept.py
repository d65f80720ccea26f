"""Results of parts of a long run, kept in a folder, so that the run can be broken off and gone on with."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Kept:
    """`folder` None: nothing is kept. A folder belongs to one set of arguments and one state of the code."""

    folder: Path | None

    def get(self, name: str, make: Callable[[], _T]) -> _T:
        """The result that an earlier call kept under `name`, else that of `make`, which is kept now."""
        path = None if self.folder is None else self.folder / f"{name.replace(' ', '-')}.pickle"
        if path is not None and path.exists():
            # Written by this class on this machine.
            found: _T = pickle.loads(path.read_bytes())
            return found
        start_s = time.process_time()
        made = make()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(made))
        print(f"{name} done in {time.process_time() - start_s:.0f} s of the CPU", flush=True)
        return made
