"""Copies every Parquet file of a folder as a job does, and compares types and values with other readers' of the file.

The folder is a checkout of the public repository `apache/parquet-testing`, or any folder with Parquet files:

    .venv/bin/python tests/suites/parquet.py FOLDER

Each file goes as it is into a folder `prompt=hi`, whose name is the prompt. A child process with limits of time and
memory takes it through the steps of a job without an engine: check, index, plan, shards, parts. Columns of the parts
are compared with what DuckDB and PyArrow read from the file. A file that is refused for columns by name is copied once
more without them. Files below `bad_data` go through the command, too. The exit code is 1 where a column differs, a
child process ends by itself or at a limit, or a refusal is not one sentence.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset  # slow to import: not in each child process
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from lorabatch.engine.request import Request
from lorabatch.jobs.errors import JobError
from lorabatch.jobs.opening.opened_job import make_record
from lorabatch.jobs.opening.validation import check_job
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.dataset.answers import RowAnswer
from lorabatch.pipeline.dataset.chunk import IndexJob
from lorabatch.pipeline.dataset.index import IndexTotals, index_chunk, list_chunks
from lorabatch.pipeline.dataset.reader import ShardRows, read_shard
from lorabatch.pipeline.dataset.writer import empty_part, part_bytes
from lorabatch.pipeline.planning.plan import plan_job
from lorabatch.pipeline.planning.settings import RunSettings

TIME_LIMIT_S = 120
MEMORY_LIMIT_BYTES = 6 << 30
#: The most that resident memory of a child may grow by: a row group may have 2 GiB.
MOST_BYTES = 3 << 30
MOST_CHARACTERS = 1200
#: Before the names of columns that a job adds.
PREFIX = "lb_"


@dataclass
class Outcome:
    """What became of one file."""

    verdict: str
    reason: str = ""
    dropped: Sequence[str] = ()
    differences: list[str] = field(default_factory=list)
    grown_bytes: int = 0


def write_model(folder: Path) -> Path:
    """A model folder without weights that knows one word."""
    folder.mkdir()
    words = Tokenizer(WordLevel({"<unk>": 0, "hi": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": 3,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copy_as_a_job(given: Path, model: Path, output: Path, **options: Any) -> list[Path]:
    """The parts of a job over an input, every row answered by one word. Raises `JobError`."""
    spec = JobSpec(
        model=str(model),
        input=str(given),
        output=str(output),
        load_format="dummy",
        max_tokens=1,
        max_errors="100%",
        output_prefix=PREFIX,
        **options,
    )
    checked = check_job(spec)
    record, store = make_record(checked), checked.store
    store.freeze(record)
    job = IndexJob.from_record(record, spec)
    indexed = IndexTotals.of(index_chunk(chunk, job, store) for chunk in list_chunks(record))
    if indexed.damages:
        raise JobError("\n".join(damage for damages in indexed.damages.values() for damage in damages))
    settings = RunSettings.of_machine("cpu-smollm2-135m", batch_rows=spec.batch_rows)
    plan = plan_job(store, record, indexed, num_replicas=1, settings=settings)
    if not plan.shards:
        assert store.commit_part(0, empty_part(record, "run"))
    for shard in plan.shards:
        rows = read_shard(store, record, shard.shard_id)
        assert store.commit_part(rows.shard_id, part_bytes(rows, _answers(rows), record))
    return sorted(output.glob("part-*.parquet"))


def _answers(rows: ShardRows) -> dict[str, RowAnswer]:
    fingerprints = rows.fingerprint_of()
    return {
        request.request_id: RowAnswer(
            fingerprint=fingerprints[request.request_id],
            adapter_sha256=None,
            completion="yes",
            finish_reason="stop",
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=1,
            mode="base",
            attempts=1,
        )
        for request in rows.requests
        if isinstance(request, Request)
    }


def differences(given: Path, parts: Sequence[Path], dropped: Sequence[str] = ()) -> list[str]:
    """What DuckDB and PyArrow read otherwise from the parts than from the file; rows in any order."""
    by_arrow, by_duckdb = _of_arrow(given, dropped), _of_duckdb([given], dropped)
    if isinstance(by_arrow, str) and isinstance(by_duckdb, str):
        return [f"copied, and neither DuckDB nor PyArrow reads it: {by_duckdb}; {by_arrow}"]
    found = []
    if not isinstance(by_duckdb, str):
        ours = _of_duckdb(parts, dropped, list(by_duckdb[0]))
        found += [f"DuckDB: {text}" for text in _compared(by_duckdb, ours)]
    if not isinstance(by_arrow, str):
        tables = [_of_arrow(part, dropped, list(by_arrow[0])) for part in parts]
        ours = next((t for t in tables if isinstance(t, str)), None) or (
            tables[0][0],
            [row for table in tables for row in table[1]],
        )
        found += [f"PyArrow: {text}" for text in _compared(by_arrow, ours)]
    return found


_Table = tuple[Mapping[str, str], list[tuple[str, ...]]]


def _compared(given: _Table, ours: _Table | str) -> list[str]:
    if isinstance(ours, str):
        return [f"does not read the parts: {ours}"]
    found = [f"{name}: {kind} became {ours[0].get(name)}" for name, kind in given[0].items() if ours[0][name] != kind]
    for i, name in enumerate(given[0]):
        before, after = Counter(row[i] for row in given[1]), Counter(row[i] for row in ours[1])
        if before != after:
            found.append(f"{name}: values {list(before - after)[:2]} became {list(after - before)[:2]}")
    return found or ([] if Counter(given[1]) == Counter(ours[1]) else ["rows: values of columns have changed places"])


def _of_duckdb(paths: Sequence[Path], dropped: Sequence[str], names: Sequence[str] | None = None) -> _Table | str:
    with duckdb.connect() as connection:
        connection.sql("SET TimeZone = 'UTC'")
        source = f"read_parquet({[str(path) for path in paths]}, hive_partitioning=false)"
        try:
            kinds = {row[0]: row[1] for row in connection.sql(f"DESCRIBE SELECT * FROM {source}").fetchall()}
            names = [name for name in kinds if name not in dropped] if names is None else names
            quoted = ['"{}"'.format(name.replace('"', '""')) for name in names]
            shown = ", ".join(f"{name}::VARCHAR" for name in quoted) or "1"
            rows = connection.sql(f"SELECT {shown} FROM {source}").fetchall()
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
    return {name: kinds[name] for name in names}, rows


def _of_arrow(path: Path, dropped: Sequence[str], names: Sequence[str] | None = None) -> _Table | str:
    try:
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us", page_checksum_verification=True) as file:
            table = file.read()
        names = [name for name in table.schema.names if name not in dropped] if names is None else names
        columns = [_shown(table.column(name)) for name in names]
        rows = list(zip(*columns, strict=True)) if columns else [()] * table.num_rows
        return {name: _plain(table.schema.field(name).type) for name in names}, rows
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def _shown(column: pa.ChunkedArray) -> list[str]:
    """A text for each value. Those of timestamps in nanoseconds have more digits than Python's."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        return [str(value) for value in column.cast(pa.int32() if pa.types.is_time32(kind) else pa.int64()).to_pylist()]
    return [repr(value) for value in column.to_pylist()]


