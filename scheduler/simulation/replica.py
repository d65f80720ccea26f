"""A simulated replica: the real batching policy on rows whose steps take the cost model's seconds.

Admission and steps follow the engine's rules (`engine/batching`). A row enters when the pages of its prompt and all of
`max_tokens` are free and its adapter is there. Where rows grow, those of the tokens that it is expected to generate are
enough: it takes more as it grows, and when none is left the rows that came last are preempted.

A step holds one token of each decoding row, then as much of the prompts as its tokens allow, in order of admission: a
prompt that is longer is begun.
An absent adapter is read beside the steps, and its rows wait, unless nothing else can run. Not modelled: free
pages that lie apart, between which rows on CPUs do not fit, and the pages that a prefix cache holds.

One `step` may stand for several forward passes (a *leap*). Where nothing can change meanwhile, a leap is exact: it
ends when the first row ends. A coarse replica always leaps `leap_steps` passes; rows that end inside leave their
place empty until its end, so it overstates time slightly and runs many times faster.

True lengths come from the workload, and so does the part of a prompt that need not be computed; a replica that meets
a shared prefix first does not pay for it again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batchers.batching import (
    Batcher,
    BatchView,
    FreeMemory,
    StepPlan,
    all_unmerged,
    without_vain_merge,
)
from ..costs.cost import AdapterSource, CostModel, StepLoad
from ..estimates.lengths import LengthEstimator, LengthsByPrompt, expected_tokens, tokens_to_hold
from ..estimates.pace import StepBudget
from ..messages import StepTotals
from ..workload import Workload
from .memory import SimulatedMemory, SimulatedPages
from .passes import Passes, cut_passes
from .timeline import Timeline

# Adapters that are read before their rows can enter (`engine.memory.loader.MAX_AHEAD`).
_MAX_AHEAD = 4


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Limits of a simulated replica, and how closely it is simulated."""

    #: Rows that run at once.
    max_batch_rows: int = 64
    #: Tokens of one step, prompts and decoding rows together.
    max_step_tokens: int = 2048
    #: Tokens that the pool holds (None: endless).
    kv_tokens: int | None = None
    #: Tokens of a page of the pool.
    page_tokens: int = 1
    #: A row's pages are contiguous and, where there is room, a multiple of this number.
    run_pages: int = 1
    #: Pages that a row takes whatever its length, for its recurrent state.
    row_pages: int = 0
    #: Bytes of the keys and values of one token, by which adapters take pages of the pool too; 0: they take none.
    token_bytes: int = 0
    #: Whether a row enters with pages for the tokens that it is expected to generate, and takes more as it grows.
    rows_grow: bool = False
    #: Adapters resident at once, the least recently used leaves first (None: endless).
    adapter_slots: int | None = None
    #: Source of adapter loads; `host`: the replica's host memory holds every adapter.
    adapter_source: AdapterSource = "host"
    #: Host memory for adapters that had to leave the pool; beyond it they are loaded from their source again (None:
    #: endless).
    host_tier_bytes: int | None = None
    #: Whether loads cost steps nothing; on CPU both take the same cores.
    loads_beside_steps: bool = True
    #: Cores that steps share with the fetching of adapters from a store (None: fetching costs steps nothing).
    fetch_cores: float | None = None
    #: Waiting rows that the batcher sees.
    look_ahead: int = 512
    #: Most forward passes that one step stands for.
    leap_steps: int = 1
    #: Whether a leap goes on although rows end inside: faster, and time is slightly overstated.
    is_coarse: bool = False


