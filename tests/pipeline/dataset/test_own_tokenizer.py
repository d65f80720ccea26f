"""An adapter that ships a tokenizer or a chat template has its rows prepared with them, and no other rows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.jobs.errors import JobRequestError, StorageError
from lorabatch.jobs.opening import confined_audit
from lorabatch.jobs.opening.opened_job import make_record
from lorabatch.jobs.opening.validation import check_job
from lorabatch.jobs.record import JobRecord
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.dataset.chunk import IndexJob
from lorabatch.pipeline.dataset.index import index_chunk, list_chunks
from lorabatch.pipeline.dataset.schema import ADAPTER, ERROR, TOKENS, arrow_file
from lorabatch.system.confinement import ConfinedProcess

TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


@pytest.fixture(scope="module", autouse=True)
def _kept_auditors() -> Iterator[None]:
    """All jobs of this module have their adapters audited by the same processes, which start once."""
    kept = [KeptProcess() for _ in range(min(confined_audit.MAX_PROCESSES, os.cpu_count() or 1))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confined_audit, "ConfinedProcess", cycle(kept).__next__)
        yield
    for process in kept:
        ConfinedProcess.close(process)


class KeptProcess(ConfinedProcess):
    """A process that outlives the audit of one job."""

    def close(self) -> None:
        """Nothing: the next job uses it."""


@pytest.fixture
def folders(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> Path:
    """Two adapters; `own` may be given files of its own."""
    shutil.copytree(tiny_adapters["rank8"], tmp_path / "adapters" / "plain")
    shutil.copytree(tiny_adapters["rank1"], tmp_path / "adapters" / "own")
    return tmp_path / "adapters"


@pytest.fixture
def record(tiny_llama: Path, folders: Path, tmp_path: Path) -> Callable[..., tuple[JobSpec, JobRecord]]:
    """`record(**changes)`: a job that asks both adapters and the base the same."""
    rows = [{"adapter": name, "messages": [{"role": "user", "content": "hi"}]} for name in ("own", "plain", None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    given: dict[str, Any] = {
        "model": str(tiny_llama),
        "adapters": str(folders),
        "input": str(tmp_path / "in.parquet"),
        "output": str(tmp_path / "out"),
        "max_tokens": 4,
    }

    def make(**changes: Any) -> tuple[JobSpec, JobRecord]:
        spec = JobSpec(**given | changes)
        return spec, make_record(check_job(spec))

    return make


def tokens_by_adapter(spec: JobSpec, record: JobRecord) -> dict[str | None, list[int]]:
    store = JobStore(spec.output)
    for chunk in list_chunks(record):
        index_chunk(chunk, IndexJob.from_record(record, spec), store)
    with arrow_file(store.rows_source(0)) as reader:
        table = reader.read_all()
    return dict(zip(table.column(ADAPTER).to_pylist(), table.column(TOKENS).to_pylist(), strict=True))


def test_a_chat_template_of_its_own_renders_its_rows_only(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]]
) -> None:
    (folders / "own" / "chat_template.jinja").write_text(TEMPLATE)
    tokens = tokens_by_adapter(*record())
    base = Tokenizer.from_folder(tiny_llama)
    assert base.decode(tokens["own"]) == "[hi]"
    rendered = base.render([{"role": "user", "content": "hi"}])
    assert tokens["plain"] == tokens[None] == base.encode_batch([rendered], is_rendered=True)[0]


def test_the_job_s_template_takes_the_place_of_the_model_s_and_of_its_own(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]], tmp_path: Path
) -> None:
    (folders / "own" / "chat_template.jinja").write_text(TEMPLATE)
    spec, _ = record()
    (tmp_path / "job.jinja").write_text("({{ messages[0].content }})")
    checked = check_job(JobSpec(**spec.model_dump() | {"chat_template": str(tmp_path / "job.jinja")}))
    found = make_record(checked)
    (tmp_path / "job.jinja").unlink()
    tokens = tokens_by_adapter(checked.spec, found)
    base = Tokenizer.from_folder(tiny_llama)
    assert {name: base.decode(ids) for name, ids in tokens.items()} == dict.fromkeys(("own", "plain", None), "(hi)")
    # The text is recorded, so that the job goes on without the file.
    assert check_job(found.job_spec()).spec.chat_template == "({{ messages[0].content }})"


def test_its_identity_changes_with_its_template(
    folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]]
) -> None:
    _, before = record()
    (folders / "own" / "chat_template.jinja").write_text(TEMPLATE)
    _, after = record()
    by_name = [{a.name: a.sha256 for a in r.adapters} for r in (before, after)]
    assert by_name[0]["own"] != by_name[1]["own"]
    assert by_name[0]["plain"] == by_name[1]["plain"]


def test_a_tokenizer_that_numbers_special_tokens_otherwise_is_refused(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]]
) -> None:
    tokenizer = json.loads((tiny_llama / "tokenizer.json").read_text())
    start, end = tokenizer["added_tokens"][1], tokenizer["added_tokens"][2]
    start["content"], end["content"] = end["content"], start["content"]
    vocab = tokenizer["model"]["vocab"]
    vocab[start["content"]], vocab[end["content"]] = start["id"], end["id"]
    (folders / "own" / "tokenizer.json").write_text(json.dumps(tokenizer))
    _, found = record()
    refused = {a.name: a.reasons for a in found.adapters if a.is_refused}
    assert list(refused) == ["own"]
    assert "<|im_end|>" in refused["own"][0]


def test_a_template_that_takes_too_much_costs_the_rows_of_its_adapter_only(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]]
) -> None:
    (folders / "own" / "chat_template.jinja").write_text("{{ 'a' * 10**10 }}")
    spec, found = record()
    assert not any(adapter.is_refused for adapter in found.adapters)
    tokens = tokens_by_adapter(spec, found)
    with arrow_file(JobStore(spec.output).rows_source(0)) as reader:
        table = reader.read_all()
    errors = dict(zip(table.column(ADAPTER).to_pylist(), table.column(ERROR).to_pylist(), strict=True))
    assert errors == {
        "own": "messages: the chat template fails on them: it needs more than 1 GiB of memory.",
        "plain": None,
        None: None,
    }
    base = Tokenizer.from_folder(tiny_llama)
    rendered = base.render([{"role": "user", "content": "hi"}])
    assert tokens["plain"] == tokens[None] == base.encode_batch([rendered], is_rendered=True)[0]


def own_tokenizer(tiny_llama: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Give an adapter's folder the base's tokenizer with a change."""
    raw = json.loads((tiny_llama / "tokenizer.json").read_text())
    change(raw)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    shutil.copy(tiny_llama / "tokenizer_config.json", folder)


