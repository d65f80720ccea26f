"""`JobStore`: the layout of OUTPUT and OUTPUT/_lorabatch; no other file knows it.

The store reads and writes whole files and journals; the content of Arrow and Parquet files belongs to the pipeline. A
part file's presence means that its shard is committed. `_SUCCESS` is written last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from ..system.untrusted import MALFORMED, parse_json
from .agreement import Agreement
from .contents import OURS, SUCCESS, OutputContents, part_name
from .errors import DamagedRecordError, MissingFileError, OutputConflictError, StorageError, naming_damage
from .record import JobRecord, JobState, changed_adapters, is_version_id
from .storage.location import Location
from .storage.redaction import redacted_url

_JOB = f"{OURS}/job.json"
_PLAN = f"{OURS}/plan.arrow"
_PLAN_FACTS = f"{OURS}/plan.json"
_STATE = f"{OURS}/state.json"
_EVENTS = f"{OURS}/events.jsonl"
_SUMMARY = f"{OURS}/summary.json"
_PARTS = f"{OURS}/parts.json"
# The files of a wide output, and the folder of the parts that they are made of.
_WIDE = f"{OURS}/wide.json"
_PARTS_OF_WIDE = f"{OURS}/parts"
_AGREEMENT = f"{OURS}/agreement.json"
_CANARY = f"{OURS}/canary.json"
_ADAPTERS = f"{OURS}/adapters"
#: Folder in which `compare` answers some rows again.
COMPARISON = f"{OURS}/compare"
_INPUT = "input"
# Folders of records that only a running job needs.
_OF_A_RUN = ("rows", "wip", "tmp")
_UPDATE_NAME = re.compile(r"update-(\d+)")
_CANCEL = f"{OURS}/CANCEL"
# Bytes that a remote store sends beyond each read of an Arrow file, of which a reader needs a few record batches.
_ARROW_BLOCK_BYTES = 1 << 20
_WIP_NAME = re.compile(r"(?P<attempt>[A-Za-z0-9_-]+)\.wip(\..+)?")
_LOG_NAME = re.compile(r"(?P<source>[A-Za-z0-9_-]+)\.log(\..+)?")


# Types of the fields by which readers of events sort, count or look up.
_NUMBER = (int, float)
_EVENT_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "kind": str, "time_s": _NUMBER, "at_s": _NUMBER, "replica_id": str, "from_replica_id": str, "to_replica_id": str,
    "adapter": str, "reason": str, "run_id": str, "coordinator": str, "shard_id": int, "attempt": int,
    "batch_rows": int, "num_rows": int, "running_rows": int, "open_rows": int, "tokens_per_s": _NUMBER,
}  # fmt: skip


def _event(line: bytes) -> dict[str, Any] | None:
    """The event in one line; None for a torn line, or a field of another type than ours."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return value if all(isinstance(value[name], kind) for name, kind in _EVENT_TYPES.items() if name in value) else None


#: Content hash of an adapter, and reasons against its values, one of them empty.
AdapterContent = tuple[str, tuple[str, ...]]


