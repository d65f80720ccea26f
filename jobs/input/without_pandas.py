"""`leave_out_pandas`: keeps PyArrow from importing pandas, which takes 0.35 s of a processor in every process of a job.

PyArrow's first `pa.array` imports pandas, to recognise its series. Our processes use no series.
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
    """Makes PyArrow believe that this process has no pandas. `to_pandas` still finds and imports it.

    Only for processes that convert no series of pandas: PyArrow would read the nulls of a series as NaN.
    """
    import pyarrow as pa

    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(absent)
