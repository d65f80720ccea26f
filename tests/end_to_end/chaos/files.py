"""Files of a job that others change while it runs, and put back; and what its command says meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from lorabatch.tests.end_to_end.chaos.scenario import Signal

# Longest time without a word of a command, and with one that is not true.
_SILENT_LIMIT_S = 60.0
_ROWS = re.compile(r"[\d,]+ of [\d,]+ rows.*")


class ChangedFile:
    """A file that is other than it was. `own`: where the right one is kept. `num_ends`: ends of clients until its user
    puts it back.
    """

    def __init__(self, path: Path, own: Path, num_ends: int) -> None:
        self._path = path
        self._own = own
        self.num_ends = num_ends

    def change(self, signal: Signal, contents: bytes, *, in_place: bool) -> None:
        """Delete it, or give it other contents."""
        shutil.copy2(self._path, self._own)
        if signal == "DELETED":
            self._path.unlink()
        elif in_place:
            with self._path.open("r+b") as file:
                file.write(contents)
                file.truncate()
        else:
            others = self._own.with_suffix(".others")
            others.write_bytes(contents)
            others.replace(self._path)

    def put_back(self) -> None:
        """Once; it is as it was, also in its time of change."""
        if self._own.exists():
            os.replace(self._own, self._path)


class Words:
    """What a command writes to its log, which may be no line for a while. `faults`: what it should have said."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("rb")
        self._log.seek(0, os.SEEK_END)
        self._heard_s = self._moved_s = time.monotonic()
        self._rows = ""
        self.longest_silence_s = 0.0
        self.faults: list[str] = []

    def listen(self, *, is_paused: bool) -> None:
        """Take what is new. `is_paused`: the command is stopped, and cannot say anything."""
        now_s = time.monotonic()
        new = self._log.read().decode(errors="replace").splitlines()
        if new or is_paused:
            self._heard_s = now_s
        self._moved_s = now_s if is_paused else self._moved_s
        silence_s = now_s - self._heard_s
        if silence_s > _SILENT_LIMIT_S >= self.longest_silence_s:
            self.faults.append(f"the command said nothing for {_SILENT_LIMIT_S:.0f} s")
        self.longest_silence_s = max(self.longest_silence_s, silence_s)
        for line in new:
            self._judge(line, now_s)

    def _judge(self, line: str, now_s: float) -> None:
        """Time left is promised only while tokens are generated, or rows finish."""
        rows = _ROWS.search(line)
        if rows is None:
            return
        answered = rows[0].split("  ")[0]
        if answered != self._rows or " running " not in line or "  0 tokens/s" not in line:
            self._rows, self._moved_s = answered, now_s
        elif now_s - self._moved_s > _SILENT_LIMIT_S and line.rstrip().endswith(("left", ")")) and not self.faults:
            self.faults.append(f"no row has finished for {now_s - self._moved_s:.0f} s, and the command says: {line}")

    def close(self) -> None:
        """Listen no more."""
        self._log.close()
