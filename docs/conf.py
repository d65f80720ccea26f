"""Builds these pages as a site: `make docs` writes it to `build/docs`.

Pages stay plain Markdown, as a forge shows it. The site's side bar comes from the links of the map, `README.md`, and of
the index of decisions. Files outside of this folder that pages link to are copied beside them.
"""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

from sphinx.application import Sphinx

FOLDER = Path(__file__).parent
#: Pages whose links are the side bar.
MAPS = ("README", "adr/README")
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")

project = "lorabatch"
release = runpy.run_path(str(FOLDER.parent / "version.py"))["__version__"]
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["examples"]
highlight_language = "none"  # blocks that name no language are commands and what they print
nitpicky = True
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"lorabatch {release}"
html_show_copyright = False


def add_what_the_site_needs(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add a map's table of contents, and have links that leave this folder copy their file."""
    at = FOLDER / page

    def copied(link: re.Match[str]) -> str:
        target = (at.parent / link[1]).resolve()
        return link[0] if target.is_relative_to(FOLDER) else f"](path:{link[1]})"

    contents = tables_of_contents(source[0], at.parent) if page in MAPS else ""
    source[0] = _LINK.sub(copied, source[0]) + contents


def tables_of_contents(text: str, folder: Path) -> str:
    """A hidden table of contents for each section of a map: the page that each of its lines links to first."""
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        targets = [link[1] for line in section.splitlines() if (link := _LINK.search(line))]
        pages = [
            target.removesuffix(".md")
            for target in targets
            if target.endswith(".md") and (folder / target).resolve().is_relative_to(FOLDER)
        ]
        found.append(
            "\n".join(["", "```{toctree}", ":hidden:", f":caption: {section.splitlines()[0]}", "", *pages, "```", ""])
        )
    return "\n".join(found)


def begin_with_the_map(app: Sphinx, error: Exception | None) -> None:
    """A copy of the map as the site's `index.html`."""
    if error is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_what_the_site_needs)
    app.connect("build-finished", begin_with_the_map)
