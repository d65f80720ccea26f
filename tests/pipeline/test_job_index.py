"""Numbers of all rows come together from their chunks, and are sorted on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.pipeline.job_index import INDEXED_ROW, SortedRows, read_chunks


def test_adapters_of_all_chunks_are_told_apart(prepare_job: Callable[..., Any]) -> None:
    """Each chunk has its own dictionary of names; together they must mean the same."""
    names = ["beta", "beta", "alpha", None, None, "alpha", "zeta", "beta"]
    job = prepare_job(pa.table({"id": range(8), "prompt": ["a"] * 8, "adapter": names}), row_group_rows=2)
    job.index()
    codes = {"alpha": 0, "beta": 1, "zeta": 2}
    index = np.concatenate(list(read_chunks(job.store, 4, codes)))
    assert Counter([*codes, None][code] for code in index["adapter"]) == Counter(names)
    assert np.array_equal(index["chunk"], [0, 0, 1, 1, 2, 2, 3, 3])


@given(
    chunks=st.lists(st.lists(st.integers(-1, 3), max_size=20), max_size=6),
    block_rows=st.integers(1, 30),
)
def test_blocks_hold_all_rows_sorted_by_adapter_and_then_as_they_came(chunks: list[list[int]], block_rows: int) -> None:
    flat = [code for codes in chunks for code in codes]
    made = []
    with SortedRows([flat.count(code) for code in (0, 1, 2, 3, -1)]) as rows:
        for number, codes in enumerate(chunks):
            chunk = np.zeros(len(codes), INDEXED_ROW)
            chunk["adapter"], chunk["chunk"], chunk["row"] = codes, number, np.arange(len(codes))
            rows.add(chunk)
            made += chunk.tolist()
        blocks = list(rows.blocks(block_rows))
    assert all(len(block) <= block_rows for block in blocks)
    sizes = {len(block) for block in blocks}
    assert max(sizes) - min(sizes) <= 1
    found = [row for block in blocks for row in block.tolist()]
    assert found == sorted(made, key=lambda row: row[0] % 5)
