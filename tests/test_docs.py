"""What the documents show exists: commands and their options, modules, files that are linked, keys of the job file."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import distributed
import pytest
import typer
import yaml
from distributed.cli import dask_scheduler, dask_worker

import lorabatch
from lorabatch.benchmarks.speed_picture import ratios
from lorabatch.cli import app
from lorabatch.console.options import job_options
from lorabatch.jobs.options.values import SAMPLING_COLUMNS
from lorabatch.jobs.spec import JobSpec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = sorted(
    ROOT / name
    for name in subprocess.check_output(["git", "ls-files", "*.md", "docs/examples/*"], cwd=ROOT, text=True).split()
)
CLI = typer.main.get_command(app)
DASK: dict[str, Any] = {"scheduler": dask_scheduler.main, "worker": dask_worker.main}
_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")


def code(text: Path) -> list[str]:
    """Every line of code in a document: fenced, indented or between backticks; all lines of an example."""
    content = text.read_text(encoding="utf-8")
    if text.suffix != ".md":
        return content.replace("\\\n", " ").splitlines()
    fenced = [line for block in _FENCED.findall(content) for line in block.replace("\\\n", " ").splitlines()]
    indented = [line for line in content.splitlines() if line.startswith("    ")]
    return fenced + indented + _INLINE.findall(_FENCED.sub("", content))


def container_args(value: Any) -> Iterator[list[str]]:
    """The arguments of every container in a part of a Kubernetes manifest."""
    if isinstance(value, dict):
        if "args" in value:
            yield value["args"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from container_args(item)


def command_lines(text: Path) -> list[list[str]]:
    """Every line of code of a document as words; of a manifest what its containers run."""
    if text.suffix == ".yaml":
        return [
            words for part in yaml.safe_load_all(text.read_text(encoding="utf-8")) for words in container_args(part)
        ]
    return [line.split("#")[0].replace("…", " ").split() for line in code(text)]


def dask_shown(text: Path) -> list[list[str]]:
    """Every `dask worker …` and `dask scheduler …`, as words; also what an example in Python adds to a worker's."""
    found = [words[1:] for words in command_lines(text) if words[:1] == ["dask"] and words[1:2] != ["cuda"]]
    if text.suffix == ".py":
        keywords = (n for n in ast.walk(ast.parse(text.read_text(encoding="utf-8"))) if isinstance(n, ast.keyword))
        found += [["worker", *ast.literal_eval(k.value)] for k in keywords if k.arg == "worker_extra_args"]
    return found


