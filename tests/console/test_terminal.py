"""What strangers wrote is printed as text: a terminal neither obeys nor interprets it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from lorabatch.cli import app
from lorabatch.jobs.opening.opened_job import open_job
from lorabatch.jobs.spec import JobSpec


def test_keys_of_a_configuration_are_neither_markup_nor_escape_sequences(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_adapters["rank8"], tmp_path / "[red]bad\x1b[2J"))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"[/foo]": 1, "\x1b[2J\x1b]0;title\x07": 1}))
    typed = ["audit", str(folder), "--model", str(tiny_llama)]
    done = CliRunner().invoke(app, typed, env={"COLUMNS": "1000"})
    assert "Traceback" not in done.output
    assert "[/foo]=1" in done.output
    assert r"\x1b[2J\x1b]0;title\x07=1" in done.output
    assert r"[red]bad\x1b[2J" in done.output
    assert "\x1b" not in done.output


def test_messages_of_errors_are_printed_as_text(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["status", str(tmp_path / "[/foo]\x1b[2J")])
    assert done.exit_code == 2
    assert r"[/foo]\x1b[2J" in done.output
    assert "\x1b" not in done.output


def test_lines_of_logs_and_names_of_outputs_are_printed_as_text(tiny_llama: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), rows)
    output = tmp_path / "out\x1b[2J"
    job = open_job(JobSpec(model=str(tiny_llama), input=str(rows), output=str(output), max_tokens=8))
    job.store.append_log("worker-0", "2026-11-23 04:00:00,000 - x - WARNING - \x1b]0;title\x07 of a tenant\n")
    for command in ("logs", "status"):
        done = CliRunner().invoke(app, [command, str(output)])
        assert done.exit_code in (0, 1, 3), done.output
        assert "\x1b" not in done.output
        assert "\x07" not in done.output
    assert r"\x1b]0;title\x07 of a tenant" in CliRunner().invoke(app, ["logs", str(output)]).output
