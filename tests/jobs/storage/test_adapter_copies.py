"""Local copies of adapters on a host: a limit for all, the one used longest ago leaves, and never one that is held."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lorabatch.jobs.storage.adapter_copies import AdapterCopies

HOLDER = """
import sys
from pathlib import Path
from lorabatch.jobs.storage.adapter_copies import AdapterCopies
copies = AdapterCopies(Path(sys.argv[1]), 100)
assert copies.hold([copies.root / "a"]) == []
print("held", flush=True)
sys.stdin.read()
"""


def add(copies: AdapterCopies, name: str, num_bytes: int = 40) -> Path:
    folder = copies.root / name

    def write() -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(num_bytes))

    copies.with_room(num_bytes, write)
    return folder


def names(copies: AdapterCopies) -> set[str]:
    return {path.name for path in copies.root.iterdir() if not path.name.startswith(".")}


def test_the_copy_used_longest_ago_leaves(tmp_path: Path) -> None:
    copies = AdapterCopies(tmp_path, 100)
    for seconds, name in enumerate("ab"):
        os.utime(add(copies, name), (seconds, seconds))
    assert copies.hold([copies.root / "a"]) == []
    copies.release([copies.root / "a"])
    add(copies, "c")
    assert names(copies) == {"a", "c"}
    assert copies.num_bytes == 80


def test_a_held_copy_stays_whatever_the_limit(tmp_path: Path) -> None:
    copies = AdapterCopies(tmp_path, 100)
    held = [add(copies, "a"), add(copies, "b")]
    assert copies.hold(held) == []
    add(copies, "c")
    assert names(copies) == {"a", "b", "c"}
    copies.release(held)
    add(copies, "d")
    assert names(copies) <= {"a", "b", "c", "d"}
    assert copies.num_bytes <= 100
    assert copies.hold([copies.root / "d", copies.root / "never", tmp_path]) == [copies.root / "never"]


def test_what_another_process_holds_stays_until_that_process_ends(tmp_path: Path) -> None:
    copies = AdapterCopies(tmp_path, 100)
    add(copies, "a")
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        add(copies, "b")
        add(copies, "c")
        assert "a" in names(copies)
        other.kill()
        other.wait()
    add(copies, "d", 90)
    assert names(copies) == {"d"}


def test_copies_of_a_process_whose_names_are_cut_off_stay(tmp_path: Path) -> None:
    """A disk was full when they were written, or they are being written: it may hold any."""
    copies = AdapterCopies(tmp_path, 100)
    add(copies, "a")
    add(copies, "b")
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for path in copies.root.glob(".held-*"):
            if path.stat().st_size:
                os.truncate(path, 3)
        add(copies, "c")
        assert names(copies) == {"a", "b", "c"}
        other.kill()
        other.wait()
    add(copies, "d", 90)
    assert names(copies) == {"d"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_gives_up_what_no_one_holds_once(tmp_path: Path, number: int) -> None:
    copies = AdapterCopies(tmp_path, 1000)
    held = add(copies, "held")
    add(copies, "free")
    copies.hold([held])
    calls: list[set[str]] = []

    def full() -> None:
        calls.append(names(copies))
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=os.strerror(number)):
        copies.with_room(10, full)
    assert calls == [{"held", "free"}, {"held"}]


@example([("add", 0), ("add", 2), ("hold", 0), ("hold", 2), ("add", 1), ("release", 0), ("add", 0)])
@given(st.lists(st.tuples(st.sampled_from(["add", "hold", "release"]), st.integers(0, 7)), max_size=40))
def test_copies_stay_within_the_limit_and_what_is_held(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    copies = AdapterCopies(tmp_path_factory.mktemp("cache"), 100)
    held: list[str] = []
    for step, number in steps:
        name = str(number)
        if step == "add" and name not in names(copies):
            add(copies, name)
        elif step == "hold" and copies.hold([copies.root / name]) == []:
            held.append(name)
        elif step == "release" and name in held:
            held.remove(name)
            copies.release([copies.root / name])
        assert set(held) <= names(copies)
        assert copies.num_bytes == sum(
            file.stat().st_size for folder in names(copies) for file in (copies.root / folder).iterdir()
        )
        assert copies.num_bytes <= max(100, 40 * (len(set(held)) + 1))
    copies.close()
    assert copies.num_bytes <= 100


def test_what_is_released_after_the_end_is_written_to_no_other_file(tmp_path: Path) -> None:
    copies = AdapterCopies(tmp_path)
    folder = add(copies, "alpha")
    copies.hold([folder])
    copies.close()
    with (tmp_path / "part.parquet").open("wb") as other:  # it has the number of the file that was closed
        other.write(b"rows")
        other.flush()
        copies.release([folder])
        copies.hold([folder])
        assert (tmp_path / "part.parquet").read_bytes() == b"rows"
