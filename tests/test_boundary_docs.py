"""Tables of docs/reference/model-folder.md are those of the code. `python tests/test_boundary_docs.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lorabatch
from lorabatch.engine.model_config import folder, keys
from lorabatch.engine.text.tokenizers import tokenizer_settings as settings
from lorabatch.engine.tokenizer_files import OLDER_VOCABULARIES

_PAGE = Path(lorabatch.__file__).parent / "docs" / "reference" / "model-folder.md"
_MARK = "<!-- table: {} -->\n"


def by_meaning(of_keys: Mapping[str, str], head: str) -> str:
    """A table of meanings, each with the keys that have it."""
    found: dict[str, list[str]] = {}
    for key, meaning in of_keys.items():
        found.setdefault(meaning, []).append(f"`{key}`")
    rows = [f"| {', '.join(names)} | {meaning} |" for meaning, names in found.items()]
    return "\n".join([f"| {head} | |", "|---|---|", *rows, ""])


def tables() -> dict[str, str]:
    """Name of each table -> its text."""
    return {
        "files read": by_meaning(folder.READ, "read"),
        "files irrelevant": by_meaning(folder.IRRELEVANT, "does not matter"),
        "config read": by_meaning(keys.READ, "read"),
        "config irrelevant": by_meaning(keys.IRRELEVANT, "does not matter"),
        "config refused": by_meaning(keys.REFUSED, "refused where it is set"),
        "rope read": by_meaning(keys.ROPE_READ, "read"),
        "tokenizer read": by_meaning(settings.READ, "read"),
        "tokenizer irrelevant": by_meaning(settings.IRRELEVANT, "does not matter"),
        "tokenizer refused": by_meaning(settings.REFUSED, "refused where it is set"),
        "older vocabularies": by_meaning(OLDER_VOCABULARIES, "file"),
    }


def written(page: str) -> str:
    """A page with the tables as the code has them."""
    for name, table in tables().items():
        mark = _MARK.format(name)
        before, found, after = page.partition(mark)
        assert found, f"docs/reference/model-folder.md has no place for the table {name!r}"
        rest = after.lstrip("\n")
        while rest.startswith("|"):
            rest = rest.partition("\n")[2]
        page = f"{before}{mark}{table}\n{rest.lstrip()}"
    return page


def test_the_tables_are_those_of_the_code() -> None:
    page = _PAGE.read_text()
    assert written(page) == page, "run `python tests/test_boundary_docs.py`"


if __name__ == "__main__":
    _PAGE.write_text(written(_PAGE.read_text()))
