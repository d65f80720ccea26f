"""`RowAnswer`: what the output says about one row. `BegunRow`: what was generated for an unfinished row.

Both are kept in the journals of unfinished shards. A journal is a run of frames: length and CRC-32 (four bytes each,
little-endian), then msgpack: a list for an answer, a map for a begun row. A process may die in the middle of a write,
so a journal is read up to its first frame that is not whole.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import msgpack

from ...engine.request import FinishReason, Request, Result, ServedMode, ToolCall, TopLogprobs

_HEAD = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The answer to one row. `fingerprint` and `adapter_sha256` (None: base model) say what it answers.

    `mode` is None for rows that no engine served. `token_ids`, `token_logprobs` and `token_top_logprobs` are kept only
    where the row asked for log-probabilities. `attempts`: how often an engine started on the row.
    `reused_prompt_tokens`: see `Result`; no column of the output, so None in what is read from a part. `reasoning`: see
    `Result`. `tool_calls`: id, name and arguments of each; None where they are not read. `choice_logprobs`,
    `prompt_token_logprobs`, `prompt_token_top_logprobs`: see `Result`.
    """

    fingerprint: bytes
    adapter_sha256: str | None
    completion: str | None
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    mode: ServedMode | None
    attempts: int
    error: str | None = None
    token_ids: tuple[int, ...] | None = None
    token_logprobs: tuple[float, ...] | None = None
    reused_prompt_tokens: int | None = None
    token_top_logprobs: tuple[TopLogprobs, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[tuple[str, str, str], ...] | None = None
    choice_logprobs: tuple[float, ...] | None = None
    prompt_token_logprobs: tuple[float, ...] | None = None
    prompt_token_top_logprobs: tuple[TopLogprobs, ...] | None = None

    @classmethod
    def from_result(cls, fingerprint: bytes, request: Request, result: Result, attempts: int) -> RowAnswer:
        """What an engine answered to `request`."""
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
        )


def _with_ids(fingerprint: bytes, calls: Sequence[ToolCall]) -> tuple[tuple[str, str, str], ...]:
    """Ids of nine letters and digits, as Mistral's templates want them: the row's beginning and the call's number."""
    row = fingerprint.hex()[:6]
    return tuple((f"{row}{number:03x}", call.name, call.arguments) for number, call in enumerate(calls))


@dataclass(frozen=True, slots=True)
class BegunRow:
    """What a worker had generated for a row when it had to leave; the next attempt at the shard goes on from there.

    `fingerprint` and `adapter_sha256` (None: base model) say for what. `token_logprobs` and `top_logprobs` have one
    item per token when the row asks for them, else none.
    """

    fingerprint: bytes
    adapter_sha256: str | None
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()


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
