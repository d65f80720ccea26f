"""Bad requests and bad rows, as typed: what is printed, and the exit code. Nothing here starts a cluster.

`plan` refuses what `run` refuses, with the same sentences.
"""

from __future__ import annotations

import errno
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from lorabatch.cli import app
from lorabatch.jobs.opening.opened_job import open_job
from lorabatch.jobs.spec import JobSpec

NAMES = ("alpha", "beta", "gamma")
WEIGHTS = "adapter_model.safetensors"


class DeniedFileSystem(MemoryFileSystem):
    """Storage that refuses these credentials."""

    protocol = "denied"

    def info(self, path: str, **more: Any) -> Any:
        raise PermissionError("Forbidden")

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        raise PermissionError("Forbidden")


class FullFileSystem(MemoryFileSystem):
    """Storage without any space left."""

    protocol = "full"

    def pipe_file(self, *place: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def write_rows(folder: Path) -> None:
    """Inputs, right and wrong ones."""

    def write(name: str, table: pa.Table | dict[str, Any], **options: Any) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), folder / name, **options)
        return folder / name

    prompts = ["a", "b", "c", "d"]
    chats = [[{"role": "user", "content": text}] for text in prompts]
    write("good.parquet", {"id": [1, 2, 3, 4], "adapter": [None, *NAMES], "prompt": prompts})
    write("tenants.parquet", {"prompt": prompts, "tenant": [*NAMES, None]})
    write("unnamed.parquet", {"prompt": prompts, "adapter": pa.nulls(4, pa.string())})
    write("some.parquet", {"prompt": prompts, "adapter": [None, "alpha", None, "alpha"]})
    write("unknown.parquet", {"prompt": prompts, "adapter": [None, "alpha", "betta", None]})
    write("bad-adapter.parquet", {"prompt": prompts, "adapter": ["bad"] * 4})
    write("no-prompt.parquet", {"id": [1], "text": ["a"]})
    write("two-prompts.parquet", {"prompt": ["a"], "messages": ["[]"]})
    write("numbers.parquet", {"prompt": [1.5], "id": [0.5]})
    write("double.parquet", {"id": [1, 2, 1, 3], "prompt": prompts})
    write("empty.parquet", {"id": pa.array([], pa.int64()), "prompt": pa.array([], pa.string())})
    write("long.parquet", {"prompt": ["a", "word " * 400]})
    write("huge.parquet", {"prompt": ["a", "word " * 2_000_000]})
    write("negative.parquet", {"prompt": prompts, "temperature": [None, -1.0, 0.5, None]})
    write("chats.parquet", {"messages": [json.dumps(chat) for chat in chats]})
    image = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}
    ]
    write("images.parquet", {"messages": [json.dumps(image), json.dumps(chats[0])]})
    write("output.parquet", {"prompt": ["a"], "error": ["b"]})
    write("types/a.parquet", {"prompt": ["a"], "n": [1]})
    write("types/b.parquet", {"prompt": ["a"], "n": ["x"]})
    write("hive/tenant=alpha/x.parquet", {"prompt": ["a"], "tenant": ["alpha"]})
    damaged = write("damaged.parquet", {"prompt": ["word " * 200] * 64}, row_group_size=16, compression="none")
    content = bytearray(damaged.read_bytes())
    start = pq.read_metadata(damaged).row_group(2).column(0).data_page_offset
    content[start : start + 40] = b"\xff" * 40
    damaged.write_bytes(content)
    # 6 KB that stand for 10 GB of prompts, and rows that take no bytes at all.
    bomb = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2000, np.int32)), ["x" * 5_000_000])
    write("bomb.parquet", {"id": range(2000), "prompt": bomb})
    write("rows-bomb.parquet", {"prompt": pa.nulls((1 << 22) + 1)}, row_group_size=1 << 23)
    (folder / "cut.parquet").write_bytes(content[:100])
    (folder / "rows.csv").write_text("id,prompt\n1,a\n2,b,c\n")
    (folder / "rows.jsonl").write_text('{"id": 1, "prompt": "a"}\n[2]\n')
    (folder / "nothing").mkdir()


