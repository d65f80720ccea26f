"""The clock of the machine is set back by an hour in mid-job: no row is lost or wrong, and no time is negative."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from echo_job import ECHO_FOLDER, EchoJob, make_rows

pytestmark = pytest.mark.long
# Adds the number in a file to the time of day in each process that loads it; the monotonic clock stays as it is.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    char text[32] = {0};
    int file = clock == CLOCK_REALTIME ? open(getenv("CLOCK_OFFSET"), O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        if (read(file, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
        close(file);
    }
    return status;
}
"""


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "clock.c").write_text(SHIM)
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    return library


@pytest.mark.parametrize("num_steps", [1, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "is resumed"])
def test_a_job_whose_clock_is_set_back_gives_the_same_rows(
    echo_job: EchoJob, shim: Path, is_killed: bool, num_steps: int
) -> None:
    """By an hour, once, or forty times within four seconds, so that messages of all processes wait for the old time."""
    rows = make_rows(160)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.05)
    offset, said = echo_job.folder / "offset", echo_job.folder / "said"
    offset.write_text("0")
    environment = {**os.environ, "LD_PRELOAD": str(shim), "CLOCK_OFFSET": str(offset)}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in echo_job.options(max_tokens=20).items()]
    words = [sys.executable, str(ECHO_FOLDER / "echo_cli.py"), "run", *options]
    with said.open("w") as file:
        client = subprocess.Popen(words, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        pause, give_up_s = threading.Event(), time.monotonic() + 300
        while not re.search(r" [1-9]\d*/\d+ shards", said.read_text()):
            assert client.poll() is None, said.read_text()
            assert time.monotonic() < give_up_s, said.read_text()
            pause.wait(0.05)
        if is_killed:
            os.killpg(client.pid, signal.SIGKILL)
        for step in range(num_steps):
            # in place of the old file at once, which processes read at every look at the clock
            (echo_job.folder / "next").write_text(str(-3600 * (step + 1)))
            os.replace(echo_job.folder / "next", offset)
            pause.wait(0.1)
        code = client.wait(300)
    finally:
        if client.poll() is None:
            os.killpg(client.pid, signal.SIGKILL)
            client.wait()
    if is_killed:
        code = subprocess.run(words, env=environment, capture_output=True, timeout=300, check=False).returncode
    assert code == 0, said.read_text()
    echo_job.assert_answered(rows, max_tokens=20)
    assert json.loads((echo_job.output / "_lorabatch" / "summary.json").read_text())["seconds"] > 0
