"""The demo as an ordinary job: the shipped adapters and prompts on a small real model."""

from __future__ import annotations

from pathlib import Path

from ..jobs.errors import JobFailedError
from ..jobs.spec import JobSpec
from .base_model import BaseModelUnavailableError, base_model_folder

DEMO_FOLDER = Path(__file__).resolve().parent


def demo_spec(output: Path, *, workers: int, overwrite: bool) -> JobSpec:
    """The demo's job. Fetches and converts the base model on first use.

    Raises `JobFailedError` when it cannot be fetched.
    """
    try:
        model = base_model_folder()
    except BaseModelUnavailableError as error:
        raise JobFailedError(str(error)) from None
    return JobSpec(
        model=str(model),
        adapters=str(DEMO_FOLDER / "adapters"),
        input=str(DEMO_FOLDER / "prompts.parquet"),
        output=str(output),
        name="demo",
        row_settings=("max_tokens",),
        workers=workers,
        overwrite=overwrite,
    )
