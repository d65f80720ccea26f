"""Tables of pages about models are those of the code. `python tests/test_boundary_docs.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import lorabatch
from lorabatch.engine.model_config import folder, keys, opt
from lorabatch.engine.model_config.families import FAMILIES, TEXT_FAMILIES
from lorabatch.engine.model_config.gguf import ARCHITECTURES
from lorabatch.engine.model_config.wrappers import WRAPPERS
from lorabatch.engine.text.tokenizers import tokenizer_settings as settings
from lorabatch.engine.tokenizer_files import OLDER_VOCABULARIES

_REFERENCE = Path(lorabatch.__file__).parent / "docs" / "reference"
_MARK = "<!-- table: {} -->\n"


def by_meaning(of_keys: Mapping[str, str], head: str) -> str:
    """A table of meanings, each with the keys that have it."""
    found: dict[str, list[str]] = {}
    for key, meaning in of_keys.items():
        found.setdefault(meaning, []).append(f"`{key}`")
    rows = [f"| {', '.join(names)} | {meaning} |" for meaning, names in found.items()]
    return "\n".join([f"| {head} | |", "|---|---|", *rows, ""])


def families() -> str:
    """The families of models of text alone."""
    rows = [(family.name, family.models, family.differs_by) for family in FAMILIES.values()]
    rows.append(("opt", opt.MODELS, opt.DIFFERS_BY))
    lines = [f"| `{name}` | {models} | {words} |" for name, models, words in rows]
    return "\n".join(["| `model_type` | models | differs from Llama by |", "|---|---|---|", *lines, ""])


def wrappers() -> str:
    """The models with images whose text is served."""
    lines = [
        f"| `{name}` | {wrapper.models} | {', '.join(f'`{text}`' for text in wrapper.families)} |"
        for name, wrapper in WRAPPERS.items()
    ]
    return "\n".join(["| `model_type` | models | text model |", "|---|---|---|", *lines, ""])


def architectures() -> str:
    """The architectures of GGUF files, and the families that they stand for."""
    lines = []
    for name, read in ARCHITECTURES.items():
        stands_for = f"`{read.family}`"
        if read.other is not None:
            stands_for += f"; `{read.other[1]}` with `{read.other[0]}`"
        keys = ", ".join(f"`{key}`" for key in read.keys)
        others = ", ".join(f"`{key}`" for key in read.keys_of_others)
        lines.append(f"| `{name}` | {stands_for} | {keys}{f'; passed over: {others}' if others else ''} |")
    return "\n".join(["| `general.architecture` | `model_type` | further keys |", "|---|---|---|", *lines, ""])


def own_keys() -> str:
    """Keys that single families read."""
    found: dict[tuple[str, str], list[str]] = {}
    for family in (*FAMILIES.values(), *TEXT_FAMILIES.values()):
        for key, meaning in family.own_keys.items():
            found.setdefault((key, meaning), []).append(f"`{family.name}`")
    lines = [f"| `{key}` | {meaning} | {', '.join(names)} |" for (key, meaning), names in found.items()]
    return "\n".join(["| read | | by |", "|---|---|---|", *lines, ""])


def tables() -> dict[str, dict[str, str]]:
    """Page -> name of each of its tables -> the table's text."""
    return {
        "models.md": {"families": families(), "wrappers": wrappers()},
        "gguf.md": {"architectures": architectures()},
        "model-folder.md": {
            "files read": by_meaning(folder.READ, "read"),
            "files irrelevant": by_meaning(folder.IRRELEVANT, "does not matter"),
            "config read": by_meaning(keys.READ, "read"),
            "config own": own_keys(),
            "config irrelevant": by_meaning(keys.IRRELEVANT, "does not matter"),
            "config refused": by_meaning(keys.REFUSED, "refused where it is set"),
            "rope read": by_meaning(keys.ROPE_READ, "read"),
            "tokenizer read": by_meaning(settings.READ, "read"),
            "tokenizer irrelevant": by_meaning(settings.IRRELEVANT, "does not matter"),
            "tokenizer refused": by_meaning(settings.REFUSED, "refused where it is set"),
            "older vocabularies": by_meaning(OLDER_VOCABULARIES, "file"),
        },
    }


def written(page: str, of_page: Mapping[str, str]) -> str:
    """A page with the tables as the code has them."""
    for name, table in of_page.items():
        mark = _MARK.format(name)
        before, found, after = page.partition(mark)
        assert found, f"there is no place for the table {name!r}"
        rest = after.lstrip("\n")
        while rest.startswith("|"):
            rest = rest.partition("\n")[2]
        page = f"{before}{mark}{table}\n{rest.lstrip()}"
    return page


@pytest.mark.parametrize("name", tables())
def test_the_tables_are_those_of_the_code(name: str) -> None:
    page = (_REFERENCE / name).read_text()
    assert written(page, tables()[name]) == page, "run `python tests/test_boundary_docs.py`"


if __name__ == "__main__":
    for name, of_page in tables().items():
        (_REFERENCE / name).write_text(written((_REFERENCE / name).read_text(), of_page))
