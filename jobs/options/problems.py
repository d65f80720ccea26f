"""Words the problems with a job's options in this project's style: unknown names and wrong values.

Each problem names the option, what was given and what was expected; pydantic's findings are put into that form.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ...engine.config import Mode
from ...system.untrusted import shortened
from ..storage.redaction import redacted_url, scrubbed
from .values import PROMPT_ROLES, TEMPLATE_OPTIONS, parse_price

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
# Options whose values may be secrets.
_NEVER_SHOWN = ("storage_options", "cluster_options")
# Policies that decide by themselves whether adapters are merged -> the modes that leave them to it.
_MODES_OF_POLICY: dict[str, tuple[Mode, ...]] = {
    "dlora": ("auto",),
    "s-lora": ("auto", "unmerged", "exact"),
    "vllm-like": ("auto", "unmerged", "exact"),
    "merged-only": ("auto", "merged"),
    "peft-like": ("auto", "merged"),
}


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
        elif name in _NEVER_SHOWN:
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


def conflicts(spec: Any, wrong: Collection[str] = ()) -> list[str]:
    """Problems of valid options that exclude each other or are not served together. `spec`: a `JobSpec`. `wrong`: its
    fields whose values could not be used.
    """
    problems = []
    if spec.tensor_parallel != 1 and spec.mode == "exact":
        problems.append(
            f"tensor_parallel={spec.tensor_parallel}, mode={spec.mode!r}: what parts add up rounds otherwise than "
            "the whole. Use mode auto, unmerged or merged, or tensor_parallel 1."
        )
    if spec.base_quantization == "fp8" and spec.mode == "exact":
        problems.append(
            f"base_quantization={spec.base_quantization!r}, mode={spec.mode!r}: on GPUs a library multiplies in 8 "
            "bits and rounds a row by the rows beside it. Use mode auto or unmerged, or base_quantization none."
        )
    if spec.device == "cpu" and spec.dtype == "float16":
        problems.append(f"dtype={spec.dtype!r}: CPUs multiply in float32 or bfloat16. Use dtype auto.")
    if spec.base_quantization != "none" and spec.mode == "merged":
        problems.append(
            f"mode={spec.mode!r}, base_quantization={spec.base_quantization!r}: adapters are not merged into a "
            "quantised base, whose rounding is larger than what they change. Use mode auto or unmerged."
        )
    if spec.add_generation_prompt and spec.continue_final_message:
        problems.append(
            "add_generation_prompt, continue_final_message: a prompt ends with one of the two. Give one of them."
        )
    problems += _template_problems(spec)
    problems += [] if "stages" in wrong else _stage_problems(spec)
    problems += _limit_problems(spec)
    if spec.update and spec.overwrite:
        problems.append(
            "update, overwrite: one keeps the answers in the output, the other removes them. Give one of them."
        )
    problems += _sweep_problems(spec)
    if spec.keep and spec.drop:
        problems.append("keep, drop: each says which columns are copied. Give one of them.")
    if spec.scheduler_file is not None and spec.cluster != "local":
        problems.append(
            f"cluster={redacted_url(spec.cluster)!r}, scheduler_file={spec.scheduler_file!r}: each names a cluster. "
            "Give one of them."
        )
    if spec.cluster_options and not spec.is_cluster_class:
        problems.append(
            f"cluster_options, cluster={redacted_url(spec.cluster)!r}: these are arguments of a cluster class. Name "
            "one, for example --cluster dask_jobqueue.SLURMCluster, or leave cluster_options out."
        )
    problem = policy_problem(spec.policy, spec.mode)
    if problem is not None:
        problems.append(problem)
    if spec.policy != "planner" and spec.placement in ("planned", "none"):
        problems.append(
            f"placement={spec.placement!r}, policy={spec.policy!r}: this policy deals rows out to workers itself. "
            "Leave placement out, or use policy planner."
        )
    return problems


def _sweep_problems(spec: Any) -> list[str]:
    """Problems of options that say which adapters answer every row, and how answers are scored, as sentences."""
    problems = []
    if spec.for_each_adapter and not spec.adapters:
        problems.append("for_each_adapter: the job has no adapters. Give them with --adapters.")
    if spec.stages is not None and (spec.for_each_adapter or spec.expected is not None):
        problems.append(
            "stages: a stage names its adapter, and has no score. Leave out for_each_adapter and expected, or the "
            "stages."
        )
    if spec.allowed_adapters is not None and (spec.for_each_adapter or spec.stages is not None):
        problems.append(
            "allowed_adapters: is for rows that name their adapter in a column. Leave it out, or leave out "
            f"{'stages' if spec.stages is not None else 'for_each_adapter'}."
        )
    if spec.include_base and not spec.for_each_adapter:
        problems.append("include_base: is for jobs of several adapters a row. Give --for-each-adapter all.")
    if spec.shape == "wide" and not spec.for_each_adapter:
        problems.append(
            "shape='wide': is for jobs of several adapters a row. Give --for-each-adapter all, or leave it out."
        )
    if spec.score_by != "exact" and spec.expected is None:
        problems.append(f"score_by={spec.score_by!r}: nothing says what is right. Name the column with --expected.")
    return problems


def _template_problems(spec: Any) -> list[str]:
    """Problems of options that say of which columns prompts are made, as sentences."""
    given = [name for name in (*TEMPLATE_OPTIONS, "stages") if getattr(spec, name) is not None]
    columns = [f"column {role}={spec.columns[role]!r}" for role in PROMPT_ROLES if spec.columns.get(role)]
    problems = []
    if len(given) + len(columns) > 1 and given:
        problems.append(f"{', '.join([*given, *columns])}: each says what the prompts are. Give one of them.")
    if spec.chat is False and spec.messages_template is not None:
        problems.append(
            "chat=False, messages_template: messages are rendered by the chat template. Give prompt_template for "
            "a prompt that is text."
        )
    return problems


def _stage_problems(spec: Any) -> list[str]:
    """Problems of options beside `stages`, as sentences."""
    if spec.stages is None:
        return [
            f"{name}: belongs to stages, and the job has none. Give stages, or leave it out."
            for name in ("until", "output_columns")
            if getattr(spec, name)
        ]
    is_given = {
        "n": spec.n > 1,
        "samples": spec.samples != "rows",
        "split_answer": spec.split_answer,
        "row_settings": bool(spec.row_settings),
        "continue_final_message": spec.continue_final_message,
        "add_generation_prompt": spec.add_generation_prompt is not None,
        "tools": spec.tools is not None,
        "chat": spec.chat is not None,
    }
    return [
        f"{name}, stages: stages say themselves what is asked. Write it into the stage, or leave it out."
        for name, given in is_given.items()
        if given
    ]


def _limit_problems(spec: Any) -> list[str]:
    """Problems of options by which a job stops itself, as sentences."""
    problems = []
    if spec.confirm and spec.canary is None:
        problems.append("confirm: what is to be confirmed are the answers of a canary. Give canary, such as 16, too.")
    if spec.max_cost is None:
        return problems
    (_, currency), hour = parse_price(spec.max_cost) or (0.0, ""), parse_price(spec.gpu_hour_price)
    if hour is None:
        problems.append(
            f"max_cost={spec.max_cost!r}: a cost needs the price of a worker's hour. Give gpu_hour_price, such as "
            f"'2.5{' ' + currency if currency else ''}'."
        )
    elif currency and hour[1] and currency != hour[1]:
        problems.append(
            f"max_cost={spec.max_cost!r}, gpu_hour_price={spec.gpu_hour_price!r}: give both in one currency."
        )
    return problems


def policy_problem(policy: str, mode: Mode) -> str | None:
    """Why a policy and a mode exclude each other, as a plain sentence; None when they do not."""
    modes = _MODES_OF_POLICY.get(policy)
    if modes is None or mode in modes:
        return None
    merging = "merges adapters by itself" if "merged" in modes or modes == ("auto",) else "never merges an adapter"
    return f"policy={policy!r}, mode={mode!r}: {policy} {merging}. Use mode {' or '.join(modes)}, or policy planner."
