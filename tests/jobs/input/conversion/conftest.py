"""Files that are converted, and what becomes of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.input.conversion.converter import Converter
from lorabatch.jobs.input.conversion.source import Kind, Source
from lorabatch.jobs.storage.location import Location

Convert = Callable[..., pa.Table]


def source(path: Path, kind: Kind = "CSV") -> Source:
    """A file of this machine."""
    return Source(str(path), {}, str(path), str(path), path.name, kind)


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Convert]:
    """`convert(kind, *contents, name="x.csv", **typed)`: the rows of files with these contents, as one table."""
    root, number = tmp_path_factory.mktemp("converted"), 0

    def run(kind: Kind, *contents: bytes, name: str = "x", **typed: Any) -> pa.Table:
        nonlocal number
        sources = []
        for content in contents:
            number += 1
            (root / str(number)).mkdir()
            path = root / str(number) / name
            path.write_bytes(content)
            sources.append(source(path, kind))
        converter = Converter(Location(str(root / "output")), **typed)
        try:
            tables = [pq.read_table(made) for made in converter.convert(sources)]
        finally:
            converter.close()
        return pa.concat_tables(tables, promote_options="default").replace_schema_metadata(None)

    yield run
    assert not (root / "output").exists()