def options_of(command: Any) -> set[str]:
    """All options of a command, and of those below it."""
    # options are made when a command is called
    called = command.make_context(command.name, [], resilient_parsing=True).command
    own = {option for parameter in called.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


def shown(text: Path) -> list[list[str]]:
    """Every `lorabatch COMMAND …` of a document, as words."""
    return [
        line[1:]
        for line in command_lines(text)
        if line[:1] == ["lorabatch"] and len(line) > 1 and line[1].isidentifier()
    ]


def test_documents_are_found_and_show_commands() -> None:
    assert {"README.md", "running.md"} <= {text.name for text in TEXTS}
    assert sum(len(shown(text)) for text in TEXTS) > 20


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_commands_exist_with_the_options_that_are_shown(text: Path) -> None:
    for words in shown(text):
        command: Any = CLI
        while hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        asked = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert asked <= options_of(command) | {"--help"}, words


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_options_shown_for_dask_are_those_of_the_installed_one(text: Path) -> None:
    for role, *words in dask_shown(text):
        asked = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert asked <= options_of(DASK[role]), words


def test_examples_show_commands_of_dask() -> None:
    found = {text.name: {words[0] for words in dask_shown(text)} for text in TEXTS}
    assert found["slurm.py"] == {"worker"}
    assert found["kubernetes.yaml"] == {"scheduler", "worker"}
    assert found["dask_cuda.sh"] == {"scheduler"}
    assert ["run", "/job/job.yaml"] in [words[:2] for words in shown(DOCS / "examples" / "kubernetes.yaml")]


@pytest.mark.parametrize("text", sorted((DOCS / "guides").glob("*.md")), ids=lambda text: text.name)
def test_options_named_alone_are_of_a_command_of_ours_or_of_dask(text: Path) -> None:
    known = options_of(CLI).union(*map(options_of, DASK.values()))
    for line in code(text):
        if line.startswith("-"):
            assert line.split()[0].partition("=")[0] in known, line


def test_settings_shown_for_dask_are_those_of_the_installed_one() -> None:
    (shown_settings,) = re.findall(
        r"```yaml\n(.*?)```", (DOCS / "guides" / "clusters.md").read_text("utf-8"), re.DOTALL
    )
    known: Any = yaml.safe_load((Path(distributed.__file__).parent / "distributed.yaml").read_text("utf-8"))

    def assert_known(asked: dict[str, Any], known: dict[str, Any]) -> None:
        assert asked.keys() <= known.keys()
        for name, value in asked.items():
            if isinstance(value, dict):
                assert_known(value, known[name])

    assert_known(yaml.safe_load(shown_settings), known)


def calls_in(path: Path) -> dict[str, ast.Call]:
    """Function, as it is written -> a call of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_the_example_in_python_scales_by_our_backlog_and_makes_a_job() -> None:
    calls = calls_in(DOCS / "examples" / "slurm.py")
    assert ast.unparse(calls["cluster.adapt"].args[0]) == "JobAdaptive"
    given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in calls["lorabatch.JobSpec"].keywords}
    JobSpec(**given)


@pytest.mark.parametrize("name", [path.name for path in (DOCS / "examples").glob("*.py")])
def test_calls_in_examples_have_the_parameters_of_our_functions(name: str) -> None:
    found = calls_in(DOCS / "examples" / name)
    ours = ("lorabatch.run", "lorabatch.submit", "lorabatch.Job")
    calls = {function: call for function, call in found.items() if function in ours}
    assert calls
    for function, call in calls.items():
        known = inspect.signature(getattr(lorabatch, function.removeprefix("lorabatch."))).parameters
        assert {keyword.arg for keyword in call.keywords} <= known.keys()


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_modules_that_are_run_exist(text: Path) -> None:
    for name in re.findall(r"python -m (lorabatch[\w.]*)", text.read_text(encoding="utf-8")):
        place = ROOT / Path(*name.split(".")[1:])
        is_test = name.startswith("lorabatch.tests.") and (place / "__main__.py").exists()
        assert is_test or find_spec(name) is not None, name


def links(text: Path) -> list[tuple[Path, str]]:
    """File and anchor of each link of a document to a file; the anchor is "" for the whole file."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", text.read_text(encoding="utf-8")))
    local = [target.partition("#") for target in targets if "://" not in target]
    return [((text.parent / file).resolve() if file else text, anchor) for file, _, anchor in local]


