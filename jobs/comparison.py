"""`compare_answers`: joins the answers of two finished jobs, or of two adapters, and counts how they differ.

Texts are compared by hash, so that memory holds a few numbers for each row; the texts of examples are read again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..system.html import facts_table
from .errors import JobRequestError
from .input.columns import DEFAULT_ID_COLUMN, output_name, readable_values, records_samples, sample_field
from .record import JobRecord, changed_adapters, differences
from .stages import refuse_stages
from .status.job_status import read_status
from .storage.redaction import redacted_url
from .store import JobStore

#: Differing rows whose texts a comparison has.
NUM_EXAMPLES = 10
_BATCH_ROWS = 4096
_NAMES_SHOWN = 10
# `asked`: adapter that was asked, where two sweeps are joined; else "".
_KEYS = ("key", "sample", "asked")
# Columns of a row of one side: its adapter, hash of its completion, `finish_reason`, tokens, and number of its part.
_VALUES = ("adapter", "hash", "reason", "tokens", "part")
#: Columns of an example, in this order.
EXAMPLE_COLUMNS = ("adapter", "finish_reason", "completion", "error")

# One row of an output by column.
_Row = dict[str, Any]
# Values of `_KEYS`.
_Key = tuple[Any, int, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers of two sides, joined by row. A side is a job's output, or one adapter's rows in it.

    Rows are equal if their completions and their `finish_reason` are. Each completion of a row with several is a row.
    """

    #: First and second side: URL of the output, and the adapter if its rows were chosen.
    sides: tuple[str, str]
    #: Column by which rows are joined.
    key: str
    #: Rows on both sides that are equal.
    num_equal: int
    #: Rows on both sides that are not equal.
    num_different: int
    #: Rows of the first side only, and of the second side only.
    num_alone: tuple[int, int]
    #: Rows on both sides whose adapter's name is not the same on both.
    num_other_adapter: int
    #: Tokens of the completions of rows on both sides, on the first side and on the second.
    completion_tokens: tuple[int, int]
    #: `finish_reason` on the first side and on the second -> rows on both sides.
    finish_reasons: Mapping[tuple[str, str], int]
    #: Options, model, input and adapters in which the two jobs differ, one line each.
    changes: tuple[str, ...] = ()
    #: At most `NUM_EXAMPLES` differing rows, of all adapters in turn: key and sample, row of the first side, row of the
    #: second side.
    examples: tuple[tuple[str, _Row, _Row], ...] = ()
    #: Adapter on the first side, or on the second for rows that are only there ("": base model) -> its rows.
    adapters: Mapping[str, Comparison] = field(default_factory=dict)

    @property
    def num_both(self) -> int:
        """Rows on both sides."""
        return self.num_equal + self.num_different

    @property
    def is_equal(self) -> bool:
        """Whether every row of either side has an equal row on the other."""
        return not self.num_different and not any(self.num_alone)

    def __str__(self) -> str:
        first, second = self.num_alone
        text = f"{self.num_equal} rows equal, {self.num_different} different"
        return f"{text}, {first} only on the first side, {second} only on the second"

    def _repr_html_(self) -> str:
        first, second = self.num_alone
        facts = {"equal rows": self.num_equal, "different rows": self.num_different}
        facts |= {"only on the first side": first, "only on the second side": second}
        return facts_table(" and ".join(self.sides), facts)

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object. Pairs of sides are lists of two."""
        values = {name: value for name, value in asdict(self).items() if name not in ("finish_reasons", "examples")}
        values["finish_reasons"] = [[*reasons, count] for reasons, count in self.finish_reasons.items()]
        values["examples"] = [{"row": key, "first": first, "second": second} for key, first, second in self.examples]
        values["adapters"] = {name: found.to_json() for name, found in self.adapters.items()}
        return values


def compare_answers(
    first: JobStore, second: JobStore, *, adapters: Sequence[str | None] = (None, None), on: str | None = None
) -> Comparison:
    """Joins the rows of two finished jobs and counts how their answers differ. Both may be one job.

    `adapters`: for each side the adapter ("": base model) whose rows are taken; None for all rows. `on`: column of both
    outputs that names rows on each side; None for their ids.

    Raises `JobRequestError` where rows cannot be joined, and `StorageError`.
    """
    sides = _Side(first, adapters[0], on), _Side(second, adapters[1], on)
    _check_ids(*sides)
    if all(side.record.swept and side.adapter is None for side in sides):
        for side in sides:
            side.is_by_adapter = True
    left, right = (side.rows() for side in sides)
    left, right = _with_equal_types(sides, left, right)
    joined = left.append_column("left", _true(left)).join(
        right.append_column("right", _true(right)), list(_KEYS), join_type="full outer", right_suffix="_2"
    )
    is_both = pc.and_(_is_there(joined, "left"), _is_there(joined, "right"))
    if not pc.any(is_both).as_py():
        raise JobRequestError(
            f"{sides[0]} and {sides[1]}: no {sides[0].key!r} is on both sides ({_shown(left)}; {_shown(right)}). "
            "Name outputs of the same rows, or with --on a column that names rows in both."
        )
    names = str(sides[0]), str(sides[1])
    found = _counted(joined, names, sides[0].key)
    groups = joined.append_column("of", pc.coalesce(joined["adapter"], joined["adapter_2"]))
    of_adapters = {
        name: _counted(groups.filter(pc.equal(groups["of"], name)), names, sides[0].key)
        for name in sorted(pc.unique(groups["of"]).to_pylist())
    }
    examples, changes = tuple(_examples(groups, *sides)), tuple(_changes(*sides))
    return replace(found, changes=changes, examples=examples, adapters=of_adapters)


class _Side:
    """One side of a comparison: a finished job, or one adapter's rows in it. Raises `JobRequestError`."""

    def __init__(self, store: JobStore, adapter: str | None, on: str | None) -> None:
        self.url = redacted_url(store.url)
        self.store, self.adapter = store, adapter
        status = read_status(store)
        self.record: JobRecord = status.record
        if status.outcome != "done":
            raise JobRequestError(
                f"output={self.url!r}: this job has not finished. Wait for it, or `lorabatch resume` it."
            )
        refuse_stages(self.record, self.url)
        self.id_column = self.record.input.roles.get("id", DEFAULT_ID_COLUMN)
        self.key = on or self.id_column
        #: Whether a row is the answer of one adapter, and an id has one for each.
        self.is_by_adapter = False

    def __str__(self) -> str:
        if self.adapter is None:
            return self.url
        return f"{self.url}, {f'adapter {self.adapter}' if self.adapter else 'base model'}"

    def rows(self) -> pa.Table:
        """`_KEYS` and `_VALUES` of each row."""
        tables = [self._prepared(batch, part) for part, batch in self._batches(self.store.committed_parts())]
        rows = pa.concat_tables(tables, promote_options="permissive") if tables else _no_rows()
        if self.adapter is not None:
            names = sorted(pc.unique(rows["adapter"]).to_pylist())
            rows = rows.filter(pc.equal(rows["adapter"], self.adapter))
            if not rows.num_rows:
                known = ", ".join(name or "(base model)" for name in names[:_NAMES_SHOWN])
                raise JobRequestError(
                    f"adapter={self.adapter!r}: no row of {self.url!r} names it. Its rows name {known}."
                )
        kind = rows.schema.field("key").type
        if pa.types.is_nested(kind):
            raise JobRequestError(f"on={self.key!r}: has type {kind} in {self}. Name a column of texts or numbers.")
        if num_nulls := rows["key"].null_count:
            raise JobRequestError(
                f"on={self.key!r}: {num_nulls} rows of {self} have no value there, so that they cannot be joined."
            )
        counts = rows.group_by(list(_KEYS)).aggregate([([], "count_all")])
        if counts.num_rows < rows.num_rows:
            twice = counts.filter(pc.greater(counts["count_all"], 1))["key"]
            raise JobRequestError(
                f"on={self.key!r}: {len(twice)} values are in several rows of {self}, such as "
                f"{readable_values(twice[:1])[0]!r}. Name a column whose values are unique, or an adapter of each side."
            )
        return rows

    def texts(self, keys: Mapping[_Key, int]) -> dict[_Key, _Row]:
        """`_KEYS` -> `EXAMPLE_COLUMNS` of these rows. `keys`: `_KEYS` -> number of the row's part."""
        found: dict[_Key, _Row] = {}
        for part, batch in self._batches(set(keys.values()), with_errors=True):
            table = self._completions(batch)
            columns = {name: readable_values(table[name]) for name in (*_KEYS, *EXAMPLE_COLUMNS)}
            for values in zip(*columns.values(), strict=True):
                row = dict(zip(columns, values, strict=True))
                place = row.pop("key"), row.pop("sample"), row.pop("asked")
                if keys.get(place) == part and self.adapter in (None, row["adapter"]):
                    found[place] = row
        return found

    def _batches(self, parts: Collection[int], *, with_errors: bool = False) -> Iterator[tuple[int, pa.RecordBatch]]:
        names = ["completion", "finish_reason", "completion_tokens", *(["error"] if with_errors else [])]
        columns = [self.key, *(output_name(self.record, name) for name in names)]
        columns += [name for name in [self.record.input.roles.get("adapter")] if name is not None]
        columns += [sample_field(self.record).name] if records_samples(self.record) else []
        for part in sorted(parts):
            with self.store.open_part(part) as source, pq.ParquetFile(source) as file:
                if self.key not in file.schema_arrow.names:
                    raise JobRequestError(
                        f"on={self.key!r}: {self.url!r} has no such column. It has "
                        f"{', '.join(file.schema_arrow.names)}."
                    )
                for batch in file.iter_batches(_BATCH_ROWS, columns=list(dict.fromkeys(columns))):
                    yield part, batch

    def _completions(self, batch: pa.RecordBatch) -> pa.Table:
        """A row for each completion, whose columns have their own names, besides `_KEYS` and the adapter's name."""
        role = self.record.input.roles.get("adapter")
        key = batch[self.key]
        adapter = pa.nulls(batch.num_rows, pa.string()) if role is None else batch[role].cast(pa.string())
        names = ("completion", "finish_reason", "completion_tokens", "error")
        columns = {n: batch[o] for n in names if (o := output_name(self.record, n)) in batch.schema.names}
        sample = pa.array(np.zeros(batch.num_rows, np.int32))
        if self.record.has_lists:
            lists = columns["finish_reason"]
            parents = pc.list_parent_indices(lists).to_numpy()
            starts = np.searchsorted(parents, np.arange(batch.num_rows))
            sample = pa.array((np.arange(len(parents)) - starts[parents]).astype(np.int32))
            key, adapter = key.take(pa.array(parents)), adapter.take(pa.array(parents))
            columns = {
                name: column.take(pa.array(parents)) if name == "error" else pc.list_flatten(column)
                for name, column in columns.items()
            }
        elif records_samples(self.record):
            sample = batch[sample_field(self.record).name].cast(pa.int32())
        key = key.dictionary_decode() if pa.types.is_dictionary(key.type) else key
        adapter = pc.fill_null(adapter, "")
        asked = adapter if self.is_by_adapter else pa.array([""] * len(adapter))
        return pa.table({"key": key, "sample": sample, "asked": asked, "adapter": adapter, **columns})

    def _prepared(self, batch: pa.RecordBatch, part: int) -> pa.Table:
        rows = self._completions(batch)
        values = {
            "hash": pa.array(map(_text_hash, rows["completion"].to_pylist()), pa.int64()),
            "reason": rows["finish_reason"],
            "tokens": pc.fill_null(rows["completion_tokens"].cast(pa.int64()), 0),
            "part": pa.array(np.full(rows.num_rows, part, np.int32)),
        }
        return pa.table({name: rows[name] for name in (*_KEYS, "adapter")} | values)


