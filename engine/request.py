"""The engine's rows: `Request` (asked), `ExportedRow` (handed over unfinished) and `Result` (answered).

Plain data: no torch, no Dask, and nothing that is slow to import: every command has the options of sampling, which
`SamplingParams` declares once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_origin, get_type_hints

from .structured_output import CONSTRAINTS, schema_text
from .teacher import token_bytes

#: Options of the first version: hashes of rows and indexes always contain them, other options only where they are
#: given.
FIRST_OPTIONS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "ignore_eos")
#: Pairs of a token and what is added to its logit, by rising token.
LogitBias = tuple[tuple[int, float], ...]
MOST_TOP_LOGPROBS = 20
#: Most of the likeliest tokens of a place that `teacher_top_k` keeps.
MOST_TEACHER_TOKENS = 1024
#: Most texts of a choice that are scored: each place of their tree is a step of the row.
MOST_SCORED = 1024
#: The likeliest tokens of one place and their log-probabilities, the likeliest first.
TopLogprobs = tuple[tuple[int, float], ...]
#: Tasks that rows may ask. A row that classifies or embeds computes its prompt alone; one that reranks chooses one of
#: two texts.
TASKS = ("generate", "classify", "embed", "rerank")
POOLED_TASKS = ("classify", "embed")
#: The texts of a choice of the task `rerank` that gives none: the first one stands for relevance.
RERANK_CHOICE = ("yes", "no")
#: Ways in which the hidden states of a prompt become one embedding.
POOLINGS = ("last", "mean")
#: Forms of tool calls that are read from completions.
TOOL_CALL_PARSERS = ("hermes", "llama3", "mistral")
FinishReason = Literal["stop", "length", "error"]
ServedMode = Literal["base", "unmerged", "merged", "mixture"]


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """One field of `SamplingParams`, as every place that shows or checks it needs it.

    Command line, job file, input columns (which override it per row), documentation and validation are made from these.
    """

    #: Name of the field.
    name: str
    #: Its type, as annotated.
    kind: Any
    #: Its value when it is not given.
    default: Any
    #: Sentence for the command line and the documentation.
    help: str
    #: Completes "expected …" in messages about values that `is_valid` rejects.
    expected: str
    #: Whether a value of the right type is in range.
    is_valid: Callable[[Any], bool]
    #: Part of the command line's help that shows it.
    panel: Literal["answers", "form"]
    #: Its letter on the command line; "" for none.
    short: str

    def read(self, value: Any) -> Any:
        """A value as users give it, in the type of the option: one item stands for a list of it, a logit bias is a
        mapping or JSON of one. Raises ValueError for what is none.
        """
        if self.kind == LogitBias:
            return _read_logit_bias(value)
        if self.name == "json_schema":
            return schema_text(value)
        if get_origin(self.kind) is tuple:
            return tuple(value) if isinstance(value, list | tuple) else (value,)
        return float(value) if self.kind is float and isinstance(value, int) else value


def _read_logit_bias(value: Any) -> Any:
    try:
        given = json.loads(value) if isinstance(value, str) else value
        pairs = given.items() if isinstance(given, Mapping) else given
        return tuple(sorted((int(token), float(bias)) for token, bias in pairs))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("expected a JSON object of tokens and numbers") from None


def _option(
    default: Any,
    help: str,
    expected: str = "",
    is_valid: Callable[[Any], bool] = lambda value: True,
    *,
    panel: Literal["answers", "form"] = "answers",
    short: str = "",
) -> Any:
    """The declaration of one sampling option; its name and type are those of the field it is assigned to."""
    shown = {"help": help, "expected": expected, "panel": panel, "short": short}
    return field(default=default, metadata=shown | {"is_valid": is_valid})


def _are_texts(texts: Any) -> bool:
    return all(isinstance(text, str) and text for text in texts)


def _are_tokens(tokens: Any) -> bool:
    return all(isinstance(token, int) and token >= 0 for token in tokens)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. docs/internals/changing.md lists the other places of a new option.

    Each option's `help` and `expected` say what users read about it; the comments here say what they leave out.
    """

    #: Tokens, a final stop token included.
    max_tokens: int = _option(128, "Most tokens of a completion.", "at least 1", lambda n: n >= 1, short="t")
    #: Tokens; at most `max_tokens`.
    min_tokens: int = _option(0, "Tokens before which a completion does not end.", "at least 0", lambda n: n >= 0)
    #: Divisor of the logits; 0 takes the likeliest token.
    temperature: float = _option(
        0.0,
        "Randomness of the draw; 0 is greedy.",
        "0 (greedy) or a positive finite number",
        lambda t: 0.0 <= t < float("inf"),
        short="T",
    )
    #: Probability; 1 for all tokens.
    top_p: float = _option(
        1.0,
        "Draw from the likeliest tokens that together reach this probability; 1 is all.",
        "above 0 and at most 1",
        lambda p: 0.0 < p <= 1.0,
    )
    #: Tokens; 0 for all.
    top_k: int = _option(
        0, "Draw from this many likeliest tokens; 0 is all.", "0 (off) or a positive count", lambda k: k >= 0
    )
    #: Key of the random stream together with the request's `stream_id`: a retried or moved request draws the same
    #: numbers.
    seed: int = _option(
        0, "With the row's identity, the key of its random stream.", "from 0 to 2**63 - 1", lambda s: 0 <= s < 2**63
    )
    #: Strings; the one that is complete first ends the completion.
    stop: tuple[str, ...] = _option(
        (),
        "A string that ends a completion and is not part of it. Repeatable.",
        "strings that are not empty",
        _are_texts,
    )
    #: Whether the generated tokens' log-probabilities are part of the result.
    logprobs: bool = _option(False, "Add token ids and their log-probabilities to the output.")
    #: Likeliest tokens that are returned for each generated token; 0 for none.
    top_logprobs: int = _option(
        0,
        "Add, for each token, this many of the likeliest tokens and their log-probabilities to the output.",
        f"from 0 to {MOST_TOP_LOGPROBS}",
        lambda k: 0 <= k <= MOST_TOP_LOGPROBS,
    )
    #: Whether log-probabilities of the prompt's tokens but the first are part of the result.
    prompt_logprobs: bool = _option(False, "Add the prompt's tokens and their log-probabilities to the output.")
    #: Likeliest tokens that are returned for each place of the prompt; 0 for none.
    prompt_top_logprobs: int = _option(
        0,
        "Add, for each token of the prompt, this many of the likeliest tokens in its place to the output.",
        f"from 0 to {MOST_TOP_LOGPROBS}",
        lambda k: 0 <= k <= MOST_TOP_LOGPROBS,
    )
    #: Likeliest tokens that are kept of each place of the completion, packed (`teacher`); 0 for none. Equal in all rows
    #: of a job.
    teacher_top_k: int = _option(
        0,
        "Add, for each token of a completion or given text, this many of the likeliest tokens and their "
        "log-probabilities as lists of one length, for distillation.",
        f"from 0 to {MOST_TEACHER_TOKENS}",
        lambda k: 0 <= k <= MOST_TEACHER_TOKENS,
    )
    #: False beside a constraint, whose grammar ends the completion.
    ignore_eos: bool = _option(False, "Continue after the model's end token, up to max_tokens.")
    #: Tokens, beside the end tokens of model and tokenizer.
    stop_token_ids: tuple[int, ...] = _option(
        (), "A token that ends a completion and is not part of its text. Repeatable.", "tokens, 0 or more", _are_tokens
    )
    #: Completions of an input row; each is a request of its own.
    n: int = _option(
        1,
        "Completions of each row, a row of the output each; those of a greedy row are equal.",
        "from 1 to 128",
        lambda n: 1 <= n <= 128,
    )
    #: Share of the likeliest token's probability; 0 for all tokens.
    min_p: float = _option(
        0.0,
        "Draw from tokens at least this share as likely as the likeliest; 0 is all.",
        "from 0 to 1",
        lambda p: 0.0 <= p <= 1.0,
    )
    #: Logits to subtract; 0 changes nothing.
    presence_penalty: float = _option(
        0.0, "Subtracted from the logits of tokens already generated.", "from -2 to 2", lambda p: -2 <= p <= 2
    )
    #: Logits to subtract per occurrence; 0 changes nothing.
    frequency_penalty: float = _option(
        0.0, "Taken from a token's logit for each time it is in the completion.", "from -2 to 2", lambda p: -2 <= p <= 2
    )
    #: Factor; 1 changes nothing.
    repetition_penalty: float = _option(
        1.0,
        "Divides positive logits and multiplies negative ones, of tokens in prompt and completion; 1 is off.",
        "a positive finite number",
        lambda p: 0.0 < p < float("inf"),
    )
    #: Pairs of a token and what is added to its logit, by rising token.
    logit_bias: tuple[tuple[int, float], ...] = _option(
        (),
        "JSON object of tokens and what is added to their logits.",
        "tokens, 0 or more, and numbers from -100 to 100, each token once",
        lambda pairs: (
            _are_tokens(token for token, _ in pairs)
            and all(-100 <= bias <= 100 for _, bias in pairs)
            and len({token for token, _ in pairs}) == len(pairs)
        ),
    )
    #: Texts; empty for none.
    bad_words: tuple[str, ...] = _option(
        (), "A text that is not generated. Repeatable.", "strings that are not empty", _are_texts
    )
    #: Tokens; empty for all.
    allowed_token_ids: tuple[int, ...] = _option(
        (),
        "A token of which completions may consist; others are not generated. Repeatable.",
        "tokens, 0 or more",
        _are_tokens,
    )
    #: Tokens; empty for a completion that is generated.
    continuation_token_ids: tuple[int, ...] = _option(
        (), "A token of the completion, which is given and scored. Repeatable.", "tokens, 0 or more", _are_tokens
    )
    #: JSON; "" for none. At most one constraint (`json_schema`, `regex`, `choice`, `grammar`) is given.
    json_schema: str = _option("", "JSON Schema of which the completion is an instance.", panel="form")
    #: "" for none.
    regex: str = _option(
        "", "Regular expression that the completion matches from its beginning to its end.", panel="form"
    )
    #: Texts; empty for none.
    choice: tuple[str, ...] = _option(
        (),
        "One of the texts of which the completion is one. Repeatable.",
        "strings that are not empty",
        _are_texts,
        panel="form",
    )
    #: Has an effect only where `choice` is given.
    score_choices: bool = _option(True, "Add the log-probability of each text of choice to the output.", panel="form")
    #: "" for none.
    grammar: str = _option(
        "", "Context-free grammar of the completion, in the form of Lark that llguidance reads.", panel="form"
    )
    #: "" where reasoning is not split from the completion; parsed by `reasoning`.
    reasoning_markers: str = _option(
        "",
        "START,END: texts around a model's reasoning, which goes to a column of its own.",
        "START,END such as <think>,</think>; with an empty START every answer begins with reasoning",
        lambda text: not text or bool(text.partition(",")[2]),
        panel="form",
    )
    #: One of `TOOL_CALL_PARSERS`; "" where calls are not read.
    tool_call_parser: str = _option(
        "",
        f"Form of the tool calls that are read from completions: {', '.join(TOOL_CALL_PARSERS)}.",
        f"one of {', '.join(TOOL_CALL_PARSERS)}",
        lambda name: name in ("", *TOOL_CALL_PARSERS),
        panel="form",
    )
    #: One of `TASKS`; "" for the adapter's own, or the base's.
    task: str = _option(
        "",
        f"Task of the rows: {', '.join(TASKS)}; by default a classifier's rows are classified, an embedding adapter's "
        "embedded, and all others generate text.",
        f"one of {', '.join(TASKS)}",
        lambda name: name in ("", *TASKS),
        panel="form",
    )
    #: One of `POOLINGS`; has an effect only on rows that are embedded.
    pooling: str = _option(
        "last",
        "Embeddings are the last hidden state of the prompt's last token (last), or the mean of all its tokens (mean).",
        f"one of {', '.join(POOLINGS)}",
        lambda name: name in POOLINGS,
        panel="form",
    )
    #: Has an effect only on rows that are embedded.
    normalize_embeddings: bool = _option(True, "Divide embeddings by their length, so that it is 1.", panel="form")

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters behind JSON or msgpack values: lists become tuples, missing options have their defaults."""
        return cls(**{name: _with_tuples(value) for name, value in values.items()})

    @property
    def is_drawn(self) -> bool:
        """Whether tokens are drawn at a temperature, not the likeliest ones."""
        return self.temperature > 0

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the tokens are part of the answer; those of the likeliest come with them."""
        return self.logprobs or self.top_logprobs > 0 or self.teacher_top_k > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are part of the answer."""
        return self.prompt_logprobs or self.prompt_top_logprobs > 0

    @property
    def is_given(self) -> bool:
        """Whether the completion is given and computed in steps of many tokens, as a prompt is."""
        return self.teacher_top_k > 0 and bool(self.continuation_token_ids)

    @property
    def has_rules(self) -> bool:
        """Whether options beside `min_tokens` change logits (`text.answers.token_rules`), by tokens so far or not."""
        return bool(
            self.is_constrained
            or self.continuation_token_ids
            or self.allowed_token_ids
            or self.bad_words
            or self.logit_bias
            or self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or self.min_p
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that options name."""
        biased = (token for token, _ in self.logit_bias)
        return (*self.stop_token_ids, *self.allowed_token_ids, *self.continuation_token_ids, *biased)

    def scoring(self, token_ids: tuple[int, ...]) -> SamplingParams:
        """The sampling of a row whose completion is given, to be scored."""
        return SamplingParams(
            max_tokens=len(token_ids),
            ignore_eos=True,
            logprobs=True,
            top_logprobs=self.top_logprobs,
            teacher_top_k=self.teacher_top_k,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
            continuation_token_ids=token_ids,
        )

    @property
    def is_pooled(self) -> bool:
        """Whether rows ask for numbers about their prompts, and no token."""
        return self.task in POOLED_TASKS

    def of_task(self, task: str) -> SamplingParams:
        """The sampling of a row that asks `task`. A row that is classified or embedded has none of the options that
        tokens have; one that generates text has none of those of other tasks.
        """
        if task == "classify":
            return SamplingParams(max_tokens=1, task=task)
        if task == "embed":
            normalizes = self.normalize_embeddings
            return SamplingParams(max_tokens=1, task=task, pooling=self.pooling, normalize_embeddings=normalizes)
        plain = replace(self, task="", pooling=POOLINGS[0], normalize_embeddings=True)
        if task != "rerank":
            return plain
        return replace(plain, task=task, choice=self.choice or RERANK_CHOICE, score_choices=True)

    @property
    def is_constrained(self) -> bool:
        """Whether completions follow a grammar."""
        return bool(self.json_schema or self.regex or self.choice or self.grammar)

    @property
    def scores_choices(self) -> bool:
        """Whether the texts of `choice` are scored."""
        return self.score_choices and bool(self.choice)

    @property
    def constraint(self) -> str:
        """The grammar that completions follow, as JSON of its option and value; "" for none."""
        given = {name: value for name in CONSTRAINTS if (value := getattr(self, name))}
        return json.dumps(given, ensure_ascii=False) if given else ""

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """The texts before and after reasoning; None where it is not split from the completion. The first is empty
        where the prompt has it already.
        """
        start, _, end = self.reasoning_markers.partition(",")
        return (start, end) if end else None

    def problems(self) -> list[str]:
        """Every field out of range, as `field=value: expectation`; empty when all is well."""
        values = {name: getattr(self, name) for name in SAMPLING_OPTIONS}
        found = [
            f"{name}={_shown(value)}: expected {SAMPLING_OPTIONS[name].expected}"
            for name, value in values.items()
            if not SAMPLING_OPTIONS[name].is_valid(value)
        ]
        if self.min_tokens > max(self.max_tokens, 1):
            found.append(f"min_tokens={self.min_tokens}: expected at most max_tokens={self.max_tokens}")
        constraints = [name for name in CONSTRAINTS if getattr(self, name)]
        if len(constraints) > 1:
            found.append(f"{', '.join(constraints)}: expected at most one of them")
        if self.scores_choices and len(self.choice) > MOST_SCORED:
            found.append(
                f"choice={len(self.choice)} texts, score_choices={self.score_choices}: expected at most {MOST_SCORED} "
                "that are scored, or score_choices=False"
            )
        if self.task == "rerank" and len(self.choice) not in (0, 2):
            found.append(f"task={self.task}, choice={list(self.choice)}: expected two texts, the first for relevance")
        if self.task == "rerank" and (constraints or ["choice"]) != ["choice"]:
            found.append(f"task={self.task}, {constraints[0]}: a row that reranks chooses one of two texts")
        if self.teacher_top_k and self.scores_choices:
            found.append(
                f"teacher_top_k={self.teacher_top_k}, choice: the answer may be another text than the one whose tokens "
                "were generated; expected score_choices=False"
            )
        if constraints and self.ignore_eos:
            found.append(f"ignore_eos={self.ignore_eos}, {constraints[0]}: a completion ends where its grammar does")
        return found


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _sampling_options() -> dict[str, SamplingOption]:
    kinds = get_type_hints(SamplingParams)
    return {f.name: SamplingOption(f.name, kinds[f.name], f.default, **f.metadata) for f in fields(SamplingParams)}


