"""The thin door: options, exit codes, and how little it loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import fsspec
import pytest
from typer.testing import CliRunner

from lorabatch import __version__
from lorabatch.cli import app
from lorabatch.console.options import job_options
from lorabatch.console.patterns import with_expanded_patterns
from lorabatch.engine.request import SAMPLING_OPTIONS
from lorabatch.jobs.spec import JobSpec, Panel

HEAVY = {"torch", "triton", "dask", "distributed", "pyarrow", "transformers", "pandas", "scipy"}


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_help_lists_the_commands_and_run_lists_its_options() -> None:
    code, text = invoke("--help")
    assert code == 0
    assert all(command in text for command in ("demo", "run", "audit", "status", "bench"))
    _, text = invoke("run", "--help-all")
    assert all(f"--{option.name.replace('_', '-')}" in text for option in job_options().values())


@pytest.mark.parametrize("columns", [200, 80, 60, 40])
@pytest.mark.parametrize("command", ["run", "plan", "submit"])
def test_help_shows_every_option_whole_in_its_panel_at_any_width(command: str, columns: int) -> None:
    done = CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= columns
    # Panel -> the names in it
    found: dict[str, list[str]] = {}
    for line in done.output.splitlines():
        if title := re.match(r"╭─ (\w+) ─", line):
            names = found.setdefault(title[1], [])
        elif name := re.match(r"│ (?:-\w, |    )--([\w-]+)", line):
            names.append(name[1])
    expected = {panel.capitalize(): list[str]() for panel in get_args(Panel)}
    for option in job_options().values():
        expected[option.panel.capitalize()].append(option.name.replace("_", "-"))
    assert {title: names for title, names in found.items() if title in expected} == expected
    assert {"help", "help-all"} <= set(found["Options"])
    assert "help-all" not in invoke("status", "--help")[1]


def test_short_help_shows_the_commonest_options_and_says_how_to_see_all() -> None:
    common = {option.name for option in job_options().values() if option.is_common}
    assert len(common) < 20
    _, text = invoke("run", "--help")
    for option in job_options().values():
        assert (f" --{option.name.replace('_', '-')} " in text) == (option.name in common), option.name
    assert f"of {len(job_options())}: `lorabatch run --help-all` shows all" in text


def test_ten_options_have_a_letter_of_their_own_also_where_commands_share_them() -> None:
    letters = {option.key: option.short for option in job_options().values() if option.short}
    assert len(letters) == len(set(letters.values())) == 10
    shared = {"audit": ["model"], "profile": ["model"], "resume": ["cluster", "workers", "max_errors"]}
    for command, keys in shared.items():
        _, text = invoke(command, "--help")
        for key in keys:
            assert f"-{letters[key]}, --{key.replace('_', '-')}" in text


def test_letters_are_the_long_names(tmp_path: Path) -> None:
    short = ["-m", "/no/m", "-i", "/no/i", "-o", "x", "-t", "0", "-T", "-1", "-e", "lots", "-C", "prompt", "-w", "0"]
    long = [
        *("--model", "/no/m", "--input", "/no/i", "--output", "x", "--max-tokens", "0", "--temperature", "-1"),
        *("--max-errors", "lots", "--column", "prompt", "--workers", "0"),
    ]
    assert invoke("plan", *short) == invoke("plan", *long)
    code, text = invoke("plan", *short)
    assert code == 2
    assert all(f"{name}=" in text for name in ("max_tokens", "temperature", "max_errors", "columns", "workers"))
    assert invoke("plan", "-t", "1", "--max-tokens", "2")[1].startswith("lorabatch: --max-tokens: given 2 times")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("lorabatch st", {"status"}),
        ("lorabatch run --mo", {"--model", "--mode"}),
        ("lorabatch plan --max-tokens 3 --max-tokens 4 --dt", {"--dtype"}),
        ("lorabatch run --mode m", {"merged"}),
    ],
)
def test_shells_complete_commands_options_and_values(shell: str, typed: str, expected: set[str]) -> None:
    env = {
        "_LORABATCH_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    code = "import sys; from lorabatch.cli import main; sys.argv = ['lorabatch']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False
    )
    if shell == "zsh":
        found = re.findall(r'^(?:_arguments .*?\()?"([\w-]+)"', done.stdout, re.MULTILINE)
    else:
        found = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert set(found) == expected, done


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with inputs `data/a.parquet` and `b.parquet`, a job file, and two adapters."""
    monkeypatch.chdir(tmp_path)
    for name in ("data", "adapters/x", "adapters/y", "adapters/lr=1", "adapters/lr=2", "days/day=1", "days/day=2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("data/a.parquet", "data/b.parquet", "job.yaml"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["--input", "data/a.parquet", "data/b.parquet"],
        ["-i", "data/a.parquet", "data/b.parquet", "--seed", "1"],
        ["--seed", "1", "--input", "data/a.parquet", "data/b.parquet", "job.yaml"],
        ["job.yaml", "--input", "days/day=1", "days/day=2"],
    ],
)
def test_a_pattern_that_the_shell_has_expanded_is_all_of_its_files(folder: Path, words: list[str]) -> None:
    made = with_expanded_patterns(words)
    quoted = [words[i - 1] for i in range(1, len(words)) if words[i - 1].startswith(("data/", "days/"))]
    quoted += [words[-1]] if words[-1].startswith(("data/", "days/")) else []
    flag = next(word for word in words if word in ("-i", "--input"))
    assert [made[i + 1] for i, word in enumerate(made) if word == flag] == quoted
    assert [word for word in made if word not in (flag, *quoted)] == [w for w in words if w not in (flag, *quoted)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--input", "data/a.parquet", "data/b.parquet", "data/notes.txt"], "--input 'data/*.parquet'"),
        (["--input", "data/README.md", "data/a.parquet", "data/b.parquet"], "--input 'data/*.parquet'"),
        (["-i", "data/a.parquet", "data/b.parquet", "data/job.yaml"], "-i 'data/*.parquet'"),
        (["--adapters", "adapters/x", "adapters/y"], "or NAME=URL for each: --adapters adapters."),
        (["-a", "adapters/lr=1", "adapters/lr=2"], "or NAME=URL for each: -a adapters."),
    ],
)
def test_a_pattern_of_which_not_all_can_be_meant_is_to_be_quoted(folder: Path, words: list[str], said: str) -> None:
    for name in ("data/notes.txt", "data/README.md", "data/job.yaml"):
        (folder / name).touch()
    code, text = invoke("plan", *words)
    assert code == 2
    assert text.startswith(f"lorabatch: {words[0]} {words[1]}")
    assert said in text


