"""What the documents show exists: commands and their options, modules, files that are linked, keys of the job file."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lorabatch.cli import app
from lorabatch.jobs.spec import JobSpec

ROOT = Path(__file__).parents[1]
TEXTS = sorted(
    ROOT / name
    for name in subprocess.check_output(["git", "ls-files", "*.md", "docs/examples/*"], cwd=ROOT, text=True).split()
)
CLI = typer.main.get_command(app)
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


def shown(text: Path) -> list[list[str]]:
    """Every `lorabatch COMMAND …` of a document, as words."""
    words = (line.split("#")[0].replace("…", " ").split() for line in code(text))
    return [line[1:] for line in words if line[:1] == ["lorabatch"] and len(line) > 1 and line[1].isidentifier()]


def test_documents_are_found_and_show_commands() -> None:
    assert {"README.md", "operations.md"} <= {text.name for text in TEXTS}
    assert sum(len(shown(text)) for text in TEXTS) > 20


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_commands_exist_with_the_options_that_are_shown(text: Path) -> None:
    for words in shown(text):
        command: Any = CLI
        while hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        asked = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert asked <= options | {"--help"}, words


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_modules_that_are_run_exist(text: Path) -> None:
    for name in re.findall(r"python -m (lorabatch[\w.]*)", text.read_text(encoding="utf-8")):
        place = ROOT / Path(*name.split(".")[1:])
        is_test = name.startswith("lorabatch.tests.") and (place / "__main__.py").exists()
        assert is_test or find_spec(name) is not None, name


@pytest.mark.parametrize("text", [t for t in TEXTS if t.suffix == ".md"], ids=lambda t: str(t.relative_to(ROOT)))
def test_files_that_are_linked_are_there(text: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", text.read_text(encoding="utf-8"))):
        if "://" not in target and not target.startswith("#"):
            assert (text.parent / target.partition("#")[0]).exists(), target


def test_the_job_file_that_is_shown_is_a_job_and_every_key_is_explained() -> None:
    text = (ROOT / "docs" / "data-formats.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    JobSpec(**yaml.safe_load(example))
    table = text[text.index("| key | default |") :].split("\n\n")[0]
    explained = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines())))
    assert explained == set(JobSpec.model_fields)
