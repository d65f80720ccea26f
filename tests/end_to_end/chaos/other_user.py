"""Another user of a Dask cluster, as a process: `python other_user.py ADDRESS take|refuse PICK SECONDS`.

"take": a task that sleeps has the thread of one worker. "refuse": the system gives a worker no thread for its next
task, once, and for so long. This stands in for a limit of processes, which root has not.
"""

from __future__ import annotations

import sys
import time

from distributed import Client


def refuse_threads(seconds: float) -> None:
    """Run in a worker's process: threads of Dask's pool do not start."""
    import threading
    import time

    start, until_s = threading.Thread.start, time.monotonic() + seconds

    def start_or_refuse(thread: threading.Thread) -> None:
        if "Dask-Default-Threads" in thread.name:
            if time.monotonic() >= until_s:
                threading.Thread.start = start  # type: ignore[method-assign]
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_or_refuse  # type: ignore[method-assign]


def main() -> None:
    """Do it, and stay as long as it lasts."""
    address, does, pick, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    with Client(address, timeout=60, set_as_default=False) as client:
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            return
        worker = workers[pick % len(workers)]
        if does == "refuse":
            client.run(refuse_threads, seconds, workers=[worker])
        else:
            task = client.submit(time.sleep, seconds, workers=[worker], priority=1000, pure=False)
            task.exception()


if __name__ == "__main__":
    main()
