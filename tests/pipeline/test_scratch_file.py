"""What is too much for memory is written and read back whole, or the user hears where room is missing."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

from lorabatch.pipeline.scratch_file import ScratchFile


def test_what_is_written_anywhere_is_read_back() -> None:
    with ScratchFile() as file:
        assert [file.write(b"abc"), file.write(b"defg"), file.write(b"XY", 1)] == [0, 3, 1]
        assert (bytes(file.read()), bytes(file.read(2, 3))) == (b"aXYdefg", b"Yde")


def test_reading_past_the_end_is_an_error() -> None:
    with ScratchFile() as file:
        file.write(b"abc")
        with pytest.raises(EOFError, match="2 bytes"):
            file.read(1, 4)


def test_a_folder_without_room_is_named_with_what_to_do() -> None:
    """In a process of its own: the limit holds for all of its files."""
    code = """
        import resource, signal
        from lorabatch.pipeline.scratch_file import ScratchFile

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with ScratchFile() as file:
            file.write(bytes(10_000))
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("lorabatch.jobs.errors.StorageError: temporary folder")
    assert "File too large" in told
    assert "TMPDIR" in told
