"""Parts of running a shard that jobs with one request a row and jobs with stages share."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from ...engine.request import ExportedRow
from ...engine.server.frames import RegisterAdapter
from ...scheduler.messages import AdapterFetch, RunShard
from ...scheduler.planning.bound import JobWork
from ..dataset.answers import BegunRow, RowAnswer, encode_begun
from ..supervisor.open_shard import OpenShard
from .plugin import RunPlugin

FLUSH_INTERVAL_S = 1.0
# Seconds between two turns of a shard's loop after which the output is checked again: the worker was stopped, or
# storage hung, and the output may be another job's by now.
PAUSE_S = 10.0


class AwaitedAdapters:
    """The adapters of a shard, which come one after another, and the rows that wait for them.

    `adapter_ids`: in the order in which they are fetched. `fetches`: as `RunPlugin.adapters` takes them.
    """

    def __init__(self, plugin: RunPlugin, adapter_ids: Iterable[str], fetches: Collection[AdapterFetch]) -> None:
        self._plugin = plugin
        self._num_announced = 0
        self._needed = dict.fromkeys(adapter_ids)
        self._arriving = plugin.adapters(self._needed, fetches)
        self._fresh: list[RegisterAdapter] = []
        # Rows whose adapters have come and that are not given to the engine yet, and the time since which there may be
        # some.
        self._come: list[ExportedRow] = []
        self._since_s = time.monotonic()
        #: Adapters that have come, by identity; a clause in place of one that cannot be used says why.
        self.found: dict[str, RegisterAdapter | str] = {}
        #: Rows whose adapters have not come yet.
        self.rows: list[ExportedRow] = []

    def ready(self, rows: Iterable[ExportedRow]) -> list[ExportedRow]:
        """Rows of the base model and of adapters that have come; the others wait."""
        ready: list[ExportedRow] = []
        for row in rows:
            adapter_id = row.request.adapter_id
            (ready if adapter_id is None or adapter_id in self.found else self.rows).append(row)
        return ready

    def come(self) -> list[ExportedRow]:
        """Rows that wait no more, after a fraction of a second in which adapters may come: a batch of rows, those of a
        second, or the last. A step takes about as long for a few rows as for many. Raises what `RunPlugin.adapters`
        raises.
        """
        found = next(self._arriving, None)
        if found is None:
            assert self._needed.keys() <= self.found.keys(), "an adapter has not come"
        if found != {}:
            self.found |= found or {}
            self._fresh += [adapter for adapter in (found or {}).values() if not isinstance(adapter, str)]
            waiting, self.rows = self.rows, []
            self._come += self.ready(waiting)
        now_s = time.monotonic()
        is_enough = len(self._come) >= self._plugin.batch_rows or not self.rows
        if not is_enough and now_s - self._since_s < FLUSH_INTERVAL_S:
            return []
        come, self._come, self._since_s = self._come, [], now_s
        return come

    def open(self, command: RunShard, rows: list[ExportedRow], rows_left: int | None = None) -> OpenShard:
        """Open a shard with rows that wait no more; those that wait are announced. `rows_left`: as `OpenShard` takes
        it.
        """
        self._num_announced = self._num_waiting
        return self._plugin.engine.open(
            command.shard_id, rows, self._take(), command.rows_behind, rows_left, num_announced=self._num_announced
        )

    def extend(self, shard: OpenShard, rows: list[ExportedRow]) -> None:
        """Give an open shard further rows, which wait no more, and announce those that wait."""
        shard.announce(self._num_waiting + len(rows) - self._num_announced)
        self._num_announced = self._num_waiting
        if rows:
            self._plugin.engine.extend(shard, rows, self._take())

    @property
    def _num_waiting(self) -> int:
        return len(self.rows) + len(self._come)

    def _take(self) -> list[RegisterAdapter]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def close(self) -> None:
        """Wait for no further adapters, and let the folders of those that have come go."""
        self._arriving.close()
        self._plugin.release(self.found.values())


def journals_of(run_id: str) -> str:
    """Beginning of the names of a run's journals."""
    return f"{run_id.rpartition('-')[2]}-"


def keep_begun(plugin: RunPlugin, shard: OpenShard, fingerprint_of: Callable[[str], bytes], journal: str) -> None:
    """Journal begun rows of a shard that has failed, with their tokens, from which the next attempt goes on.
    `fingerprint_of`: of a request, by its id. Raises `OutputConflictError` when the output is another job's by now.
    """
    begun = [
        BegunRow(
            fingerprint_of(row.request.request_id),
            row.request.adapter_id,
            row.token_ids,
            row.token_logprobs,
            row.top_logprobs,
            row.teacher,
        )
        for row in shard.begun
    ]
    if begun and shard.shard_id is not None:
        plugin.check_output()
        plugin.store.append_wip(shard.shard_id, journal, encode_begun(begun))


def work_of(answers: Mapping[str, RowAnswer], begun: Mapping[str, ExportedRow]) -> JobWork:
    """Work that engines did for these answers. `begun`: rows that had tokens before. Both by request id. The tokens of
    a given completion but the last are computed as a prompt's.
    """
    done = [(answer, begun.get(request_id)) for request_id, answer in answers.items() if answer.error is None]
    adapters = list(dict.fromkeys(answer.adapter_sha256 for answer, _ in done))
    slot = [adapters.index(answer.adapter_sha256) for answer, _ in done]
    prompt = np.array([answer.prompt_tokens for answer, _ in done], dtype=np.float64)
    prompt += [len(row.token_ids) if row is not None and row.request.sampling.is_given else 0 for _, row in done]
    copied = np.array([answer.reused_prompt_tokens or 0 for answer, _ in done], dtype=np.float64)
    # The first token comes out of the prompt and the tokens that a row had before.
    first = np.array([1 if before is None else len(before.token_ids) + 1 for _, before in done], dtype=np.float64)
    decoded = np.array([answer.completion_tokens for answer, _ in done], dtype=np.float64) - first
    return JobWork.of_rows(
        adapters, np.array(slot, dtype=np.int64), prompt, np.maximum(prompt - copied, 0.0), np.maximum(decoded, 0.0)
    )
