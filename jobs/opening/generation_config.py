"""Reads sampling options from a model's `generation_config.json`, for jobs that ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.config import read_json
from ...engine.errors import EngineError
from ...engine.request import SAMPLING_OPTIONS
from ..errors import JobRequestError
from ..spec import JobSpec

FILE_NAME = "generation_config.json"
# Options that the file has under the same names. Its length limits are not taken: they count prompt and answer.
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(model_folder: Path) -> dict[str, Any]:
    """Sampling options that the file gives; `do_sample: false` is temperature 0. Empty without a readable file; values
    that an option cannot have are left out.
    """
    path = model_folder / FILE_NAME
    try:
        given = read_json(path) if path.exists() else {}
    except EngineError:
        return {}
    if given.get("do_sample") is False:
        given["temperature"] = 0.0
    found = {}
    for name in _OPTIONS:
        option, value = SAMPLING_OPTIONS[name], given.get(name)
        is_number = isinstance(value, option.kind | int) and not isinstance(value, bool)
        if is_number and option.is_valid(value):
            found[name] = option.kind(value)
    return found


def with_generation_defaults(spec: JobSpec, model_folder: Path) -> JobSpec:
    """The job with the file's values in the place of options that it does not give.

    Raises `JobRequestError` when the model says nothing of sampling.
    """
    found = generation_defaults(model_folder)
    if not found:
        raise JobRequestError(
            f"generation_config: the model's {FILE_NAME} says nothing of {', '.join(_OPTIONS)}. Leave the option out, "
            "and give those that you want."
        )
    return spec.model_copy(update={name: value for name, value in found.items() if name not in spec.model_fields_set})
