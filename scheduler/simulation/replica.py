"""A simulated replica: the real batching policy on rows whose steps take the cost model's seconds.

One `step` may stand for several forward passes (a *leap*). Where nothing can change meanwhile, a leap is exact: it
ends when the first row ends. A coarse replica always leaps `leap_steps` passes; rows that end inside leave their
place empty until its end, so it overstates time slightly and runs many times faster.

True lengths come from the workload, and so does the part of a prompt that need not be computed; a replica that meets
a shared prefix first does not pay for it again. An adapter is fetched ahead, beside the work, or when its first row is
admitted, which delays the step (`SimulatedMemory`). `Passes` are the forward passes of one step and their seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..batching import Batcher, BatchView, FreeMemory, StepPlan, all_unmerged, without_vain_merge
from ..cost import AdapterSource, CostModel, StepLoad, lora_load, prompt_pairs
from ..workload import AdapterInfo, Workload
from .timeline import Timeline


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """`max_step_tokens`: prompt tokens admitted per pass beside the decoding rows (at least one row always).

    `kv_tokens`: KV slots, reserved per row up to its `max_tokens`; None: endless. `adapter_slots`: adapters resident
    at once, least recently used goes first; None: endless. `look_ahead`: waiting rows the batcher sees.
    """

    max_batch_rows: int = 64
    max_step_tokens: int = 2048
    kv_tokens: int | None = None
    adapter_slots: int | None = None
    adapter_source: AdapterSource = "host"
    look_ahead: int = 512
    leap_steps: int = 1
    is_coarse: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """`end_s`: when the step (or leap) is over. `finished` int64: rows that ended in it."""

    end_s: float
    finished: NDArray[np.int64]


class SimulatedReplica:
    """One engine of the simulator. Row numbers are the workload's; `number` is its place in the timeline."""

    def __init__(
        self,
        number: int,
        workload: Workload,
        cost: CostModel,
        batcher: Batcher,
        settings: ReplicaSettings,
        timeline: Timeline,
    ) -> None:
        assert workload.output_tokens is not None, "a simulation needs the true output lengths"
        self.number = number
        self.waiting: NDArray[np.int64] = np.zeros(0, np.int64)
        self.running: NDArray[np.int64] = np.zeros(0, np.int64)
        self._remaining: NDArray[np.int64] = np.zeros(0, np.int64)
        self._context: NDArray[np.int64] = np.zeros(0, np.int64)
        self._workload, self._output = workload, workload.output_tokens
        self._computed = workload.computed_prompt_tokens
        self._ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)
        self._cost, self._batcher, self._settings, self._timeline = cost, batcher, settings, timeline
        # Tokens that rows on loan had generated elsewhere; they are prefilled again with the prompt.
        self._brought: dict[int, int] = {}
        self._merged: int | None = None
        self._has_merged = False
        self._memory = SimulatedMemory(workload.adapters, cost, settings.adapter_source, settings.adapter_slots)

    @property
    def num_rows(self) -> int:
        """Rows waiting and running."""
        return len(self.waiting) + len(self.running)

    @property
    def resident(self) -> list[int]:
        """Adapters in its memory."""
        return self._memory.resident

    @property
    def running_tokens(self) -> int:
        """Tokens that running rows have generated so far."""
        return int((self._context - self._workload.prompt_tokens[self.running]).sum())

    def add(self, rows: NDArray[np.int64]) -> None:
        """Rows join the end of the queue."""
        self.waiting = np.concatenate([self.waiting, rows])

    def take_waiting(self, adapter: int, num_rows: int) -> NDArray[np.int64]:
        """Remove and return up to `num_rows` waiting rows of one adapter, the last to arrive first."""
        positions = np.flatnonzero(self._workload.adapter_index[self.waiting] == adapter)[-num_rows:]
        taken = self.waiting[positions]
        self.waiting = np.delete(self.waiting, positions)
        return taken

    def hand_over(self, rows: NDArray[np.int64], num_rows: int) -> dict[int, int]:
        """Remove up to `num_rows` of `rows`, waiting ones first, then those with most left; row -> tokens generated so
        far.
        """
        waiting = self.waiting[np.isin(self.waiting, rows)][::-1][:num_rows].tolist()
        self.waiting = self.waiting[~np.isin(self.waiting, waiting)]
        handed = {row: self._brought.pop(row, 0) for row in waiting}
        positions = np.flatnonzero(np.isin(self.running, rows))
        positions = positions[np.argsort(-self._remaining[positions], kind="stable")][: num_rows - len(waiting)]
        generated = self._context[positions] - self._workload.prompt_tokens[self.running[positions]]
        handed |= dict(zip(self.running[positions].tolist(), generated.tolist(), strict=True))
        self.running, self._remaining, self._context = (
            np.delete(array, positions) for array in (self.running, self._remaining, self._context)
        )
        return handed

    def take_over(self, handed: dict[int, int]) -> None:
        """Rows another replica has begun join the queue with what they have generated."""
        self._brought |= handed
        self.add(np.fromiter(handed, dtype=np.int64))

    def drop(self, row: int) -> None:
        """A row on loan is not wanted here any more."""
        self._brought.pop(row, None)
        self.waiting = self.waiting[self.waiting != row]
        stays = self.running != row
        self.running, self._remaining, self._context = (
            array[stays] for array in (self.running, self._remaining, self._context)
        )

    def clear(self) -> NDArray[np.int64]:
        """Lose everything; returns the rows that were here."""
        lost = np.concatenate([self.waiting, self.running])
        self.waiting = self.running = self._remaining = self._context = np.zeros(0, np.int64)
        self._merged, self._has_merged, self._brought = None, False, {}
        self._memory.clear()
        return lost

    def fetch(self, adapter: int, now_s: float, source: AdapterSource) -> None:
        """Begin to load an adapter beside the work."""
        self._memory.fetch(adapter, now_s, source)

    def step(self, now_s: float, until_s: float = float("inf")) -> StepOutcome:
        """Run one step, or one leap that ends about `until_s` at the latest. There must be rows."""
        seen = self.waiting[: self._settings.look_ahead]
        view = self._view(seen)
        plan = self._batcher.next_step(view)
        admitted = self._admissible(plan, seen)
        if not plan.serve.any() and len(admitted) == 0:
            # Paused rows hold the memory that the policy wants for others: let them finish.
            plan = all_unmerged(view, np.zeros(0, np.int64))
        rows = np.concatenate([self.running[plan.serve], admitted])
        plan = without_vain_merge(plan, self._merged, self._workload.adapter_index[rows])
        overhead_s = self._switch(plan.merged_adapter) + self._load(rows, now_s)
        is_served = self._join(plan.serve, plan.admit[: len(admitted)])
        passes = self._passes(plan, is_served, len(admitted), now_s, until_s)
        return self._advance(now_s, overhead_s, is_served, len(admitted), passes)

    def _view(self, seen: NDArray[np.int64]) -> BatchView:
        """What the batcher sees."""
        adapters, kv_tokens, memory = self._workload.adapter_index, self._settings.kv_tokens, None
        if kv_tokens is not None:
            free = max(0, kv_tokens - int(self._reserved(self.running).sum()))
            memory = FreeMemory((free,), self._reserved(seen).astype(np.int64))
        view = BatchView(adapters[self.running], adapters[seen], self._settings.max_batch_rows, self._merged)
        return replace(view, paused_steps=self._timeline.paused_steps[self.running], memory=memory)

    def _admissible(self, plan: StepPlan, seen: NDArray[np.int64]) -> NDArray[np.int64]:
        """The plan's admissions as far as this step's tokens and the KV memory reach."""
        rows = seen[plan.admit]
        if len(rows) == 0:
            return rows
        budget = self._settings.max_step_tokens - int(plan.serve.sum())
        fits = np.cumsum(self._computed[rows]) <= budget
        fits[0] |= not plan.serve.any()
        if self._settings.kv_tokens is not None:
            held = int(self._reserved(self.running).sum())
            has_room = held + np.cumsum(self._reserved(rows)) <= self._settings.kv_tokens
            has_room[0] |= len(self.running) == 0
            fits &= has_room
        num_admitted = len(fits) if fits.all() else int(np.argmin(fits))
        return rows[:num_admitted]

    def _reserved(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        return self._workload.prompt_tokens[rows] + self._workload.max_tokens[rows]

    def _switch(self, merged: int | None) -> float:
        seconds = self._cost.merge_s if merged != self._merged else 0.0
        if merged is not None and not self._has_merged:
            seconds += self._cost.first_merge_s
            self._has_merged = True
        self._merged = merged
        self._timeline.switch_s[self.number] += seconds
        return seconds

    def _load(self, rows: NDArray[np.int64], now_s: float) -> float:
        """Seconds until the adapters of these rows are there."""
        needed = np.unique(self._workload.adapter_index[rows])
        seconds = self._memory.wait_s(needed[needed >= 0].tolist(), now_s)
        timeline = self._timeline
        timeline.load_s[self.number] += seconds
        timeline.peak_adapters[self.number] = max(timeline.peak_adapters[self.number], len(self._memory.resident))
        return seconds

    def _join(self, serve: NDArray[np.bool_], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Waiting rows at these positions become the last running ones; returns who takes part, `[num_running]`."""
        if len(positions) == 0:
            return serve
        admitted = self.waiting[positions]
        stays = np.ones(len(self.waiting), dtype=bool)
        stays[positions] = False
        self.waiting = self.waiting[stays]
        self.running = np.concatenate([self.running, admitted])
        brought = np.array([self._brought.pop(int(row), 0) for row in admitted] if self._brought else 0)
        left = np.maximum(1, self._output[admitted] - brought)
        self._remaining = np.concatenate([self._remaining, left])
        self._context = np.concatenate([self._context, self._workload.prompt_tokens[admitted] + brought])
        return np.concatenate([serve, np.ones(len(admitted), bool)])

    def _passes(
        self, plan: StepPlan, is_served: NDArray[np.bool_], num_admitted: int, now_s: float, until_s: float
    ) -> int:
        """Forward passes this step stands for."""
        limit = self._settings.leap_steps
        if limit == 1:
            return 1
        if self._settings.is_coarse:
            return int(min(limit, self._remaining[is_served].max()))
        is_full = len(self.running) >= self._settings.max_batch_rows
        if num_admitted or not is_served.all() or not (is_full or len(self.waiting) == 0):
            return 1
        passes = int(min(limit, self._remaining.min()))
        if not is_full and until_s < float("inf"):
            load = StepLoad(decode_rows=len(self.running), context_tokens=self._context.sum())
            passes = min(passes, max(1, int((until_s - now_s) / float(self._cost.step_seconds(load)))))
        return passes

    def _advance(
        self, now_s: float, overhead_s: float, is_served: NDArray[np.bool_], num_admitted: int, passes: int
    ) -> StepOutcome:
        """Every served row gets up to `passes` tokens; the first of an admitted row comes with its prefill."""
        rows = self.running[is_served]
        tokens = np.minimum(self._remaining[is_served], passes)
        num_passes = int(tokens.max())
        context, first_new = self._context[is_served], len(rows) - num_admitted
        prompts, stored = context[first_new:], self._stored(rows[first_new:], context[first_new:])
        done = Passes(num_passes, self._workload.adapter_index[rows], tokens, context, prompts, stored)
        seconds = overhead_s + done.seconds(self._cost, self._ranks, self._merged)
        # Linear in between: exact when all rows of the leap last to its end.
        finish_s = now_s + seconds * tokens / num_passes
        timeline = self._timeline
        new = rows[first_new:]
        # A row on loan was admitted, and had its first token, where it came from.
        fresh = new[np.isnan(timeline.admit_s[new])]
        timeline.admit_s[fresh] = now_s
        timeline.first_token_s[fresh] = now_s + seconds / num_passes
        timeline.replica[new] = self.number
        self._remaining[is_served] -= tokens
        self._context[is_served] += tokens
        is_done = self._remaining[is_served] <= 0
        finished = rows[is_done]
        timeline.finish_s[finished] = finish_s[is_done]
        timeline.busy_s[self.number] += seconds
        timeline.num_steps[self.number] += num_passes
        timeline.row_steps[self.number] += int(tokens.sum())
        timeline.prompt_tokens[self.number] += int((prompts - stored).sum())
        timeline.paused_steps[self.running[~is_served]] += num_passes
        timeline.merged_steps[self.number] += num_passes * (self._merged is not None)
        stays = self._remaining > 0
        self.running, self._remaining, self._context = (
            self.running[stays],
            self._remaining[stays],
            self._context[stays],
        )
        return StepOutcome(now_s + seconds, finished)

    def _stored(self, rows: NDArray[np.int64], context: NDArray[np.int64]) -> NDArray[np.int64]:
        """How much of what new rows bring is copied; rows on loan compute all of it."""
        is_fresh = context == self._workload.prompt_tokens[rows]
        return np.where(is_fresh, context - self._computed[rows], 0).astype(np.int64)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books of running rows disagree."""
        sizes = {len(self.running), len(self._remaining), len(self._context)}
        assert len(sizes) == 1, f"running arrays of different lengths {sizes}"
        assert (self._remaining > 0).all(), "a finished row is still running"
        both = np.intersect1d(self.running, self.waiting)
        assert len(both) == 0, f"rows {both[:5]} wait and run"


class SimulatedMemory:
    """The adapters of a simulated replica. `source`: of those that were not fetched ahead. `slots`: adapters at once,
    least recently used goes first; None: endless.
    """

    def __init__(
        self, adapters: Sequence[AdapterInfo], cost: CostModel, source: AdapterSource, slots: int | None
    ) -> None:
        self._adapters, self._cost, self._source, self._slots = adapters, cost, source, slots
        # Least recently used first.
        self._resident: dict[int, None] = {}
        # Adapters on their way -> when each is there; one after the other.
        self._arriving: dict[int, float] = {}
        self._link_free_s = 0.0

    @property
    def resident(self) -> list[int]:
        """Adapters that are there, least recently used first."""
        return list(self._resident)

    def fetch(self, adapter: int, now_s: float, source: AdapterSource) -> None:
        """Begin to load an adapter beside the work."""
        if adapter not in self._resident and adapter not in self._arriving:
            self._link_free_s = max(now_s, self._link_free_s) + self._load_s(adapter, source)
            self._arriving[adapter] = self._link_free_s

    def clear(self) -> None:
        """Everything is lost."""
        self._resident, self._arriving, self._link_free_s = {}, {}, 0.0

    def wait_s(self, needed: Sequence[int], now_s: float) -> float:
        """Seconds until these are all there; afterwards they are, and others may have gone for them."""
        seconds = 0.0
        for adapter in needed:
            if adapter in self._resident:
                del self._resident[adapter]
            elif adapter in self._arriving:
                seconds += max(0.0, self._arriving.pop(adapter) - now_s - seconds)
            else:
                seconds += self._load_s(adapter, self._source)
            self._resident[adapter] = None
        while self._slots is not None and len(self._resident) > max(self._slots, len(needed)):
            del self._resident[next(iter(self._resident))]
        return seconds

    def _load_s(self, adapter: int, source: AdapterSource) -> float:
        return self._cost.load_seconds(self._adapters[adapter].weight_bytes, source)


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """`number` forward passes of one batch. `adapter`, `tokens`, `context` `[num_rows]`: of each row, how many tokens
    it gets, and the KV slots that the first pass reads. The last rows are new: `prompts` `[num_new]` are the tokens of
    their prompts, `stored` those among them that are copied from rows that begin alike.
    """

    number: int
    adapter: NDArray[np.int32]
    tokens: NDArray[np.int64]
    context: NDArray[np.int64]
    prompts: NDArray[np.int64]
    stored: NDArray[np.int64]

    def seconds(self, cost: CostModel, ranks: NDArray[np.float64], merged: int | None) -> float:
        """All passes together; the cost model is linear, so sums are enough."""
        new, prompts = len(self.prompts), (self.prompts - self.stored).astype(np.float64)
        computed = self.tokens.astype(np.float64)
        # The first token of a new row comes out of its prefill.
        decode_rows = float(computed.sum()) - new
        if new:
            computed[-new:] += prompts - 1
        unmerged = lora_load(self.adapter, computed, ranks, merged_adapter=merged, kernel=cost.kernel)
        load = replace(
            unmerged,
            prefill_tokens=float(prompts.sum()),
            prefill_pairs=float(prompt_pairs(prompts, self.stored).sum()),
            decode_rows=decode_rows,
            context_tokens=float((self.context * self.tokens + self.tokens * (self.tokens - 1) / 2).sum()),
        )
        again = StepLoad(num_adapters=unmerged.num_adapters, rank_sum=unmerged.rank_sum)
        repeated = float(cost.step_seconds(again)) * (self.number - 1) if self.number > 1 else 0.0
        return float(cost.step_seconds(load)) + repeated
