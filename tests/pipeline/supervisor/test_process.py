"""Messages to a process that reads, to one that does not, and to one that is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import IO

import pytest

from lorabatch.engine.server.frames import TO_ENGINE, AbortRows, Heartbeat, read_frame
from lorabatch.pipeline.supervisor.process import FrameWriter
from lorabatch.pipeline.supervisor.spare import engine_environment
from lorabatch.system.codec import MessageError

# Together a megabyte: a pipe takes 64 KiB.
MESSAGES = [AbortRows((str(i), "x" * 1000)) for i in range(1000)]


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """What a process would read, and what its supervisor writes to."""
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as inlet, os.fdopen(writes, "wb") as outlet:
        yield inlet, outlet


def test_messages_arrive_whole_and_in_order_however_late_they_are_read(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    inlet, outlet = pipe
    writer = FrameWriter(outlet)
    for message in MESSAGES:
        writer.send(message)
    writer.close()
    assert not outlet.closed
    assert [read_frame(inlet, TO_ENGINE) for _ in MESSAGES] == MESSAGES
    assert read_frame(inlet, TO_ENGINE) is None
    writer.join(10)
    assert outlet.closed


def test_a_write_that_waits_ends_with_its_reader(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    inlet, outlet = pipe
    before = set(threading.enumerate())
    writer = FrameWriter(outlet)
    (thread,) = set(threading.enumerate()) - before
    for message in MESSAGES:
        writer.send(message)
    assert thread.is_alive()
    inlet.close()
    writer.join(10)
    assert not thread.is_alive()
    assert outlet.closed
    # Later messages are dropped.
    writer.send(MESSAGES[0])
    writer.close()


def test_a_message_of_the_other_direction_is_the_senders_error(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    writer = FrameWriter(pipe[1])
    with pytest.raises(MessageError, match="Heartbeat"):
        writer.send(Heartbeat(0.0))  # type: ignore[arg-type]
    writer.close()
    writer.join(10)


def test_an_engine_has_its_own_threads_and_keeps_its_memory() -> None:
    worker = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = engine_environment(worker, 4)
    assert (found["PATH"], found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("/bin", "4", "4")
    assert "MALLOC_TRIM_THRESHOLD_" not in found


def test_without_a_number_of_threads_the_workers_are_left_as_they_are() -> None:
    assert engine_environment({"OMP_NUM_THREADS": "1"}, None)["OMP_NUM_THREADS"] == "1"


def test_memory_of_a_gpu_grows_in_place_unless_the_user_has_said_how() -> None:
    assert engine_environment({}, 2)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    found = engine_environment({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, 2)
    assert {n: v for n, v in found.items() if n.endswith("ALLOC_CONF")} == {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}


def test_threads_that_wait_sleep_soon_unless_the_user_has_said_how_they_wait() -> None:
    assert int(engine_environment({}, 2)["GOMP_SPINCOUNT"]) < 100_000
    assert engine_environment({"GOMP_SPINCOUNT": "7"}, 2)["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in engine_environment({"OMP_WAIT_POLICY": "active"}, 2)