def write_adapters(folder: Path, good: Path) -> None:
    """Adapters that cannot be used, each in a folder that says why."""

    def copy(name: str, change: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Path:
        made = Path(shutil.copytree(good, folder / name))
        if change is not None:
            save_file(change(load_file(made / WEIGHTS)), made / WEIGHTS)
        return made

    (copy("no-config") / "adapter_config.json").unlink()
    (copy("no-weights") / WEIGHTS).unlink()
    pickled = copy("pickled")
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    copy("other-base", lambda tensors: {n: t[:, : t.shape[1] // 2].copy() for n, t in tensors.items()})
    copy("nan", lambda tensors: {n: np.full_like(t, np.nan) for n, t in tensors.items()})
    copy("inf", lambda tensors: {n: np.full_like(t, np.inf) for n, t in tensors.items()})
    damaged = copy("corrupt") / WEIGHTS
    damaged.write_bytes(damaged.read_bytes()[:-100])


@pytest.fixture(scope="module")
def places(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What stands in braces below: folders of inputs and adapters, a model, and an output with a job in it."""
    folder = tmp_path_factory.mktemp("bad-input")
    write_rows(folder / "rows")
    for name in NAMES:
        shutil.copytree(tiny_adapters["rank8"], folder / "adapters" / name)
    write_adapters(folder / "bad", tiny_adapters["rank8"])
    shutil.copytree(tiny_adapters["rank8"], folder / "one")
    (folder / "mixed").mkdir()
    shutil.copy(folder / "rows" / "chats.parquet", folder / "mixed")
    shutil.copy(folder / "rows" / "rows.csv", folder / "mixed")
    (folder / "thesis").mkdir()
    (folder / "thesis" / "thesis.tex").write_text("mine")
    (folder / "job.yaml").write_text("max_tokens: 1\nmodel: m\nmax-tokens: 2\n")
    (folder / "unknown.yaml").write_text(f"model: {tiny_llama}\ninput: in\noutput: out\nmax_tokenz: 2\n")
    (folder / "list.yaml").write_text("- model\n")
    lists = (f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))
    (folder / "bomb.yaml").write_text(f"model: {tiny_llama}\nmax_tokens: [&a0 [1], {', '.join(lists)}]\n")
    (folder / "twice.yaml").write_text(f"model: {tiny_llama}\ncolumns: {{prompt: a, prompt: b}}\n")
    taken = JobSpec(
        model=str(tiny_llama), input=str(folder / "rows" / "chats.parquet"), output=str(folder / "taken"), max_tokens=8
    )
    open_job(taken)
    kinds: dict[str, Any] = {"denied": DeniedFileSystem, "full": FullFileSystem}
    for protocol, kind in kinds.items():
        fsspec.register_implementation(protocol, kind, clobber=True)
    return {
        "rows": folder / "rows",
        "adapters": folder / "adapters",
        "bad": folder / "bad",
        "model": tiny_llama,
        "folder": folder,
    }


RIGHT = "--model {model} --max-tokens 8 --workers 1"
BASE = f"{RIGHT} --input {{rows}}/good.parquet --adapters {{adapters}}"
UNNAMED = "adapters: 3 adapters are given, and no row can name one: the input has no column 'adapter'."
# What is typed behind `lorabatch`, the exit code, and what is printed, in pieces.
TABLE: list[tuple[str, int, list[str]]] = [
    # Options
    (
        "plan --model {model} --input {rows}/none --max-tokens zero --temperature warm --workers -1",
        2,
        [
            "max_tokens='zero': expected a valid integer. See `lorabatch run --help`.",
            "temperature='warm': expected a valid number. See",
            "workers='-1': expected at least 1",
            "none': not found",
        ],
    ),
    (
        "resume {folder}/taken --workers two",
        2,
        ["workers='two': expected a valid integer. See `lorabatch run --help`."],
    ),
    ("simulate --rows many", 2, ["--rows='many': ", "valid integer", ". See `lorabatch simulate --help`."]),
    ("simulate --rows 0", 2, ["--rows='0': ", "1. See `lorabatch simulate --help`."]),
    ("wait {folder}/taken --timeout soon", 2, ["--timeout='soon': ", "See `lorabatch wait --help`."]),
    (
        "plan --gpu-hour-price dear",
        2,
        ["gpu_hour_price='dear': expected a number, 0 or more", "such as 2.5 or '2.5 EUR'."],
    ),
    ("bench engine --repeats 1.5", 2, ["--repeats='1.5': ", "See `lorabatch bench engine --help`."]),
    ("run --max-tokens 3 --max-tokens 5", 2, ["--max-tokens: given 2 times, '3' and '5'; keep one."]),
    ("run {folder}/job.yaml", 2, ["max_tokens: given 2 times, line 1 and 3; keep one."]),
    ("run {folder}/list.yaml", 2, ["expected a mapping such as `model: …`, found list"]),
    ("run {folder}/none.yaml", 2, ["none.yaml: not found. Check the path."]),
    ("plan {folder}/bomb.yaml", 2, ["not valid YAML (line 1: its aliases stand for more than 10000 values"]),
    ("plan {folder}/twice.yaml", 2, ["twice.yaml: prompt: given 2 times, line 2; keep one."]),
    ("run {folder}/unknown.yaml", 2, ["max_tokenz: not an option; did you mean 'max_tokens'"]),
    ("run", 2, ["model: required and not given", "input: required and not given", "output: required and not given"]),
    (f"plan {BASE} --temperature -1", 2, ["temperature=-1.0: expected 0 (greedy) or a positive finite number"]),
    (f"plan {RIGHT} --input i --max-tokens 0", 2, ["--max-tokens: given 2 times"]),
    ("plan --model {model} --input {rows}/none --max-tokens 0", 2, ["max_tokens=0: expected at least 1", "not found"]),
    (f"plan {BASE} --mode best", 2, ["mode='best': expected 'auto', 'unmerged', 'merged' or 'exact'"]),
    (f"plan {BASE} --max-errors many", 2, ["max_errors='many': 'many': expected a count of rows such as 25"]),
    (f"plan {BASE} --storage-options [hush", 2, ["storage_options: expected a JSON object; not JSON at character"]),
    ("plan --model {model} --max-tokens 300 --input {rows}/chats.parquet", 2, ["max_tokens=300: leaves no room"]),
    # Model
    (
        "plan --model {folder}/none --input {rows}/chats.parquet",
        2,
        ["model='", "expected a folder, found nothing there"],
    ),
    ("plan --model {rows} --input {rows}/chats.parquet", 2, ["config.json: missing"]),
    # Input
    (f"plan {RIGHT} --input {{rows}}/none.parquet", 2, ["none.parquet': not found", "Check the path"]),
    (f"plan {RIGHT} --input {{rows}}/nothing", 2, ["no Parquet files there. Expected a file of Parquet, CSV"]),
    (f"plan {RIGHT} --input {{rows}}/*.pq", 2, ["no Parquet files there"]),
    (f"plan {RIGHT} --input {{rows}}/cut.parquet", 2, ["input file 'cut.parquet': not a readable Parquet file"]),
    (
        f"plan {RIGHT} --input {{rows}}/rows.csv",
        2,
        ["input file 'rows.csv': line 3: 3 fields, expected 2 as in the first line: '2,b,c'"],
    ),
    (f"plan {RIGHT} --input {{rows}}/rows.jsonl", 2, ["input file 'rows.jsonl': line 2: a list, expected an object"]),
    (f"plan {RIGHT} --input {{folder}}/mixed", 0, ["files that are not read (1 .csv): rows.csv"]),
    (
        f"plan {RIGHT} --input denied://rows",
        2,
        ["input='denied://rows': access was refused (Forbidden). Check the cred"],
    ),
    (f"plan {RIGHT} --input zzz://rows", 2, ["input='zzz://rows': Protocol not known: zzz"]),
    (f"plan {RIGHT} --input {{rows}}/types", 2, ["'b.parquet': column 'n' is string, but int64 in 'a.parquet'"]),
    (f"plan {RIGHT} --input {{rows}}/hive", 2, ["'tenant': stands in folder names (tenant=…) and in their files too"]),
    (
        f"plan {RIGHT} --input {{rows}}/chats.parquet --input {{rows}}/chats.*",
        2,
        ["chats.parquet' is behind two of the inputs. Leave one of these inputs out."],
    ),
    (f"plan {RIGHT} --input {{rows}}/empty.parquet", 0, ["0 rows, 0 prompt tokens"]),
    (
        f"plan {RIGHT} --input {{rows}}/damaged.parquet",
        2,
        ["'damaged.parquet', row group 2 (rows 32 to 47): cannot be read", "Repair the file or leave it out"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/bomb.parquet",
        2,
        [
            "input file 'bomb.parquet', row group 0 (rows 0 to 1999): column 'prompt' takes 2.6 GB or more in memory, "
            "expected at most 2.1 GB for all columns. Write it in smaller row groups or leave it out.",
        ],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/rows-bomb.parquet",
        2,
        ["input file 'rows-bomb.parquet', row group 0: 4194305 rows, expected at most 4194304. Write it in smaller"],
    ),
    # Columns
    (f"plan {RIGHT} --input {{rows}}/no-prompt.parquet", 2, ["no prompt column. Expected one of prompt, messages"]),
    (f"plan {RIGHT} --input {{rows}}/two-prompts.parquet", 2, ["a row must have one kind of prompt"]),
    (f"plan {RIGHT} --input {{rows}}/output.parquet", 2, ["'error': the output has a column of that name"]),
    (
        f"plan {RIGHT} --input {{rows}}/numbers.parquet",
        2,
        ["'prompt' (prompt): type double, expected string", "'id' (id): type double, expected string or integer"],
    ),
    (
        f"plan {BASE} --column prompt=words",
        2,
        ["column prompt='words': the input has no such column. Name one of id, "],
    ),
    (f"plan {BASE} --column user=id", 2, ["'user' is not a role"]),
    # Rows
    (
        f"plan {RIGHT} --input {{rows}}/double.parquet",
        2,
        ["column 'id' (id): 1 id appears in more than one row: 1 at double.parquet:0, double.parquet:2"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/long.parquet",
        1,
        ["max_errors=10%: 1 of 2 rows cannot be answered", "together more than the context of 256 tokens"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/huge.parquet",
        1,
        [
            "1 of 2 rows cannot be answered",
            "prompt of 10000000 characters: more tokens than the context of 256 tokens.",
        ],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/chats.parquet --allow-special-tokens",
        0,
        ["special tokens inside of them are control tokens (allow_special_tokens)"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/negative.parquet --row-settings temperature",
        1,
        ["1 of 4 rows", "temperature=-1.0: expected 0 (greedy)"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/images.parquet",
        1,
        ["messages[0].content[1]: content part of type image_url: only text is supported. Leave the part out."],
    ),
    (f"plan {RIGHT} --input {{rows}}/images.parquet --max-errors 1", 0, ["1 rows cannot be answered (prompt)"]),
    # Adapters
    (
        f"plan {RIGHT} --input {{rows}}/tenants.parquet --adapters {{adapters}}",
        2,
        [f"{UNNAMED} `tenant` holds 3 of the 3 adapter names: add --column adapter=tenant."],
    ),
    (f"plan {RIGHT} --input {{rows}}/chats.parquet --adapters {{adapters}}", 2, [f"{UNNAMED} No column holds one"]),
    (
        f"plan {RIGHT} --input {{rows}}/unnamed.parquet --adapters {{adapters}}",
        0,
        ["column 'adapter' (adapter): null or empty in all 4 rows; the base model answers them, none of"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/some.parquet --adapters {{adapters}}",
        0,
        ["2 of 3 adapters are named by no row: beta, gamma"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/unknown.parquet --adapters {{adapters}}",
        1,
        ["adapter='betta': not among this job's adapters; did you mean 'beta'?"],
    ),
    (f"plan {BASE} --adapters a={{adapters}}/beta", 2, ["expected NAME=URL"]),
    (
        f"plan {RIGHT} --input {{rows}}/good.parquet --adapters {{folder}}/none",
        2,
        ["adapters='", "no adapter folders there"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/chats.parquet --adapters {{folder}}/one",
        0,
        ["no column names adapters; one, the only one of the job, answers all rows"],
    ),
    *(
        (
            f"plan {RIGHT} --input {{rows}}/bad-adapter.parquet --adapters bad={{bad}}/{name}",
            1,
            ["4 of 4 rows cannot be answered", "adapter='bad': refused.", why],
        )
        for name, why in {
            "no-config": "adapter_config.json: missing",
            "no-weights": "adapter_model.safetensors: missing",
            "pickled": "adapter_model.bin: does not hold tensors alone",
            "other-base": "expected",
            "nan": "NaN",
            "inf": "infinit",
            "corrupt": "adapter_model.safetensors",
        }.items()
    ),
    # System prompt
    (f"plan {BASE} --system-prompt Hi", 2, ["system_prompt: the prompts of this input are in column 'prompt'"]),
    (
        f"plan {RIGHT} --input {{rows}}/chats.parquet --system-prompt ''",
        2,
        ["system_prompt='': expected text that is not"],
    ),
    # Templates and tools
    (f"plan {RIGHT} --input {{rows}}/chats.parquet --tools [", 2, ["tools='[': not JSON"]),
    (f"plan {BASE} --continue-final-message", 2, ["continue_final_message: the prompts of this input are in column"]),
    (
        f"plan {RIGHT} --input {{rows}}/chats.parquet --chat-template {{folder}}/none.jinja",
        2,
        ["chat_template='", "none.jinja': No such file or directory. Name a file"],
    ),
    (
        f"plan {RIGHT} --input {{rows}}/chats.parquet --chat-template '{{{{{{{{ messages[0].content }}}}}}}}'",
        0,
        ["messages: rendered by the job's chat template, instead of the model's"],
    ),
    # Output
    (f"run {BASE} --output {{folder}}/thesis", 2, ["holds 1 files that are not this job's (thesis.tex)"]),
    (f"run {BASE} --output {{folder}}/thesis/thesis.tex", 2, ["cannot write to", "expected a folder"]),
    (
        f"run {BASE} --output {{folder}}/taken",
        2,
        ["holds another job, job-", "Choose another output, keep what is unchanged with --update, or start over"],
    ),
    (f"run {RIGHT} --input {{rows}} --output {{rows}}/answers", 2, ["its parts would be among the files of input="]),
    (f"run {BASE} --output denied://out", 2, ["output='denied://out'", "access was refused (Forbidden)"]),
    (
        f"run {BASE} --output full://out",
        1,
        ["cannot write full://out/_lorabatch/job.json: the disk is full. Free some"],
    ),
    # Commands on an output
    *(
        (f"{command} {{folder}}", 2, ["no job there. Check the URL; it must be the --output of a job."])
        for command in ("status", "wait", "logs", "cancel", "resume", "report")
    ),
    ("audit --model {model} {folder}/none", 2, ["none: not a folder. Check the path."]),
]


@pytest.mark.parametrize(("typed", "exit_code", "printed"), TABLE, ids=[case[0] for case in TABLE])
def test_what_is_wrong_is_printed_with_its_exit_code(
    places: dict[str, Path], typed: str, exit_code: int, printed: list[str]
) -> None:
    before = sorted((places["folder"] / "taken").rglob("*"))
    done = CliRunner().invoke(app, shlex.split(typed.format_map(places)), env={"COLUMNS": "1000"})
    assert done.exit_code == exit_code, done.output
    assert "Traceback" not in done.output
    assert "hush" not in done.output
    for part in printed:
        assert part.format_map(places) in done.output, done.output
    assert sorted((places["folder"] / "taken").rglob("*")) == before


# Between the tests' process and the command: what a process has taken before it becomes another program counts too.
LARGEST = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, "-m", "lorabatch", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def test_a_bomb_is_refused_in_little_memory(places: dict[str, Path]) -> None:
    typed = f"plan --model {places['model']} --max-tokens 8 --workers 1 --input {places['rows']}/bomb.parquet"
    command = [sys.executable, "-c", LARGEST, *typed.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "takes 2.6 GB or more in memory" in done.stderr
    assert done.returncode == 2
    # KiB of the command or of those it has waited for, whichever took most
    assert 1 << 14 < int(done.stdout.split()[-1]) < 1 << 19


# A package that is not installed, what is typed, the exit code, and what is printed.
MISSING: list[tuple[str, str, int, str]] = [
    ("s3fs", f"plan {RIGHT} --input s3://b/rows", 2, "storage is missing: pip install s3fs"),
    ("s3fs", f"run {BASE} --output s3://b/out", 2, "storage is missing: pip install s3fs"),
    ("s3fs", "status s3://b/out", 1, "storage is missing: pip install s3fs"),
    ("gcsfs", f"plan {RIGHT} --input gs://b/rows", 2, "storage is missing: pip install gcsfs"),
    ("paramiko", f"plan {RIGHT} --input sftp://host/rows", 2, "storage is missing: pip install paramiko"),
    ("adlfs", f"run {BASE} --output abfs://container/out", 2, "storage is missing: pip install adlfs"),
    ("smbclient", f"plan {RIGHT} --input smb://host/rows", 2, "storage is missing: pip install smbprotocol"),
    ("huggingface_hub", "plan --model some/model --input i", 2, "from the hub: pip install huggingface_hub"),
    (
        "matplotlib",
        "simulate --rows 8 --adapters 1 --workers 1 --policy planner --output {folder}/simulated",
        0,
        "(plots need matplotlib: pip install matplotlib)",
    ),
]


@pytest.mark.parametrize(("package", "typed", "exit_code", "printed"), MISSING, ids=[case[1] for case in MISSING])
def test_a_package_that_is_missing_is_named_with_the_extra_that_has_it(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, package: str, typed: str, exit_code: int, printed: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    # a class of storage that an earlier test has used is kept there
    for protocol in ("s3", "gs", "sftp", "abfs", "smb"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    done = CliRunner().invoke(app, shlex.split(typed.format_map(places)), env={"COLUMNS": "1000"})
    assert done.exit_code == exit_code, done.output
    assert printed in done.output


def test_names_in_square_brackets_are_printed_as_they_are(places: dict[str, Path], tmp_path: Path) -> None:
    """They are markup to rich, and a closing one that opens nothing is an error there."""
    shutil.copytree(places["adapters"] / "alpha", tmp_path / "[red]tenant:cat:")
    pq.write_table(pa.table({"prompt": ["a"], "adapter": ["[red]tenant:cat:"]}), tmp_path / "rows.parquet")
    for typed in (
        f"audit --model {places['model']} '{tmp_path}/[red]tenant:cat:'",
        f"plan --model {places['model']} --max-tokens 8 --input {tmp_path}/rows.parquet --adapters {tmp_path}",
    ):
        done = CliRunner().invoke(app, shlex.split(typed), env={"COLUMNS": "1000"})
        assert done.exit_code == 0, done.output
        assert "[red]tenant:cat:" in done.output
