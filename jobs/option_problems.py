"""What is wrong with a job's options, in sentences: which one, its value, what is expected, where to look."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from .secrets import scrubbed

# Where pydantic's own words would say little.
_EXPECTED = {
    "name": "expected 1 to 64 letters, digits, dots, hyphens or underscores, a letter or digit first",
    "model": "expected a folder, GGUF file, hub id or URL",
    "input": "expected a Parquet file, folder, glob or URL",
    "output": "expected a folder or URL",
    "cluster": "expected local, local-cuda, or an address such as tcp://10.0.0.5:8786",
}


def unknown_options(values: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """One finding for each key that is not an option's name."""
    return [with_suggestion(f"{name}: not an option", name, names) for name in values if name not in names]


def with_suggestion(text: str, word: str, choices: tuple[str, ...]) -> str:
    """`text`, and which of the choices may have been meant."""
    close = difflib.get_close_matches(word, choices, n=2, cutoff=0.6)
    return f"{text}; did you mean {' or '.join(map(repr, close))}?" if close else text


def with_next_step(problem: str) -> str:
    """A finding about an option as a whole sentence that says where to look."""
    return problem if problem.endswith((".", "?")) else f"{problem}. See `lorabatch run --help`."


def value_problems(error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """pydantic's findings in our form: `field=value: expectation`; storage options without their values."""
    sentences = []
    for found in error.errors(include_url=False):
        field = ".".join(str(part) for part in found["loc"][:1])
        expectation = _EXPECTED.get(field) or found["msg"].removeprefix("Value error, ")
        expectation = expectation.replace("Input should be", "expected").replace("greater than or equal to", "at least")
        if found["type"] == "missing":
            option = f"--{field.replace('_', '-')}"
            sentences.append(f"{field}: required and not given. Add {option}, or the key {field} in the job file.")
        elif field == "storage_options":
            sentences.append(f"{field}: {expectation}")
        else:
            sentences.append(f"{field}={values.get(field)!r}: {expectation}")
    # values may be URLs
    return [scrubbed(sentence, {}) for sentence in dict.fromkeys(sentences)]