def _plain(kind: pa.DataType) -> str:
    """A type by name, without what tells only Arrow how values lie in memory."""
    # names of elements are the writer's
    text = re.sub(r"list<\w+: ", "list<element: ", str(kind))
    text = re.sub(r"dictionary<values=(.*?), indices=\w+, ordered=\d>", r"\1", text)
    return re.sub(r"\b(string|binary|list)_view\b", r"\1", text)


def _child(given: Path, model: Path, scratch: Path, dropped: Sequence[str], answer: Connection) -> None:
    """One file's way through a job. Sends an `Outcome`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        parts = copy_as_a_job(given.parent.parent, model, scratch / "out", drop=tuple(dropped))
    except JobError as error:
        said = str(error)
        names = sorted({match[1] or match[2] for match in re.finditer(r"--drop (?:'(.*?)'|([\w.]*\w))", said)})
        outcome = Outcome("refused", said, [*dropped, *names] if names else ())
    except BaseException:
        outcome = Outcome("crash", traceback.format_exc()[-1500:])
    else:
        outcome = Outcome("same", dropped=dropped)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome.grown_bytes = max(after - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
    if outcome.verdict == "same":
        outcome.differences = differences(given, parts, dropped)
        outcome.verdict = "silently wrong" if outcome.differences else "same"
    answer.send(outcome)


def try_file(path: Path, model: Path, dropped: Sequence[str] = ()) -> Outcome:
    """What becomes of one file in a child process with limits."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "in" / "prompt=hi" / path.name
        given.parent.mkdir(parents=True)
        given.write_bytes(path.read_bytes())
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.Process(target=_child, args=(given, model, Path(folder), dropped, theirs))
        child.start()
        theirs.close()
        try:
            outcome = ours.recv() if ours.poll(TIME_LIMIT_S) else Outcome("hang", f"more than {TIME_LIMIT_S} s")
        except EOFError:
            child.join()
            outcome = Outcome("crash", f"the process ended with {child.exitcode}")
        child.kill()
        child.join()
    if outcome.verdict == "refused":
        sentence = _not_one_sentence(outcome.reason)
        outcome = Outcome("crash", sentence) if sentence else outcome
    if outcome.grown_bytes > MOST_BYTES:
        return Outcome("unbounded", f"{outcome.grown_bytes / 1e9:.1f} GB")
    return outcome


