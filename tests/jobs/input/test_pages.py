"""Headers of Parquet pages that hold something else than the format says: found by the fuzzer."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.input.pages import decoded_bytes


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"\x55\x02\x00", id="a number in the place of the data page's header"),
        pytest.param(b"\x11\x15\x02\x15\x02\x2c\x15\x02\x00\x00", id="a flag in the place of the kind"),
        pytest.param(b"\x15\x00\x1c\x00\x15\x02\x2c\x15\x02\x00\x00", id="a struct in the place of the size"),
    ],
)
def test_fields_of_another_type_are_damage(header: bytes) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"x": [1, 2, 3]}), file)
    metadata = pq.ParquetFile(file).metadata
    with pytest.raises(ValueError, match="the header of a page is damaged"):
        decoded_bytes(metadata.row_group(0).column(0), metadata.schema.column(0), memoryview(header), exact=False)
