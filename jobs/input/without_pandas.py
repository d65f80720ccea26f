"""`leave_out_pandas`: keeps PyArrow from importing pandas, which takes 0.35 s of a processor in every process of a job.

PyArrow's first `pa.array` looks for pandas, to know its series when it sees them. Processes of ours have none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType


class _Absent:
    """A finder of modules that denies pandas."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"no {name} at the start", name=name)


def leave_out_pandas() -> None:
    """Have PyArrow take this process for one without pandas. `to_pandas` finds it all the same, and imports it then.

    Only for processes that convert no series of pandas: nulls of one that is not known as such are read as NaN.
    """
    import pyarrow as pa

    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(absent)