def _not_one_sentence(said: str) -> str:
    lines = said.strip().splitlines()
    is_odd = "Traceback" in said or not lines or any(len(line) > MOST_CHARACTERS for line in lines)
    return f"no plain refusal: {said[:300]}" if is_odd else ""


def by_command(path: Path, model: Path) -> str:
    """What is wrong with how the command refuses a file; "" where it is one sentence and exit code 2, or it plans."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        given = Path(folder) / "prompt=hi" / path.name
        given.parent.mkdir()
        given.write_bytes(path.read_bytes())
        command = ["plan", "--model", str(model), "--input", folder, "--output", f"{scratch}/out"]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "lorabatch", *command, "--load-format", "dummy", "--max-tokens", "1"],
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"more than {TIME_LIMIT_S} s"
    if ended.returncode == 0:
        return ""
    return _not_one_sentence(ended.stderr) or (f"exit code {ended.returncode}" if ended.returncode != 2 else "")


def reason_of(said: str) -> str:
    """A refusal without the names in it, to count by."""
    lines = said.splitlines()
    text = lines[1].removeprefix("  - ") if len(lines) > 1 and lines[0].endswith(":") else lines[0]
    text = re.sub(r"^input (column|file) ('[^']*'|\"[^\"]*\")(, row group \d+ \(rows [^)]*\))?: ", "", text)
    return re.sub(r"'[^']*'", "…", text)[:110]


def main(folder: Path) -> int:
    """Try all files below a folder and print what became of them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and ".parquet" in path.name)
    if not paths:
        raise SystemExit(f"{folder}: no Parquet files there")
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    is_wrong = False
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model")
        for path in paths:
            outcome = try_file(path, model)
            verdict = outcome.verdict
            if verdict == "refused":
                reasons[reason_of(outcome.reason)] += 1
            rest = outcome
            for _ in range(3):  # a file may be refused for one column after the other
                if rest.verdict != "refused" or not rest.dropped:
                    break
                rest = try_file(path, model, rest.dropped)
            if verdict == "refused" and outcome.dropped:
                verdict = {"same": "refused by column, rest same"}.get(rest.verdict, f"rest: {rest.verdict}")
            if path.parent.name == "bad_data" and (odd := by_command(path, model)):
                verdict, rest = "crash", Outcome("crash", odd)
            counts[path.parent.name, verdict] += 1
            bad = verdict not in ("same", "refused", "refused by column, rest same")
            is_wrong |= bad
            shown = "; ".join(rest.differences) or outcome.reason
            print(f"{verdict:30} {path.relative_to(folder)}  {'' if verdict == 'same' else shown[:600]}", flush=True)
    print("\nfolder, outcome, files")
    for (name, verdict), count in sorted(counts.items()):
        print(f"{name:20} {verdict:32} {count:4}")
    print("\nrefusals by reason")
    for reason, count in reasons.most_common():
        print(f"{count:4}  {reason}")
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
