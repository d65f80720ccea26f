"""`OutputContents`: what OUTPUT holds, by the names of its entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: Folder of a job's records in OUTPUT.
OURS = "_lorabatch"
#: File that a job writes last.
SUCCESS = "_SUCCESS"
_PART_NAME = re.compile(r"part-(\d{5,})\.parquet")


def part_name(shard_id: int) -> str:
    """File name of a shard's part."""
    return f"part-{shard_id:05d}.parquet"


@dataclass(frozen=True, slots=True)
class OutputContents:
    """The contents of OUTPUT, from one listing; that of a wide output from two."""

    #: Whether a job is frozen in OUTPUT.
    has_job: bool
    #: Whether OUTPUT has the folder `_lorabatch`.
    has_records: bool
    #: Whether OUTPUT has `_SUCCESS`.
    is_finished: bool
    #: Shard id -> bytes of its part.
    parts: dict[int, int]
    #: Number -> bytes of each Parquet file in OUTPUT itself: the parts, or files of a wide output.
    files: dict[int, int]
    #: Names that no job of ours gives, without names that begin with a dot.
    foreign: tuple[str, ...]

    @classmethod
    def of(
        cls, entries: Mapping[str, int | None], *, has_job: bool, beside: Mapping[str, int | None] | None = None
    ) -> OutputContents:
        """Makes the contents from the names in OUTPUT and their sizes (None: a folder). `beside`: those in the folder
        of parts of a wide output; None where the parts are in OUTPUT.
        """
        files = _numbered(entries)
        ours = {OURS, SUCCESS, *map(part_name, files)}
        return cls(
            has_job=has_job,
            has_records=OURS in entries,
            is_finished=SUCCESS in entries,
            parts=files if beside is None else _numbered(beside),
            files=files,
            foreign=tuple(sorted(name for name in entries if name not in ours and not name.startswith("."))),
        )

    @property
    def is_empty(self) -> bool:
        """Whether OUTPUT holds nothing but, at most, records of a job that was never frozen."""
        return not (self.has_job or self.is_finished or self.files or self.foreign)

    @property
    def foreign_names(self) -> list[str]:
        """Files that no job of ours put there. Parts without a frozen job are another tool's."""
        if self.has_job:
            return list(self.foreign)
        return [*self.foreign, *map(part_name, sorted(self.files)), *[SUCCESS] * self.is_finished]


def _numbered(entries: Mapping[str, int | None]) -> dict[int, int]:
    """Number -> size of the entries with a part's name."""
    found = ((_PART_NAME.fullmatch(name), name, size or 0) for name, size in entries.items())
    return {int(m[1]): size for m, name, size in found if m and part_name(int(m[1])) == name}
