from __future__ import annotations

from pathlib import Path

import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.pipeline.trace_file import read_trace_lengths


def test_lengths_are_read_in_pairs_and_are_at_least_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,374,44\n2023,396,0\n")
    prompt, output = read_trace_lengths(path)
    assert (prompt.tolist(), output.tolist()) == ([374, 396], [44, 1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", "no column ContextTokens and no column GeneratedTokens"),
        ("ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("ContextTokens,GeneratedTokens\n1,2\n3,many\n", "line 3 holds no number"),
        ("ContextTokens,GeneratedTokens\n1\n", "line 2 holds no number"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(JobRequestError, match=expected):
        read_trace_lengths(tmp_path / "trace.csv")
