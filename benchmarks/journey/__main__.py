"""Writes the objects of `docs/concepts/journey.md` from a run of the demo: `python -m lorabatch.benchmarks.journey`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from lorabatch.benchmarks.journey.recorded_run import record_demo
from lorabatch.benchmarks.journey.stations import STATIONS, Journey
from lorabatch.system.local_cache import temporary_folder

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "journey.md"
_BLOCK = re.compile(r"(<!-- station: (\w+) -->\n```\n)(.*?)(?=```)", re.DOTALL)


def blocks_of(page: str) -> dict[str, str]:
    """The blocks of objects in the text of the page, by the names of their stations."""
    return {name: block for _, name, block in _BLOCK.findall(page)}


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The text of the page with these blocks. Raises KeyError for a station of the page that has no block."""
    return _BLOCK.sub(lambda found: f"{found[1]}{blocks[found[2]]}\n", page)


def main() -> None:
    """Run the demo and write the page."""
    logging.getLogger("distributed").setLevel(logging.WARNING)
    with temporary_folder() as folder:
        journey = Journey(record_demo(folder))
        blocks = {name: station(journey) for name, station in STATIONS.items()}
    PAGE.write_text(with_blocks(PAGE.read_text(encoding="utf-8"), blocks), encoding="utf-8")


if __name__ == "__main__":
    main()
