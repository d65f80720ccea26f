"""`RowAnswer`: the output's values for one row. `BegunRow`: the tokens generated for an unfinished row.

Both are kept in the journals of unfinished shards. A journal is a run of frames: length and CRC-32 (four bytes each,
little-endian), then msgpack: a list for an answer, a map for a begun row. A process may die in the middle of a write,
so a journal is read up to its first frame that is not whole.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import msgpack

from ...engine.request import FinishReason, Request, Result, ServedMode, TopLogprobs

_HEAD = struct.Struct("<II")
#: Fingerprint of a row, and content hash of the adapter that answers it (None: the base model).
AnswerKey = tuple[bytes, str | None]


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The answer to one row, or the error in its place. Most fields are columns of the output."""

    #: Fingerprint of the row that is answered.
    fingerprint: bytes
    #: Identity of the adapter that answered, in parts its content hash; None for the base model.
    adapter_sha256: str | None
    #: Text of the completion; None for an error.
    completion: str | None
    #: Why the completion ended.
    finish_reason: FinishReason
    #: Tokens of the prompt.
    prompt_tokens: int
    #: Tokens of the completion.
    completion_tokens: int
    #: Mode of the steps that served the row; None for a row that no engine served.
    mode: ServedMode | None
    #: Number of times that an engine started on the row.
    attempts: int
    #: Why the row has no answer, as sentences; None for an answer.
    error: str | None = None
    #: Tokens of the completion; None unless the row asks for log-probabilities.
    token_ids: tuple[int, ...] | None = None
    #: Log-probability of each token of the completion; None unless the row asks for them.
    token_logprobs: tuple[float, ...] | None = None
    #: Prompt tokens that were copied from rows that begin alike. No column of the output, so None in an answer that was
    #: read from a part.
    reused_prompt_tokens: int | None = None
    #: Likeliest tokens in place of each token; None unless the row asks for log-probabilities.
    token_top_logprobs: tuple[TopLogprobs, ...] | None = None
    #: Text before the completion; None if there was none, or it is not split.
    reasoning: str | None = None
    #: Id, name and arguments of each tool call; None when calls are not read.
    tool_calls: tuple[tuple[str, str, str], ...] | None = None
    #: Log-probability of each text of the row's choice; None when none is scored.
    choice_logprobs: tuple[float, ...] | None = None
    #: Log-probabilities of the prompt's tokens but the first; None unless the row asks for them.
    prompt_token_logprobs: tuple[float, ...] | None = None
    #: Likeliest tokens in place of each of the prompt's tokens but the first; None unless the row asks for them.
    prompt_token_top_logprobs: tuple[TopLogprobs, ...] | None = None
    #: Logits of the labels of a row that was classified, or an embedding, as `Result.pooled`; None for other rows.
    pooled: bytes | None = None
    #: Likeliest tokens in place of each token, packed (`engine.teacher`); None unless the row asks for them.
    teacher: bytes | None = None

    @property
    def key(self) -> AnswerKey:
        """The fingerprint and the adapter, by which the answer of a row is found: adapters of a sweep answer rows with
        one fingerprint.
        """
        return self.fingerprint, self.adapter_sha256

    @classmethod
    def from_result(cls, fingerprint: bytes, request: Request, result: Result, attempts: int) -> RowAnswer:
        """The answer of a row from an engine's result for its request."""
        has_logprobs = request.sampling.wants_logprobs and result.token_logprobs is not None
        return cls(
            fingerprint=fingerprint,
            adapter_sha256=request.adapter_id,
            completion=None if result.error is not None else result.text,
            finish_reason=result.finish_reason,
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            mode=result.mode,
            attempts=attempts,
            error=result.error,
            token_ids=result.token_ids if has_logprobs else None,
            token_logprobs=result.token_logprobs if has_logprobs else None,
            reused_prompt_tokens=result.reused_prompt_tokens,
            token_top_logprobs=result.top_logprobs if has_logprobs else None,
            reasoning=result.reasoning,
            tool_calls=None if result.tool_calls is None else _with_ids(fingerprint, result.tool_calls),
            choice_logprobs=result.choice_logprobs,
            prompt_token_logprobs=result.prompt_logprobs,
            prompt_token_top_logprobs=result.prompt_top_logprobs,
            pooled=result.pooled,
            teacher=result.teacher,
        )

    @classmethod
    def refused(cls, fingerprint: bytes, adapter_sha256: str | None, error: str, prompt_tokens: int) -> RowAnswer:
        """The error in place of an answer to a row that no engine sees."""
        return cls(
            fingerprint=fingerprint,
            adapter_sha256=adapter_sha256,
            completion=None,
            finish_reason="error",
            prompt_tokens=prompt_tokens,
            completion_tokens=0,
            mode=None,
            attempts=0,
            error=error,
        )


def _with_ids(fingerprint: bytes, calls: Sequence[tuple[str, str]]) -> tuple[tuple[str, str, str], ...]:
    """Ids of nine letters and digits, as Mistral's templates want them: the row's beginning and the call's number."""
    row = fingerprint.hex()[:6]
    return tuple((f"{row}{number:03x}", *call) for number, call in enumerate(calls))


def probabilities(logprobs: Sequence[float] | None) -> list[float] | None:
    """The share of each text of a choice in the probability of all of them; None if that is 0 or not known.
    `logprobs`: log-probability of each text.
    """
    if logprobs is None or not math.isfinite(most := max(logprobs)):
        return None
    weights = [math.exp(logprob - most) for logprob in logprobs]
    whole = math.fsum(weights)
    return [weight / whole for weight in weights]


@dataclass(frozen=True, slots=True)
class BegunRow:
    """The tokens that a worker had generated for a row when it had to leave. The next attempt at the shard continues
    from them.
    """

    #: Fingerprint of the row.
    fingerprint: bytes
    #: Content hash of the row's adapter; None for the base model.
    adapter_sha256: str | None
    #: Tokens generated.
    token_ids: tuple[int, ...]
    #: Log-probability of each token; empty unless the row asks for them.
    token_logprobs: tuple[float, ...]
    #: Likeliest tokens in place of each token; empty unless the row asks for them.
    top_logprobs: tuple[TopLogprobs, ...] = ()
    #: Likeliest tokens in place of each token, packed (`engine.teacher`); empty unless the row asks for them.
    teacher: bytes = b""


def encode_answers(rows: Iterable[RowAnswer]) -> bytes:
    """Frames to append to a journal."""
    return _frames(astuple(row) for row in rows)


def encode_begun(rows: Iterable[BegunRow]) -> bytes:
    """Frames to append to a journal."""
    return _frames(asdict(row) for row in rows)


def _frames(values: Iterable[Any]) -> bytes:
    bodies = (msgpack.packb(value, use_bin_type=True) for value in values)
    return b"".join(_HEAD.pack(len(body), zlib.crc32(body)) + body for body in bodies)


def decode_journal(journal: bytes) -> Iterator[RowAnswer | BegunRow]:
    """The rows of a journal, up to the first frame that is torn or damaged."""
    start = 0
    while start + _HEAD.size <= len(journal):
        size, checksum = _HEAD.unpack_from(journal, start)
        start += _HEAD.size
        body = journal[start : start + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            return
        try:
            values = msgpack.unpackb(body, raw=False, use_list=False)
            row = BegunRow(**values) if isinstance(values, dict) else RowAnswer(*values)
        except (TypeError, ValueError, msgpack.UnpackException):
            return
        yield row
        start += size
