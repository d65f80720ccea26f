"""`CostProfile`: the measurements of `lorabatch profile`, as a file.

It belongs to a base model (by content), a device, a dtype and a number of CPU threads per engine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..scheduler.costs.cost import CostModel
from ..scheduler.costs.fitting import FitQuality
from ..system.local_cache import default_cache_root
from ..system.untrusted import MALFORMED, parse_json
from .errors import JobRequestError

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostProfile:
    """The result of one `lorabatch profile`: a cost model fitted to measured steps, and what was measured where."""

    #: Content hash of the base model.
    model_sha256: str
    #: Processor and number of cores; see `machine`.
    machine: str
    #: ISO 8601, UTC.
    measured_at: str
    #: Device of the engines: "cpu" or "cuda".
    device: str
    #: Format in which linear layers multiply; see `products_format`.
    dtype: str
    #: CPU threads per engine; None on a GPU.
    engine_threads: int | None
    #: Engines that were measured at the same time.
    num_engines: int
    #: Rows of an engine's largest batch.
    batch_rows: int
    #: Kind of step -> how well `cost` meets the measured steps of this kind.
    quality: Mapping[str, FitQuality]
    #: The fitted cost model.
    cost: CostModel

    def to_json(self) -> dict[str, Any]:
        """The profile as a JSON object, the form in which it is stored."""
        return {"format": _FORMAT} | asdict(self) | {"cost": self.cost.to_json()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CostProfile:
        """The profile that `to_json` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        if raw["format"] != _FORMAT:
            raise ValueError(f"format={raw['format']!r}: this version reads {_FORMAT}")
        known = {name: value for name, value in raw.items() if name != "format"}
        quality = {kind: FitQuality(**found) for kind, found in raw["quality"].items()}
        return cls(**known | {"quality": quality, "cost": CostModel.from_json(raw["cost"])})


def read_profile(path: Path) -> CostProfile:
    """Reads a profile from a file. Raises `JobRequestError` when the file cannot be read or is no profile."""
    try:
        return CostProfile.from_json(parse_json(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise JobRequestError(f"cost_model={str(path)!r}: cannot be read ({error.strerror}). Check the path.") from None
    except MALFORMED as error:
        raise JobRequestError(
            f"cost_model={str(path)!r}: not a file that `lorabatch profile` wrote ({error}). Run it again."
        ) from None


def profile_path(model_sha256: str, device: str, dtype: str, threads: int | None, processes: int = 1) -> Path:
    """Path at which this machine keeps the profile of this combination."""
    return default_cache_root() / "profiles" / f"{profile_name(model_sha256, device, dtype, threads, processes)}.json"


def profile_name(model_sha256: str, device: str, dtype: str, threads: int | None, processes: int = 1) -> str:
    """A name for files about this combination. `processes`: processes of one engine."""
    of_group = f"-{processes}-processes" if processes > 1 else ""
    return f"{model_sha256[:16]}-{device}-{dtype}" + (f"-{threads}-threads" if threads else "") + of_group


def machine() -> str:
    """The processor's name and number of cores, as one text."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
