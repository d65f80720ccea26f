"""Compares a job's parts with what they should be: `PartMark` with the plan, `changed_parts` with what was recorded.

A part may have been cut, exchanged, or copied over another one: by a sync that broke off, a restore, a full quota. A
part counts only when it holds the rows of its shard, answered with the contents that the job names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack

from .contents import OutputContents, part_name
from .options.stages import stages_of
from .record import JobRecord
from .store import JobStore

if TYPE_CHECKING:
    import pyarrow as pa

_PREFIX = "lorabatch."
_COUNTED = ("completion", "error", "mode", "prompt_tokens", "completion_tokens", "finish_reason")
#: Keys of `counted_columns` for the two columns that are the input's.
ROW_ID, ROW_ADAPTER = "row id", "row adapter"
_NUMBERS = ("num_completions", "num_reused", "num_errors", "num_curable")
#: The clause of a part that belongs to no shard.
OF_NO_SHARD = "belongs to no shard of the job"
_HASH_SHOWN = 12
_PARTS_SHOWN = 5
_READS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class PartMark:
    """A part's record of how it was made, kept in the metadata of its file. A missing value is "" or 0."""

    #: Job that wrote the part.
    job_id: str = ""
    #: Run of the job that wrote the part.
    run_id: str = ""
    #: Number of the part's shard.
    shard_id: str = ""
    #: Hash of all that its answers depend on; see `contents_of`.
    contents: str = ""
    #: Content hash of the base model.
    model_sha256: str = ""
    #: Content hash of the base model without its weights.
    tokenizer_sha256: str = ""
    #: Hash of the answers; see `answers_hash`.
    answers: str = ""
    #: Counts of the requests of a part with stages, packed (`dataset.staged_writer`); "" for other parts.
    requests: str = ""
    #: Completions in the part; a row of the file may have several.
    num_completions: int = 0
    #: Completions that runs before `run_id` computed.
    num_reused: int = 0
    #: Rows that are errors; counted in parts with stages.
    num_errors: int = 0
    #: Completions that are errors which another run may not have; see `engine.errors.RUN_AGAIN`.
    num_curable: int = 0

    @classmethod
    def of(cls, schema: pa.Schema) -> PartMark:
        """The mark of a part with this schema."""
        found = schema.metadata or {}  # others' values may be anything
        given = {name: found.get(f"{_PREFIX}{name}".encode(), b"").decode() for name in cls.__dataclass_fields__}
        return cls(**given | {name: int(given[name] or 0) for name in _NUMBERS})

    def metadata(self) -> dict[bytes, str]:
        """The mark as metadata of a part's schema; keys begin with `lorabatch.`."""
        return {f"{_PREFIX}{name}".encode(): str(getattr(self, name)) for name in self.__dataclass_fields__}

    def reused_by(self, run_id: str) -> int:
        """Completions that runs before `run_id` had done: all of them, when another run wrote the part."""
        return self.num_reused if self.run_id == run_id else self.num_completions

    def problem(self, shard_id: int, record: JobRecord, contents: str) -> str:
        """Why the part is not what this shard would be today, as a clause; "" when it is.

        `contents`: hash of the shard; see `contents_of`.
        """
        if self.job_id != record.job_id:
            return f"was written by {self.job_id or 'no job of this version'}, not by {record.job_id}"
        if self.shard_id != str(shard_id):
            return f"holds the rows of shard {self.shard_id}" if self.shard_id else "does not say whose rows it holds"
        if self.model_sha256 != record.model.sha256:
            before, now = self.model_sha256[:_HASH_SHOWN], record.model.sha256[:_HASH_SHOWN]
            return f"was made with base model {before}, not with {now}"
        return "" if self.contents == contents else "was made of other rows or with other adapters"


def contents_of(record: JobRecord, rows: Iterable[tuple[bytes, str | None, bool]]) -> str:
    """Hash of the base model and a shard's rows.

    `rows`: for each row its fingerprint (id, tokens, sampling), the content hash of its adapter (None: base model), and
    whether no engine can answer it.
    """
    digest = hashlib.blake2b(record.model.sha256.encode(), digest_size=16)
    for fingerprint, adapter, is_error in rows:
        digest.update(fingerprint + (adapter or "").encode() + bytes([is_error]))
    return digest.hexdigest()


