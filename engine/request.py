"""A request, what is asked of it, and what comes back. Plain data: no torch, no Dask.

A `Request` is one input row, immutable. The engine works on it as a `Sequence`; its outcome is a `Result`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "error"]
ServedMode = Literal["base", "unmerged", "merged", "mixture"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` switch those filters off. `stop` strings end the
    completion and are not part of it. `logprobs` asks for the log-probability of each chosen token. `seed` and
    the request's own identity key its random stream, so a retried or moved request draws the same numbers.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    ignore_eos: bool = False

    def problems(self) -> list[str]:
        """Every field out of range, as `field=value: expectation`; empty when all is well."""
        checks = [
            (self.max_tokens >= 1, f"max_tokens={self.max_tokens}: must be at least 1"),
            (self.min_tokens >= 0, f"min_tokens={self.min_tokens}: must be at least 0"),
            (
                self.min_tokens <= max(self.max_tokens, 1),
                f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}",
            ),
            (
                0.0 <= self.temperature < float("inf"),
                f"temperature={self.temperature}: must be 0 (greedy) or a positive finite number",
            ),
            (0.0 < self.top_p <= 1.0, f"top_p={self.top_p}: must be above 0 and at most 1"),
            (self.top_k >= 0, f"top_k={self.top_k}: must be 0 (off) or a positive count"),
            (0 <= self.seed < 2**63, f"seed={self.seed}: must be from 0 to 2**63 - 1"),
            (all(self.stop), f"stop={list(self.stop)!r}: an empty stop string would end every completion"),
        ]
        return [message for holds, message in checks if not holds]


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

    `reused_prompt_tokens`: of the prompt, those that were copied from rows that begin alike; None where nobody counted.
    It is no part of the answer: results that differ in it alone are equal.
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
