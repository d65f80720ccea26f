"""What is too much for memory is written and read back whole, or the user hears where room is missing."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator

import pytest

from lorabatch.jobs.errors import StorageError
from lorabatch.pipeline.scratch_file import ScratchFile


@pytest.fixture
def files_of_4_kb_at_most() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_is_written_anywhere_is_read_back() -> None:
    with ScratchFile() as file:
        assert [file.write(b"abc"), file.write(b"defg"), file.write(b"XY", 1)] == [0, 3, 1]
        assert (bytes(file.read()), bytes(file.read(2, 3))) == (b"aXYdefg", b"Yde")


def test_reading_past_the_end_is_an_error() -> None:
    with ScratchFile() as file:
        file.write(b"abc")
        with pytest.raises(EOFError, match="2 bytes"):
            file.read(1, 4)


@pytest.mark.usefixtures("files_of_4_kb_at_most")
def test_a_folder_without_room_is_named_with_what_to_do() -> None:
    with ScratchFile() as file, pytest.raises(StorageError, match=r"File too large.*TMPDIR"):
        file.write(bytes(10_000))
