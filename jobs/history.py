"""`ModelHistory`: measurements of finished jobs on a base model on this machine, for the plans of later jobs.

One small file for each base model, device, dtype and number of threads, beside the profiles. It holds what steps cost
and how long the answers of each adapter and task were. Costs are for predictions only: engines and the scheduler decide
by the cost model that `lorabatch profile` or a preset gives. Lengths are for the plan: which rows are dispatched first.
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

from ..scheduler.costs.cost import CostModel
from ..scheduler.estimates.lengths import AnswerKey, AnswerLengths
from ..system.local_cache import default_cache_root, file_lock, make_private
from ..system.untrusted import MALFORMED, parse_json
from .agreement import Agreement
from .cost_profile import machine, profile_name

logger = logging.getLogger(__name__)
_FORMAT = 3
# A format that had lengths by adapter alone, which fit no task.
_WITHOUT_TASKS = 2
_VARIABLE, _OFF = "LORABATCH_HISTORY", "off"
# Most pairs of an adapter and a task whose answer lengths are kept; those of the latest jobs stay.
_MAX_PAIRS = 4_000
# Most rows that a pair's kept lengths count as, so that old answers lose weight against new ones.
_MAX_ROWS = 1_000.0


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """Measured costs and answer lengths of the finished jobs on one base model, device, dtype and number of threads."""

    #: Costs of steps, as the latest job measured them; None while no job took long enough.
    cost: CostModel | None = None
    #: Content hash of an adapter (None: base model) and hash of a task -> lengths of its answers; those of the latest
    #: jobs last.
    lengths: Mapping[AnswerKey, AnswerLengths] = field(default_factory=dict)

    def joined(self, cost: CostModel | None, lengths: Mapping[AnswerKey, AnswerLengths]) -> ModelHistory:
        """The history with the measurements of one more job added."""
        all_lengths = {key: found for key, found in self.lengths.items() if key not in lengths}
        for key, found in lengths.items():
            before = self.lengths.get(key)
            both = found if before is None else AnswerLengths.joined([before, found])
            all_lengths[key] = both.scaled(min(1.0, _MAX_ROWS / both.num_rows))
        latest = list(all_lengths.items())[-_MAX_PAIRS:]
        return ModelHistory(cost or self.cost, dict(latest))

    def to_json(self) -> dict[str, Any]:
        """The history as a JSON object, the form in which it is stored; it names this machine. A key of its lengths is
        the adapter's hash, nothing for the base model, a colon, and the task as 16 hexadecimal digits.
        """
        return {
            "format": _FORMAT,
            "machine": machine(),
            "cost": None if self.cost is None else self.cost.to_json(),
            "lengths": {f"{key[0] or ''}:{key[1]:016x}": found.to_json() for key, found in self.lengths.items()},
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelHistory:
        """The history that `to_json` wrote on this machine. Raises ValueError, KeyError, TypeError, AttributeError."""
        if raw["format"] not in (_FORMAT, _WITHOUT_TASKS):
            raise ValueError(f"format={raw['format']!r}: this version reads {_FORMAT}")
        if raw["machine"] != machine():
            raise ValueError(f"it was measured on another machine, {raw['machine']!r}")
        cost = None if raw["cost"] is None else CostModel.from_json(raw["cost"])
        if raw["format"] == _WITHOUT_TASKS:
            return cls(cost)
        return cls(cost, {_key(key): AnswerLengths.from_json(found) for key, found in raw["lengths"].items()})


def _key(text: str) -> AnswerKey:
    """Adapter and task of a key of a stored history. Raises ValueError."""
    adapter_id, colon, task = text.rpartition(":")
    number = int(task, 16)
    if not (colon and 0 <= number < 1 << 64):
        raise ValueError(f"{text!r}: expected an adapter's hash and a task of 64 bits")
    return adapter_id or None, number


def history_path(model_sha256: str, device: str, dtype: str, threads: int | None, processes: int = 1) -> Path | None:
    """Path at which this machine keeps the history of this combination; None when history is switched off."""
    root = _folder()
    return None if root is None else root / f"{profile_name(model_sha256, device, dtype, threads, processes)}.json"


def read_history(path: Path | None) -> ModelHistory:
    """The history at this path; an empty one for None, a missing file, a damaged one, or another machine's."""
    if path is None or not path.exists():
        return ModelHistory()
    try:
        return ModelHistory.from_json(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, *MALFORMED) as error:
        logger.warning("%s: what earlier jobs have measured is not used: %s", path, error)
        return ModelHistory()


def add_to_history(path: Path | None, cost: CostModel | None, lengths: Mapping[AnswerKey, AnswerLengths]) -> None:
    """Join a job's measurements with the history at this path. The file is replaced whole; a folder that cannot be
    written is logged and raises nothing.
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
    """The latest comparison on this base model in this format; None without one, or when its file is damaged."""
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
