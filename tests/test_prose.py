"""Docstrings, comments and documents that can be read once: subjects first, fields documented one by one."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = sorted(
    ROOT / name
    for name in subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    if not name.startswith(("tests/", "docs/"))
)
#: With these a sentence begins whose subject is elsewhere.
WITHOUT_SUBJECT = re.compile(r"(Of|As|The same|See|What|Where)\b")
_COMMENT = re.compile(r"(?:^|\s)#[:!]* (.*)")
#: Fields from which on each has a comment of its own.
_MANY_FIELDS = 5


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def texts() -> list[tuple[str, str]]:
    """Place and text of each docstring and comment."""
    return [*docstrings(), *comments()]


def docstrings() -> Iterator[tuple[str, str]]:
    for path in CODE:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}", text


def comments() -> Iterator[tuple[str, str]]:
    """Lines that follow each other are one. A line of a string that looks like a comment counts as one."""
    for path in CODE:
        is_before_alone = False
        found: list[tuple[int, str]] = []
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            comment = _COMMENT.search(line)
            if comment is None:
                is_before_alone = False
                continue
            is_alone = not line[: comment.start()].strip()
            if is_alone and is_before_alone:
                found[-1] = (found[-1][0], f"{found[-1][1]} {comment[1]}")
            else:
                found.append((number, comment[1]))
            is_before_alone = is_alone
        yield from ((f"{path.relative_to(ROOT)}:{number}", text) for number, text in found)


def test_sentences_begin_with_their_subject() -> None:
    assert len(texts()) > 5000
    assert [place for place, text in texts() if WITHOUT_SUBJECT.match(text)] == []


def test_comments_of_kernels_in_c_have_a_subject_and_name_what_is_counted() -> None:
    found = []
    for path in sorted((ROOT / "kernels").rglob("*.[ch]")):
        comments_there = re.findall(r"/\*(.*?)\*/", path.read_text("utf-8"), re.DOTALL)
        texts_there = [" ".join(text.replace("\n *", " ").split()) for text in comments_there]
        assert texts_there, path
        wrong = [text for text in texts_there if WITHOUT_SUBJECT.match(text) or "so many" in text]
        found += [f"{path.relative_to(ROOT)}: {text}" for text in wrong]
    assert found == []


def test_what_is_counted_is_named() -> None:
    assert [place for place, text in texts() if re.search(r"\bso many\b", text)] == []


def has_help(field: ast.AnnAssign) -> bool:
    """Whether a field is declared by a call that has a text among its arguments."""
    given = field.value.args if isinstance(field.value, ast.Call) else []
    return any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in given)


def test_each_field_has_a_comment_of_its_own() -> None:
    without = []
    for path in CODE:
        lines = path.read_text("utf-8").splitlines()
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            kinds = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
            # An option is declared together with its help.
            fields = [line for line in node.body if isinstance(line, ast.AnnAssign) and not has_help(line)]
            if len(fields) >= _MANY_FIELDS and re.search(r"dataclass|BaseModel|_Frozen", kinds):
                bare = [field for field in fields if not lines[field.lineno - 2].lstrip().startswith("#")]
                without += [f"{path.relative_to(ROOT)}:{field.lineno} {ast.unparse(field.target)}" for field in bare]
    assert without == []


def test_no_comment_is_a_heading() -> None:
    """A file that needs headings is two files."""
    found = []
    for path in CODE:
        lines = ["", *path.read_text("utf-8").splitlines(), ""]
        for number, (before, line, after) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), 1):
            if line.lstrip().startswith("# ") and not before.strip() and not after.strip():
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert found == []


def test_documents_begin_with_a_subject_and_have_short_lines() -> None:
    files = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
    beginnings, long = [], []
    for name in files:
        text = (ROOT / name).read_text("utf-8")
        first = next(line for line in text.splitlines() if line.strip() and not line.startswith("#"))
        beginnings += [name] if WITHOUT_SUBJECT.match(first) else []
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        # tables, code and links are as long as they are
        lines = [line for line in prose.splitlines() if not re.match(r" {4}|\s*\||#", line)]
        long += [f"{name}: {line}" for line in lines if len(re.sub(r"`.*?`|\]\(.*?\)", "", line)) > 100]
    assert beginnings == []
    assert long == []
