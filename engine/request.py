"""What an engine is asked (`Request`), works on (`Sequence`), hands over (`ExportedRow`) and answers (`Result`).

Plain data: no torch, no Dask, and nothing that is slow to import: every command has the options of sampling, which
`SamplingParams` declares once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_type_hints

FinishReason = Literal["stop", "length", "error"]
ServedMode = Literal["base", "unmerged", "merged", "mixture"]


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """One field of `SamplingParams` as every place that shows or checks it needs it.

    Command line, job file, input columns (which override it per row), documentation and validation are made from
    these. `expected` completes "expected …" for values that `is_valid` rejects.
    """

    name: str
    kind: Any
    default: Any
    help: str
    expected: str
    is_valid: Callable[[Any], bool]


def _option(
    default: Any,
    help: str,
    expected: str = "",
    is_valid: Callable[[Any], bool] = lambda value: True,
) -> Any:
    """The declaration of one sampling option; its name and type stand beside it."""
    return field(default=default, metadata={"help": help, "expected": expected, "is_valid": is_valid})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. A new option is one line here and its code in the samplers.

    `stop` strings end the completion and are not part of it. `seed` and the request's own identity key its random
    stream, so a retried or moved request draws the same numbers.
    """

    max_tokens: int = _option(128, "Most tokens of a completion.", "at least 1", lambda n: n >= 1)
    min_tokens: int = _option(0, "Tokens before which a completion does not end.", "at least 0", lambda n: n >= 0)
    temperature: float = _option(
        0.0,
        "Randomness of the draw; 0 is greedy.",
        "0 (greedy) or a positive finite number",
        lambda t: 0.0 <= t < float("inf"),
    )
    top_p: float = _option(
        1.0,
        "Draw from the likeliest tokens that together reach this probability; 1 is all.",
        "above 0 and at most 1",
        lambda p: 0.0 < p <= 1.0,
    )
    top_k: int = _option(
        0, "Draw from this many likeliest tokens; 0 is all.", "0 (off) or a positive count", lambda k: k >= 0
    )
    seed: int = _option(
        0, "With the row's identity, the key of its random stream.", "from 0 to 2**63 - 1", lambda s: 0 <= s < 2**63
    )
    stop: tuple[str, ...] = _option(
        (),
        "A string that ends a completion and is not part of it. Repeatable.",
        "strings that are not empty",
        lambda texts: all(isinstance(text, str) and text for text in texts),
    )
    logprobs: bool = _option(False, "Add token ids and their log-probabilities to the output.")
    ignore_eos: bool = _option(False, "Continue after the model's end token, up to max_tokens.")

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters behind JSON or msgpack values: lists become tuples, missing options have their defaults."""
        known: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**known)

    def problems(self) -> list[str]:
        """Every field out of range, as `field=value: expectation`; empty when all is well."""
        values = {name: getattr(self, name) for name in SAMPLING_OPTIONS}
        found = [
            f"{name}={list(value) if isinstance(value, tuple) else value}: expected {SAMPLING_OPTIONS[name].expected}"
            for name, value in values.items()
            if not SAMPLING_OPTIONS[name].is_valid(value)
        ]
        if self.min_tokens > max(self.max_tokens, 1):
            found.append(f"min_tokens={self.min_tokens}: expected at most max_tokens={self.max_tokens}")
        return found


def _sampling_options() -> dict[str, SamplingOption]:
    kinds = get_type_hints(SamplingParams)
    return {f.name: SamplingOption(f.name, kinds[f.name], f.default, **f.metadata) for f in fields(SamplingParams)}


#: Option name -> its declaration, in the order of `SamplingParams`.
SAMPLING_OPTIONS: Mapping[str, SamplingOption] = _sampling_options()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for one adapter.

    `adapter_id` is the adapter's content hash (never its name or path); None asks the base model.
    `stream_id` (64 bits, from the row's fingerprint) keys the random stream together with `sampling.seed`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    adapter_id: str | None
    sampling: SamplingParams
    stream_id: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one request. `error` is a plain sentence, set exactly when `finish_reason == "error"`.

    `reused_prompt_tokens`: of the prompt, those that were copied from rows that begin alike; None where that was not
    counted. It is no part of the answer: results that differ in it alone are equal.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    mode: ServedMode
    error: str | None = None
    token_logprobs: tuple[float, ...] | None = None
    reused_prompt_tokens: int | None = field(default=None, compare=False)

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

    `token_logprobs` has one number per token when the request asks for log-probabilities, else none.
    """

    request: Request
    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()

    def problems(self) -> list[str]:
        """What is wrong with the row as a whole, beside its request; empty for rows that an engine exported."""
        sampling = self.request.sampling
        num_logprobs = len(self.token_ids) if sampling.logprobs else 0
        checks = [
            (
                len(self.token_ids) < sampling.max_tokens,
                f"the row has {len(self.token_ids)} tokens, max_tokens={sampling.max_tokens}: it is finished",
            ),
            (
                len(self.token_logprobs) == num_logprobs,
                f"the row has {len(self.token_logprobs)} log-probabilities, expected {num_logprobs}",
            ),
        ]
        return [message for holds, message in checks if not holds]


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_stored`: tokens (prompt first, then generated) whose keys and values are in the pool.

    `prompt_tokens` counts the prompt alone; a sequence from another engine may have `token_ids` already.
    `num_pending`: tokens behind `token_ids` whose steps are launched and not read yet. They count, but only the
    device knows them. `mode`: how it was served so far; None before its first step. `holds_adapter`: it keeps its
    adapter in the pool. `num_reused`: prompt tokens that another row had computed for it.
    `num_paused`: steps that it sat out, holding memory. `held_tokens`: tokens for which it holds memory.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)  # generated
    token_logprobs: list[float] = field(default_factory=list)
    num_stored: int = 0
    num_pending: int = 0
    mode: ServedMode | None = None
    holds_adapter: bool = False
    num_reused: int = 0
    num_paused: int = 0
    held_tokens: int = 0

    @classmethod
    def of(cls, row: ExportedRow) -> Sequence:
        """The sequence that goes on where `row` stopped; nothing of it is stored yet."""
        return cls(row.request, list(row.token_ids), list(row.token_logprobs))

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def total_tokens(self) -> int:
        """Tokens so far, prompt and generated."""
        return self.prompt_tokens + self.num_generated

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose keys and values the sequence may have to store: the last one is never read back."""
        return self.prompt_tokens + self.request.sampling.max_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """One token is left to compute, and it yields the next one."""
        return self.num_stored == self.total_tokens - 1 and self.num_generated > 0

    @property
    def awaits_end(self) -> bool:
        """Its last token is pending: nothing is left to launch."""
        return self.num_pending > 0 and self.num_generated >= self.request.sampling.max_tokens

    def served(self, mode: ServedMode) -> None:
        """Count a step's mode; a row that saw more than one was served by a mixture."""
        self.mode = mode if self.mode in (None, mode) else "mixture"

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions `start:end` of prompt and completion together."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return list(prompt[start:end])
        generated = self.token_ids[max(start - len(prompt), 0) : end - len(prompt)]
        return [*prompt[start:], *generated]

    def preempted(self) -> Sequence:
        """The sequence that goes on with its tokens once there is memory for it again; nothing of it is stored."""
        again = Sequence.of(self.exported())
        again.mode, again.num_paused = self.mode, self.num_paused
        return again

    def exported(self) -> ExportedRow:
        """What another engine needs to go on."""
        return ExportedRow(self.request, tuple(self.token_ids), tuple(self.token_logprobs))

    def result(self, text: str, finish_reason: FinishReason) -> Result:
        """The outcome, once nothing more will be generated."""
        assert self.mode is not None, f"row {self.request.request_id} ended before its first step"
        return Result(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=self.prompt_tokens,
            mode=self.mode,
            token_logprobs=tuple(self.token_logprobs) if self.request.sampling.logprobs else None,
            reused_prompt_tokens=self.num_reused,
        )
