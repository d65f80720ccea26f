"""`ModelProof`: proves that what was loaded from a base model's folder is the content that a job names.

Files are looked at before they are loaded and again afterwards. Where each is still the same file (inode, size, times),
its remembered digest is that of what was loaded; one that is not remembered is read. A start takes no longer for that:
unknown files are hashed while the engine loads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from .local_copy import file_key, identity_files, open_file_sha256, sha256_of_files

_HASH_SHOWN = 12


@dataclass(frozen=True, slots=True)
class ModelProblem:
    """Why what was loaded is not, or may not be, what the job names. `is_permanent`: loading it again is pointless."""

    text: str
    is_permanent: bool


@dataclass(slots=True)
class _Held:
    """A file that stays open. `facts`: what its file system said of it before it was loaded. `digest`: of its content
    then, once it is known.
    """

    name: str
    path: Path
    file: BufferedReader
    facts: os.stat_result
    digest: str = ""

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to this very file, unchanged."""
        try:
            return file_key(self.path, self.path.stat()) == file_key(self.path, self.facts)
        except OSError:
            return False

    def is_as_read(self) -> bool:
        """Whether the open file has the content that it had, though it may have been removed or replaced since. It is
        read only where its size or time has changed.
        """
        try:
            now = os.fstat(self.file.fileno())
            if (now.st_size, now.st_mtime_ns) == (self.facts.st_size, self.facts.st_mtime_ns):
                return True
            if open_file_sha256(self.path, self.file) != self.digest:
                return False
        except ValueError:  # closed meanwhile: the engine has ended
            return True
        self.facts = now
        return True


class ModelProof:
    """Made before a folder is loaded. `expected_sha256`: as `model_sha256` gives it, "" where nothing is expected.

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
        if expected_sha256:
            for path in self._paths():
                file = path.open("rb")
                self._held.append(_Held(path.name, path.resolve(), file, os.fstat(file.fileno())))

    def digest(self) -> str:
        """Hash of the content before loading. Takes long where digests are not remembered."""
        trusts, root = self._use_remembered, self._cache_root
        for held in self._held:
            held.digest = open_file_sha256(held.path, held.file, use_remembered=trusts, cache_root=root)
        return sha256_of_files((held.name, held.digest) for held in self._held)

    def problem(self, digest: str) -> ModelProblem | None:
        """What is wrong with what was loaded meanwhile. `digest`: what the method of this name gave."""
        if not self._expected:
            return None
        moved = [held.name for held in self._held if not held.is_in_place]
        if moved or [path.resolve() for path in self._paths()] != [held.path for held in self._held]:
            what = ", ".join(moved) or "the list of its files"
            return ModelProblem(f"the base model in {self._folder} was changed while it was loaded: {what}", False)
        if digest != self._expected:
            return ModelProblem(
                f"the base model in {self._folder} holds content {digest[:_HASH_SHOWN]}, expected "
                f"{self._expected[:_HASH_SHOWN]}: its files have changed since the job was started. Put back what they "
                "were and run the same command again, or start over with --overwrite",
                True,
            )
        return None

    def later_problem(self) -> ModelProblem | None:
        """Whether files were written to in place since they were loaded: engines may compute from mapped files. Files
        that were replaced or removed are of no account.
        """
        for held in self._held:
            if held.digest and not held.is_as_read():
                text = f"the base model in {self._folder}: {held.name} was written to while an engine used it"
                return ModelProblem(f"{text}. Put back what it was and run the same command again", True)
        return None

    def close(self) -> None:
        """Close the files."""
        held, self._held = self._held, []
        for one in held:
            one.file.close()

    def _paths(self) -> list[Path]:
        return identity_files(self._folder, with_weights=self._with_weights)
