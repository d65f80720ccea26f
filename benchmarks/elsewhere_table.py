"""Counts what a user writes and must know for one task with lorabatch and with other systems, as a table in Markdown.

`python -m lorabatch.benchmarks.elsewhere_table`. Programs are in `benchmarks/elsewhere/TASK/`, their files begin with
the system's name. Counted are, by rules alone:

- lines: those that are neither blank nor a comment;
- steps: commands of the shell; a program without a shell script is one;
- names: what must be looked up, each once: commands, their options, keys of YAML files; in Python imported names,
  called functions and methods, keyword arguments and keys of dictionaries, without those of Python itself.
"""

from __future__ import annotations

import ast
import builtins
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "elsewhere"
TASKS = {
    "tickets": "CSV of tickets, one adapter",
    "datasets": "data of TRL, Alpaca, ShareGPT",
    "frame": "a DataFrame in Python",
    "checkpoints": "three checkpoints and the base",
    "judge": "draft, then judge",
    "grown": "the CSV, grown by 100 rows",
}
SYSTEMS = {
    "lorabatch": "lorabatch",
    "vllm": "vLLM",
    "ray": "Ray Data LLM",
    "lm_eval": "lm-eval",
    "llamacpp": "llama.cpp",
    "openai_batch": "OpenAI batch",
}
_PYTHONS_OWN = {name for kind in (str, list, dict, set) for name in dir(kind)} | set(dir(builtins))
_STANDARD = sys.stdlib_module_names
_LOOP = {"for", "done"}


@dataclass(frozen=True, slots=True)
class Effort:
    """Counts of one task with one system."""

    num_lines: int
    num_steps: int
    num_names: int

    def __str__(self) -> str:
        return f"{self.num_lines} / {self.num_steps} / {self.num_names}"


def effort(task: str, system: str) -> Effort:
    """Counts the files of a system in a task's folder."""
    files = sorted(
        path for path in (FOLDER / task).iterdir() if path.stem == system or path.stem.startswith(f"{system}_")
    )
    names: set[str] = set()
    num_lines = num_steps = 0
    for file in files:
        text = file.read_text("utf-8")
        num_lines += sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())
        if file.suffix == ".py":
            names |= set(_names_of_python(text))
        elif file.suffix == ".yaml":
            names |= set(re.findall(r"(?:^|[{,\[] ?)\s*(\w+):(?=\s|$)", text, re.MULTILINE))
        else:
            commands = _commands(text)
            num_steps += len(commands)
            names |= {name for words in commands for name in _names_of_command(words)}
    return Effort(num_lines, num_steps or 1, len(names))


def _names_of_python(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                if (module or alias.name).partition(".")[0] not in _STANDARD:
                    yield alias.name
        elif isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and type(key.value) is str)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called not in _PYTHONS_OWN:
                yield called
            yield from (word.arg for word in node.keywords if word.arg and called not in _PYTHONS_OWN)


def _commands(text: str) -> list[list[str]]:
    """Words of each command of a shell script. The commands of a loop count once."""
    commands, begun = [], ""
    for line in text.splitlines():
        begun += line + "\n"
        try:
            words = shlex.split(begun.replace("\\\n", " "), comments=True)
        except ValueError:
            continue  # a quote is open
        if line.endswith("\\"):
            continue
        begun = ""
        if words and words[0] not in _LOOP:
            commands.append(words)
    return commands


def _names_of_command(words: list[str]) -> Iterator[str]:
    """The command (of `python FILE` the file) and its options; a second word without a dash is a part of it."""
    yield words[1] if words[0] == "python" else words[0]
    if words[0] != "python" and words[1].isidentifier():
        yield words[1]
    yield from (word for word in words[1:] if word.startswith("-"))


def table() -> str:
    """The table: a row for each task, `lines / steps / names` for each system."""
    rows = [
        "| task | " + " | ".join(SYSTEMS.values()) + " |",
        "|---" * (len(SYSTEMS) + 1) + "|",
    ]
    rows += [
        f"| {title} | " + " | ".join(str(effort(task, system)) for system in SYSTEMS) + " |"
        for task, title in TASKS.items()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