def _text_hash(text: str | None) -> int:
    if text is None:
        return 0
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _no_rows() -> pa.Table:
    kinds = (pa.null(), pa.int32(), pa.string(), pa.string(), pa.int64(), pa.string(), pa.int64(), pa.int32())
    return pa.schema(zip((*_KEYS, *_VALUES), kinds, strict=True)).empty_table()


def _true(rows: pa.Table) -> pa.Array:
    return pa.array(np.ones(rows.num_rows, bool))


def _is_there(joined: pa.Table, side: str) -> pa.ChunkedArray:
    return pc.fill_null(joined[side], False)


def _check_ids(first: _Side, second: _Side) -> None:
    """Raise `JobRequestError` for made ids that name other rows on each side."""
    if any(side.key != DEFAULT_ID_COLUMN or "id" in side.record.input.roles for side in (first, second)):
        return
    files = {file.name: (file.size_bytes, file.footer_sha256) for file in first.record.input.files}
    others = {file.name: (file.size_bytes, file.footer_sha256) for file in second.record.input.files}
    if changed := [name for name, content in others.items() if files.get(name, content) != content]:
        raise JobRequestError(
            f"{first} and {second}: ids were made of file names and row numbers, and {changed[0]!r} is not the same "
            "file in both jobs. Give rows a column of ids, or name with --on a column that names rows in both."
        )