#: Option name -> its declaration, in the order of `SamplingParams`.
SAMPLING_OPTIONS: Mapping[str, SamplingOption] = _sampling_options()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for one adapter."""

    #: Id of the row; unique among the unfinished rows of an engine.
    request_id: str
    #: Tokens of the whole prompt.
    prompt_token_ids: tuple[int, ...]
    #: Content hash of the adapter (never its name or path); None asks the base model.
    adapter_id: str | None
    #: How its tokens are chosen.
    sampling: SamplingParams
    #: 64 bits from the row's fingerprint; key of the random stream together with `sampling.seed`.
    stream_id: int = 0
    #: Whether a later request of the same adapter is expected to begin with this prompt and its answer. The engine then
    #: keeps the keys and values of both while memory lasts. It changes no answer.
    will_continue: bool = False
    #: Whether the prompt begins with that of a request which had `will_continue` set, as its answer has come. It enters
    #: before rows that wait, since pages are kept for it. It changes no answer.
    is_continuation: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one request."""

    #: Id of the request.
    request_id: str
    #: Tokens generated, a final stop token included.
    token_ids: tuple[int, ...]
    #: The completion, without reasoning and stop strings; "" for an error.
    text: str
    #: Why the completion ended.
    finish_reason: FinishReason
    #: Tokens of the prompt.
    prompt_tokens: int
    #: Mode of the steps that served the row.
    mode: ServedMode
    #: A plain sentence, set exactly when `finish_reason == "error"`.
    error: str | None = None
    #: Log-probability of each token; None where they are not asked.
    token_logprobs: tuple[float, ...] | None = None
    #: Likeliest tokens in place of each token; None where they are not asked.
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    #: Prompt tokens that were copied from rows that begin alike, or that the prompt continues; None where that was not
    #: counted. It is no part of the answer: results that differ in it alone are equal.
    reused_prompt_tokens: int | None = field(default=None, compare=False)
    #: Text before `text`; None if there was none, or it is not split.
    reasoning: str | None = None
    #: Name of each tool that `text` calls, and its arguments as a JSON object; None where they are not read.
    tool_calls: tuple[tuple[str, str], ...] | None = None
    #: Log-probability of each text of the row's choice; None where none is scored.
    choice_logprobs: tuple[float, ...] | None = None
    #: Log-probabilities of the prompt's tokens but the first; None where they are not asked.
    prompt_logprobs: tuple[float, ...] | None = None
    #: Likeliest tokens in place of each of these; None where they are not asked.
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None
    #: Likeliest tokens in place of each of `token_ids`, packed (`teacher`); None where they are not asked.
    teacher: bytes | None = None
    #: Numbers about the prompt, fp32, little-endian: a logit for each label of a row that is classified, or its
    #: embedding; None for other rows.
    pooled: bytes | None = None

    @classmethod
    def refused(cls, request: Request, error: str) -> Result:
        """The outcome of a request that no engine can serve; `error` says why."""
        return cls(
            request_id=request.request_id,
            token_ids=(),
            text="",
            finish_reason="error",
            prompt_tokens=len(request.prompt_token_ids),
            mode="base" if request.adapter_id is None else "unmerged",
            error=error,
        )

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, a final stop token included."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ExportedRow:
    """A request and what was generated for it so far; a row that has not begun has no tokens.

    Log-probabilities, likeliest tokens and the packed `teacher` have one item per token when the request asks for them,
    else none.
    """

    #: The request.
    request: Request
    #: Tokens generated.
    token_ids: tuple[int, ...] = ()
    #: Log-probability of each token.
    token_logprobs: tuple[float, ...] = ()
    #: Likeliest tokens in place of each token.
    top_logprobs: tuple[TopLogprobs, ...] = ()
    #: Likeliest tokens in place of each token as `engine.teacher` packs them.
    teacher: bytes = b""

    def problems(self) -> list[str]:
        """Problems of the tokens so far, and of their fit to the request's options; empty for rows that an engine
        exported.
        """
        sampling, num_tokens = self.request.sampling, len(self.token_ids)
        counts = {
            "log-probabilities": (len(self.token_logprobs), num_tokens * sampling.wants_logprobs),
            "lists of likeliest tokens": (len(self.top_logprobs), num_tokens * (sampling.top_logprobs > 0)),
            "bytes of likeliest tokens": (len(self.teacher), num_tokens * token_bytes(sampling.teacher_top_k)),
        }
        problems = [f"the row has {n} {what}, expected {asked}" for what, (n, asked) in counts.items() if n != asked]
        if num_tokens >= sampling.max_tokens:
            problems.append(f"the row has {num_tokens} tokens, max_tokens={sampling.max_tokens}: it is finished")
        if sampling.is_given and self.token_ids != sampling.continuation_token_ids[:num_tokens]:
            problems.append("the row has other tokens than the completion that is given")
        return problems
