"""What lies at the top of OUTPUT, by name: parts, `_SUCCESS`, our records, and what is not ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

OURS = "_lorabatch"
SUCCESS = "_SUCCESS"
_PART_NAME = re.compile(r"part-(\d{5,})\.parquet")


def part_name(shard_id: int) -> str:
    """The part of a shard."""
    return f"part-{shard_id:05d}.parquet"


@dataclass(frozen=True, slots=True)
class OutputContents:
    """One look at OUTPUT. `has_records`: `_lorabatch` is there; `has_job`: with a frozen job in it. `parts`: shard
    id -> bytes. `foreign`: names that no job of ours gives.
    """

    has_job: bool
    has_records: bool
    is_finished: bool
    parts: dict[int, int]
    foreign: tuple[str, ...]

    @classmethod
    def of(cls, entries: Mapping[str, int | None], *, has_job: bool) -> OutputContents:
        """From the names in OUTPUT and their sizes. Names that begin with a dot are nobody's."""
        found = ((_PART_NAME.fullmatch(name), name, size or 0) for name, size in entries.items())
        parts = {int(m[1]): size for m, name, size in found if m and part_name(int(m[1])) == name}
        ours = {OURS, SUCCESS, *map(part_name, parts)}
        return cls(
            has_job=has_job,
            has_records=OURS in entries,
            is_finished=SUCCESS in entries,
            parts=parts,
            foreign=tuple(sorted(name for name in entries if name not in ours and not name.startswith("."))),
        )

    @property
    def is_empty(self) -> bool:
        """Nothing is there but, at most, records of a job that was never frozen."""
        return not (self.has_job or self.is_finished or self.parts or self.foreign)

    @property
    def foreign_names(self) -> list[str]:
        """Files that no job of ours put there. Parts without a frozen job are another tool's."""
        if self.has_job:
            return list(self.foreign)
        return [*self.foreign, *map(part_name, sorted(self.parts)), *[SUCCESS] * self.is_finished]
