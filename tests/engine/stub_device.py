"""A device that computes nothing: its steps take seconds of a clock of its own, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from lorabatch.engine.models.step_batch import StepEntry
from lorabatch.engine.runner.backend import CpuBackend, MakeBackend
from lorabatch.engine.runner.runner import LaunchedStep
from lorabatch.engine.runner.sampler import SampledTokens
from lorabatch.scheduler.costs.fitting import StepSample

EOS, OTHER = 2, 7


class StubDevice:
    """A `StepRunner` and a clock. Only the device's steps and `wait` let time pass.

    `seconds_of`: of a step. `answer_tokens`: by row, the tokens after which its answer ends; others go on.
    """

    def __init__(self, seconds_of: Callable[[Items[StepEntry]], float], steps_ahead: int = 1) -> None:
        self.steps_ahead = steps_ahead
        self.answer_tokens: dict[str, int] = {}
        #: Tokens and seconds of each step, in the order of launching.
        self.steps: list[tuple[int, float]] = []
        self._seconds_of = seconds_of
        self._now_s = self._free_s = 0.0

    def clock(self) -> float:
        """Seconds on the host."""
        return self._now_s

    def wait(self, seconds: float, *, is_busy: bool) -> None:
        """Let the host pause. `is_busy`: no longer than until the device has done all steps."""
        self._now_s += min(seconds, max(0.0, self._free_s - self._now_s)) if is_busy else seconds

    def launch(self, entries: Items[StepEntry]) -> LaunchedStep:
        """See `StepRunner`."""
        seconds = self._seconds_of(entries)
        self.steps.append((sum(entry.num_tokens for entry in entries), seconds))
        self._free_s = ends_s = max(self._now_s, self._free_s) + seconds
        sampled = tuple(entry.sequence for entry in entries if entry.yields_token)
        ids = [EOS if s.num_generated + 1 == self.answer_tokens.get(s.request.request_id) else OTHER for s in sampled]

        def read() -> SampledTokens:
            self._now_s = max(self._now_s, ends_s)
            return SampledTokens(ids, [0.0] * len(ids), [()] * len(ids), [()] * len(ids))

        if not self.steps_ahead:
            read()
        return LaunchedStep(sampled, read)


def backend_of(runner: Any) -> MakeBackend:
    """Makes backends of block tables whose steps `runner` runs."""

    class StubBackend(CpuBackend):
        """Loads a model on the CPU and computes nothing with it."""

        run_pages, has_block_tables, reads_other_rows = 1, True, False

        def runner(self, *_: Any) -> Any:
            return runner

    return StubBackend


def tokens_and_seconds(sample: StepSample) -> tuple[float, float]:
    """A sample in the terms of `StubDevice.steps`."""
    return float(sample.load.prefill_tokens + sample.load.decode_rows), sample.seconds  # type: ignore[operator,arg-type]