def errors_by_adapter(spec: JobSpec, record: JobRecord) -> dict[str | None, list[str | None]]:
    store = JobStore(spec.output)
    for chunk in list_chunks(record):
        index_chunk(chunk, IndexJob.from_record(record, spec), store)
    found: dict[str | None, list[str | None]] = {}
    with arrow_file(store.rows_source(0)) as reader:
        table = reader.read_all()
    for name, error in zip(table.column(ADAPTER).to_pylist(), table.column(ERROR).to_pylist(), strict=True):
        found.setdefault(name, []).append(error)
    return found


def with_model(**model: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        vocab = {text: number for text, number in raw["model"]["vocab"].items() if number < 50}
        raw["model"] = {"vocab": vocab} | model

    return change


def as_unigram(raw: dict[str, Any]) -> None:
    pieces = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)[:60]
    raw["model"] = {"type": "Unigram", "vocab": [[text, -1.0] for text in pieces], "unk_id": None}


RAISING = {
    "WordLevel": with_model(type="WordLevel", unk_token="<unk>"),
    "WordPiece": with_model(
        type="WordPiece", unk_token="[UNK]", continuing_subword_prefix="##", max_input_chars_per_word=100
    ),
    "Unigram": as_unigram,
}


def test_a_tokenizer_without_a_token_for_a_text_costs_that_row_alone(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]], tmp_path: Path
) -> None:
    for kind, change in RAISING.items():
        shutil.copytree(folders / "plain", folders / kind)
        own_tokenizer(tiny_llama, folders / kind, change)
    rows = [{"adapter": name, "prompt": text} for text in ("é zzz", "!") for name in (*RAISING, None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    spec, found = record()
    assert not any(adapter.is_refused for adapter in found.adapters)
    errors = errors_by_adapter(spec, found)
    assert errors.pop(None) == [None, None]
    for kind, (first, second) in errors.items():
        assert first is not None, kind
        assert "the tokenizer makes no tokens of it" in first
        assert second is None


@pytest.mark.long
def test_a_tokenizer_that_backtracks_costs_the_rows_that_it_takes_too_long_on(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]], tmp_path: Path
) -> None:
    slow = {"type": "Replace", "pattern": {"Regex": "(a|aa)+c"}, "content": "q"}
    own_tokenizer(tiny_llama, folders / "own", lambda raw: raw.update(normalizer=slow))
    rows = [{"adapter": "own", "prompt": text} for text in (("a" * 31 + "b") * 60, "fox")] + [{"prompt": "fox"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    errors = errors_by_adapter(*record())
    assert errors[None] == [None]
    assert errors["own"][0] is not None
    assert "the adapter's tokenizer fails on it: it takes more than" in errors["own"][0]
    assert errors["own"][1] is None


def test_a_tokenizer_replaced_since_the_audit_costs_its_own_rows(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]]
) -> None:
    own_tokenizer(tiny_llama, folders / "own", lambda raw: raw["model"].update(merges=[]))
    spec, found = record()
    own_tokenizer(tiny_llama, folders / "own", RAISING["WordLevel"])
    errors = errors_by_adapter(spec, found)
    assert errors[None] == errors["plain"] == [None]
    (error,) = errors["own"]
    assert error is not None
    assert "holds content" in error
    assert found.adapters[0].tokenizer_sha256[:12] in error


