"""The lock among processes: one holder at a time, none for ever. Temporary files, of which none stays for ever."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorabatch.system import local_cache as module
from lorabatch.system.local_cache import file_lock, scratch_folder, temporary_folder

# Adds one to a number in a file, which goes wrong when two do it at once.
_COUNT = """
import sys
from pathlib import Path
from lorabatch.system.local_cache import file_lock
lock, counter = map(Path, sys.argv[1:3])
for _ in range(int(sys.argv[3])):
    with file_lock(lock):
        number = int(counter.read_text())
        counter.write_text(str(number + 1))
"""
_HOLD = """
import sys
from pathlib import Path
from lorabatch.system.local_cache import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

_WORK = """
import sys
from pathlib import Path
from lorabatch.system.local_cache import temporary_folder
with temporary_folder(Path(sys.argv[1]), "work-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_processes_take_turns_and_leave_no_file(tmp_path: Path) -> None:
    lock, counter = tmp_path / "new" / "a.lock", tmp_path / "counter"
    counter.write_text("0")
    command = [sys.executable, "-c", _COUNT, str(lock), str(counter), "300"]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert counter.read_text() == "1200"
    assert not lock.exists()


def test_threads_take_turns(tmp_path: Path) -> None:
    inside: list[int] = []
    pause = threading.Event()

    def enter(_: int) -> None:
        with file_lock(tmp_path / "a.lock"):
            inside.append(1)
            pause.wait(0.001)
            assert len(inside) == 1
            inside.pop()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(200)))


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder, ThreadPoolExecutor(1) as pool:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waiting = pool.submit(lambda: file_lock(lock).__enter__())
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        holder.kill()
        waiting.result(timeout=20)


def test_where_no_lock_can_be_had_the_work_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with file_lock(tmp_path / "a.lock"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / "file" / "a.lock"):
        raise ZeroDivisionError


def test_a_scratch_folder_that_another_user_has_made_or_may_enter_is_not_used(tmp_path: Path) -> None:
    own = scratch_folder(tmp_path)
    assert (own.parent, own.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert scratch_folder(tmp_path) == own
    own.chmod(0o770)
    other = scratch_folder(tmp_path)
    assert (other != own, other.stat().st_mode & 0o777) == (True, 0o700)
    own.rmdir()
    own.symlink_to(tmp_path)
    assert scratch_folder(tmp_path) == other


def test_a_temporary_folder_goes_with_its_block_or_after_its_process_is_gone(tmp_path: Path) -> None:
    (tmp_path / "work-file").touch()
    (tmp_path / "work-link").symlink_to(tmp_path)
    others = {"work-file", "work-link"}
    command = [sys.executable, "-c", _WORK, str(tmp_path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None
        assert living.stdout is not None
        left, used = (Path(process.stdout.readline().strip()) for process in (killed, living))
        killed.kill()
        killed.wait(60)
        assert (left / "file").exists()
        with temporary_folder(tmp_path, "other-") as folder:
            assert {left, used, folder} <= set(tmp_path.iterdir())
        with temporary_folder(tmp_path, "work-") as folder:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert {path.name for path in tmp_path.iterdir()} == others | {used.name, folder.name}
        assert (used / "file").exists()
        living.communicate(timeout=60)
    assert {path.name for path in tmp_path.iterdir()} == others


def test_temporary_folders_are_made_and_removed_by_many_processes_at_once(tmp_path: Path) -> None:
    """Whoever looks for what was left meets folders that are just being made."""

    def use(number: int) -> None:
        for _ in range(20):
            with temporary_folder(tmp_path, "work-") as folder:
                (folder / str(number)).write_text("here")
                assert (folder / str(number)).read_text() == "here"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert not list(tmp_path.iterdir())
