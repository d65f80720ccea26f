"""How much hypothesis draws for a slow property: all in `make test-all`, a small share of it in `make test`."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def examples(num_long: int) -> int:
    """`num_long` under `--hypothesis-profile=long`, else a fifth."""
    return num_long if _is_long() else max(1, num_long // 5)


def explore(machine: Callable[[], RuleBasedStateMachine], num_short: int, num_steps: int, long_s: float) -> None:
    """Run a machine `num_short` times of at most so many steps; under `--hypothesis-profile=long` for `long_s` seconds.

    Raises what the machine raises, after its shortest story was printed.
    """
    give_up_s = time.monotonic() + long_s
    while True:
        run_state_machine_as_test(
            machine,  # type: ignore[arg-type]
            settings=settings(
                max_examples=20 if _is_long() else num_short,
                stateful_step_count=num_steps,
                deadline=None,
                derandomize=not _is_long(),  # what is found at random is found by who looks for it
                suppress_health_check=list(HealthCheck),
            ),
        )
        if not _is_long() or time.monotonic() > give_up_s:
            return


def _is_long() -> bool:
    return settings.get_current_profile_name() == "long"
