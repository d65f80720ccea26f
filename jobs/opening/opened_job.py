"""Opens a job: checks and audits it, then freezes it in its output, or resumes the same job there.

All this happens before the first row is read.
"""

from __future__ import annotations

import logging
import platform
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...engine.model_config.classifier import problem_type_of
from ...engine.model_config.model import ModelConfig
from ...engine.text.answers.sampling_check import token_problems
from ...engine.text.chat.conversation import read_variables
from ...engine.text.tokenizers.template_probe import template_traits
from ...system.untrusted import NoProcessError
from ..contents import OutputContents
from ..errors import DamagedRecordError, JobFailedError, JobRequestError, MissingFileError, OutputConflictError
from ..input.columns import task_clashes
from ..input.wide import wide_clashes
from ..parts import PartMark, changed_parts, in_words, read_mark
from ..record import AdapterRecord, InputRecord, JobRecord, JobState, ModelRecord, changed_adapters, differences
from ..spec import JobSpec
from ..storage.local_copy import model_sha256
from ..storage.redaction import redacted_url
from ..store import JobStore
from ..updates import put_in_place
from .adapters import as_before, audit_all
from .generation_config import generation_defaults
from .sweeps import swept_adapters
from .validation import CheckedJob, check_job

logger = logging.getLogger(__name__)
# Seconds without a new state after which a job counts as not running. A running job rewrites its state about once a
# second; a coordinator that hangs is replaced after this time.
SILENCE_S = 20.0
_LOOK_INTERVAL_S = 0.5
#: Kind of error rows, in summaries, that an engine gave up.
ENGINE_ERROR = "engine"
_RECORDED_PACKAGES = ("lorabatch", "torch", "dask", "distributed", "pyarrow", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """A checked job that is frozen in its output and may run."""

    #: The job as asked, with absolute paths.
    spec: JobSpec
    #: Its output.
    store: JobStore
    #: The record of this run. With `changed_adapters`, it must replace the frozen one once no part in the output has
    #: answers of the old adapters any more.
    record: JobRecord
    #: The base model's folder on this machine.
    model_folder: Path
    #: Whether the job was frozen before and all its parts are there.
    is_finished: bool
    #: Names of adapters whose content differs from the frozen record; their rows must be computed again.
    changed_adapters: frozenset[str]


def open_job(spec: JobSpec) -> OpenedJob:
    """Freeze a new job, or resume the same one.

    Raises `JobRequestError` with all problems at once, and `OutputConflictError` when the output holds another
    job that has got as far as its plan. With `overwrite`, the output's job is removed first: after all other checks
    have passed, and only when it is not running.
    """
    checked = check_job(spec)
    with closing(checked.converter):
        return _opened(checked)


def _opened(checked: CheckedJob) -> OpenedJob:
    """Freeze a checked job, or resume the same one; see `open_job`."""
    spec, converter = checked.spec, checked.converter
    left = checked.store.latest() if checked.output.has_job else checked.store
    if left.update and left.is_finished():
        checked = replace(checked, output=put_in_place(left).contents())
    holder = _holder(checked.store) if checked.output.has_job else None
    record = make_record(checked)
    if checked.output.has_job and not spec.overwrite:
        record = _with_known_adapters(record, checked, left)
    if checked.output.is_empty or spec.overwrite or _makes_way(checked, record):
        if checked.output.has_records:
            check_silent(checked.store)
            check_silent(checked.store.latest())
            if not spec.overwrite and _holder(checked.store) != holder:
                return _resumed(checked, record, checked.store)  # another command was faster
            # Removes the leftovers of a job that was never frozen too: its plan would be taken for this job's.
            checked.store.overwrite(keep_input=bool(converter.key))
        record = record.model_copy(update={"input": converter.put_in_place(record.input)})
        if checked.store.freeze(record):
            converter.remove_others()
            return OpenedJob(checked.spec, checked.store, record, checked.model.folder, False, frozenset())
    return _updated(checked, record) if spec.update else _resumed(checked, record, checked.store)


def _with_known_adapters(record: JobRecord, checked: CheckedJob, store: JobStore) -> JobRecord:
    """The record, with adapters as the job in `store` knows them. Adapters whose files have other versions than at that
    time are read whole, since the same content may have been stored again.
    """
    try:
        before = store.read_record()
    except (MissingFileError, DamagedRecordError):
        return record
    spec, model = checked.spec, checked.model

    def read(name: str, url: str) -> AdapterRecord:
        adapters = {name: checked.adapters.get(name, url)}
        return audit_all(adapters, model.folder, model.config, spec.storage_options, spec.model, reads_all=True)[0]

    try:
        adapters = as_before(record.adapters, before, store, read)
    except NoProcessError as error:
        raise JobFailedError(str(error)) from None
    return record.model_copy(update={"adapters": adapters})


def _updated(checked: CheckedJob, record: JobRecord) -> OpenedJob:
    """An update of the job in the output: the one that was begun, if it is this one, else a new one. A job that is
    this one goes on, or is done.
    """
    left = checked.store.latest()
    frozen = left.read_record()
    if not differences(frozen, record) and (left.update or not _is_to_redo(left, frozen, record)):
        return _resumed(checked, record, left)
    check_silent(checked.store)
    check_silent(left)
    store = checked.store.next_update()
    contents = {each.sha256: left.content_of(each.sha256) or each.sha256 for each in record.adapters}
    known = tuple(each.model_copy(update={"sha256": contents[each.sha256]}) for each in record.adapters)
    record = updating(record.model_copy(update={"adapters": known}), [checked.store, *checked.store.updates()])
    record = record.model_copy(update={"input": checked.converter.put_in_place(record.input)})
    if not store.freeze(record):
        return _resumed(checked, record, store)  # another command was faster
    return OpenedJob(checked.spec, store, record, checked.model.folder, False, frozenset())


def updating(record: JobRecord, sources: Sequence[JobStore]) -> JobRecord:
    """The record of a job that keeps answers of earlier ones, the output's own job first. Its chat templates see the
    time that the first job's have seen: a date in prompts would make every row another one.
    """
    first = sources[0].read_record()
    time_zone = first.time_zone if first.local_time else ""
    names = tuple(source.update for source in sources)
    given = {"local_time": first.local_time or first.created_at, "time_zone": time_zone, "sources": names}
    return record.model_copy(update=given)


def _is_to_redo(store: JobStore, frozen: JobRecord, record: JobRecord) -> bool:
    """Whether the output's job is done, and some of its answers are not what they would be now: an adapter has changed,
    or an engine has given rows up, which may be right now.
    """
    if not store.is_finished():
        return False
    errors = (store.read_summary() or {}).get("errors", ())
    return bool(changed_adapters(frozen, record)) or any(kind["kind"] == ENGINE_ERROR for kind in errors)


def check_silent(store: JobStore, silence_s: float = SILENCE_S) -> None:
    """Raise `OutputConflictError` when the job in the output runs: its answers would mix with a new job's.

    A job whose state is not final may have been killed: its state is watched for `silence_s`.
    """
    first = _unfinished_state(store)
    if first is None:
        return
    quiet_at_s = time.monotonic() + min(silence_s, silence_s - (time.time() - first.updated_at_s))
    if time.monotonic() < quiet_at_s:
        logger.warning("the job in %s has not ended; looking whether it runs", redacted_url(store.url))
    while time.monotonic() < quiet_at_s:
        time.sleep(_LOOK_INTERVAL_S)
        state = _unfinished_state(store)
        if state is None:
            return
        if state.updated_at_s != first.updated_at_s:
            shown = redacted_url(store.url)
            raise OutputConflictError(
                f"output={shown!r}: the job there is running ({state.phase}, {state.rows_done} of {state.rows} rows). "
                f"Stop it first with `lorabatch cancel {shown}`, or choose another output."
            )


def _holder(store: JobStore) -> str | None:
    """Id of the job that is frozen in the output; None when there is none, or its record is damaged."""
    try:
        return store.read_record().job_id
    except (MissingFileError, DamagedRecordError):
        return None


def _last_state(store: JobStore) -> JobState | None:
    """The last state that the job in the output wrote; None when it wrote none, or its state is damaged."""
    try:
        return store.read_state()
    except DamagedRecordError:
        return None


def _unfinished_state(store: JobStore) -> JobState | None:
    """The last state that the job in the output wrote, unless the state is final."""
    state = _last_state(store)
    return None if state is None or state.is_final else state


def _makes_way(checked: CheckedJob, record: JobRecord) -> bool:
    """Whether the job in the output is another one that was refused before it had a plan: its rows were wrong, say, and
    have been corrected. Nothing is lost with it.
    """
    store = checked.store
    if not checked.output.has_job or checked.output.parts or store.has_plan():
        return False
    state = _last_state(store)
    return state is not None and state.is_final and bool(differences(store.read_record(), record))


def _resumed(checked: CheckedJob, record: JobRecord, store: JobStore) -> OpenedJob:
    """The job that is frozen in the output, if it is this one. `store`: that of the output, or of an update of it."""
    shown = redacted_url(checked.spec.output)
    frozen = store.read_record()
    reasons = differences(frozen, record)
    if reasons:
        raise OutputConflictError(
            f"output={shown!r}: holds another job, {frozen.job_id} of {frozen.created_at}: {'; '.join(reasons)}. "
            "Choose another output, keep what is unchanged with --update, or start over with --overwrite."
        )
    record = record.model_copy(update={"input": checked.converter.put_in_place(record.input)})
    changed = changed_adapters(frozen, record)
    is_finished = _is_still_finished(store, is_verified=checked.spec.verify)
    # The input files may have been copied or touched meanwhile. Rows that were prepared but not planned come from the
    # files as they were; for planned rows, each part records what it was made of.
    is_read_again = not store.has_plan() and _versions_of(frozen.input) != _versions_of(record.input)
    if is_read_again or (checked.spec.verify and not is_finished):
        check_silent(store)
        store.remove_index()
    resumed = frozen.model_copy(update={"adapters": record.adapters, "spec": record.spec, "input": record.input})
    return OpenedJob(checked.spec, store, resumed, checked.model.folder, is_finished, changed)


def _versions_of(given: InputRecord) -> list[tuple[str, float] | None]:
    return [(file.version.tag, file.version.modified_s) if file.version else None for file in given.files]


def _is_still_finished(store: JobStore, *, is_verified: bool) -> bool:
    """Whether the job was done and all its parts are unchanged since. If they are not, or if the job `is_verified`,
    `_SUCCESS` is removed: the run compares the parts with the plan and computes again what is missing.
    """
    contents = store.contents()
    if not contents.is_finished:
        return False
    try:
        reasons = in_words(changed_parts(store, contents))
        reasons = reasons or ("" if store.read_summary() is not None else "its summary.json is gone")
        reasons = reasons or ("its parts.json is gone" if _has_lost_its_list(store, contents) else "")
    except DamagedRecordError as error:
        reasons = str(error)  # written again at the end
    if not reasons and not is_verified:
        return True
    logger.warning("the job in %s was done and is compared again: %s", redacted_url(store.url), reasons or "--verify")
    store.unmark_success()
    return False


def _has_lost_its_list(store: JobStore, contents: OutputContents) -> bool:
    """Whether a finished job once had `parts.json` and it is gone. Earlier versions wrote neither the list nor marks in
    parts, so a mark in any part, or no part at all, means that the list is lost.
    """
    if store.read_parts() is not None:
        return False
    marks = (read_mark(store, shard_id) for shard_id in sorted(contents.parts))
    return not contents.parts or any(not isinstance(mark, PartMark) or bool(mark.contents) for mark in marks)


def make_record(checked: CheckedJob) -> JobRecord:
    """Makes the record to freeze: the spec without secrets, and content hashes of everything it names.

    Audits all adapters and reads all weights once, but not those of adapters whose store tells the versions of files
    (unless the job verifies): their workers do. Raises `JobRequestError` for tokens that no vocabulary has, and
    `JobFailedError` when the machine cannot start the processes in which adapters and templates are read.
    """
    spec, roles = checked.spec, checked.input.roles.keys()
    now = datetime.now(UTC)
    config = checked.model.config
    try:
        missing_header, template_drops = _template_traits(checked)
        options, reads_all = spec.storage_options, spec.verify
        adapters = audit_all(checked.adapters, checked.model.folder, config, options, spec.model, reads_all=reads_all)
    except NoProcessError as error:
        raise JobFailedError(str(error)) from None
    largest = max([config.vocab_size, *(adapter.vocab_size for adapter in adapters)])
    problems = token_problems(spec.sampling, largest)
    if problems:
        raise JobRequestError(*(f"{problem}. Correct it, or leave out what is named." for problem in problems))
    record = JobRecord(
        job_id=f"{spec.name or 'job'}-{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}",
        created_at=now.isoformat(timespec="seconds"),
        local_time=now.astimezone().isoformat(timespec="seconds"),
        time_zone=now.astimezone().tzname() or "",
        versions=_versions(),
        spec=spec.without_secrets(),
        storage_option_names=tuple(sorted(spec.storage_options)),
        model=ModelRecord(
            url=redacted_url(spec.model),
            sha256=model_sha256(
                checked.model.folder, with_weights=spec.load_format != "dummy", use_remembered=not spec.verify
            ),
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_context_tokens,
            generation=generation_defaults(checked.model.folder),
            tokenizer_sha256=model_sha256(checked.model.folder, with_weights=False),
            notes=checked.model.notes,
            missing_header=missing_header,
            template_drops=template_drops,
            pad_token_id=config.pad_token_id,
            **_head_of(config),
        ),
        adapters=adapters,
        input=checked.input,
        with_logprobs=spec.sampling.wants_logprobs
        or not roles.isdisjoint(("logprobs", "top_logprobs", "continuation")),
        swept=swept_adapters(spec, checked.adapters),
    )
    if problems := [*task_clashes(record), *(wide_clashes(record) if record.is_wide else [])]:
        raise JobRequestError(*problems)
    return record


def _head_of(config: ModelConfig) -> dict[str, Any]:
    """Fields of `ModelRecord` about the head of a base that classifies; none for one that generates text."""
    if not config.is_classifier:
        return {}
    problem_type = problem_type_of(config.problem_type, len(config.labels))
    return {"task": "classify", "labels": config.labels, "problem_type": problem_type}


def _template_traits(checked: CheckedJob) -> tuple[str, tuple[str, ...]]:
    """Traits of all prompts that the chat template makes of messages; empty ones for input without messages."""
    if not checked.spec.renders_messages(checked.input.roles):
        return "", ()
    given = checked.spec.chat_template_kwargs
    return template_traits(checked.model.tokenizer.chat_template, read_variables(given) if given else None)


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
