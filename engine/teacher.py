"""The packed form of the likeliest tokens of many places: for each place `count` tokens, then their log-probabilities.

A place takes 6 bytes for each of its tokens: 4 of a little-endian unsigned number, and 2 of a floating point number of
16 bits. The bytes of consecutive places follow each other, so that those of a row can be cut and joined between any two
places. Journals, messages and rows that move carry them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_TOKEN_BYTES = 4 + 2


def token_bytes(count: int) -> int:
    """Bytes of one place with `count` of its likeliest tokens."""
    return _TOKEN_BYTES * count


def pack(token_ids: NDArray[Any], logprobs: NDArray[Any]) -> bytes:
    """The packed form of `token_ids` and `logprobs`, both [num_places, count]. Log-probabilities are rounded to 16
    bits; those below what 16 bits hold become minus infinity.
    """
    import numpy as np

    places = np.empty(len(token_ids), _place(token_ids.shape[1]))
    places["token_ids"] = token_ids
    with np.errstate(over="ignore"):
        places["logprobs"] = logprobs
    return places.tobytes()


def unpack(packed: Iterable[bytes], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tokens, uint32, and their log-probabilities, float16, both [num_places, count], of all places of `packed`."""
    import numpy as np

    places = np.frombuffer(b"".join(packed), _place(count))
    return np.ascontiguousarray(places["token_ids"]), np.ascontiguousarray(places["logprobs"])


def _place(count: int) -> Any:
    import numpy as np

    return np.dtype([("token_ids", "<u4", (count,)), ("logprobs", "<f2", (count,))])