class SimulatedReplica:
    """One engine of the simulator. Row numbers are the workload's; `number` is its place in the timeline.

    `lengths` is given every row that comes and every one that ends, as an engine's own estimator is. `expected`: by
    adapter, rows announced to come later.
    """

    def __init__(
        self,
        number: int,
        workload: Workload,
        cost: CostModel,
        batcher: Batcher,
        settings: ReplicaSettings,
        timeline: Timeline,
        lengths: LengthEstimator | None = None,
        expected: Counter[int] | None = None,
    ) -> None:
        assert workload.output_tokens is not None, "a simulation needs the true output lengths"
        self.number = number
        self.expected: Counter[int] = Counter() if expected is None else expected
        self.waiting: NDArray[np.int64] = np.zeros(0, np.int64)
        self.running: NDArray[np.int64] = np.zeros(0, np.int64)
        # By running row: tokens still to generate; tokens so far, prompt and generated; tokens among these that are to
        # be computed before the row decodes; pages held.
        self._remaining: NDArray[np.int64] = np.zeros(0, np.int64)
        self._total: NDArray[np.int64] = np.zeros(0, np.int64)
        self._unstored: NDArray[np.int64] = np.zeros(0, np.int64)
        self._held: NDArray[np.int64] = np.zeros(0, np.int64)
        self._workload, self._output = workload, workload.output_tokens
        self._ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)
        self._cost, self._batcher, self._settings, self._timeline = cost, batcher, settings, timeline
        self._lengths = LengthEstimator() if lengths is None else lengths
        self._by_prompt = LengthsByPrompt()
        # Row on loan -> tokens that it had generated elsewhere; they are prefilled again with the prompt.
        self._brought: dict[int, int] = {}
        self._merged: int | None = None
        self._has_merged = False
        self._memory = SimulatedMemory(
            *(workload.adapters, cost, settings.adapter_source, settings.adapter_slots, settings.loads_beside_steps),
            host_tier_bytes=settings.host_tier_bytes,
            fetch_cores=settings.fetch_cores,
        )
        self._pages = SimulatedPages(
            workload,
            settings.kv_tokens,
            settings.page_tokens,
            settings.run_pages,
            settings.token_bytes,
            settings.row_pages,
        )
        self._pinned_pages = 0
        self._totals = np.zeros(len(fields(StepTotals)))
        self._budget = StepBudget(settings.max_step_tokens)

    @property
    def num_rows(self) -> int:
        """Rows waiting and running."""
        return len(self.waiting) + len(self.running)

    @property
    def resident(self) -> list[int]:
        """Adapters in its memory."""
        return self._memory.resident

    @property
    def totals(self) -> StepTotals:
        """Work of its steps."""
        totals: Any = self._totals.tolist()
        return StepTotals(*totals)

    @property
    def num_prefilling(self) -> int:
        """Running rows whose prompts are being computed."""
        return int((self._unstored > 0).sum())

    @property
    def prefill_tokens_left(self) -> int:
        """Tokens that are to be computed before all rows decode."""
        prompts = int(self._workload.computed_of(self.waiting).sum())
        return prompts + sum(self._brought.values()) + int(self._unstored[self._unstored > 0].sum())

    @property
    def running_tokens(self) -> int:
        """Tokens that running rows have generated so far."""
        return int((self._total - self._workload.prompt_tokens[self.running]).sum())

    def add(self, rows: NDArray[np.int64]) -> None:
        """Add rows to the end of the queue."""
        self.waiting = np.concatenate([self.waiting, rows])
        prompts = int(self._workload.computed_of(rows).sum())
        self._lengths.asked(int(self._workload.max_tokens[rows].sum()), len(rows), prompts)

    def hand_over(self, rows: NDArray[np.int64], num_rows: int) -> dict[int, int]:
        """Remove the last `num_rows` of `rows` that are here; row -> tokens generated so far.

        This is the rule of a real worker's queue, which does not know which rows have most left.
        """
        is_here = np.isin(rows, self.waiting) | np.isin(rows, self.running)
        handed: dict[int, int] = {row: self._brought.pop(row, 0) for row in rows[is_here][-num_rows:].tolist()}
        gone = np.fromiter(handed, np.int64, len(handed))
        self.waiting = self.waiting[~np.isin(self.waiting, gone)]
        is_gone = np.isin(self.running, gone)
        leaving = self.running[is_gone]
        generated = self._total[is_gone] - self._workload.prompt_tokens[leaving]
        handed |= dict(zip(leaving.tolist(), generated.tolist(), strict=True))
        self._keep(~is_gone)
        return handed

    def take_over(self, handed: dict[int, int]) -> None:
        """Add rows that another replica has begun to the queue, with what they have generated."""
        self._brought |= handed
        self.add(np.fromiter(handed, dtype=np.int64))

    def drop(self, row: int) -> None:
        """Remove a row on loan that is not wanted here any more."""
        self._brought.pop(row, None)
        self.waiting = self.waiting[self.waiting != row]
        self._keep(self.running != row)

    def clear(self) -> NDArray[np.int64]:
        """Lose everything; returns the rows that were here."""
        lost = np.concatenate([self.waiting, self.running])
        self.waiting = np.zeros(0, np.int64)
        self._keep(np.zeros(len(self.running), bool))
        self._merged, self._has_merged, self._brought = None, False, {}
        self._memory.clear()
        return lost

    def fetch(self, adapter: int, now_s: float, source: AdapterSource) -> None:
        """Begin to load an adapter beside the work."""
        self._memory.fetch(adapter, now_s, source)

    def step(self, now_s: float, until_s: float = float("inf")) -> tuple[float, NDArray[np.int64]]:
        """Run one step, or one leap that ends about `until_s` at the latest. There must be rows.

        Returns the seconds at which it ends, and the rows that end in it, int64.
        """
        self._grow()
        seen = self.waiting[: self._settings.look_ahead]
        view = self._view(seen, now_s)
        plan = self._batcher(view)
        admit = self._admissible(plan, view, now_s)
        if not plan.serve.any() and len(admit) == 0:
            # Paused rows hold the memory that the policy wants for others: let them finish.
            plan = all_unmerged(view, plan.admit)
            admit = self._admissible(plan, view, now_s)
        rows = np.concatenate([self.running[plan.serve], seen[admit]])
        plan = without_vain_merge(plan, self._merged, self._workload.adapter_index[rows])
        overhead_s = self._switch(plan.merged_adapter)
        if len(admit) or self._settings.adapter_slots is not None:
            overhead_s += self._load(rows, now_s)
        is_served = self._join(plan.serve, admit, None if view.memory is None else view.memory.row_pages[admit], now_s)
        if plan.mode != "merged":
            self._read_ahead(now_s)
        # In a full batch nothing changes when an adapter comes.
        is_full = len(self.running) >= self._settings.max_batch_rows
        is_same = is_full or not (plan.holds_back or self._memory.absent(view.waiting_adapter, now_s))
        may_leap = not len(admit) and is_same
        return self._advance(now_s, overhead_s, is_served, self._num_passes(is_served, may_leap, now_s, until_s))

    def _view(self, seen: NDArray[np.int64], now_s: float) -> BatchView:
        """State of the replica as its batcher sees it before a step."""
        adapters, memory = self._workload.adapter_index, None
        running, waiting, expected = adapters[self.running], adapters[seen], self._expected_tokens(seen)
        if self._pages.num_pages is not None:
            free = max(0, self._pages.num_pages - int(self._held.sum()) - self._pinned_pages)
            awaited = self._memory.absent(waiting, now_s)
            memory = FreeMemory(
                (free,), self._pages_to_hold(seen, expected), self._pages.of_adapter, self._settings.run_pages, awaited
            )
        return BatchView(
            running,
            waiting,
            self._settings.max_batch_rows,
            self._merged,
            resident_adapter=self._memory.resident_array,
            paused_steps=self._timeline.paused_steps[self.running],
            memory=memory,
            waiting_tokens=expected,
            has_prompts=bool(self._unstored.any()),
        )

    def _expected_tokens(self, waiting: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Expected output tokens of waiting rows; None without any, or before any row has finished."""
        if not len(waiting):
            return None
        prompt, limit = self._workload.prompt_tokens, self._workload.max_tokens
        own = prompt[self.running]
        return self._by_prompt.expected(prompt[waiting], limit[waiting], own, self._total - own)

    def _pages_to_hold(self, waiting: NDArray[np.int64], expected: NDArray[np.float64] | None) -> NDArray[np.int64]:
        """Pages that each of these rows takes when it enters."""
        if not self._settings.rows_grow or not len(waiting):
            return self._pages.of_rows(waiting)
        prompt, limit = self._workload.prompt_tokens[waiting], self._workload.max_tokens[waiting]
        brought = np.array([self._brought.get(row, 0) for row in waiting.tolist()] if self._brought else [0])
        guess = expected_tokens(limit) if expected is None else expected
        return self._pages.of_tokens(tokens_to_hold(prompt, brought, limit, guess))

    def _grow(self) -> None:
        """Take pages for the next token of each row; where none is left, the rows that came last wait again."""
        if not self._settings.rows_grow or self._pages.num_pages is None or not len(self.running):
            return
        ahead = self._settings.leap_steps if self._settings.is_coarse else 1
        tokens = self._total + np.minimum(ahead, self._remaining) - 1
        needed = np.maximum(self._held, self._pages.of_tokens(tokens))
        num_kept = len(needed)
        while num_kept > 1 and needed[:num_kept].sum() > self._pages.num_pages - self._pinned_pages:
            num_kept -= 1
            self._preempt_last()
        self._held = needed[:num_kept]
        self._memory.shrink(self._pages.left_for_adapters(int(self._held.sum())), self._pages.of_adapter, self._pin())

    def _preempt_last(self) -> None:
        row = int(self.running[-1])
        self._brought[row] = int(self._total[-1] - self._workload.prompt_tokens[row])
        self._timeline.preempted[self.number] += 1
        self.waiting = np.concatenate([[row], self.waiting])
        self._keep(np.arange(len(self.running)) < len(self.running) - 1)

    def _admissible(self, plan: StepPlan, view: BatchView, now_s: float) -> NDArray[np.int64]:
        """Positions of the plan's admissions that enter: until memory ends, without those that wait for an adapter."""
        if not len(plan.admit):
            return plan.admit
        admit = plan.admit[self._is_ready(view.waiting_adapter[plan.admit], now_s)]
        if plan.holds_back:
            return admit[:0]
        if view.memory is None:
            return admit
        admit = admit[: view.memory.num_fitting(admit, view.waiting_adapter, view.running_adapter)]
        # The engine does so too: where nothing has to make room, rows of equal size are side by side.
        rounded = self._pages.rounded(view.memory.row_pages[admit])
        absent = {a for a in set(view.waiting_adapter[admit].tolist()) if not self._memory.has(a)}
        num_pages = int(rounded.sum()) + sum(self._pages.of_adapter.get(a, 0) for a in absent)
        if num_pages <= view.memory.gaps[0] // 2:
            admit = admit[np.argsort(rounded, kind="stable")]
        return admit

    def _is_ready(self, adapters: NDArray[np.int32], now_s: float) -> NDArray[np.bool_]:
        """Which rows of these adapters need not wait for them, bool.

        If there is none and nothing runs, the rows of the first adapter are ready.
        """
        wanted = dict.fromkeys(adapters.tolist())
        missing = self._memory.absent(adapters, now_s)
        if not missing:
            return np.ones(len(adapters), bool)
        for adapter in (a for a in wanted if a in missing):
            self._memory.fetch(adapter, now_s, self._settings.adapter_source)
        still = self._memory.absent(adapters, now_s)
        if len(still) == len(wanted) and not len(self.running):
            still -= {next(iter(wanted))}
        return ~np.isin(adapters, list(still))

    def _read_ahead(self, now_s: float) -> None:
        """Begin to read the adapters that are needed next, a few at a time."""
        if self._memory.num_coming >= _MAX_AHEAD or self._memory.has_all:
            return
        waiting = self._workload.adapter_index[self.waiting[: self._settings.look_ahead]]
        absent = self._memory.absent(waiting, float("inf"))
        for adapter in (a for a in dict.fromkeys(waiting.tolist()) if a in absent):
            if self._memory.num_coming >= _MAX_AHEAD:
                return
            self._memory.fetch(adapter, now_s, self._settings.adapter_source)

    def _switch(self, merged: int | None) -> float:
        seconds = self._cost.merge_s if merged != self._merged else 0.0
        if merged is not None and not self._has_merged:
            seconds += self._cost.first_merge_s
            self._has_merged = True
        self._merged = merged
        self._timeline.switch_s[self.number] += seconds
        return seconds

    def _load(self, rows: NDArray[np.int64], now_s: float) -> float:
        """Seconds by which the adapters of these rows delay the step."""
        needed = np.unique(self._workload.adapter_index[rows])
        seconds = self._memory.wait_s(needed[needed >= 0].tolist(), now_s)
        timeline = self._timeline
        timeline.load_s[self.number] += seconds
        timeline.num_loads[self.number] = self._memory.num_loads
        timeline.peak_adapters[self.number] = max(timeline.peak_adapters[self.number], len(self._memory.resident))
        return seconds

    def _join(
        self, serve: NDArray[np.bool_], positions: NDArray[np.int64], pages: NDArray[np.int64] | None, now_s: float
    ) -> NDArray[np.bool_]:
        """Move waiting rows at these positions to the end of the running ones; return which rows take part.

        `pages`: pages of each of these rows (None: endless memory). The result is bool `[num_running]`.
        """
        if len(positions) == 0:
            return serve
        admitted = self.waiting[positions]
        stays = np.ones(len(self.waiting), dtype=bool)
        stays[positions] = False
        self.waiting = self.waiting[stays]
        brought = np.array([self._brought.pop(int(row), 0) for row in admitted] if self._brought else 0)
        total = self._workload.prompt_tokens[admitted] + brought
        # Rows on loan compute all tokens that they come with.
        unstored = np.maximum(1, np.where(brought > 0, total, self._workload.computed_of(admitted)))
        self.running = np.concatenate([self.running, admitted])
        self._remaining = np.concatenate([self._remaining, np.maximum(1, self._output[admitted] - brought)])
        self._total = np.concatenate([self._total, total])
        self._unstored = np.concatenate([self._unstored, unstored])
        taken = self._pages.taken(self._pages.of_rows(admitted) if pages is None else pages, int(self._held.sum()))
        self._held = np.concatenate([self._held, taken])
        pinned = self._pin()
        self._memory.shrink(self._pages.left_for_adapters(int(self._held.sum())), self._pages.of_adapter, pinned)
        # A row on loan was admitted where it came from.
        fresh = admitted[np.isnan(self._timeline.admit_s[admitted])]
        self._timeline.admit_s[fresh] = now_s
        self._timeline.replica[admitted] = self.number
        return np.concatenate([serve, np.ones(len(admitted), bool)])

    def _keep(self, stays: NDArray[np.bool_]) -> None:
        """Keep only the running rows that `stays` marks."""
        if stays.all():
            return
        self.running, self._remaining, self._total, self._unstored, self._held = (
            array[stays] for array in (self.running, self._remaining, self._total, self._unstored, self._held)
        )
        self._pin()

    def _pin(self) -> set[int]:
        """Count the pages of the adapters of running rows, which cannot leave, and return these adapters."""
        pinned = set(self._workload.adapter_index[self.running].tolist())
        self._pinned_pages = sum(self._pages.of_adapter.get(a, 0) for a in pinned) if self._pages.of_adapter else 0
        return pinned

    def _num_passes(self, is_served: NDArray[np.bool_], may_leap: bool, now_s: float, until_s: float) -> int:
        """Forward passes that this step stands for."""
        limit = self._settings.leap_steps
        if limit == 1:
            return 1
        num_prompts = int(self._unstored[is_served].sum())
        if self._settings.is_coarse:
            prefill = -(-num_prompts // self._prompt_budget(is_served))
            return int(min(limit, self._remaining[is_served].max() + prefill))
        if not may_leap or num_prompts or not is_served.all():
            return 1
        passes = int(min(limit, self._remaining.min()))
        if self._settings.rows_grow and self._pages.num_pages is not None:
            passes = min(passes, int((self._held * self._settings.page_tokens - self._total).min()) + 1)
        if len(self.running) < self._settings.max_batch_rows and until_s < float("inf"):
            load = StepLoad(decode_rows=len(self.running), context_tokens=self._total.sum())
            passes = min(passes, max(1, int((until_s - now_s) / float(self._cost.step_seconds(load)))))
        return passes

    def _prompt_budget(self, is_served: NDArray[np.bool_]) -> int:
        """Prompt tokens of one pass: what decoding rows leave, and one at least."""
        num_decoding = int((self._unstored[is_served] == 0).sum())
        limit = self._settings.max_step_tokens if self._settings.is_coarse else self._budget.tokens
        return max(limit - num_decoding, 1)

    def _advance(
        self, now_s: float, overhead_s: float, is_served: NDArray[np.bool_], num_passes: int
    ) -> tuple[float, NDArray[np.int64]]:
        """Compute what these passes hold, and count it. Returns what `step` does."""
        served = np.flatnonzero(is_served)
        chunk, tokens, prompt_end = cut_passes(
            self._unstored[served], self._remaining[served], num_passes, self._prompt_budget(is_served)
        )
        is_in = (chunk > 0) | (tokens > 0)
        if not is_in.all():
            served, chunk, tokens, prompt_end = (array[is_in] for array in (served, chunk, tokens, prompt_end))
        rows, unstored = self.running[served], self._unstored[served]
        is_prompt = unstored > 0
        ended = prompt_end + tokens - is_prompt
        num_passes = int(max(1, np.where(tokens > 0, ended, num_passes).max(initial=1)))
        # A row that decodes has stored all but its last token.
        stored = self._total[served] - np.maximum(unstored, 1)
        drawn = 0 if self._workload.is_drawn is None else int(tokens[self._workload.is_drawn[rows]].sum())
        scored = 0 if self._workload.is_scored is None else int(chunk[self._workload.is_scored[rows]].sum())
        done = Passes(num_passes, self._workload.adapter_index[rows], tokens, stored, chunk, drawn, scored)
        load = done.load(self._cost, self._ranks, self._merged)
        self._totals += done.totals(load)
        seconds = overhead_s + done.seconds(load, self._cost)
        self._budget.took(int(chunk.sum()) + int((~is_prompt).sum()), self._budget.tokens, seconds / num_passes)
        self._remaining[served] -= tokens
        self._total[served] += tokens
        left = unstored - chunk
        # all but the last token of a row that had begun before are stored: from here on it decodes
        left[(left == 1) & (self._total[served] > self._workload.prompt_tokens[rows])] = 0
        self._unstored[served] = left
        # Linear in between: exact when all rows of the leap last to its end.
        pass_s, timeline = seconds / num_passes, self._timeline
        timeline.count(self.number, done, seconds, is_merged=self._merged is not None)
        if not is_served.all():
            timeline.paused_steps[self.running[~is_served]] += num_passes
        if is_prompt.any():
            is_first = is_prompt & (tokens > 0) & np.isnan(timeline.first_token_s[rows])
            timeline.first_token_s[rows[is_first]] = now_s + pass_s * prompt_end[is_first]
        is_done = self._remaining[served] <= 0
        finished = rows[is_done]
        if len(finished):
            timeline.finish_s[finished] = now_s + pass_s * ended[is_done]
            self._lengths.finished(int(self._output[finished].sum()), len(finished))
            self._by_prompt.finished(self._workload.prompt_tokens[finished], self._output[finished])
            self._keep(self._remaining > 0)
        return now_s + seconds, finished

    def check_integrity(self) -> None:
        """Raise AssertionError when the books of running rows disagree."""
        sizes = {len(array) for array in (self.running, self._remaining, self._total, self._unstored, self._held)}
        assert len(sizes) == 1, f"running arrays of different lengths {sizes}"
        assert (self._remaining > 0).all(), "a finished row is still running"
        both = np.intersect1d(self.running, self.waiting)
        assert len(both) == 0, f"rows {both[:5]} wait and run"
        held, limit = int(self._held.sum()), self._pages.num_pages
        assert limit is None or held <= limit or len(self.running) == 1, f"{held} pages held of {limit}"
