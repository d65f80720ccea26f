"""The teacher's columns of the output: the likeliest tokens in place of each token, for training another model on them.

    teacher_prompt_token_ids    tokens of the prompt             list<int32>
    teacher_token_ids           tokens of each place             list<fixed_size_list<uint32>[k]>
    teacher_logprobs            their log-probabilities          list<fixed_size_list<float16>[k]>

All places of a job have the same number of tokens, so that the values of a column are one array. Parquet has lists of
any length only; readers of Arrow find the fixed length in the file's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.types as t
from numpy.typing import NDArray

from ...engine.teacher import pack, token_bytes, unpack

PROMPT, TOKENS, LOGPROBS = "teacher_prompt_token_ids", "teacher_token_ids", "teacher_logprobs"


def teacher_fields(count: int) -> tuple[pa.Field, ...]:
    """The columns of a job whose places have `count` tokens; none where it is 0."""
    if not count:
        return ()
    return (
        pa.field(PROMPT, pa.list_(pa.int32())),
        pa.field(TOKENS, pa.list_(pa.list_(pa.uint32(), count))),
        pa.field(LOGPROBS, pa.list_(pa.list_(pa.float16(), count))),
    )


def teacher_arrays(packed: Sequence[bytes | None], count: int) -> dict[str, pa.Array]:
    """The columns `TOKENS` and `LOGPROBS` of completions. `packed`: their places (`engine.teacher`); None for a
    completion without.
    """
    lengths = [len(places or b"") // token_bytes(count) for places in packed]
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    is_missing = pa.array([places is None for places in packed], pa.bool_())
    columns = unpack((places for places in packed if places), count)
    return {
        name: pa.ListArray.from_arrays(
            pa.array(offsets), pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), count), mask=is_missing
        )
        for name, values in zip((TOKENS, LOGPROBS), columns, strict=True)
    }


def packed_places(token_ids: pa.ChunkedArray, logprobs: pa.ChunkedArray, count: int) -> list[bytes | None]:
    """The places of completions, as `teacher_arrays` was given them, from columns of a part. Where a row has several
    completions, in lists, their places follow each other.
    """
    found: list[bytes | None] = []
    for ids, values in zip(_completions(token_ids), _completions(logprobs), strict=True):
        if ids is None or values is None:
            found.append(None)
            continue
        found.append(pack(_numbers(ids).reshape(-1, count), _numbers(values).reshape(-1, count)))
    return found


def _completions(column: pa.ChunkedArray) -> Iterable[pa.Array | None]:
    """The places of each completion in a column."""
    for chunk in column.chunks:
        if t.is_list(chunk.type.value_type) and _is_list(chunk.type.value_type.value_type):
            chunk = chunk.flatten()  # completions in lists
        starts = chunk.offsets.to_numpy()
        for is_valid, (start, end) in zip(chunk.is_valid().to_pylist(), pairwise(starts.tolist()), strict=True):
            yield chunk.values.slice(start, end - start) if is_valid else None


def _is_list(kind: pa.DataType) -> bool:
    return bool(t.is_list(kind) or t.is_fixed_size_list(kind))


def _numbers(places: pa.Array) -> NDArray[np.generic]:
    """All numbers of places, one after the other."""
    numbers: NDArray[np.generic] = places.flatten().to_numpy(zero_copy_only=False)
    return numbers
