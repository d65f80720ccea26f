"""The job file: a YAML mapping of a job's options, as people write it. `JobSpec` judges what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import JobRequestError


def read_job_file(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values in a job file, with `overrides` taking precedence. Raises `JobRequestError`."""
    values = {name.replace("-", "_"): value for name, value in _read_yaml(Path(path)).items()}
    return values | dict(overrides or {})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobRequestError(f"job file {path}: not found. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobRequestError(f"job file {path}: cannot be read ({error}).") from None
    except yaml.YAMLError as error:
        raise JobRequestError(f"job file {path}: not valid YAML ({error}).") from None
    if not isinstance(value, dict):
        raise JobRequestError(f"job file {path}: expected a mapping such as `model: …`, found {type(value).__name__}.")
    return {str(name): item for name, item in value.items()}
