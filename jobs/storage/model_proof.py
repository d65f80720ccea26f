"""`ModelProof`: proves that an engine has loaded the base model content that its job names.

Files are examined before they are loaded and again afterwards. If each is still the same file (inode, size, times), its
digest is the digest of the loaded content. Digests are remembered; files without one are hashed while the engine loads,
so that a start takes no longer.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from .local_copy import file_key, identity_files, open_file_sha256, sha256_of_files

_HASH_SHOWN = 12


@dataclass(slots=True)
class _Held:
    """A file of the model that stays open."""

    #: Name in the model's folder.
    name: str
    #: Path with all links followed.
    path: Path
    #: The open file.
    file: BufferedReader
    #: Its status before it was loaded; later, at the latest check that found its content unchanged.
    facts: os.stat_result
    #: Hash of its content before loading; "" until it is known.
    digest: str = ""

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to this file, and the file is unchanged."""
        try:
            return file_key(self.path, self.path.stat()) == file_key(self.path, self.facts)
        except OSError:
            return False

    def is_as_read(self) -> bool:
        """Whether the open file has the same content as before; its path may have been removed or replaced since. The
        file is read only when its size or time has changed.
        """
        now = os.fstat(self.file.fileno())
        if (now.st_size, now.st_mtime_ns) == (self.facts.st_size, self.facts.st_mtime_ns):
            return True
        if open_file_sha256(self.path, self.file) != self.digest:
            return False
        self.facts = now
        return True


class ModelProof:
    """A check of one model folder, made before the folder is loaded. `expected_sha256`: hash that `model_sha256` gives;
    "" turns the check off.

    Raises `OSError` when a file cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        expected_sha256: str,
        *,
        with_weights: bool,
        use_remembered: bool = True,
        cache_root: Path | None = None,
    ) -> None:
        self._folder = folder
        self._expected = expected_sha256
        self._with_weights = with_weights
        self._use_remembered = use_remembered
        self._cache_root = cache_root
        self._held: list[_Held] = []
        # Held while files are looked at and closed: the number of a closed file may soon be another's.
        self._lock = threading.Lock()
        if expected_sha256:
            for path in self._paths():
                file = path.open("rb")
                self._held.append(_Held(path.name, path.resolve(), file, os.fstat(file.fileno())))

    def digest(self) -> str:
        """Hash of the content before loading. Takes long when digests are not remembered."""
        trusts, root = self._use_remembered, self._cache_root
        files = self._held
        for held in files:
            held.digest = open_file_sha256(held.path, held.file, use_remembered=trusts, cache_root=root)
        return sha256_of_files((held.name, held.digest) for held in files)

    def problem(self, digest: str) -> tuple[str, bool] | None:
        """Why the content loaded since may not be the expected one, as a clause for messages, and whether loading it
        again is pointless; None without a problem. `digest`: the result of `digest()`.
        """
        if not self._expected:
            return None
        moved = [held.name for held in self._held if not held.is_in_place]
        if moved or [path.resolve() for path in self._paths()] != [held.path for held in self._held]:
            what = ", ".join(moved) or "the list of its files"
            return f"the base model in {self._folder} was changed while it was loaded: {what}", False
        if digest != self._expected:
            text = (
                f"the base model in {self._folder} holds content {digest[:_HASH_SHOWN]}, expected "
                f"{self._expected[:_HASH_SHOWN]}: its files have changed since the job was started. Put back what they "
                "were and run the same command again, or start over with --overwrite"
            )
            return text, True
        return None

    def later_problem(self) -> str | None:
        """A clause about a file that was written to in place since it was loaded, since engines may compute from mapped
        files; None without one, and after `close`. Files that were replaced or removed are ignored: the mapped file is
        unchanged.
        """
        with self._lock:
            changed = [held.name for held in self._held if held.digest and not held.is_as_read()]
        if not changed:
            return None
        text = f"the base model in {self._folder}: {changed[0]} was written to while an engine used it"
        return f"{text}. Put back what it was and run the same command again"

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for held in self._held:
                held.file.close()
            self._held = []

    def _paths(self) -> list[Path]:
        return identity_files(self._folder, with_weights=self._with_weights)
