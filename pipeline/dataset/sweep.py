"""Rows of a sweep, in which several adapters answer every row: prepared once, and given the adapters afterwards.

Rows are checked, rendered and tokenised once for all adapters that have one tokenizer and vocabulary. A prepared row
has the name of one of these adapters, and the plan says for which adapters it stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...jobs.input.partitions import ADAPTER_ROLE
from ...jobs.record import JobRecord
from .schema import ADAPTER, REQUEST_ID


def swept_rows(rows: NDArray[Any], members: Mapping[int, Sequence[int]], salts: Mapping[int, int]) -> NDArray[Any]:
    """The rows of a chunk's index once for each adapter, adapter after adapter. `rows`: structured, with the code of an
    adapter (`adapter`) and the hash of an id (`id_hash`). `members`: code in `rows` -> codes of the adapters that the
    rows stand for. `salts`: code -> number that makes the hashes of an id differ by adapter.
    """
    parts = {}
    for code, codes in members.items():
        of_group = rows[rows["adapter"] == code]
        for member in codes:
            part = of_group.copy()
            part["adapter"] = member
            is_first = part["id_hash"] != 0
            part["id_hash"][is_first] ^= np.uint64(salts[member])
            part["id_hash"][is_first & (part["id_hash"] == 0)] = 1
            parts[member] = part
    return np.concatenate([rows[:0], *(parts[member] for member in sorted(parts))])


def salt_of(adapter: str | None) -> int:
    """The number of an adapter's name for `swept_rows`; 0 for the base model, whose ids hash as without a sweep."""
    if adapter is None:
        return 0
    return int.from_bytes(hashlib.blake2b(adapter.encode(), digest_size=8).digest(), "little")


def with_adapters(rows: pa.Table, adapters: NDArray[np.int32], record: JobRecord) -> pa.Table:
    """Prepared rows, or some of their columns, for the adapters of a shard's rows: their names, and request ids of
    their own. `adapters`: place of each row's adapter in `record.swept`, int32 `[num_rows]`.
    """
    places = pa.array(adapters)
    names = pa.array(record.swept, pa.string()).take(places)
    made = {ADAPTER: names, record.input.roles[ADAPTER_ROLE]: names}
    if REQUEST_ID in rows.column_names:
        ids = rows.column(REQUEST_ID).combine_chunks()
        made[REQUEST_ID] = pc.binary_join_element_wise(ids, places.cast(pa.string()), ":")
    for name, values in made.items():
        if (place := rows.schema.get_field_index(name)) >= 0:
            rows = rows.set_column(place, rows.schema.field(place), values)
    return rows
