"""Request lengths from a CSV file, as the Azure LLM inference traces have them (Azure public data set, 2023)."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..jobs.errors import JobRequestError

_COLUMNS = ("ContextTokens", "GeneratedTokens")


def read_trace_lengths(path: Path) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Prompt and output tokens of every request, int32 `[num_requests]` each, at least 1.

    Raises `JobRequestError` naming the first line that cannot be read.
    """
    pairs: list[tuple[int, int]] = []
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise JobRequestError(
                    f"trace={str(path)!r}: no column {' and no column '.join(missing)}. Expected a CSV file with "
                    f"{' and '.join(_COLUMNS)}."
                )
            pairs.extend((max(1, int(row[_COLUMNS[0]])), max(1, int(row[_COLUMNS[1]]))) for row in reader)
    except (OSError, UnicodeDecodeError) as error:
        raise JobRequestError(f"trace={str(path)!r}: cannot be read ({error}). Check the path.") from None
    except (ValueError, TypeError) as error:
        raise JobRequestError(f"trace={str(path)!r}: line {len(pairs) + 2} holds no number ({error}).") from None
    if not pairs:
        raise JobRequestError(f"trace={str(path)!r}: holds no requests.")
    prompt, output = np.array(pairs, dtype=np.int32).T
    return prompt, output
