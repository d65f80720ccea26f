"""`ModelHistory`: what finished jobs on a base model have measured on this machine, for the plans of later ones.

One small file for each base model, device, dtype and number of threads, beside the profiles. It holds what steps cost
and how long the answers of each adapter were. Costs are for predictions only: engines and the scheduler decide by the
cost model that `lorabatch profile` or a preset gives. Lengths are for the plan: which rows are dispatched first.
`LORABATCH_HISTORY` names another folder, or `off` for none.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.local_cache import default_cache_root, file_lock, make_private
from ..engine.untrusted import MALFORMED, parse_json
from ..scheduler.cost import CostModel
from ..scheduler.estimates.lengths import AnswerLengths
from .agreement import Agreement
from .cost_profile import machine, profile_name

logger = logging.getLogger(__name__)
_FORMAT = 2
_VARIABLE, _OFF = "LORABATCH_HISTORY", "off"
# Adapters whose lengths are kept: those of the last jobs.
_MAX_ADAPTERS = 2_000
# More rows count as these: what an adapter answered long ago gives way.
_MAX_ROWS = 1_000.0


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """`cost`: of steps, as the last job has measured them; None where no job took long enough. `lengths`: by content
    hash of the adapter ("": base model), those of the latest jobs last.
    """

    cost: CostModel | None = None
    lengths: Mapping[str, AnswerLengths] = field(default_factory=dict)

    def joined(self, cost: CostModel | None, lengths: Mapping[str, AnswerLengths]) -> ModelHistory:
        """With what one more job has measured."""
        all_lengths = {name: found for name, found in self.lengths.items() if name not in lengths}
        for name, found in lengths.items():
            before = self.lengths.get(name)
            both = found if before is None else AnswerLengths.joined([before, found])
            all_lengths[name] = both.scaled(min(1.0, _MAX_ROWS / both.num_rows))
        latest = list(all_lengths.items())[-_MAX_ADAPTERS:]
        return ModelHistory(cost or self.cost, dict(latest))

    def to_json(self) -> dict[str, Any]:
        """As stored."""
        return {
            "format": _FORMAT,
            "machine": machine(),
            "cost": None if self.cost is None else self.cost.to_json(),
            "lengths": {name: found.to_json() for name, found in self.lengths.items()},
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelHistory:
        """The history that `to_json` wrote on this machine. Raises ValueError, KeyError, TypeError, AttributeError."""
        if raw["format"] != _FORMAT:
            raise ValueError(f"format={raw['format']!r}: this version reads {_FORMAT}")
        if raw["machine"] != machine():
            raise ValueError(f"it was measured on another machine, {raw['machine']!r}")
        cost = None if raw["cost"] is None else CostModel.from_json(raw["cost"])
        lengths = {name: AnswerLengths.from_json(found) for name, found in raw["lengths"].items()}
        return cls(cost, lengths)


def history_path(model_sha256: str, device: str, dtype: str, threads: int | None, processes: int = 1) -> Path | None:
    """Where the history of this combination is kept; None when none is."""
    root = _folder()
    return None if root is None else root / f"{profile_name(model_sha256, device, dtype, threads, processes)}.json"


def read_history(path: Path | None) -> ModelHistory:
    """The history at this place; an empty one where there is none, or a file that is damaged or another machine's."""
    if path is None or not path.exists():
        return ModelHistory()
    try:
        return ModelHistory.from_json(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, *MALFORMED) as error:
        logger.warning("%s: what earlier jobs have measured is not used: %s", path, error)
        return ModelHistory()


def add_to_history(path: Path | None, cost: CostModel | None, lengths: Mapping[str, AnswerLengths]) -> None:
    """Join what a job has measured with the history at this place. The file is replaced whole; a folder that cannot be
    written costs a line in the log.
    """
    if path is None:
        return
    try:
        with file_lock(path.with_suffix(".lock")):
            _replace(path, json.dumps(read_history(path).joined(cost, lengths).to_json()))
    except OSError as error:
        logger.warning("%s: what this job has measured is not kept: %s", path, error)


def keep_agreement(model_sha256: str, found: Agreement) -> None:
    """Keep how a format's answers agree with those in float32, for the plans of later jobs on this base model."""
    path = _agreement_path(model_sha256, found.products)
    if path is None:
        return
    try:
        _replace(path, json.dumps(found.to_json()))
    except OSError as error:
        logger.warning("%s: what was compared is not kept: %s", path, error)


def known_agreement(model_sha256: str, products: str) -> Agreement | None:
    """What was compared last on this base model in this format."""
    path = _agreement_path(model_sha256, products)
    if path is None:
        return None
    try:
        return Agreement.from_json(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        logger.warning("%s: what was compared before is not shown: %s", path, error)
        return None


def _agreement_path(model_sha256: str, products: str) -> Path | None:
    root = _folder()
    return None if root is None else root / f"{model_sha256[:16]}-{products}-agreement.json"


def _folder() -> Path | None:
    folder = os.environ.get(_VARIABLE)
    if folder == _OFF:
        return None
    return Path(folder) if folder else default_cache_root() / "history"


def _replace(path: Path, text: str) -> None:
    make_private(path.parent)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
