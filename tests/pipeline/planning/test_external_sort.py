"""Numbers of all rows come together from their chunks, and are sorted on disk.

What is too much for memory is written and read back whole, or the user hears where room is missing.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from textwrap import dedent
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.record import index_key
from lorabatch.pipeline.planning.external_sort import INDEXED_ROW, ScratchFile, SortedRows, read_chunks


def test_adapters_of_all_chunks_are_distinguished(prepare_job: Callable[..., Any]) -> None:
    """Each chunk has its own dictionary of names; together they must mean the same."""
    names = ["beta", "beta", "alpha", None, None, "alpha", "zeta", "beta"]
    job = prepare_job(pa.table({"id": range(8), "prompt": ["a"] * 8, "adapter": names}), row_group_rows=2)
    job.index()
    codes = {"alpha": 0, "beta": 1, "zeta": 2}
    index = np.concatenate(list(read_chunks(job.store, index_key(job.record), 4, codes)))
    assert Counter([*codes, None][code] for code in index["adapter"]) == Counter(names)
    assert np.array_equal(index["chunk"], [0, 0, 1, 1, 2, 2, 3, 3])


@given(
    chunks=st.lists(
        st.lists(st.tuples(st.integers(-1, 3), st.sampled_from([-1, -1, -1, 0, 1])), max_size=20), max_size=6
    ),
    block_rows=st.integers(1, 30),
)
def test_blocks_hold_all_rows_sorted_by_adapter_and_then_as_they_came(
    chunks: list[list[tuple[int, int]]], block_rows: int
) -> None:
    """Rows that keep answers are behind the others, sorted by the source of the answer."""
    flat = [pair for pairs in chunks for pair in pairs]
    sources = [source for _, source in flat]
    made = []
    with SortedRows([flat.count((code, -1)) for code in (0, 1, 2, 3, -1)], list(map(sources.count, (0, 1)))) as rows:
        for number, pairs in enumerate(chunks):
            chunk = np.zeros(len(pairs), INDEXED_ROW)
            chunk["chunk"], chunk["row"] = number, np.arange(len(pairs))
            chunk["adapter"], chunk["source"] = np.array(pairs, np.int32).reshape(-1, 2).T
            rows.add(chunk)
            made += chunk.tolist()
        blocks = list(rows.blocks(block_rows))
    assert all(len(block) <= block_rows for block in blocks)
    sizes = {len(block) for block in blocks}
    assert max(sizes) - min(sizes) <= 1
    found = [row for block in blocks for row in block.tolist()]
    assert found == sorted(made, key=lambda row: 5 + row[2] if row[2] >= 0 else row[0] % 5)


def test_what_is_written_anywhere_is_read_back() -> None:
    with closing(ScratchFile()) as file:
        assert [file.write(b"abc"), file.write(b"defg"), file.write(b"XY", 1)] == [0, 3, 1]
        assert (bytes(file.read()), bytes(file.read(2, 3))) == (b"aXYdefg", b"Yde")


def test_reading_past_the_end_is_an_error() -> None:
    with closing(ScratchFile()) as file:
        file.write(b"abc")
        with pytest.raises(EOFError, match="2 bytes"):
            file.read(1, 4)


def test_a_folder_without_room_is_named_with_what_to_do() -> None:
    """In a process of its own: the limit holds for all of its files."""
    code = """
        import resource, signal
        from lorabatch.pipeline.planning.external_sort import ScratchFile

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        ScratchFile().write(bytes(10_000))
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("lorabatch.jobs.errors.StorageError: temporary folder")
    assert "File too large" in last_line
    assert "TMPDIR" in last_line
