"""An adapter that ships a tokenizer or a chat template has its rows prepared with them, and no other rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.engine.text.tokenizer import Tokenizer
from lorabatch.jobs.opening import make_record
from lorabatch.jobs.record import JobRecord
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.jobs.validation import check_job
from lorabatch.pipeline.dataset.chunk import IndexJob
from lorabatch.pipeline.dataset.index import index_chunk, list_chunks
from lorabatch.pipeline.dataset.schema import ADAPTER, ERROR, TOKENS, arrow_file

TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


@pytest.fixture
def folders(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> Path:
    """Two adapters; `own` may be given files of its own."""
    shutil.copytree(tiny_adapters["rank8"], tmp_path / "adapters" / "plain")
    shutil.copytree(tiny_adapters["rank1"], tmp_path / "adapters" / "own")
    return tmp_path / "adapters"


@pytest.fixture
def record(tiny_llama: Path, folders: Path, tmp_path: Path) -> Callable[[], tuple[JobSpec, JobRecord]]:
    """A job that asks both adapters and the base the same."""
    rows = [{"adapter": name, "messages": [{"role": "user", "content": "hi"}]} for name in ("own", "plain", None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    spec = JobSpec(
        model=str(tiny_llama),
        adapters=str(folders),
        input=str(tmp_path / "in.parquet"),
        output=str(tmp_path / "out"),
        max_tokens=4,
    )
    return lambda: (spec, make_record(check_job(spec)))


def tokens_by_adapter(spec: JobSpec, record: JobRecord) -> dict[str | None, list[int]]:
    store = JobStore(spec.output)
    for chunk in list_chunks(record):
        index_chunk(chunk, IndexJob.from_record(record, spec), store)
    with arrow_file(store.rows_source(0)) as reader:
        table = reader.read_all()
    return dict(zip(table.column(ADAPTER).to_pylist(), table.column(TOKENS).to_pylist(), strict=True))


def test_a_chat_template_of_its_own_renders_its_rows_only(
    tiny_llama: Path, folders: Path, record: Callable[[], tuple[JobSpec, JobRecord]]
) -> None:
    (folders / "own" / "chat_template.jinja").write_text(TEMPLATE)
    tokens = tokens_by_adapter(*record())
    base = Tokenizer.from_folder(tiny_llama)
    assert base.decode(tokens["own"]) == "[hi]"
    rendered = base.render([{"role": "user", "content": "hi"}])
    assert tokens["plain"] == tokens[None] == base.encode_batch([rendered], is_rendered=True)[0]


def test_the_job_s_template_takes_the_place_of_the_model_s_and_of_its_own(
    tiny_llama: Path, folders: Path, record: Callable[[], tuple[JobSpec, JobRecord]], tmp_path: Path
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


def test_its_identity_changes_with_its_template(folders: Path, record: Callable[[], tuple[JobSpec, JobRecord]]) -> None:
    _, before = record()
    (folders / "own" / "chat_template.jinja").write_text(TEMPLATE)
    _, after = record()
    by_name = [{a.name: a.sha256 for a in r.adapters} for r in (before, after)]
    assert by_name[0]["own"] != by_name[1]["own"]
    assert by_name[0]["plain"] == by_name[1]["plain"]


def test_a_tokenizer_that_numbers_special_tokens_otherwise_is_refused(
    tiny_llama: Path, folders: Path, record: Callable[[], tuple[JobSpec, JobRecord]]
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
    tiny_llama: Path, folders: Path, record: Callable[[], tuple[JobSpec, JobRecord]]
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