class JobStore:
    """One job's output. Small and picklable: it travels to every worker.

    Methods raise `StorageError` when storage refuses; reading what is not there raises `MissingFileError`
    unless the method says otherwise.
    """

    # The latest content of `job.json` and the record parsed from it, which is needed before and after every shard.
    _last_read: tuple[bytes, JobRecord] | None = None
    # Whether the job's output is wide; None before its record was seen.
    _is_wide: bool | None = None

    def __init__(self, output_url: str, storage_options: Mapping[str, Any] | None = None, *, update: str = "") -> None:
        #: Name of the folder of an update, a job whose answers will replace those in OUTPUT; "" for OUTPUT's own job.
        self.update = update
        url = f"{output_url.rstrip('/')}/{OURS}/{update}" if update else output_url
        self.location = Location(url, storage_options, scratch=f"{OURS}/tmp")

    @cached_property
    def _contents(self) -> dict[str, AdapterContent]:
        """Contents of adapters that this process knows; they do not change."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "update": self.update, "_is_wide": self._is_wide}

    def __repr__(self) -> str:
        return f"JobStore({redacted_url(self.location.url)!r})"

    @property
    def url(self) -> str:
        """OUTPUT, as given; for an update the output that it is for."""
        return self.location.url.removesuffix(f"/{OURS}/{self.update}") if self.update else self.location.url

    def source(self, update: str) -> JobStore:
        """The store of an update of OUTPUT, which need not be there; with "" of OUTPUT's own job."""
        return JobStore(self.url, self.location.storage_options, update=update)

    def updates(self) -> list[JobStore]:
        """The updates of OUTPUT that are at work or were left, oldest first; empty for the store of an update."""
        found = (self.source(name) for name in self.update_names())
        return [store for store in found if store.location.exists(_JOB)]

    def next_update(self) -> JobStore:
        """The store of an update that is not there yet."""
        number = max((int(name.partition("-")[2]) for name in self.update_names()), default=0)
        return self.source(f"update-{number + 1:03d}")

    def latest(self) -> JobStore:
        """The store of the latest update that is there, else this one."""
        return (self.updates() or [self])[-1]

    def settled(self) -> JobStore:
        """The store that has the job: this one, or OUTPUT's once the update was put in place."""
        return self if not self.update or self.location.exists(_JOB) else self.source("")

    def update_names(self) -> list[str]:
        """Folders of updates, oldest first, also of those that were never frozen, or not removed whole."""
        names = () if self.update else self.location.list(OURS)
        return sorted((name for name in names if _UPDATE_NAME.fullmatch(name)), key=lambda name: int(name[7:]))

    def input_place(self) -> Location:
        """Folder of the input that was converted to Parquet; see `conversion/converter.py`."""
        return Location(f"{self.url}/{OURS}/{_INPUT}", self.location.storage_options)

    def contents(self) -> OutputContents:
        """Lists OUTPUT as it is now."""
        entries = self.location.list()
        has_job = OURS in entries and self.location.exists(_JOB)
        beside = self.location.list(_PARTS_OF_WIDE) if has_job and self.is_wide else None
        return OutputContents.of(entries, has_job=has_job, beside=beside)

    @property
    def is_wide(self) -> bool:
        """Whether the parts of the job are among its records, and OUTPUT has wide files that are made of them."""
        if self._is_wide is None:
            try:
                self.read_record()
            except (MissingFileError, DamagedRecordError):
                return False
        return bool(self._is_wide)

    def part_path(self, shard_id: int) -> str:
        """Name of a shard's part, from OUTPUT on."""
        return f"{_PARTS_OF_WIDE}/{part_name(shard_id)}" if self.is_wide else part_name(shard_id)

    def freeze(self, record: JobRecord) -> bool:
        """Claim OUTPUT for this job. False when a job is frozen there already."""
        is_ours = self.location.create(_JOB, record.to_json())
        self._is_wide = record.is_wide if is_ours else None
        return is_ours

    def read_record(self) -> JobRecord:
        """The frozen job. Raises `MissingFileError` when OUTPUT holds none."""
        data = self.location.read(_JOB)
        if self._last_read is None or self._last_read[0] != data:
            self._last_read = data, JobRecord.from_json(data)
        self._is_wide = self._last_read[1].is_wide
        return self._last_read[1]

    def check_holder(self, job_id: str) -> JobRecord:
        """The frozen job. Raises `OutputConflictError` when OUTPUT was started over and is not this job's any more."""
        try:
            record = self.read_record()
            holder = record.job_id
        except MissingFileError:
            holder = "none"
        if holder != job_id:
            raise OutputConflictError(
                f"output={redacted_url(self.url)!r}: job {job_id} was started over there (it holds {holder} now), so "
                "this run of it has stopped."
            )
        return record

    def check_current(self, record: JobRecord) -> None:
        """Raise `OutputConflictError` when OUTPUT is not this job's any more, or a newer run of it has other adapters
        than `record`.
        """
        found = self.check_holder(record.job_id)
        if found is not record and (changed := changed_adapters(found, record)):
            raise OutputConflictError(
                f"output={redacted_url(self.url)!r}: a newer run of this job goes on with other adapters "
                f"({', '.join(sorted(changed)[:5])}), so this one has stopped."
            )

    def replace_record(self, record: JobRecord) -> None:
        """Freeze the job again after its adapters have changed."""
        self.location.write(_JOB, record.to_json())
        self._is_wide = record.is_wide

    def learn_adapter(self, adapter_id: str, sha256: str, reasons: Sequence[str] = ()) -> AdapterContent:
        """Keep the content hash of an adapter that was opened by its headers, or the `reasons` against its values.
        Returns what holds: the first reader decides. A damaged record is written again.
        """
        name, own = f"{_ADAPTERS}/{adapter_id}.json", (sha256, tuple(reasons))
        found = json.dumps({"sha256": sha256, "reasons": list(reasons)}).encode()
        if self.location.create(name, found):
            self._contents[adapter_id] = own
        elif self.adapter_content(adapter_id) is None:
            self.location.write(name, found)
        return self.adapter_content(adapter_id) or own

    def adapter_content(self, adapter_id: str) -> AdapterContent | None:
        """The content that the first reader of an adapter opened by its headers has found; None before that, and for a
        damaged record: who needs the adapter reads it again.
        """
        if adapter_id not in self._contents:
            name = f"{_ADAPTERS}/{adapter_id}.json"
            try:
                with naming_damage(name):
                    found = parse_json(self.location.read(name))
                    self._contents[adapter_id] = str(found["sha256"]), tuple(map(str, found["reasons"]))
            except (MissingFileError, DamagedRecordError):
                return None
        return self._contents[adapter_id]

    def content_of(self, adapter_id: str | None) -> str | None:
        """Content hash of an adapter by its identity. None for the base model, and for an adapter whose values are
        refused or were not read yet.
        """
        if adapter_id is None or not is_version_id(adapter_id):
            return adapter_id
        found = self.adapter_content(adapter_id)
        return found[0] or None if found else None

    def mark_success(self) -> None:
        """Write `_SUCCESS`: every part is there. No part is written after this."""
        self.location.write(SUCCESS, b"")

    def is_finished(self) -> bool:
        """Whether `_SUCCESS` is there."""
        return self.location.exists(SUCCESS)

    def unmark_success(self) -> None:
        """Remove `_SUCCESS`: some parts are to be computed again."""
        self.location.remove([SUCCESS])

    def clean_up(self) -> None:
        """Remove what only a running job needs: prepared rows, unfinished work, temporary files."""
        self.location.remove([f"{OURS}/{name}" for name in _OF_A_RUN])

    def overwrite(self, *, keep_input: bool = False) -> None:
        """Remove the job in OUTPUT, parts and records; `job.json` goes last, so that a killed removal can be repeated.
        `keep_input`: converted input stays.

        Raises `OutputConflictError` when OUTPUT holds anything that is not ours.
        """
        contents = self.contents()
        self.check_ownership(contents)
        if contents.is_finished:
            self.location.remove([SUCCESS])
        self.location.remove([part_name(number) for number in contents.files])
        kept = f"{OURS}/{_INPUT}" if keep_input else ""
        self.remove_records({_JOB, kept})
        self.location.remove([_JOB] if keep_input else [_JOB, OURS])
        self._is_wide = None

    def remove_records(self, kept: Collection[str]) -> None:
        """Remove all records but those with a name in `kept`, from OUTPUT on."""
        records = [f"{OURS}/{name}" for name in self.location.list(OURS)]
        self.location.remove([name for name in records if name not in kept])

    def check_ownership(self, contents: OutputContents) -> None:
        """Raise `OutputConflictError` when OUTPUT holds files that no job of ours put there."""
        foreign = contents.foreign_names
        if foreign:
            shown = ", ".join(foreign[:5]) + (", …" if len(foreign) > 5 else "")
            raise OutputConflictError(
                f"output={redacted_url(self.url)!r}: holds {len(foreign)} files that are not this job's "
                f"({shown}). Choose an empty folder or move them away; --overwrite does not touch them."
            )

    def committed_parts(self) -> dict[int, int]:
        """Shard id -> bytes of every part that is there."""
        return self.contents().parts

    def commit_part(self, shard_id: int, data: bytes | memoryview) -> bool:
        """Put a shard's part in place, whole or not at all, and remove the shard's unfinished work.

        False when the part was there already, which is fine: both hold the same rows.
        """
        is_ours = self.location.create(self.part_path(shard_id), data)
        self.clear_wip(shard_id)
        return is_ours

    def is_committed(self, shard_id: int) -> bool:
        """Whether the shard's part is there."""
        return self.location.exists(self.part_path(shard_id))

    def open_part(self, shard_id: int) -> BinaryIO:
        """A committed part, for reading."""
        return self.location.open(self.part_path(shard_id))

    def open_file(self, number: int) -> BinaryIO:
        """A Parquet file in OUTPUT itself, for reading."""
        return self.location.open(part_name(number))

    def write_wide(self, number: int, data: bytes | memoryview) -> None:
        """Put one file of a wide output in place, whole, or replace it."""
        self.location.write(part_name(number), data)

    def keep_files(self, sizes: Mapping[int, int]) -> None:
        """Record the files of a wide output (number -> bytes) and remove all others. Without any, the output has none
        until they are written again.
        """
        self.location.remove([part_name(number) for number in self.contents().files if number not in sizes])
        self.location.write(_WIDE, json.dumps(sizes).encode())

    def read_files(self) -> dict[int, int]:
        """The files that `keep_files` recorded; none for an output that is not wide."""
        try:
            found = self._read_json(_WIDE)
        except MissingFileError:
            return {}
        with naming_damage("wide.json"):
            return {int(number): int(num_bytes) for number, num_bytes in found.items()}

    def write_parts(self, parts: Mapping[int, tuple[int, str]]) -> None:
        """Record the parts of a job that is done: shard id -> bytes of its part and hash of its contents."""
        self.location.write(_PARTS, json.dumps(parts).encode())

    def read_parts(self) -> dict[int, tuple[int, str]] | None:
        """The parts that `write_parts` recorded; None for a job of an earlier version or one that was never done."""
        try:
            found = self._read_json(_PARTS)
        except MissingFileError:
            return None
        with naming_damage("parts.json"):
            return {int(shard_id): (int(num_bytes), str(contents)) for shard_id, (num_bytes, contents) in found.items()}

    def remove_part(self, shard_id: int) -> None:
        """Uncommit a shard; its still valid rows must be in `wip` by now. `_SUCCESS` goes first."""
        self.location.remove([SUCCESS, self.part_path(shard_id)])

    def append_wip(self, shard_id: int, attempt: str, data: bytes) -> None:
        """Add encoded results to one attempt's journal. `attempt`: letters, digits, `_`, `-`; unique."""
        self.location.append(f"{self._wip(shard_id)}/{attempt}.wip", data)

    def read_wip(self, shard_id: int) -> dict[str, bytes]:
        """The journals of all attempts at a shard, by attempt; the end of each may be torn."""
        folder = self._wip(shard_id)
        found = (_WIP_NAME.fullmatch(name) for name in self.location.list(folder))
        attempts = sorted({match["attempt"] for match in found if match})
        return {attempt: self.location.read_journal(f"{folder}/{attempt}.wip") for attempt in attempts}

    def write_answers(self, shard_id: int, data: bytes | memoryview) -> None:
        """Keep the answers to all requests of a shard, from which a later run takes those that still hold."""
        self.location.write(self._answers(shard_id), data)

    def read_answers(self, shard_id: int) -> bytes:
        """The answers that `write_answers` kept; none for a shard without."""
        try:
            return self.location.read(self._answers(shard_id))
        except MissingFileError:
            return b""

    @staticmethod
    def _answers(shard_id: int) -> str:
        return f"{OURS}/answers/shard-{shard_id:05d}.msgpack.zst"

    def clear_wip(self, shard_id: int) -> None:
        """Forget the unfinished work of a shard."""
        self.location.remove([self._wip(shard_id)])

    @staticmethod
    def _wip(shard_id: int) -> str:
        return f"{OURS}/wip/{shard_id:05d}"

    def write_rows(self, chunk_id: int, data: bytes | memoryview) -> None:
        """Store the prepared rows of one chunk, an Arrow IPC file."""
        self.location.write(self._rows(chunk_id), data)

    def write_index(self, chunk_id: int, data: bytes | memoryview) -> None:
        """Store the numbers of one chunk, an Arrow IPC file, after its rows."""
        self.location.write(self._index(chunk_id), data)

    def write_plan(self, references: bytes | memoryview) -> bool:
        """Store the plan's row references, an Arrow IPC file. False when there is a plan already: shards are cut once
        for all runs of the job.
        """
        return self.location.create(_PLAN, references)

    def remove_index(self) -> None:
        """Forget all prepared rows and numbers: the input is read again."""
        self.location.remove([f"{OURS}/index", f"{OURS}/rows"])

    def has_index(self, chunk_id: int) -> bool:
        """Whether a chunk's numbers and its rows are both there."""
        return self.location.exists(self._index(chunk_id)) and self.location.exists(self._rows(chunk_id))

    def write_plan_facts(self, facts: Mapping[str, Any]) -> None:
        """Replace `plan.json`, the facts about shards, which may change while the shards stay."""
        self.location.write(_PLAN_FACTS, json.dumps(facts).encode())

    def has_plan(self) -> bool:
        """Whether the plan is there."""
        return self.location.exists(_PLAN)

    def has_plan_facts(self) -> bool:
        """Whether `plan.json` is there; it is written after the plan."""
        return self.location.exists(_PLAN_FACTS)

    def read_plan_facts(self) -> dict[str, Any]:
        """The content of `plan.json`."""
        return self._read_json(_PLAN_FACTS)

    def rows_source(self, chunk_id: int) -> Path | BinaryIO:
        """The prepared rows of a chunk: a path where it can be mapped into memory, else an open file."""
        return self._source(self._rows(chunk_id))

    def index_source(self, chunk_id: int) -> Path | BinaryIO:
        """The numbers of a chunk: a path where it can be mapped into memory, else an open file."""
        return self._source(self._index(chunk_id))

    def plan_source(self) -> Path | BinaryIO:
        """The plan's row references: a path where it can be mapped into memory, else an open file."""
        return self._source(_PLAN)

    @staticmethod
    def _rows(chunk_id: int) -> str:
        return f"{OURS}/rows/chunk-{chunk_id:05d}.arrow"

    @staticmethod
    def _index(chunk_id: int) -> str:
        return f"{OURS}/index/chunk-{chunk_id:05d}.arrow"

    def _source(self, name: str) -> Path | BinaryIO:
        if not self.location.is_local:
            return self.location.open(name, _ARROW_BLOCK_BYTES)
        path = self.location.local_path(name)
        if not path.exists():
            raise MissingFileError(f"cannot read {path}: not found. Start the job again with --overwrite.")
        return path

    def write_state(self, state: JobState) -> None:
        """Replace `state.json`."""
        self.location.write(_STATE, state.to_json())

    def write_last_state(self, state: JobState) -> None:
        """Replace `state.json` at the end of a run, also on a disk that has no room for another file."""
        try:
            self.write_state(state)
        except StorageError:
            if not self.location.overwrite(_STATE, state.to_json()):
                raise

    def read_state(self) -> JobState | None:
        """The latest state, or None when the job has not started."""
        return JobState.from_json(self.location.read(_STATE)) if self.location.exists(_STATE) else None

    def append_events(self, lines: bytes) -> None:
        """Add whole lines of JSON to the events."""
        self.location.append(_EVENTS, lines)

    def read_events(self) -> list[dict[str, Any]]:
        """Every event and command, in order. Torn lines are left out, at the end and where a writer was killed."""
        return self.read_new_events(0)[0]

    def read_new_events(self, num_bytes: int) -> tuple[list[dict[str, Any]], int]:
        """Events and commands after the first `num_bytes`, and how many bytes whole lines have by now."""
        data = self.location.read_journal(_EVENTS)[num_bytes:]
        whole = data[: data.rfind(b"\n") + 1]
        records = [record for line in whole.split(b"\n") if (record := _event(line)) is not None]
        return records, num_bytes + len(whole)

    def append_log(self, source: str, text: str) -> None:
        """Add lines to the log of `source` (letters, digits, `_`, `-`)."""
        self.settled().location.append(f"{OURS}/logs/{source}.log", text.encode())

    def read_logs(self) -> dict[str, str]:
        """Source -> its log."""
        folder = f"{OURS}/logs"
        found = (_LOG_NAME.fullmatch(name) for name in self.location.list(folder))
        sources = sorted({match["source"] for match in found if match})
        return {
            source: self.location.read_journal(f"{folder}/{source}.log").decode("utf-8", "replace")
            for source in sources
        }

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store the final account."""
        self.location.write(_SUMMARY, json.dumps(summary, indent=1).encode())

    def read_summary(self) -> dict[str, Any] | None:
        """The final account, or None when the job has not ended."""
        return self._read_json(_SUMMARY) if self.location.exists(_SUMMARY) else None

    def write_canary(self, facts: Mapping[str, Any]) -> None:
        """Store the account of the canary."""
        self.location.write(_CANARY, json.dumps(facts, indent=1).encode())

    def read_canary(self) -> dict[str, Any] | None:
        """The account of the canary, or None while it was not counted."""
        return self._read_json(_CANARY) if self.location.exists(_CANARY) else None

    def remove_canary(self) -> None:
        """Forget the account of the canary: rows of it are computed again."""
        self.location.remove([_CANARY])

    def write_agreement(self, agreement: Agreement) -> None:
        """Store the comparison of answers with answers in float32."""
        self.location.write(_AGREEMENT, json.dumps(agreement.to_json()).encode())

    def read_agreement(self) -> Agreement | None:
        """The comparison of answers with answers in float32; None when there is none, or its record is damaged."""
        try:
            return Agreement.from_json(parse_json(self.location.read(_AGREEMENT).decode()))
        except (MissingFileError, *MALFORMED):
            return None

    def request_cancel(self) -> None:
        """Ask the run of this job to stop."""
        self.location.write(_CANCEL, b"")

    def is_cancel_requested(self) -> bool:
        """Whether the job was asked to stop."""
        return self.location.exists(_CANCEL)

    def clear_cancel(self) -> None:
        """Forget the request, as `resume` does."""
        self.location.remove([_CANCEL])

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            value = parse_json(self.location.read(name))
        except ValueError as error:
            raise DamagedRecordError(f"{name}: cannot be read back ({error}).") from None
        if not isinstance(value, dict):
            raise DamagedRecordError(f"{name}: expected a JSON object, found {type(value).__name__}.")
        return value