def counted_columns(record: JobRecord) -> dict[str, str]:
    """Columns of a part that are counted and compared: role -> name in the output."""
    from .input.columns import (  # reads pyarrow, which `status` does without
        DEFAULT_ID_COLUMN,
        RIGHT_SCORE_FIELD,
        output_name,
    )

    if record.spec.stages is not None:
        stages = record.spec.output_columns or [stage.name for stage in stages_of(record.spec.stages)]
        names = {name: name for name in stages} | {name: output_name(record, name) for name in ("error", "attempts")}
        return names | {ROW_ID: record.input.roles.get("id", DEFAULT_ID_COLUMN)}
    scored = [RIGHT_SCORE_FIELD.name] if record.spec.expected is not None else []
    names = {name: output_name(record, name) for name in (*_COUNTED, *scored)}
    names[ROW_ID] = record.input.roles.get("id", DEFAULT_ID_COLUMN)
    adapter = record.input.roles.get("adapter")
    return names | ({ROW_ADAPTER: adapter} if adapter else {})


def answers_hash(values: Mapping[str, Sequence[Any]]) -> str:
    """Hash of the values of `counted_columns`."""
    packed = (msgpack.packb(values[name], default=str) for name in sorted(values))
    digest = hashlib.blake2b(digest_size=16)
    for column in packed:
        digest.update(column)
    return digest.hexdigest()


def missing_parts(store: JobStore, contents: OutputContents) -> dict[int, str]:
    """Parts of a finished job, and files of its wide output, that are gone, have changed their size, or are not the
    job's: number -> clause. Empty for jobs of earlier versions, which kept no list of their parts.
    """
    recorded = store.read_parts()
    if recorded is None:
        return {}
    found = _differing({shard_id: num_bytes for shard_id, (num_bytes, _) in recorded.items()}, contents.parts)
    if not store.is_wide:
        return found
    return _differing(store.read_files() or {0: 0}, contents.files) | found


def _differing(recorded: Mapping[int, int], there: Mapping[int, int]) -> dict[int, str]:
    """Number -> clause, of files that do not have the recorded bytes. Both arguments: number -> bytes."""
    found = {
        number: "is not there" if number not in there else f"has {there[number]} bytes, not {num_bytes}"
        for number, num_bytes in recorded.items()
        if there.get(number) != num_bytes
    }
    return found | dict.fromkeys(there.keys() - recorded.keys(), OF_NO_SHARD)


def changed_parts(store: JobStore, contents: OutputContents) -> dict[int, str]:
    """`missing_parts`, and parts whose metadata has changed since the job was done, and parts with errors that another
    run may not have: shard id -> clause.
    """
    found = missing_parts(store, contents)
    recorded = store.read_parts() or {}

    def problem(shard_id: int) -> str:
        mark = read_mark(store, shard_id)
        if isinstance(mark, str):
            return mark
        contents = recorded[shard_id][1]
        if contents and mark.contents != contents:
            return f"holds the rows of shard {mark.shard_id or '?'} of {mark.job_id or 'another program'}"
        return curable(mark)

    rest = sorted(recorded.keys() - found.keys())
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        return found | {i: clause for i, clause in zip(rest, pool.map(problem, rest), strict=True) if clause}


def curable(mark: PartMark) -> str:
    """A clause about error rows of a part that another run may answer; "" when there are none."""
    return f"has {mark.num_curable} error rows that may be right now" if mark.num_curable else ""


def read_mark(store: JobStore, shard_id: int) -> PartMark | str:
    """The mark of a part, or why it cannot be read, as a clause. Raises `MissingFileError` when it is gone."""
    with store.open_part(shard_id) as part:
        return mark_in(part)


def mark_in(part: BinaryIO) -> PartMark | str:
    """The mark in a part's file, or why it cannot be read, as a clause."""
    import pyarrow.parquet as pq

    try:
        return PartMark.of(pq.read_schema(part))
    except Exception as error:
        return damage_of(error)


def damage_of(error: Exception) -> str:
    """A clause for what reading a damaged Parquet file raised; any other error is raised again."""
    from pyarrow import ArrowException

    # Arrow's own OSError has no number; errors of file systems and stores have one, or a class of their own.
    is_damage = isinstance(error, ArrowException) or (type(error) is OSError and error.errno is None)
    if not is_damage and type(error) not in (ValueError, UnicodeDecodeError):
        raise error
    return f"cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})"


def in_words(parts: Mapping[int, str]) -> str:
    """The first few parts, each with its clause, and how many more there are."""
    shown = [f"{part_name(shard_id)} {clause}" for shard_id, clause in sorted(parts.items())[:_PARTS_SHOWN]]
    rest = f"; and {len(parts) - _PARTS_SHOWN} more" if len(parts) > _PARTS_SHOWN else ""
    return "; ".join(shown) + rest
