from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lorabatch.scheduler

ROOM = Path(lorabatch.scheduler.__file__).parent
FILES = [path for path in ROOM.rglob("*.py") if path.stem != "__init__"]
MODULES = sorted(".".join(path.relative_to(ROOM).with_suffix("").parts) for path in FILES)


def test_the_whole_room_loads_nothing_heavy_and_nothing_of_the_other_rooms():
    program = "\n".join(
        ["import sys", *(f"import lorabatch.scheduler.{name}" for name in MODULES), "print(*sorted(sys.modules))"]
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("lorabatch.")}
    assert rooms - {"version"} == {"scheduler", "system"}
    assert {"torch", "triton", "dask", "distributed", "pyarrow", "matplotlib"}.isdisjoint(loaded)
