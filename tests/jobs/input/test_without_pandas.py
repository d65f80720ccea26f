"""PyArrow without pandas at the start of a process, and with it as soon as it is asked for."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import pyarrow as pa
from lorabatch.jobs.input.without_pandas import leave_out_pandas
leave_out_pandas()
table = pa.table({"text": ["a", None], "number": [1, 2]})
assert "pandas" not in sys.modules
assert sys.meta_path[0] is not None and not any("without_pandas" in str(type(f)) for f in sys.meta_path)
frame = table.to_pandas()
import pandas as pd
assert type(frame) is pd.DataFrame and len(frame) == 2
assert pa.array(pd.Series([1.0, None])).null_count == 1
"""


def test_arrays_are_made_without_pandas_and_frames_with_it() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
