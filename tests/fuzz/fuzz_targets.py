"""What is fuzzed: for each kind of data the cases, the product's reader of it, and how that reader may refuse.

Messages between processes have a module of their own.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, astuple
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import fuzz_seeds as seeds
import pyarrow.parquet as pq
import yaml
from fuzz_case import Case, Target
from fuzz_messages import frame_cases, packed, peer_cases, read_frames, read_peers, small, unpaired
from fuzz_templates import templates
from fuzz_values import Raw, changed, damaged, dump, json_files, one_of_files, scalars, texts, values
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lorabatch.engine.config import read_model_config
from lorabatch.engine.errors import AdapterRefusedError, EngineError, ModelFilesError, TokenizerError
from lorabatch.engine.models.gguf.convert import convert_gguf
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.tensor_file import TensorReader, read_header
from lorabatch.engine.request import SamplingParams
from lorabatch.engine.text.chat.prompt_template import PromptTemplate, names_in
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.jobs.cost_profile import read_profile
from lorabatch.jobs.errors import JobError
from lorabatch.jobs.history import ModelHistory, read_history
from lorabatch.jobs.input.columns import find_roles
from lorabatch.jobs.input.conversion.converter import Converter
from lorabatch.jobs.input.files import pack_schema, read_footers, unified_schema
from lorabatch.jobs.openai_batch.importing import import_batch
from lorabatch.jobs.opening.confined_audit import Auditors
from lorabatch.jobs.opening.validation import requested_job
from lorabatch.jobs.report.page import write_report
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.job_status import read_status
from lorabatch.jobs.status.logs import log_lines
from lorabatch.jobs.storage.adapter_copy import adapter_folder
from lorabatch.jobs.storage.location import Location
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.dataset.answers import BegunRow, RowAnswer, decode_journal, encode_answers, encode_begun
from lorabatch.pipeline.dataset.chunk import ChunkRef, DamagedChunkError, IndexJob, RowGroupRef, read_chunk
from lorabatch.pipeline.dataset.chunk_rows import ChunkRows
from lorabatch.pipeline.dataset.prompt_reader import PromptReader
from lorabatch.pipeline.planning.plan import read_plan
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.estimates.lengths import AnswerLengths

# Adapter folders


def _adapter_cases() -> SearchStrategy[Case]:
    key = st.sampled_from(sorted(seeds.ADAPTER_CONFIG)) | st.sampled_from(
        ("megatron_config", "arrow_config", "auto_mapping")
    )
    patterns = st.lists(st.sampled_from(_PATTERN_PARTS), min_size=1, max_size=6).map("".join)
    replacements = values | patterns | st.dictionaries(patterns, scalars, max_size=3) | st.lists(patterns, max_size=3)
    known = st.dictionaries(key, replacements, min_size=1, max_size=3).map(
        lambda some: dump(seeds.ADAPTER_CONFIG | some).encode("utf-8", "surrogatepass")
    )
    strategies = {
        "adapter_config.json": known | json_files(seeds.ADAPTER_CONFIG, replacements),
        "adapter_model.safetensors": _safetensors_files(),
        "tokenizer.json": json_files(seeds.tokenizer_json()),
        "tokenizer_config.json": json_files(seeds.TOKENIZER_CONFIG),
        "adapter_model.safetensors.index.json": json_files({"weight_map": {"a": "adapter_model.safetensors"}}),
        "chat_template.jinja": templates,
    }
    return one_of_files(seeds.adapter_files(), strategies)


_PATTERN_PARTS = (
    "q_proj", "(", ")", "(?:", "(?=", "(?P<index>", "[a-z0-9_.]", "[", "]", "+", "*", "?", "{2,}", "{1,9999}", ".*",
    "|", "^", "$", "\\", "\\1", "\\d", ".", "layers", "!", "\ud800", "\x1b", "(?i)", "a" * 50, "([a-z0-9_.]+)+!",
)  # fmt: skip


def _safetensors_files() -> SearchStrategy[bytes]:
    header, data = seeds.adapter_header()
    shapes = st.lists(st.sampled_from((0, 1, 2, 16, 2**31, 2**63)) | scalars, max_size=10)
    entry = st.fixed_dictionaries(
        {"dtype": st.sampled_from(("F32", "BF16", "I64", "F8_E4M3", "F99")) | scalars, "shape": shapes | scalars,
         "data_offsets": st.lists(st.integers(-1, len(data) + 1) | scalars, max_size=3) | scalars}
    )  # fmt: skip
    whole = changed(header, values | entry).map(lambda value: seeds.safetensors_file(dump(value), data))
    seed = seeds.adapter_files()["adapter_model.safetensors"]
    return st.one_of(whole, whole, damaged(seed, head=1500))


def _read_adapter(folder: Path) -> Iterator[str]:
    audit = audit_adapter(folder, seeds.model_config(), "fuzzed")
    yield from (*audit.reasons, *audit.notes)
    yield json.dumps(audit.to_json()).encode().decode()
    whole = _auditors().audit("fuzzed", folder)
    yield from whole.reasons
    assert whole.verdict == "refused" or audit.verdict == whole.verdict


def _mlx_cases() -> SearchStrategy[Case]:
    header, data = seeds.mlx_header()
    weights = json_files(header).map(lambda text: len(text).to_bytes(8, "little") + text + data)
    strategies = {
        "adapter_config.json": json_files(seeds.MLX_CONFIG),
        "adapters.safetensors": weights | damaged(seeds.mlx_files()["adapters.safetensors"]),
    }
    return one_of_files(seeds.mlx_files(), strategies)


def _gguf_adapter_cases() -> SearchStrategy[Case]:
    return damaged(seeds.gguf_adapter(), head=600).map(lambda data: {"x.gguf": data})


def _pickle_cases() -> SearchStrategy[Case]:
    seed = seeds.pickled_weights()
    config = seeds.adapter_files()["adapter_config.json"]
    whole = damaged(seed) | damaged(seed, head=1200) | st.binary(max_size=300).map(lambda data: b"\x80\x02" + data)
    return whole.map(lambda data: {"adapter_config.json": config, "adapter_model.bin": data})


def _read_pickle(folder: Path) -> Iterator[str]:
    converted = adapter_folder(str(folder), {}, folder.parent / "cache")
    yield from audit_adapter(converted, seeds.model_config(), "fuzzed").reasons


@cache
def _auditors() -> Auditors:
    auditors = Auditors(seeds.model_folder(), seeds.model_config())
    atexit.register(auditors.__exit__)
    return auditors


# Model folders, tokenizers, chat templates


def _model_cases() -> SearchStrategy[Case]:
    strategies = {
        "config.json": st.sampled_from(seeds.configs()).flatmap(json_files),
        "generation_config.json": json_files({"eos_token_id": [257], "temperature": 0.7}),
        "tokenizer.json": json_files(seeds.tokenizer_json()),
        "tokenizer_config.json": json_files(seeds.TOKENIZER_CONFIG, values | templates.map(_text)),
        "special_tokens_map.json": json_files({"unk_token": "<unk>", "eos_token": {"content": "<s>"}}),
    }
    return one_of_files(seeds.model_files(), strategies)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _read_model(folder: Path) -> Iterator[str]:
    try:
        config = read_model_config(folder)
        yield f"{config!r}"
        config.parameter_shapes()
    except EngineError as error:
        yield str(error)
    tokenizer = Tokenizer.from_folder(folder)
    yield from tokenizer.conflicts(Tokenizer.from_folder(seeds.model_folder()))
    for tokens in tokenizer.encode_batch(["hello <|im_start|> é\u0301 \x00", ""], is_rendered=False):
        tokenizer.decode(tokens)
    if tokenizer.has_chat_template:
        try:
            tokenizer.render(MESSAGES)
        except TokenizerError as error:
            yield str(error)


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "x", "thinking": None, "tool_calls": [{"name": "f"}]},
]


def _read_template(folder: Path) -> Iterator[str]:
    (folder / "tokenizer.json").write_bytes(seeds.model_files()["tokenizer.json"])
    Tokenizer.from_folder(folder).render(MESSAGES)
    yield ""


def _read_prompt_template(folder: Path) -> Iterator[str]:
    source = (folder / "prompt.jinja").read_bytes().decode("utf-8", "replace")
    row = dict.fromkeys(names_in(source)[0], MESSAGES) | {"messages": MESSAGES, "text": "x", "null": None}
    (found,) = PromptTemplate([source]).render_all([row])
    # A prompt has the characters that the template writes; only what people are shown must be printable.
    yield repr(found[0]) if isinstance(found, list) else str(found)


# Weights


def _read_safetensors(folder: Path) -> Iterator[str]:
    entries = read_header(folder / "x.safetensors").tensors.values()
    with TensorReader(folder) as reader:
        for entry in entries:
            reader.read(entry)
            yield repr(entry.key)


def _gguf_cases() -> SearchStrategy[Case]:
    seed = seeds.gguf_file()

    # Types, counts and lengths of the metadata, wherever they stand: an array of 2**63 items, arrays in arrays.
    def redone(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = bytearray(seed)
        for place, width, number in edits:
            data[place : place + width] = number[:width]
        return bytes(data)

    numbers = st.sampled_from((0, 1, 4, 8, 9, 12, 13, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1))
    edits = st.tuples(st.integers(4, 1200), st.sampled_from((4, 8)), numbers.map(lambda n: n.to_bytes(8, "little")))
    nested = st.integers(1, 3000).map(_nested_gguf)
    whole = st.one_of(damaged(seed, head=1200), st.lists(edits, min_size=1, max_size=3).map(redone), nested)
    return whole.map(lambda data: {"x.gguf": data})


def _nested_gguf(depth: int) -> bytes:
    """A GGUF file whose one value is an array of an array of an array."""
    key = b"general.architecture"
    head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    nest = (9).to_bytes(4, "little") + b"".join([(9).to_bytes(4, "little") + (1).to_bytes(8, "little")] * depth)
    return head + len(key).to_bytes(8, "little") + key + nest


def _read_gguf(folder: Path) -> Iterator[str]:
    convert_gguf(folder / "x.gguf", folder / "converted")
    yield ""


# Input


def _parquet_cases() -> SearchStrategy[Case]:
    files = [
        seeds.parquet_file(table, **options)
        for table in (seeds.INPUT_TABLE, seeds.MESSAGES_TABLE)
        for options in ({}, {"compression": "zstd", "use_dictionary": False})
    ]
    # The footer is what points at everything else.
    whole = st.sampled_from(files).flatmap(lambda seed: damaged(seed) | _damaged_tail(seed))
    return whole.map(lambda data: {"in.parquet": data})


def _other_format_cases() -> SearchStrategy[Case]:
    files = seeds.other_formats()
    return st.sampled_from(sorted(files)).flatmap(lambda name: damaged(files[name]).map(lambda data: {name: data}))


def _read_other_format(folder: Path) -> Iterator[str]:
    (path,) = folder.iterdir()
    with closing(Converter(Location(str(folder / "out")), numbers=("n",))) as converter:
        footers, _ = read_footers([str(path)], {}, converter.convert)
        unified_schema(footers)
    yield from ()


def _damaged_tail(seed: bytes) -> SearchStrategy[bytes]:
    length = int.from_bytes(seed[-8:-4], "little") + 8
    footers = damaged(seed[-length:-8])
    return footers.map(lambda footer: seed[:-length] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def _read_parquet(folder: Path) -> Iterator[str]:
    footers, _ = read_footers([str(folder / "in.parquet")], {})
    schema = unified_schema(footers)
    roles, problems = find_roles(schema, {}, row_settings=["all"])
    yield from problems
    if problems:
        return
    job = IndexJob(
        str(seeds.model_folder()), SamplingParams(), roles, pack_schema(schema), 270, 128, "key", "2025-01-01T00:00:00"
    )
    file, first_row = footers[0].file, 0
    for number, num_rows in enumerate(file.row_group_rows):
        group = RowGroupRef(file.url, file.name, number, first_row, num_rows, file.footer_sha256, {})
        chunk = ChunkRef(number, (group,))
        first_row += num_rows
        try:
            reader, rows = PromptReader(job, lambda _: _tokenizer()), ChunkRows(number, job)
            for batch, places in read_chunk(chunk, job.schema_ipc, {}):
                rows.add(batch, places, reader.read(batch, places))
            if num_rows:
                order, offsets = rows.order()
                for prepared in rows.prepared_batches(order, offsets):
                    yield from (text for text in prepared.column("__lb_error").to_pylist() if text)
                rows.index(order, offsets)
        except DamagedChunkError as error:
            yield str(error)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(seeds.model_folder())


def _job_cases() -> SearchStrategy[Case]:
    text = seeds.JOB_FILE.format(folder="/nowhere")
    names = st.sampled_from([*JobSpec.model_fields, "column", "adapter"])
    options = st.dictionaries(names | texts, values.filter(_is_plain), max_size=4)
    structured = st.one_of(options, changed(yaml.safe_load(text), values)).map(
        lambda v: dump(v).encode("utf-8", "surrogatepass")
    )
    lines = st.lists(st.sampled_from([*text.splitlines(), *_YAML_LINES]), max_size=8).map(
        lambda some: "\n".join(some).encode()
    )
    return st.one_of(structured, lines, damaged(text.encode())).map(lambda data: {"job.yaml": data})


def _is_plain(value: Any) -> bool:
    return not isinstance(value, Raw)


_YAML_LINES = (
    "workers: 1e400", "workers: 0x7fffffffffffffffffff", "seed: 1:2:3", "name: 2020-13-45", "name: 2020-02-30",
    "? [a, b]", "? {a: b}\n: c", "max_tokens: !!python/object/apply:os.system [id]", "temperature: .nan",
    "&a model: *a", "stop: &s [*s]", "<<: {workers: 2}", "<<: 3", "adapters: {1: 2}", "columns: {null: 3}", "%YAML 9.9",
    "---", "...", "- x", "\ttab: 1", "model: !!binary x", "model: !!int a", "model: !!timestamp x",
    "stop: !!set {a, b}", 'output: "\\x1b[2J"', "top_p: 1_0", "max_errors: -1%", "max_errors: nan%",
    "storage_options: [[", "input: []", "? ", "model: !!float x",
)  # fmt: skip


def _read_job(folder: Path) -> Iterator[str]:
    spec = requested_job({}, folder / "job.yaml")
    yield repr(spec)
    spec.with_absolute_paths()


# Records


def _record_cases() -> SearchStrategy[Case]:
    found = seeds.records()
    lines = found["events.jsonl"]
    files = {name: seeds.as_json(value) for name, value in found.items() if name != "events.jsonl"}
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def journal(changed_lines: Any) -> bytes:
        some = changed_lines if isinstance(changed_lines, list) else [changed_lines]
        return "".join(dump(line) + "\n" for line in some).encode("utf-8", "surrogatepass")

    strategies = {name: json_files(found[name]) for name in files}
    strategies["events.jsonl"] = st.one_of(
        changed(lines).map(journal), changed(lines).map(journal), damaged(whole, head=9999)
    )
    strategies["logs/worker-10-0-0-1-4000.log"] = damaged(b"2025-01-01 00:00:00,123 - x tcp://10.0.0.1:4000\nmore\n")
    return one_of_files({**files, "events.jsonl": whole}, strategies)


def _read_records(folder: Path) -> Iterator[str]:
    output = folder / "out"
    (output / "_lorabatch").mkdir(parents=True)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        place = output / "_lorabatch" / file.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        file.rename(place)
    store = JobStore(str(output))
    for reader in (_record, _status, _plan, _logs, write_report):
        try:
            for text in reader(store) or ():
                yield text if reader is not write_report else ""
        except JobError as error:
            yield str(error)


def _record(store: JobStore) -> list[str]:
    return [repr(store.read_record().job_spec())]


def _status(store: JobStore) -> list[str]:
    status = read_status(store)
    return [status.headline, status.outcome, str(status.error), status.time_left, json.dumps(status.to_json())]


def _plan(store: JobStore) -> list[str]:
    read_plan(store)
    return []


def _logs(store: JobStore) -> list[str]:
    # lines are printed by `echo`, which writes control characters out
    list(log_lines(store))
    return []


def _journal_cases() -> SearchStrategy[Case]:
    rows = [
        RowAnswer(b"f" * 16, None, "text", "stop", 3, 2, "base", 1),
        RowAnswer(
            b"g" * 16, "a" * 64, None, "error", 3, 0, None, 2, error="why", token_ids=(1, 2), token_logprobs=(0.5, 1.0)
        ),
    ]
    whole = encode_answers(rows) + encode_begun([BegunRow(b"h" * 16, None, (1, 2), ())])
    history = ModelHistory(CPU_SMOLLM2_135M, {(None, 5): AnswerLengths.of([(3, 40, False), (1, 64, True)])}).to_json()
    profile = {
        "format": 1, "model_sha256": "m", "machine": "x", "measured_at": "now", "device": "cpu", "dtype": "float32",
        "engine_threads": 1, "num_engines": 1, "batch_rows": 8, "quality": {}, "cost": CPU_SMOLLM2_135M.to_json(),
    }  # fmt: skip
    values_of_rows = [list(astuple(rows[0])), asdict(BegunRow(b"h" * 16, None, (1, 2), ()))]
    other = st.sampled_from(values_of_rows).flatmap(lambda row: changed(row, scalars.map(small))).map(unpaired)
    strategies = {
        "journal": damaged(whole) | other.map(packed).map(_journal_frame),
        "history.json": json_files(history),
        "profile.json": json_files(profile),
    }
    return one_of_files({}, strategies)


def _journal_frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + crc32(body).to_bytes(4, "little") + body


def _read_journals(folder: Path) -> Iterator[str]:
    if (folder / "journal").exists():
        list(decode_journal((folder / "journal").read_bytes()))
    read_history(folder / "history.json")
    if (folder / "profile.json").exists():
        try:
            read_profile(folder / "profile.json")
        except JobError as error:
            yield str(error)


# Batch files


def _batch_cases() -> SearchStrategy[Case]:
    body = {
        "model": "rank8", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "max_completion_tokens": 4, "temperature": 0, "stop": ["x"], "logprobs": True, "seed": 7, "n": 1, "user": "me",
    }  # fmt: skip
    chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    completion = {**chat, "url": "/v1/completions", "body": {"model": "base", "prompt": [[1, 2]], "stop": "x"}}
    other = st.sampled_from((chat, completion)).flatmap(json_files)
    whole = st.sampled_from([dump(chat | {"custom_id": name}).encode() for name in "ab"])
    ends = st.sampled_from((b"\n", b"\r\n", b"\n\n", b"\n\xef\xbb\xbf", b""))
    return st.lists(st.tuples(whole | other, ends), max_size=6).map(
        lambda lines: {"batch.jsonl": b"".join(line + end for line, end in lines)}
    )


def _read_batch(folder: Path) -> Iterator[str]:
    target = folder / "rows.parquet"
    yield import_batch([str(folder / "batch.jsonl")], str(target), ["base"], {}).to_text()
    rows = pq.read_table(target)
    ids = rows.column("id").to_pylist()
    assert len(ids) == len(set(ids))
    assert not find_roles(rows.schema, {}, row_settings=["all"])[1]
    if "openai_error" in rows.column_names:
        yield from (text for text in rows.column("openai_error").to_pylist() if text)


def _single(name: str, strategy: SearchStrategy[bytes]) -> SearchStrategy[Case]:
    return strategy.map(lambda data: {name: data})


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("adapter folders", _adapter_cases, _read_adapter, ()),
        Target("adapters of mlx-lm", _mlx_cases, _read_adapter, (), 300),
        Target("adapters in gguf", _gguf_adapter_cases, _read_adapter, (), 300),
        Target("pickled adapters", _pickle_cases, _read_pickle, (AdapterRefusedError,), 300),
        Target("model folders", _model_cases, _read_model, (ModelFilesError,)),
        Target("chat templates", lambda: _single("chat_template.jinja", templates), _read_template, (EngineError,)),
        Target(
            "prompt templates", lambda: _single("prompt.jinja", templates), _read_prompt_template, (EngineError,), 100
        ),
        Target(
            "safetensors",
            lambda: _single("x.safetensors", _safetensors_files()),
            _read_safetensors,
            (EngineError,),
            300,
        ),
        Target("gguf", _gguf_cases, _read_gguf, (EngineError,)),
        Target("parquet", _parquet_cases, _read_parquet, (JobError,)),
        Target("other formats", _other_format_cases, _read_other_format, (JobError,)),
        Target("job files", _job_cases, _read_job, (JobError,), 200),
        Target("engine frames", frame_cases, read_frames, (), 300),
        Target("peer messages", peer_cases, read_peers, (), 200),
        Target("records", _record_cases, _read_records, ()),
        Target("journals", _journal_cases, _read_journals, (), 300),
        Target("batch files", _batch_cases, _read_batch, (JobError,), 300),
    )
}