def test_its_own_tokenizer_gives_the_tokens_that_it_gives_unconfined(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]]
) -> None:
    own_tokenizer(tiny_llama, folders / "own", lambda raw: raw["model"].update(merges=[]))
    tokens = tokens_by_adapter(*record())
    own = Tokenizer.from_folder(folders / "own", base=tiny_llama)
    rendered = own.render([{"role": "user", "content": "hi"}])
    assert tokens["own"] == own.encode_batch([rendered], is_rendered=True)[0]
    assert len(tokens["own"]) > len(tokens["plain"])


def test_the_index_does_not_begin_with_another_tokenizer_than_the_job_s(
    tiny_llama: Path, folders: Path, record: Callable[..., tuple[JobSpec, JobRecord]], tmp_path: Path
) -> None:
    spec, found = record()
    shutil.copytree(tiny_llama, tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 1}')
    moved = JobSpec(**spec.model_dump() | {"model": str(tmp_path / "base")})
    with pytest.raises(
        StorageError, match=f"holds content .*, expected {found.model.tokenizer_sha256[:12]}: its files"
    ):
        tokens_by_adapter(moved, found)


NEW = 320
OPTIONS = {"allowed_token_ids": [NEW], "logit_bias": json.dumps({str(NEW): 5}), "stop_token_ids": [NEW, 3]}


def test_options_of_tokens_are_limited_by_the_vocabulary_of_the_row_s_adapter(
    record: Callable[..., tuple[JobSpec, JobRecord]], tmp_path: Path
) -> None:
    rows = [{"adapter": name, "prompt": "hi", option: OPTIONS[option]} for option in OPTIONS for name in ("own", None)]
    pq.write_table(pa.Table.from_pylist([dict.fromkeys(OPTIONS) | row for row in rows]), tmp_path / "in.parquet")
    spec, found = record(row_settings="all")
    adapters = tuple(a.model_copy(update={"vocab_size": NEW + 1}) if a.name == "own" else a for a in found.adapters)
    errors = errors_by_adapter(spec, found.model_copy(update={"adapters": adapters}))
    assert errors["own"] == [None] * 3
    for error in errors[None]:
        assert error is not None
        assert f"token {NEW} of the sampling options: expected tokens up to" in error


def test_a_job_s_own_options_of_tokens_are_limited_by_its_largest_adapter(
    record: Callable[..., tuple[JobSpec, JobRecord]],
) -> None:
    with pytest.raises(JobRequestError, match=f"token {NEW} of the sampling options"):
        record(stop_token_ids=(NEW,))  # no adapter of this job has it