@cache
def anchors(text: Path) -> set[str]:
    """The anchors that a forge and the site make of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", text.read_text(encoding="utf-8")), re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(found) == len(set(found)), f"{text}: two headings are alike"
    return set(found)


@pytest.mark.parametrize("text", [t for t in TEXTS if t.suffix == ".md"], ids=lambda t: str(t.relative_to(ROOT)))
def test_files_and_headings_that_are_linked_are_there(text: Path) -> None:
    for file, anchor in links(text):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file}#{anchor}"


def test_every_page_is_reached_from_the_map() -> None:
    found, new = set[Path](), {DOCS / "README.md"}
    while new:
        found |= new
        new = {file for page in new for file, _ in links(page) if file.suffix == ".md" and DOCS in file.parents} - found
    assert {text for text in TEXTS if text.suffix == ".md" and DOCS in text.parents} - found == set()


def test_the_glossary_has_few_terms() -> None:
    """Terms that only one subject needs are defined where they are used."""
    first_cells = re.findall(r"^\| ([^|]+) \|", (DOCS / "reference" / "glossary.md").read_text("utf-8"), re.MULTILINE)
    terms = [term for cell in first_cells if cell != "term" for term in cell.split(", ")]
    assert 30 <= len(terms) <= 40
    assert len(terms) == len(set(terms))


def table_lines(text: str, header: str) -> list[str]:
    """The lines of the table with this header, without header and rule."""
    return text[text.index(header) :].split("\n\n")[0].splitlines()[2:]


def test_the_job_file_that_is_shown_is_a_job() -> None:
    text = (DOCS / "reference" / "keys.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    JobSpec(**yaml.safe_load(example))


def test_the_table_of_the_job_file_says_what_the_options_of_the_command_line_say() -> None:
    text = (DOCS / "reference" / "keys.md").read_text(encoding="utf-8")
    expected = [
        f"| `{o.key}` | {'required' if o.is_required else o.default} | {o.help} |" for o in job_options().values()
    ]
    # After a change of an option: these are the lines to put there.
    assert table_lines(text, "| key | default |") == expected, "\n".join(expected)


def test_the_sampling_columns_of_the_documented_input_are_those_that_rows_may_have() -> None:
    text = (DOCS / "reference" / "columns.md").read_text(encoding="utf-8")
    lines = [line for line in table_lines(text, "| column | type |") if "| as in the job file |" in line]
    assert tuple(re.findall(r"`(\w+)`", "".join(lines))) == SAMPLING_COLUMNS


def test_the_readmes_picture_shows_what_was_measured() -> None:
    drawn = (DOCS / "pictures" / "speed.svg").read_text("utf-8")
    assert [bar for bar, ratio in ratios().items() if not (bar in drawn and f"{ratio:.1f} times" in drawn)] == []


def test_the_index_of_decisions_has_every_one_once() -> None:
    folder = DOCS / "adr"
    rows = re.findall(r"^\| \[(\d+)\]\((.*?)\)", (folder / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(file for _, file in rows) == sorted(path.name for path in folder.glob("0*.md"))
    assert [number for number, file in rows if int(file[:4]) != int(number)] == []


def test_the_index_of_decisions_has_their_titles() -> None:
    folder = ROOT / "docs" / "adr"
    rows = re.findall(r"^\| \[(\d+)\]\((.*?)\) \| (.*?) \|", (folder / "README.md").read_text("utf-8"), re.MULTILINE)
    headings = [(folder / file).read_text("utf-8").partition("\n")[0] for _, file, _ in rows]
    assert headings == [f"# {number}. {title}" for number, _, title in rows]


def test_modules_without_a_test_of_their_name_are_named_with_their_test() -> None:
    changing = (DOCS / "internals" / "changing.md").read_text(encoding="utf-8")
    table = changing.partition("## Modules that are tested with others")[2]
    tested_in = {}
    for line in re.findall(r"^\| `.*$", table, re.MULTILINE):
        *modules, test = re.findall(r"`([^`]+)`", line)
        assert (ROOT / test).is_file(), f"{test} is not there"
        tested_in |= dict.fromkeys(modules, test)
    assert set(tested_in) == set(_modules_without_a_test_of_their_name())


def _modules_without_a_test_of_their_name() -> Iterator[str]:
    for room in ("kernels", "scheduler", "engine", "jobs", "pipeline", "console", "system", "demo"):
        for path in (ROOT / room).rglob("*.py"):
            module = path.relative_to(ROOT)
            names = {ROOT / "tests" / module.parent / f"test_{module.stem}.py"}
            if room == "kernels":
                names.add(ROOT / "tests" / "kernels" / f"test_{module.parent.name}.py")
            if not module.stem.startswith("__") and not any(name.is_file() for name in names):
                yield str(module)