def _with_equal_types(sides: tuple[_Side, _Side], left: pa.Table, right: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Both tables with keys of one type. Raises `JobRequestError` where there is none."""
    kinds = [rows.schema.field("key").type for rows in (left, right)]
    wide = [pa.int64() if pa.types.is_integer(kind) else _large(kind) for kind in kinds]
    wide = [wide[1 - place] if pa.types.is_null(kind) else kind for place, kind in enumerate(wide)]
    if wide[0] != wide[1]:
        raise JobRequestError(
            f"{sides[0]} and {sides[1]}: {sides[0].key!r} has type {kinds[0]} and {sides[1].key!r} has type "
            f"{kinds[1]}, so that rows cannot be joined by them. Name with --on a column of texts or numbers."
        )
    try:
        both = [rows.set_column(0, "key", rows["key"].cast(wide[0])) for rows in (left, right)]
    except pa.ArrowInvalid as error:
        raise JobRequestError(f"{sides[0]} and {sides[1]}: no join by {sides[0].key!r} ({error}).") from None
    return both[0], both[1]


def _large(kind: pa.DataType) -> pa.DataType:
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return pa.large_string() if is_text else kind


def _counted(joined: pa.Table, sides: tuple[str, str], key: str) -> Comparison:
    """The counts of joined rows, without changes, examples and adapters."""
    on_left, on_right = _is_there(joined, "left"), _is_there(joined, "right")
    both = joined.filter(pc.and_(on_left, on_right))
    num_equal = _num_true(_is_same(both))
    reasons = Counter(zip(both["reason"].to_pylist(), both["reason_2"].to_pylist(), strict=True))
    return Comparison(
        sides,
        key,
        num_equal,
        both.num_rows - num_equal,
        (_num_true(pc.invert(on_right)), _num_true(pc.invert(on_left))),
        _num_true(pc.not_equal(both["adapter"], both["adapter_2"])),
        (pc.sum(both["tokens"]).as_py() or 0, pc.sum(both["tokens_2"]).as_py() or 0),
        dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    )


def _num_true(values: pa.ChunkedArray) -> int:
    return int(pc.sum(values).as_py() or 0)


def _is_same(both: pa.Table) -> pa.ChunkedArray:
    return pc.and_(pc.equal(both["hash"], both["hash_2"]), pc.equal(both["reason"], both["reason_2"]))


def _examples(joined: pa.Table, first: _Side, second: _Side) -> Iterator[tuple[str, _Row, _Row]]:
    """Differing rows with their texts: the first of each adapter in the order of keys, then the second of each, …"""
    both = joined.filter(pc.and_(_is_there(joined, "left"), _is_there(joined, "right")))
    differing = both.filter(pc.invert(_is_same(both))).sort_by([(name, "ascending") for name in ("of", *_KEYS)])
    places = np.concatenate([np.arange(count) for _, count in _runs(differing["of"])] or [np.arange(0)])
    chosen = differing.take(pa.array(np.argsort(places, kind="stable")[:NUM_EXAMPLES]))
    others_of_key = (chosen[name].to_pylist() for name in _KEYS[1:])
    keys = list(zip(readable_values(chosen["key"]), *others_of_key, strict=True))
    ours = first.texts(dict(zip(keys, chosen["part"].to_pylist(), strict=True)))
    others = second.texts(dict(zip(keys, chosen["part_2"].to_pylist(), strict=True)))
    for place in keys:
        key, sample, _ = place
        yield f"{key}, sample {sample}" if sample else str(key), ours[place], others[place]


def _runs(column: pa.ChunkedArray) -> list[tuple[str, int]]:
    """Values of a sorted column, each with the number of its rows."""
    found = pc.value_counts(column.combine_chunks()).to_pylist()
    return [(item["values"], item["counts"]) for item in found]


def _changes(first: _Side, second: _Side) -> Iterator[str]:
    """Options, model, input and adapters that are not the same in both jobs, one line each."""
    for line in differences(first.record, second.record):
        yield line.replace("have changed since the job was started", "are not the same")
    for name in sorted(changed_adapters(_with_contents(first), _with_contents(second))):
        yield f"adapter {name!r}: its content is not the same, or only one of the jobs has it"


def _with_contents(side: _Side) -> JobRecord:
    """The record of a side, with the content hashes of all adapters that its workers have read."""
    known = [
        adapter.model_copy(update={"sha256": side.store.content_of(adapter.sha256) or adapter.sha256})
        for adapter in side.record.adapters
    ]
    return side.record.model_copy(update={"adapters": tuple(known)})


def _shown(rows: pa.Table) -> str:
    """The first few keys of a side."""
    keys = readable_values(rows["key"][:3])
    return ", ".join(map(repr, keys)) + (", …" if rows.num_rows > len(keys) else "") if keys else "no rows"
