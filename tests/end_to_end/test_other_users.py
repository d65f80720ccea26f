"""What other users of the machine reach of a running job: its ports, its files."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import stranger
from echo_job import ECHO_FOLDER, EchoJob, make_rows, wait_until

CLI = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all processes of a test put their temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o1777)
    return tmp_path / "scratch"


@contextmanager
def running(job: EchoJob, command: str, background: Path, umask: int = -1) -> Iterator[psutil.Process]:
    """The process whose cluster runs a job, half of its rows answered, until the end of the block."""
    job.write_input(make_rows(64))
    gate = job.folder / "gate"
    job.set_engine(step_s=0.05, gate=str(gate))
    process = start(job, command, umask)
    try:
        if command == "submit":
            assert process.wait(300) == 0
        wait_until(lambda: (state := job.store.read_state()) is not None and state.phase == "running")
        yield psutil.Process(process.pid if command == "run" else background_pid(background))
    finally:
        gate.touch()
        process.wait(300)
    wait_until(job.store.is_finished)


def start(job: EchoJob, command: str, umask: int = -1, **more: str) -> subprocess.Popen[bytes]:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in job.options(**more).items()]
    return subprocess.Popen([*CLI, command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, umask=umask)


def background_pid(state_file: Path) -> int:
    return int(json.loads(state_file.read_text())["pid"])


def listening(process: psutil.Process) -> dict[int, str]:
    """Port -> address of all sockets on which a process and those below it wait for others."""
    family = [process, *process.children(recursive=True)]
    sockets = [socket for one in family for socket in one.net_connections("inet")]
    return {socket.laddr.port: socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def open_to_others(folder: Path) -> list[str]:
    """What other users may list, read or write below a folder, with its permissions."""
    found = []
    for path in folder.iterdir():
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            continue
        if facts.st_mode & 0o077:
            found.append(f"{stat.filemode(facts.st_mode)} {path}")
        if stat.S_ISDIR(facts.st_mode) and facts.st_mode & 0o011:
            found += open_to_others(path)
    return found


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "submit"])
def test_other_users_run_nothing_on_a_clusters_ports_and_read_nothing_there(
    echo_job: EchoJob, background: Path, scratch: Path, command: str
) -> None:
    with running(echo_job, command, background) as process:
        ports = listening(process)
        # A scheduler, its dashboard, two nannies and two workers.
        assert len(ports) >= 6
        assert set(ports.values()) == {"127.0.0.1"}
        assert stranger.reached(ports) == []
    echo_job.assert_answered(make_rows(64))


@pytest.mark.long
@pytest.mark.parametrize("umask", [0o000, pytest.param(0o022, marks=pytest.mark.long)])
def test_files_outside_the_output_are_for_their_owner_alone(
    echo_job: EchoJob, background: Path, scratch: Path, umask: int
) -> None:
    with running(echo_job, "submit", background, umask) as process:
        assert background.stat().st_mode & 0o777 == 0o600
        assert background.parent.stat().st_mode & 0o777 == 0o700
        assert open_to_others(background.parents[2]) == []
        assert open_to_others(scratch) == []
        assert process.is_running()
    assert open_to_others(scratch) == []
    # The output has the permissions that its owner's commands give to all files.
    assert echo_job.output.stat().st_mode & 0o777 == 0o777 & ~umask
    (part, *_) = echo_job.output.glob("part-*.parquet")
    assert part.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.long
def test_an_output_is_as_private_as_the_umask_of_the_command_that_opens_it(
    echo_job: EchoJob, background: Path, scratch: Path, tmp_path: Path
) -> None:
    with running(echo_job, "submit", background, 0o022):
        assert start(echo_job, "submit", 0o077, output=str(tmp_path / "second")).wait(300) == 0
    assert (tmp_path / "second").stat().st_mode & 0o777 == 0o700