def test_a_job_file_behind_one_input_stays_a_job_file(folder: Path) -> None:
    for words in (["--input", "data/a.parquet", "job.yaml"], ["--input", "data/none.parquet", "other.parquet"]):
        assert with_expanded_patterns(words) == words
    assert with_expanded_patterns(["--", "--input", "a", "b", "c"]) == ["--", "--input", "a", "b", "c"]


def test_options_of_run_are_the_keys_of_the_job_file_and_every_sampling_option_is_one() -> None:
    assert job_options().keys() == JobSpec.model_fields.keys()
    assert job_options().keys() > SAMPLING_OPTIONS.keys()
    for name, option in SAMPLING_OPTIONS.items():
        assert (job_options()[name].help, JobSpec.model_fields[name].default) == (option.help, option.default)


def test_the_defaults_that_help_shows_are_those_of_a_job() -> None:
    _, text = invoke("run", "--help-all")
    shown = [option for option in job_options().values() if option.default]
    assert len(shown) > 10
    for option in shown:
        assert f"[default: {option.default}]" in text
        job = JobSpec(model="m", input="i", output="o", **{option.key: option.default})
        assert getattr(job, option.key) == JobSpec.model_fields[option.key].default


@pytest.mark.parametrize(
    ("words", "more"),
    [(words, {"fsspec", "asyncio"}) for words in (["--help"], ["--version"], ["status", "{output}"])],
)
def test_commands_that_must_answer_at_once_load_nothing_heavy(words: list[str], more: set[str], tmp_path: Path) -> None:
    code = f"""
import json, sys
from lorabatch.cli import main
sys.argv = ["lorabatch", *{[word.format(output=tmp_path) for word in words]!r}]
try:
    main()
except SystemExit:
    print("\\n" + json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert loaded.isdisjoint(HEAVY | more), loaded & (HEAVY | more)


def test_an_import_needs_batch_files_and_the_name_of_its_output(tmp_path: Path) -> None:
    assert invoke("import", "a.jsonl")[0] == 2
    (tmp_path / "a.jsonl").write_text('{"custom_id": "a"}')
    code, text = invoke("import", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert code == 2
    assert "no such file" not in text
    assert "expected a name that ends with .parquet" in text


def test_the_version_is_printed() -> None:
    assert invoke("--version") == (0, f"{__version__}\n")


def test_status_of_a_place_without_a_job_is_a_wrong_request(tmp_path: Path) -> None:
    code, text = invoke("status", str(tmp_path))
    assert code == 2
    assert "no job there" in text


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["run", "--max-tokens", "3", "--max-tokens=5", "--workers", "1", "--workers", "1"],
            ["--max-tokens: given 2 times, '3' and '5'; keep one.", "--workers: given 2 times, '1' and '1'; keep one."],
        ),
        (["plan", "--no-migration", "--migration"], ["--migration: given 2 times, --no-migration and --migration"]),
        (["logs", "out", "-f", "--follow"], ["--follow: given 2 times, --follow and --follow"]),
        (["bench", "engine", "--rows", "1", "--rows", "2"], ["--rows: given 2 times, '1' and '2'"]),
        (
            ["status", "out", "--storage-options", "{hush}", "--storage-options", "{}"],
            ["--storage-options: given 2 times; "],
        ),
        (["run", "--output", "s3://u:hush@b/x", "--output", "y"], ["--output: given 2 times, 's3://***@b/x' and 'y'"]),
    ],
)
def test_an_option_that_is_given_twice_is_refused_with_its_values(words: list[str], lines: list[str]) -> None:
    code, text = invoke(*words)
    assert code == 2
    assert len(text.splitlines()) == len(lines)
    for line, shown in zip(lines, text.splitlines(), strict=True):
        assert shown.startswith(f"lorabatch: {line}")
    assert "hush" not in text


def test_repeatable_options_are_given_several_times() -> None:
    repeated = [
        "--input",
        "/no/a",
        "--input",
        "/no/b",
        "--stop",
        "x",
        "--stop",
        "y",
        "--column",
        "id=a",
        "--column",
        "prompt=b",
    ]
    code, text = invoke("plan", *repeated)
    assert code == 2
    assert "given" not in text.replace("required and not given", "")
    assert "/no/a': not found" in text
    assert "/no/b': not found" in text


def test_storage_options_that_are_no_json_are_refused_without_being_shown(tmp_path: Path) -> None:
    code, text = invoke("status", str(tmp_path), "--storage-options", "{secret: hush}")
    assert code == 2
    assert "storage_options: expected a JSON object" in text
    assert "hush" not in text


def test_audit_tells_the_verdict_of_each_adapter_and_fails_when_one_is_refused(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    good = next(iter(tiny_adapters.values())).parent
    code, text = invoke("audit", "--model", str(tiny_llama), str(good))
    assert code == 0
    assert "4 exact, 0 exact-by-merge, 0 refused" in text
    shutil.copytree(good / "rank8", tmp_path / "broken")
    (tmp_path / "broken" / "adapter_model.safetensors").unlink()
    code, text = invoke("audit", "--model", str(tiny_llama), "--json", str(good), str(tmp_path / "broken"))
    assert code == 1
    verdicts = {found["name"]: found["verdict"] for found in json.loads(text)}
    assert verdicts == dict.fromkeys(tiny_adapters, "exact") | {"broken": "refused"}


def test_adapters_behind_a_url_are_audited_under_their_own_names(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = fsspec.filesystem("memory")
    store.put(str(tiny_adapters["rank8"]), "/audited/rank8", recursive=True)
    code, text = invoke("audit", "--model", str(tiny_llama), "--json", "memory://audited/rank8", "memory://audited")
    assert code == 0
    first, second = json.loads(text)
    assert (first["name"], second["verdict"]) == ("rank8", "exact")
    code, text = invoke("audit", "--model", str(tiny_llama), "memory://audited/none")
    assert code == 1
    assert "memory://audited/none': not found" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runn"], r"no such command 'runn'\. (Did you mean 'run'\? )+See `lorabatch --help`\."),
        (["--verbos"], r"no such option:? '?--verbos"),
        (["run", "--max-token", "5"], r"no such option:? '?--max-token\b.*--max-tokens\b"),
        (["status"], r"missing argument 'OUTPUT'\. See `lorabatch status --help`\."),
        (["status", "a", "b"], r"got unexpected extra argument(\(s\))? \(b\)\. See `lorabatch status --help`\."),
        (["run", "--model"], r"option '--model' requires an argument\. See `lorabatch run --help`\."),
        (["bench", "engines"], r"no such command 'engines'"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_answered_in_one_line(words: list[str], said: str) -> None:
    """The words are those of Typer and Click, whose versions differ in them."""
    done = CliRunner().invoke(app, words, prog_name="lorabatch")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert re.match(f"lorabatch: {said}", done.stderr), done.stderr
    assert done.stderr.endswith("--help`.\n")


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("words", [[], ["bench"], ["run"], ["audit"], ["status"]], ids=" ".join)
def test_help_has_a_letter_and_neither_braces_nor_kinds_of_switches(words: list[str], flag: str) -> None:
    done = CliRunner().invoke(app, [*words, flag], prog_name="lorabatch", env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "-h, --help " in done.stdout
    assert not re.search(r"Usage:.*[{}]|<bool>|default: no-", done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80
