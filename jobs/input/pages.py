"""Bounds the memory that a column chunk of a Parquet file takes, from the headers of its pages.

A footer's size of a chunk may be wrong, and a few bytes may stand for gigabytes: a dictionary's value that many rows
repeat, a run of nulls, a page of zeros. Readers allocate by the headers of pages, which are read here: Thrift structs
in the compact protocol (https://github.com/apache/parquet-format).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Kinds of pages, and encodings of values.
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_BY_DICTIONARY, _DELTA_BYTE_ARRAY = (2, 8), 7
_MAX_DEPTH = 16
_MAX_PAGES = 1 << 18
_SIZE = struct.Struct("<I")
# A fixed-size value in Arrow takes 16 bytes at most (a decimal), an offset and a level 8.
_FIXED_BYTES = 16
_OFFSET_BYTES = 8
# Largest dictionary whose values are read. The size of a larger one is the bound of each of its values.
_MAX_DICTIONARY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Page:
    """One page of a column chunk."""

    #: `_DATA`, `_DATA_2` or `_DICTIONARY`.
    kind: int
    #: Values in the page, nulls included.
    num_values: int
    #: Size decompressed, or stored if that is larger.
    num_bytes: int
    #: Parquet's number of the values' encoding.
    encoding: int
    #: The page's bytes in the file, after its header.
    stored: memoryview


def decoded_bytes(column: pq.ColumnChunkMetaData, schema: pq.ColumnSchema, stored: memoryview, *, exact: bool) -> int:
    """The most bytes that a chunk's values take as Arrow arrays. `stored`: the chunk's bytes in the file.

    `exact`: look into the dictionary for the length of its longest value, instead of taking it for as long as the
    dictionary. Raises `ValueError` when the pages are damaged.
    """
    longest = largest = total = num_values = 0
    value_bytes = _OFFSET_BYTES * (1 + schema.max_repetition_level + schema.max_definition_level)
    for page in _pages(stored, column.num_values):
        largest = max(largest, page.num_bytes)
        if page.kind == _DICTIONARY:
            longest = _longest(page, column) if exact and schema.physical_type == "BYTE_ARRAY" else page.num_bytes
            total += page.num_bytes
            continue
        num_values += page.num_values
        total += page.num_values * value_bytes
        if schema.physical_type == "FIXED_LEN_BYTE_ARRAY":
            total += page.num_values * max(schema.length, _FIXED_BYTES)
        elif schema.physical_type != "BYTE_ARRAY":
            total += page.num_values * _FIXED_BYTES
        elif page.encoding in _BY_DICTIONARY:
            total += page.num_values * longest
        elif page.encoding == _DELTA_BYTE_ARRAY:
            # Each value may repeat the one before it.
            total += page.num_values * page.num_bytes
        else:
            total += page.num_bytes
    if num_values < column.num_values:
        raise ValueError(f"column {schema.path!r}: {num_values} values in its pages, {column.num_values} in the footer")
    return total + largest


def _pages(stored: memoryview, num_values: int) -> Iterator[_Page]:
    """The pages that a reader of `num_values` values reads."""
    position = num_pages = 0
    while position < len(stored) and num_values > 0:
        num_pages += 1
        if num_pages > _MAX_PAGES:
            raise ValueError(f"more than {_MAX_PAGES} pages in one column")
        header, position = _struct(stored, position, 0)
        data = header.get(5) or header.get(8) or header.get(7) or {}
        if not isinstance(data, dict):
            raise ValueError("the header of a page is damaged")
        kind, num_bytes, stored_bytes = (header.get(field, 0) for field in (1, 2, 3))
        page_values, encoding = data.get(1, 0), data.get(4 if kind == _DATA_2 else 2, 0)
        # A field of another type is None or a struct here.
        if not all(isinstance(number, int) for number in (kind, num_bytes, stored_bytes, page_values, encoding)):
            raise ValueError("the header of a page is damaged")
        if min(num_bytes, stored_bytes, page_values) < 0 or position + stored_bytes > len(stored):
            raise ValueError("the header of a page is damaged")
        body = stored[position : position + stored_bytes]
        position += stored_bytes
        if kind in (_DATA, _DATA_2, _DICTIONARY):
            yield _Page(kind, page_values, max(num_bytes, stored_bytes), encoding, body)
        if kind in (_DATA, _DATA_2):
            num_values -= page_values


def _longest(page: _Page, column: pq.ColumnChunkMetaData) -> int:
    """Bytes of a dictionary's longest value; bytes of the whole dictionary when its values cannot be read."""
    if page.num_bytes > _MAX_DICTIONARY_BYTES:
        return page.num_bytes
    try:
        if column.compression == "UNCOMPRESSED":
            values = page.stored
        else:
            values = memoryview(pa.Codec(column.compression.lower()).decompress(page.stored, page.num_bytes))
        longest = position = 0
        for _ in range(page.num_values):
            (size,) = _SIZE.unpack_from(values, position)
            longest, position = max(longest, size), position + _SIZE.size + size
    except (pa.ArrowException, OSError, ValueError, struct.error):
        return page.num_bytes  # the reader will say what is wrong with it
    return min(longest, page.num_bytes)


def _struct(data: memoryview, position: int, depth: int) -> tuple[dict[int, Any], int]:
    """A Thrift struct (field -> integer or struct; None for other values), and the position after it."""
    if depth > _MAX_DEPTH:
        raise ValueError("the header of a page nests too deeply")
    fields: dict[int, Any] = {}
    field = 0
    try:
        while (head := data[position]) != 0:
            position += 1
            if head >> 4:
                field += head >> 4
            else:
                field, position = integer(data, position)
            fields[field], position = _value(data, position, head & 15, depth)
    except IndexError:
        raise ValueError("the header of a page is cut off") from None
    return fields, position + 1


def _value(data: memoryview, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true and false
        return None, position
    if kind == 3:
        return data[position], position + 1
    if kind in (4, 5, 6):
        return integer(data, position)
    if kind == 7:
        return None, position + 8
    if kind == 8:
        size, position = unsigned(data, position)
        return None, position + size
    if kind == 12:
        return _struct(data, position, depth + 1)
    raise ValueError("the header of a page holds what no page has")  # lists, sets, maps


def integer(data: memoryview, position: int) -> tuple[int, int]:
    """A signed number of Thrift's compact protocol, and the position after it. Raises IndexError at the data's end."""
    value, position = unsigned(data, position)
    return (value >> 1) ^ -(value & 1), position


def unsigned(data: memoryview, position: int) -> tuple[int, int]:
    """An unsigned number of Thrift's compact protocol, and the position after it. Raises as `integer` does."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("the header of a page holds a number of too many bytes")
