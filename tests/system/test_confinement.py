"""The process that reads untrusted data: what it computes, what ends it, and what is said when it cannot start."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lorabatch.engine.peft.patterns import PART
from lorabatch.system.confinement import ConfinedError, ConfinedProcess

PATTERNS = "engine.peft.patterns"
# How a chat template is asked to render: no tools, no variables, for a new answer.
AS_USUAL = [None, {}, True, False]
ENDLESS = [["([a-z]+)+!"], PART, ["a" * 60]]


@pytest.fixture
def process() -> Iterator[ConfinedProcess]:
    process = ConfinedProcess()
    yield process
    process.close()


def test_a_process_that_breaks_a_limit_is_replaced(process: ConfinedProcess) -> None:
    with pytest.raises(ConfinedError, match="it takes more than 1 s of computing"):
        process.run(PATTERNS, ENDLESS, 1)
    assert process.run(PATTERNS, [["a+"], PART, ["aa", "b"]], 1) == [["aa", 0, None]]


@pytest.mark.parametrize("name", ["json", "numbers", "jinja2"])
def test_files_in_the_working_directory_stand_for_no_modules(
    name: str, process: ConfinedProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users have files of such names, and strangers may put some where a user works."""
    (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    assert process.run(PATTERNS, [["a+"], PART, ["aa", "b"]], 1) == [["aa", 0, None]]
    asked = ["{{ messages | length }}", {}, None, [[[{"role": "user", "content": "a"}], 0]], [AS_USUAL], False]
    (answers, _) = process.run("engine.text.chat.chat_template", asked, 9)
    assert answers == [[False, "1"]]


@pytest.mark.long
def test_what_a_task_raises_is_said_on_one_line_and_the_process_goes_on(process: ConfinedProcess) -> None:
    with pytest.raises(ConfinedError, match=r"(PatternE|e)rror: unterminated character set") as raised:
        process.run(PATTERNS, [["*\x1b[2J"], PART, ["a"]], 1)
    assert str(raised.value).isprintable()
    with pytest.raises(ConfinedError, match="it needs more than 1 GiB of memory"):
        process.run(
            "engine.text.chat.chat_template", ["{{ 'a' * 2**31 }}", {}, None, [[[], 0]], [AS_USUAL], False], 5, 1 << 30
        )
    assert process.run(PATTERNS, [[], PART, []], 1) == []


def test_values_without_a_word_in_json_arrive_as_text_and_endless_nests_not_at_all(process: ConfinedProcess) -> None:
    task = ["{{ messages[0].at }}", {}, None, [[[{"at": datetime.date(2025, 1, 2)}], 0]], [AS_USUAL], False]
    assert process.run("engine.text.chat.chat_template", task, 5)[0] == [[False, "2025-01-02"]]
    nest: list[Any] = []
    for _ in range(100_000):
        nest = [nest]
    with pytest.raises(ConfinedError, match="it nests too deeply"):
        process.run("engine.text.chat.chat_template", ["", {}, None, nest, [AS_USUAL], False], 5)
    while nest:  # or its destruction would nest as deeply
        nest = nest.pop()


@pytest.mark.long
def test_what_a_task_has_left_in_memory_is_not_charged_to_the_next(process: ConfinedProcess, tmp_path: Path) -> None:
    rows = pa.table({"text": pa.array(["a" * 500_000] * 2000)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    task = [str(tmp_path / "rows.parquet"), 0, ["text"], 500_000_000]
    assert process.run("jobs.input.row_group", task, 60)["text"] > 500_000_000
    template = "{{ ('a' * 2**26) | length }}"
    answers, _ = process.run(
        "engine.text.chat.chat_template", [template, {}, None, [[[], 0]], [AS_USUAL], False], 5, 1 << 28
    )
    assert answers == [[False, str(2**26)]]


def test_the_limit_of_a_task_does_not_count_for_what_the_next_one_imports(
    process: ConfinedProcess, tmp_path: Path
) -> None:
    """torch takes hundreds of megabytes, for CUDA gigabytes, before the second task begins."""
    assert process.run(PATTERNS, [["a+"], PART, ["aa"]], 5, 32 << 20) == [["aa", 0, None]]
    torch.save({"a": torch.ones(2)}, tmp_path / "adapter.bin")
    question = {"source": str(tmp_path / "adapter.bin"), "target": str(tmp_path / "adapter.safetensors")}
    assert process.run("engine.peft.dialects.pickled", question, 60) is None


def test_limits_of_the_user_that_are_lower_hold() -> None:
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 31, 1 << 31)); r.setrlimit(r.RLIMIT_CPU, (60, 60));"
        "from lorabatch.system.confinement import confined;"
        f"print(confined().run({PATTERNS!r}, [['(a)+'], {PART!r}, ['aa']], 500))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert outcome.stdout == "[['aa', 0, None]]\n", outcome.stderr
