"""An update takes the place of the job in OUTPUT, whatever kills the process that puts it there, and whatever shape the
output had and gets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lorabatch.jobs.contents import part_name
from lorabatch.jobs.record import InputRecord, JobRecord
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.storage.location import Location
from lorabatch.jobs.store import JobStore
from lorabatch.jobs.updates import put_in_place

MakeRecord = Callable[..., JobRecord]
CHANGING = ("put", "remove", "write", "create")


class Death(BaseException):
    """The process ends."""


def finished(store: JobStore, record: MakeRecord, shape: str, job_id: str, sizes: tuple[int, int]) -> None:
    """Write a job that is done: `sizes` parts, and files of a wide output."""
    spec = JobSpec(
        model="/m", input="/i", output=store.url, adapters="/a", for_each_adapter="all", shape=shape
    ).without_secrets()
    store.freeze(record(spec=spec, job_id=job_id, swept=("a",), input=InputRecord(files=(), roles={}, schema_ipc="")))
    num_parts, num_files = sizes
    for part in range(num_parts):
        store.commit_part(part, f"{job_id} part {part}".encode())
    if shape == "wide":
        for number in range(num_files):
            store.write_wide(number, f"{job_id} file {number}".encode())
        store.keep_files(dict.fromkeys(range(num_files), len(f"{job_id} file 0")))
    store.write_parts(dict.fromkeys(range(num_parts), (len(f"{job_id} part 0"), "")))
    store.write_summary({"job": job_id})
    store.mark_success()


def held(output: Path) -> dict[str, bytes]:
    """What readers of the folder read, and the parts among the records."""
    names = [*output.glob("*.parquet"), *output.glob("_lorabatch/parts/*")]
    return {str(path.relative_to(output)): path.read_bytes() for path in names}


def expected(shape: str, job_id: str, sizes: tuple[int, int]) -> dict[str, bytes]:
    num_parts, num_files = sizes
    folder = "_lorabatch/parts/" if shape == "wide" else ""
    parts = {f"{folder}{part_name(i)}": f"{job_id} part {i}".encode() for i in range(num_parts)}
    files = {part_name(i): f"{job_id} file {i}".encode() for i in range(num_files)}
    return parts | (files if shape == "wide" else {})


class Mortal:
    """Ends the process at one of the calls that change storage, before it or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, death: int) -> None:
        self.left = death
        for name in CHANGING:
            monkeypatch.setattr(Location, name, self._watched(getattr(Location, name)))

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self._step()
            done = method(*given, **named)
            self._step()
            return done

        return call

    def _step(self) -> None:
        self.left -= 1
        if not self.left:
            raise Death


@pytest.mark.parametrize(
    ("before", "after", "sizes"),
    [
        ("wide", "wide", ((1, 1), (2, 2))),
        pytest.param("long", "wide", ((3, 2), (2, 4)), marks=pytest.mark.long),
        pytest.param("wide", "wide", ((3, 4), (2, 1)), marks=pytest.mark.long),
        pytest.param("wide", "long", ((1, 3), (4, 1)), marks=pytest.mark.long),
        pytest.param("wide", "long", ((4, 1), (1, 1)), marks=pytest.mark.long),
    ],
)
def test_an_update_is_put_in_place_whatever_kills_it_and_whatever_the_shapes(
    record: MakeRecord, tmp_path: Path, before: str, after: str, sizes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    old, new = expected(before, "old", sizes[0]), expected(after, "new", sizes[1])
    for death in range(1, 1000):
        folder = tmp_path / str(death)
        output = JobStore(str(folder))
        finished(output, record, before, "old", sizes[0])
        update = output.next_update()
        finished(update, record, after, "new", sizes[1])
        assert held(folder) == old
        with pytest.MonkeyPatch.context() as patch:
            mortal = Mortal(patch, death)
            with suppress(Death):
                put_in_place(JobStore(str(folder)).latest())
        found = JobStore(str(folder))
        assert not found.is_finished() or held(folder) in (old, new), f"death {death}: half of it counts as done"
        # the next command puts in place what it finds
        settled = put_in_place(found.latest())
        assert (settled.is_finished(), held(folder)) == (True, new), f"death {death}"
        contents = JobStore(str(folder)).contents()
        assert contents.parts.keys() == {*range(sizes[1][0])}
        assert contents.files.keys() == {*range(sizes[1][after == "wide"])}
        assert settled.read_record().job_id == "new"
        assert settled.read_files().keys() == (contents.files.keys() if after == "wide" else set())
        if mortal.left > 0:
            break
    assert death > 20
