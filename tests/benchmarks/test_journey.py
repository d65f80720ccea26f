"""The page on the journey of a row names what exists, and its pictures show what the code says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lorabatch.benchmarks.journey.__main__ import PAGE, blocks_of, with_blocks
from lorabatch.benchmarks.journey.pictures import EDGES, FOLDER, FROM_ANY, PICTURES, STATES
from lorabatch.benchmarks.journey.recorded_run import record_demo
from lorabatch.benchmarks.journey.shown import shown
from lorabatch.benchmarks.journey.stations import STATIONS, Journey
from lorabatch.benchmarks.journey.watched_engine import FOLDER as NOTES_VARIABLE
from lorabatch.pipeline.supervisor.rows import TRANSITIONS, RowState
from lorabatch.scheduler.messages import Event

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_has_a_filled_block_for_each_station(page: str) -> None:
    blocks = blocks_of(page)
    assert list(blocks) == list(STATIONS)
    assert [name for name, block in blocks.items() if not block.strip()] == []


def test_new_blocks_replace_those_of_the_page_and_nothing_else(page: str) -> None:
    new = with_blocks(page, {name: f"new {name}" for name in STATIONS})
    assert blocks_of(new) == {name: f"new {name}\n" for name in STATIONS}
    assert with_blocks(new, {name: block.removesuffix("\n") for name, block in blocks_of(page).items()}) == page


def test_files_of_the_code_that_the_page_names_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert len(re.findall(r"^\| `[\w/]+\.py`", page, re.MULTILINE)) == 8


def test_the_page_shows_every_picture(page: str) -> None:
    assert set(re.findall(r"\]\(\.\./pictures/(.*?)\)", page)) == set(PICTURES)


# After a change of the code: `python -m lorabatch.benchmarks.journey.pictures`
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_that_the_code_draws(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PICTURES[name]().svg()


def test_the_picture_of_states_has_every_state_and_every_transition_of_the_table() -> None:
    assert set(STATES) == set(RowState)
    unfinished = set(RowState) - set(FROM_ANY.values())
    from_any = {(event, before, after) for event, after in FROM_ANY.items() for before in unfinished}
    of_table = {(event, before, after) for event, changes in TRANSITIONS.items() for before, after in changes.items()}
    assert from_any | set(EDGES) == of_table


@dataclass(frozen=True)
class Thing:
    name: str
    numbers: tuple[int, ...] = ()
    began_s: float = 0.0
    more: dict[str, str] = field(default_factory=dict)


def test_an_object_is_printed_without_its_defaults_its_times_and_the_ends_of_hashes() -> None:
    assert shown(Thing("0123456789abcdef" * 2)) == "Thing(name='01234567…')"
    assert shown(Thing("a", (1,), 17.25)) == "Thing(name='a', numbers=(1,), began_s=…)"
    assert shown(Thing("a", tuple(range(20)))) == "Thing(name='a', numbers=(0, 1, 2, 3, 4, … 20 in all))"
    assert shown(Thing("tls://127.0.0.1:4321")) == "Thing(name='tls://127.0.0.1:…')"


def test_a_long_object_has_a_line_for_each_field() -> None:
    assert shown(Thing("z" * 80, (1, 2))) == f"Thing(\n    name='{'z' * 80}',\n    numbers=(1, 2),\n)"


def kinds(block: str) -> set[str]:
    """Types of the objects in a block. Which event opens a shard depends on what is ready first."""
    return set(re.findall(r"^[A-Z]\w+", block, re.MULTILINE)) - Event.kinds.keys()


@pytest.mark.long
@pytest.mark.real_model
def test_a_run_of_the_demo_gives_the_objects_of_the_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTES_VARIABLE, "")  # is set anew, and unset after the test
    journey = Journey(record_demo(tmp_path))
    fresh = {name: station(journey) for name, station in STATIONS.items()}
    assert {name: kinds(block) for name, block in fresh.items()} == {
        name: kinds(block) for name, block in blocks_of(page).items()
    }
