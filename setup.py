"""Makes README.md the description of the package on indexes, where no link can lead into the checkout.

Links and pictures get the address of this release below the `Repository` of `[project.urls]`, as GitHub and GitLab
spell it. Without a repository, links become plain text and pictures are left out. All else is in `pyproject.toml`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
_CODE = r"(?P<code>```.*?```|`[^`]+`)"
_TEXT, _PATH = r"\[(?P<text>[^\[\]]+)\]", r"\((?!https?:|mailto:|#)(?P<path>[^)\s]+)\)"
_LINK = re.compile(rf"{_CODE}|(?P<sign>!?){_TEXT}{_PATH}", re.DOTALL)
# A paragraph of one picture, and the paragraph in italics below it: its caption.
_PICTURE = re.compile(rf"{_CODE}|^!{_TEXT}{_PATH}\n\n?(?:\*[^*].*?\*\n\n)?", re.MULTILINE | re.DOTALL)


def long_description(readme: str, repository: str | None, version: str) -> str:
    """The text of README.md for package indexes: absolute links below `repository`, none where that is None."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["sign"] else "blob"
        return link["code"] or f"{link['sign']}[{link['text']}]({repository}/{kind}/v{version}/{link['path']})"

    if repository is not None:
        return _LINK.sub(absolute, readme)
    without_pictures = _PICTURE.sub(lambda picture: picture["code"] or "", readme)
    return _LINK.sub(lambda link: link["code"] or link["text"], without_pictures)


def _arguments() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    text = long_description((ROOT / "README.md").read_text(encoding="utf-8"), repository, project["version"])
    return {"long_description": text, "long_description_content_type": "text/markdown"}


if __name__ == "__main__":
    # The name by which setuptools leaves this file out of the package, whose folder is this one.
    setup(script_name="setup.py", **_arguments())
