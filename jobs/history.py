"""`ModelHistory`: measurements of finished jobs on a base model on this machine, for the plans of later jobs.

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

from ..scheduler.costs.cost import CostModel
from ..scheduler.estimates.lengths import AnswerLengths
from ..system.local_cache import default_cache_root, file_lock, make_private
from ..system.untrusted import MALFORMED, parse_json
from .agreement import Agreement
from .cost_profile import machine, profile_name

logger = logging.getLogger(__name__)
_FORMAT = 2
_VARIABLE, _OFF = "LORABATCH_HISTORY", "off"
# Most adapters whose answer lengths are kept; the adapters of the latest jobs stay.
_MAX_ADAPTERS = 2_000
# Most rows that an adapter's kept lengths count as, so that old answers lose weight against new ones.
_MAX_ROWS = 1_000.0


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """Measured costs and answer lengths of the finished jobs on one base model, device, dtype and number of threads."""

    #: Costs of steps, as the latest job measured them; None while no job took long enough.
    cost: CostModel | None = None
    #: Content hash of an adapter (None: base model) -> lengths of its answers; adapters of the latest jobs last.
    lengths: Mapping[str | None, AnswerLengths] = field(default_factory=dict)

    def joined(self, cost: CostModel | None, lengths: Mapping[str | None, AnswerLengths]) -> ModelHistory:
        """The history with the measurements of one more job added."""
        all_lengths = {adapter_id: found for adapter_id, found in self.lengths.items() if adapter_id not in lengths}
        for adapter_id, found in lengths.items():
            before = self.lengths.get(adapter_id)
            both = found if before is None else AnswerLengths.joined([before, found])
            all_lengths[adapter_id] = both.scaled(min(1.0, _MAX_ROWS / both.num_rows))
        latest = list(all_lengths.items())[-_MAX_ADAPTERS:]
        return ModelHistory(cost or self.cost, dict(latest))

    def to_json(self) -> dict[str, Any]:
        """The history as a JSON object, the form in which it is stored; it names this machine. The base model's key is
        the empty string, since JSON has no null as a key.
        """
        return {
            "format": _FORMAT,
            "machine": machine(),
            "cost": None if self.cost is None else self.cost.to_json(),
            "lengths": {adapter_id or "": found.to_json() for adapter_id, found in self.lengths.items()},
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelHistory:
        """The history that `to_json` wrote on this machine. Raises ValueError, KeyError, TypeError, AttributeError."""
        if raw["format"] != _FORMAT:
            raise ValueError(f"format={raw['format']!r}: this version reads {_FORMAT}")
        if raw["machine"] != machine():
            raise ValueError(f"it was measured on another machine, {raw['machine']!r}")
        cost = None if raw["cost"] is None else CostModel.from_json(raw["cost"])
        lengths = {adapter_id or None: AnswerLengths.from_json(found) for adapter_id, found in raw["lengths"].items()}
        return cls(cost, lengths)


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


def add_to_history(path: Path | None, cost: CostModel | None, lengths: Mapping[str | None, AnswerLengths]) -> None:
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
