"""Puts updates in place: jobs that keep answers of the one in OUTPUT, and take its place once all of theirs are there.

    OUTPUT/_lorabatch/update-001/part-00000.parquet …   parts of an update, as those of any job
    OUTPUT/_lorabatch/update-001/_lorabatch/            its records

The answers in OUTPUT stay whole until `_SUCCESS` of the update is written. No store replaces a set of files at once, so
`_SUCCESS` of OUTPUT is away while the parts are exchanged, and a process that is killed then leaves all that the next
command needs to go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from .contents import OURS, part_name
from .errors import DamagedRecordError, MissingFileError
from .record import JobRecord
from .store import JobStore

#: Identity fields of the engines' arithmetic: with another value in one of them, every answer may be another one. The
#: other identity fields change answers by way of a row's fingerprint, or say where rows and answers are.
ARITHMETIC_FIELDS = ("mode", "dtype", "load_format", "base_quantization", "policy")
# Records of an update that do not get a place in OUTPUT, at least not as they are.
_LEFT = ("job.json", "parts.json", "wide.json", "state.json", "CANCEL", "rows", "wip", "tmp")
_INPUT = f"{OURS}/input"
_MOVES_AT_ONCE = 16


def arithmetic_differences(old: JobRecord, new: JobRecord) -> tuple[str, ...]:
    """Why no answer of `old` can be one of `new`, whatever its row: a clause for each reason."""
    pairs = [(name, getattr(old.spec, name), getattr(new.spec, name)) for name in ARITHMETIC_FIELDS]
    clauses = [f"{name} was {before!r}, now {now!r}" for name, before, now in pairs if before != now]
    return (*clauses, *(["the base model has another content"] if old.model.sha256 != new.model.sha256 else ()))


def computes_rows(update: JobRecord, sources: Iterable[JobRecord]) -> bool:
    """Whether an update computes a row for certain, by records alone: its input has more rows than those of the earlier
    jobs, `sources`, whose answers can be kept.
    """
    kept = [old for old in sources if not arithmetic_differences(old, update)]
    return update.input.num_rows > sum(old.input.num_rows for old in kept)


def put_in_place(update: JobStore) -> JobStore:
    """Put a finished update into OUTPUT in place of the job there, and remove all updates; returns OUTPUT's store.
    Nothing is done when it was done before; a store that is no update is returned.

    `_SUCCESS` of OUTPUT goes first and comes last. Each step can be repeated, by another process too: the update's
    `job.json` goes when all else is in place. Raises `OutputConflictError` when OUTPUT is another job's by now.
    """
    output = update.source("")
    try:
        if not update.update:
            return update
        record, parts = update.read_record(), update.read_parts() or {}
        sizes = update.read_files() if record.is_wide else {}
    except MissingFileError:
        return output
    output.unmark_success()
    if not _is_held(output, record):
        update.check_holder(record.job_id)
        kept = ("job.json", "input", *output.update_names())
        output.remove_records({f"{OURS}/{name}" for name in kept})
        output.replace_record(record.model_copy(update={"sources": ()}))
    update.check_holder(record.job_id)
    _move(update, output, sizes or parts)
    update.check_holder(record.job_id)
    output.write_parts(parts)
    if record.is_wide:
        output.keep_files(sizes)
    output.mark_success()
    names = [f"{OURS}/{name}" for name in output.update_names()]
    output.location.remove(f"{name}/{OURS}/job.json" for name in names)
    output.location.remove([*names, *_unused_input(output, record)])
    return output


def _is_held(output: JobStore, record: JobRecord) -> bool:
    """Whether OUTPUT has become this job's before: its records are those of the update, or will be."""
    try:
        return output.read_record().job_id == record.job_id
    except (MissingFileError, DamagedRecordError):
        return False


def _move(update: JobStore, output: JobStore, files: Collection[int]) -> None:
    """Give the files and records of an update their places in OUTPUT. Files that are not the update's go. `files`:
    numbers of its Parquet files that readers read.
    """
    output.location.remove([part_name(number) for number in output.contents().files if number not in files])
    found = {name: size for name, size in update.location.list(OURS).items() if name not in _LEFT}
    records = [f"{OURS}/{name}" for name, size in found.items() if size is not None]
    for folder in (f"{OURS}/{name}" for name, size in found.items() if size is None):
        records += [f"{folder}/{name}" for name, size in update.location.list(folder).items() if size is not None]

    def move(name: str) -> None:
        try:
            output.location.put(f"{OURS}/{update.update}/{name}", name)
        except MissingFileError:
            if not output.location.exists(name):  # else it was moved before, or by another process
                raise

    with ThreadPoolExecutor(_MOVES_AT_ONCE) as pool:
        list(pool.map(move, [*map(part_name, files), *records]))


def _unused_input(output: JobStore, record: JobRecord) -> list[str]:
    """Folders of converted input that the job does not read."""
    used = {file.url.partition(f"/{_INPUT}/")[2].partition("/")[0] for file in record.input.files}
    found = output.location.list(_INPUT)
    return [f"{_INPUT}/{name}" for name in found if name not in used and not name.startswith(".")]
