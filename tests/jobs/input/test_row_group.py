"""Row groups are read within a limit of memory, whatever a few bytes of their file stand for."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.input.row_group import OversizedRowGroupError, open_row_group

MEBIBYTE = 1 << 20
LONG = "x" * 20_000
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def file_of(table: pa.Table, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    pq.write_table(table, file, compression=options.pop("compression", "zstd"), **options)
    return file


def nulls(num_values: int) -> pa.Array:
    return pa.nulls(num_values, pa.int64())


BOMBS: dict[str, tuple[pa.Array, dict[str, Any]]] = {
    "one value of a dictionary": (pa.array([LONG] * 100), {}),
    "one value, stored as a dictionary": (pa.array([LONG] * 100).dictionary_encode(), {}),
    "one value in a list": (pa.array([[LONG] * 100]), {}),
    "one content in messages": (pa.array([[{"role": "u", "content": LONG}] * 100], MESSAGES), {}),
    "values that repeat the one before": (
        pa.array([LONG] * 100),
        {"use_dictionary": False, "column_encoding": {"bomb": "DELTA_BYTE_ARRAY"}},
    ),
    "fixed size": (pa.array([LONG.encode()] * 100, pa.binary(len(LONG))), {}),
    "a page of one letter": (pa.array([LONG * 100]), {"use_dictionary": False}),
    "a dictionary of one letter": (pa.array([LONG * 100]), {}),
    "nulls in a list": (pa.ListArray.from_arrays(pa.array([0, 500_000], pa.int32()), nulls(500_000)), {}),
    "nulls": (nulls(500_000), {}),
    "binary": (pa.array([LONG.encode()] * 100), {}),
}


# A file of one text column whose footer has one other byte: its statistics do not fit the type.
ABORTING = (
    "c-l>lJr08~427MjiWs^uIKol}79s{frBaz#x_5|rg9stfp@oM2aEhL}rc;M!S$=;0?2hLe0X6CZB{vF{X&@I%B9=G?0J%yCt_yCc"
    "I6$K2Zs@NbB_L!n5k7;HVP8u!WGoomQl@~|K^|(SosHVRqhuHaoNqaz$o?3-CT*l0<mu$Y{n<atZkkFT!uU>KeV8xfE!{WOuByqb"
    "xDU(m_g@%*9Rm"
)


def of_old_writer(values: pa.Array, num_missing: int) -> io.BytesIO:
    """A file as Parquet-MR 1.2.8 wrote it: chunk sizes lack `num_missing` bytes, the header of the dictionary."""
    file = file_of(pa.table({"text": values}), compression="none", store_schema=False, write_statistics=False)
    data = file.getvalue()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer, writer = data[start:], pq.read_metadata(file).created_by.encode()

    def number(value: int) -> bytes:
        return bytes([value * 2 & 127 | 128, value * 2 >> 7])

    size = pq.read_metadata(file).row_group(0).column(0).total_compressed_size
    assert size - num_missing >= 64
    assert size < 8192
    footer = footer.replace(number(size), number(size - num_missing))
    footer = footer.replace(writer, b"parquet-mr version 1.2.8".ljust(len(writer)))
    return io.BytesIO(data[:start] + footer)


@pytest.mark.parametrize(
    ("values", "num_missing"),
    [
        (pa.array(["a" * 40, "b" * 40] * 50), 14),
        (pa.array(["a" * 1000, None, "b"] * 20), 14),
        (pa.array([["x", "y"], None, []] * 30), 15),
    ],
)
def test_chunks_whose_size_lacks_the_header_of_the_dictionary_are_read(values: pa.Array, num_missing: int) -> None:
    file = of_old_writer(values, num_missing)
    assert pq.read_table(file).column("text").to_pylist() == values.to_pylist()
    with open_row_group(file, 0) as rows:
        assert rows.table().column("text").to_pylist() == values.to_pylist()


def test_metadata_at_which_pyarrow_ends_the_process_is_an_error() -> None:
    file = io.BytesIO(zlib.decompress(base64.b85decode(ABORTING)))
    with pytest.raises(OSError, match="does not support BOOLEAN"), open_row_group(file, 0):
        pass


@pytest.mark.parametrize("compression", ["zstd", "none", "snappy"])
@pytest.mark.parametrize(("values", "options"), BOMBS.values(), ids=BOMBS)
def test_a_row_group_that_takes_too_much_memory_is_refused_by_its_column(
    values: pa.Array, options: dict[str, Any], compression: str
) -> None:
    table = pa.table({"id": np.zeros(len(values), np.int8), "bomb": values})
    file = file_of(table, compression=compression, **options)
    with pytest.raises(OversizedRowGroupError) as caught, open_row_group(file, 0, max_bytes=MEBIBYTE):
        pass
    assert "column 'bomb'" in str(caught.value) or "in its file, expected at most 1.0 MB" in str(caught.value)
    # Columns that are not read do no harm.
    with open_row_group(file, 0, ["id"], max_bytes=64 * MEBIBYTE) as rows:
        assert rows.table().column("id").equals(table.column("id"))


def test_rows_that_fit_are_cleared_though_one_of_them_is_long() -> None:
    """The headers alone would allow for a thousand long ones."""
    table = pa.table({"prompt": [LONG * 4] + [f"{i}" for i in range(1000)]})
    with open_row_group(file_of(table), 0, max_bytes=MEBIBYTE) as rows:
        assert pa.Table.from_batches(list(rows.batches())).equals(table)


TABLES: dict[str, pa.Array] = {
    "text": pa.array([f"row {i % 7}" * (i % 5) for i in range(3000)]),
    "messages": pa.array([[{"role": "user", "content": f"{i}"}] * (i % 3) for i in range(3000)], MESSAGES),
    "tokens": pa.array([list(range(i % 9)) if i % 4 else None for i in range(3000)], pa.list_(pa.int32())),
    "floats": pa.array(np.random.default_rng(0).normal(size=3000)),
    "booleans": pa.array([i % 3 == 0 for i in range(3000)]),
    "decimals": pa.array(range(3000), pa.int64()).cast(pa.decimal256(40, 2)),
    "times": pa.array(range(3000), pa.timestamp("us", "UTC")),
    "dictionary": pa.array([f"{i % 5}" for i in range(3000)]).dictionary_encode(),
    "nested": pa.array([[[["a"] * (i % 2)] * (i % 3)] * (i % 4) for i in range(3000)]),
    "map": pa.array([[("k", i)] for i in range(3000)], pa.map_(pa.string(), pa.int64())),
}
WRITTEN: list[dict[str, Any]] = [
    {},
    {"use_dictionary": False, "data_page_version": "2.0"},
    {"dictionary_pagesize_limit": 64, "data_page_size": 512, "compression": "gzip"},
    {"compression": "lz4", "write_page_checksum": True, "row_group_size": 1000},
]


@pytest.mark.parametrize("options", WRITTEN)
@pytest.mark.parametrize("values", TABLES.values(), ids=TABLES)
def test_rows_come_as_pyarrow_reads_them_and_within_the_bound(values: pa.Array, options: dict[str, Any]) -> None:
    table = pa.table({"values": values, "number": range(3000)})
    file = file_of(table, **options)
    found, bounds = [], []
    for number in range(pq.read_metadata(file).num_row_groups):
        with open_row_group(file, number, verify=True) as rows:
            batches = list(rows.batches())
            found += batches
            bounds.append((rows.num_bytes, sum(batch.nbytes for batch in batches)))
    assert pa.Table.from_batches(found).equals(pq.read_table(file))
    assert max(batch.num_rows for batch in found) <= 1024
    for bound, taken in bounds:
        assert bound >= taken


@pytest.mark.long
def test_long_rows_come_a_few_at_a_time() -> None:
    table = pa.table({"prompt": pa.array([f"{i}" + "x" * 10_000_000 for i in range(20)])})
    with open_row_group(file_of(table), 0) as rows:
        sizes = [batch.num_rows for batch in rows.batches()]
    assert sum(sizes) == 20
    assert max(sizes) <= 6


def damaged(change: Any) -> io.BytesIO:
    """A file whose first page's header, or the values behind it, were changed."""
    file = file_of(pa.table({"n": pa.array(range(100), pa.int64())}), use_dictionary=False, compression="none")
    content = bytearray(file.getvalue())
    change(content, pq.read_metadata(file).row_group(0).column(0).data_page_offset)
    return io.BytesIO(content)


def overwritten(*values: int) -> Any:
    def change(content: bytearray, start: int) -> None:
        content[start : start + len(values)] = bytes(values)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (overwritten(*[0xFF] * 40), "header of a page"),
        (overwritten(*[0x1C] * 40), "nests too deeply"),
        (overwritten(0x19), "holds what no page has"),
        # One page of a kind that nobody knows, with so many bytes.
        (overwritten(0x15, 0x22, 0x15, 0x00, 0x15, 0xFE, 0xFF, 0x7F, 0x00), "the header of a page is damaged"),
        # Index pages of no bytes, as far as the chunk goes.
        (overwritten(*[0x15, 0x02, 0x15, 0x00, 0x15, 0x00, 0x00] * 110), "0 values in its pages|header of a page"),
    ],
)
def test_pages_that_are_damaged_are_a_value_error(change: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why), open_row_group(damaged(change), 0):
        pass
