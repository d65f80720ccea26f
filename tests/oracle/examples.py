"""How many examples hypothesis draws for a slow property: all in `make test-all`, a fifth of them in `make test`."""

from __future__ import annotations

from hypothesis import settings


def examples(num_long: int) -> int:
    """`num_long` under `--hypothesis-profile=long`, else a fifth."""
    return num_long if settings.get_current_profile_name() == "long" else max(1, num_long // 5)
