"""Words the problems with a job's options in this project's style: unknown names and wrong values.

Each problem names the option, what was given and what was expected; pydantic's findings are put into that form.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ..system.untrusted import shortened
from .storage.redaction import scrubbed

# Spellings of an option that are accepted beside the field's name.
_SPELLINGS = {"column": "columns", "adapter": "adapters"}
# Options of other systems that jobs do not have -> what to do instead.
_BEAMS = "beam search is not served; draw completions with n and temperature, and compare them by logprobs"
_OF_BEAMS = ("use_beam_search", "num_beams", "beam_width", "best_of", "early_stopping", "length_penalty")
_NOT_SERVED = {
    **dict.fromkeys(_OF_BEAMS, _BEAMS),
    **{f"guided_{kind}": f"its name is {name} here" for kind, name in
       (("json", "json_schema"), ("regex", "regex"), ("choice", "choice"), ("grammar", "grammar"))},
    "logits_processors": "code of jobs is not run; see logit_bias, bad_words, allowed_token_ids and penalties",
    "do_sample": "rows are greedy at temperature 0",
    "max_new_tokens": "its name is max_tokens here",
    "echo": "see prompt_logprobs and continuation",
}  # fmt: skip
_SHOWN_CHARACTERS = 300


def field_name(key: str) -> str:
    """Name of the `JobSpec` field that a job file's key, or an option, sets."""
    name = key.replace("-", "_")
    return _SPELLINGS.get(name, name)


def unknown_options(values: Iterable[str], fields: Mapping[str, FieldInfo]) -> list[str]:
    """One problem for each key that is not the name of one of the fields."""
    names = tuple(fields)
    return [
        f"{name}: not an option; {_NOT_SERVED[name]}"
        if name in _NOT_SERVED
        else with_suggestion(f"{name}: not an option", name, names)
        for name in values
        if name not in names
    ]


def with_suggestion(text: str, word: str, choices: tuple[str, ...]) -> str:
    """`text`, and which of the choices may have been meant."""
    close = difflib.get_close_matches(word, choices, n=2, cutoff=0.65)
    return f"{text}; did you mean {' or '.join(map(repr, close))}?" if close else text


def with_next_step(problem: str) -> str:
    """A problem with an option as a whole sentence that says where to look."""
    return problem if problem.endswith((".", "?")) else f"{problem}. See `lorabatch run --help`."


def value_problems(error: ValidationError, values: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> list[str]:
    """pydantic's findings in our form: `field=value: expectation`; storage options without their values."""
    sentences = []
    for found in error.errors(include_url=False):
        name = ".".join(str(part) for part in found["loc"][:1])
        expectation = _expectation(fields[name]) or in_our_words(found["msg"])
        if found["type"] == "missing":
            option = f"--{name.replace('_', '-')}"
            sentences.append(f"{name}: required and not given. Add {option}, or the key {name} in the job file.")
        elif name == "storage_options":
            sentences.append(f"{name}: {expectation}")
        elif expectation.startswith(name):
            sentences.append(expectation)  # it says where in the value
        else:
            sentences.append(f"{name}={shortened(repr(values.get(name)), _SHOWN_CHARACTERS)}: {expectation}")
    # values may be URLs
    return [scrubbed(sentence, {}) for sentence in dict.fromkeys(sentences)]


def in_our_words(finding: str) -> str:
    """A finding of pydantic about a value, reworded as this project words problems."""
    finding = finding.removeprefix("Value error, ").partition(", unable to parse")[0]
    return finding.replace("Input should be", "expected").replace("greater than or equal to", "at least")


def _expectation(field: FieldInfo) -> str:
    """The expectation that the field declares for messages; "" for a field that leaves it to pydantic."""
    extra = field.json_schema_extra
    expected = extra.get("expected") if isinstance(extra, dict) else None
    return f"expected {expected}" if expected else ""
