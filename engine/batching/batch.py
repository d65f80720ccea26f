"""Keeps the rows that wait and run in one engine, and turns a batcher's plan into the entries of a step.

Where weights may change while rows run, a row keeps its adapter in the pool even while it is served merged: any mode
can then follow any other between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...scheduler.batchers.batching import BatchView, StepPlan, without_vain_merge
from ...scheduler.estimates.lengths import LengthsByPrompt
from ..adapter_use import AdapterUse
from ..memory.pool import PageRange
from ..memory.residency import ResidentAdapter
from ..models.step_batch import StepEntry
from ..request import ExportedRow, Request
from ..sequence import Sequence
from ..text.answers.sampling_check import token_problems
from .admission import Admission, Room, WaitingRows, row_owner


class RunningBatch:
    """Tracks waiting and running rows and their memory; no arithmetic on tensors.

    `may_switch`: weights may change while rows run. `merges_all`: no adapter is ever served from the pool.
    `shows_memory`: the batcher asks which rows would enter. `rows_grow`: rows take more pages when they need them,
    where block tables name them. `merges_packed`: adapters are merged from what the pool would hold. `clean` erases a
    run before a row gets it (None: needless).
    """

    def __init__(
        self,
        room: Room,
        clean: Callable[[PageRange], None] | None,
        *,
        may_switch: bool,
        merges_all: bool,
        shows_memory: bool = False,
        rows_grow: bool = False,
        merges_packed: bool = False,
    ) -> None:
        self.pool = room.pool
        self.residency = room.residency
        self.prefixes = room.prefixes
        self._layout = room.layout
        self._registry = room.registry
        self._room = room
        self._merges_all = merges_all
        self._rows_grow = rows_grow
        self._merges_packed = merges_packed
        self._taken_out: ResidentAdapter | None = None
        self._shows_memory = may_switch or (shows_memory and not merges_all)
        self._waiting = WaitingRows()
        self._running: dict[str, Sequence] = {}
        self._lengths = LengthsByPrompt()
        self._admission = Admission(
            self._waiting, self._running, room, clean, may_switch=may_switch, rows_grow=rows_grow
        )
        #: Times that a row lost its memory to others.
        self.num_preempted = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def adapter_use(self) -> AdapterUse:
        """Counts of what adapters have cost so far, as far as pool and host memory go."""
        residency, loader = self.residency, self.residency.loader
        return AdapterUse(
            pool_hits=self._admission.num_pool_hits,
            loads=residency.num_loads,
            host_loads=loader.num_host_loads,
            disk_reads=loader.num_reads,
            stall_s=residency.stall_s,
        )

    def use_in(self, num_rows: int, seconds: float) -> AdapterUse:
        """Costs of adapters in a step of `num_rows` rows that took `seconds`, with memory as it is now."""
        adapter_pages, prefix_pages = self.residency.num_pages, self.prefix_pages
        row_pages = self.pool.num_pages - self.pool.num_free - adapter_pages - prefix_pages
        return AdapterUse(
            step_s=seconds,
            present_row_s=num_rows * seconds,
            absent_row_s=self._admission.num_absent_rows * seconds,
            page_s=self.pool.num_pages * seconds,
            adapter_page_s=adapter_pages * seconds,
            row_page_s=row_pages * seconds,
            prefix_page_s=prefix_pages * seconds,
        )

    @property
    def prefix_pages(self) -> int:
        """Pages of the prefix cache."""
        return 0 if self.prefixes is None else len(self.prefixes.cache)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_prefilling(self) -> int:
        """Running rows that do not decode yet: their prompts, and what came with them, are being computed."""
        return sum(not sequence.is_decoding for sequence in self._running.values())

    @property
    def prefill_tokens_left(self) -> int:
        """Tokens that are to be computed before all unfinished rows decode."""
        running = sum(s.total_tokens - s.num_stored for s in self._running.values() if not s.is_decoding)
        return running + self._waiting.num_tokens

    @property
    def running_tokens(self) -> int:
        """Tokens that running rows have generated so far."""
        return sum(sequence.num_generated for sequence in self._running.values())

    def append(self, sequence: Sequence) -> None:
        """Queue a row behind all others. Raises ValueError when a row of that id is unfinished."""
        request_id = sequence.request.request_id
        if request_id in self._running or request_id in self._waiting:
            raise ValueError(f"request_id={request_id!r}: a row of this id is not finished yet")
        self._waiting.append(sequence)
        if self.prefixes is not None:
            self.prefixes.expect(sequence)

    def is_running(self, sequence: Sequence) -> bool:
        """Whether this very sequence holds memory here; another may have the same id by now."""
        return self._running.get(sequence.request.request_id) is sequence

    def view(self, max_batch_rows: int, merged_adapter_id: str | None) -> BatchView:
        """The state of the batch as the batcher sees it."""
        code_of = self._registry.code_of
        rows, expected = self._running.values(), self._expected_tokens()
        return BatchView(
            running_adapter=np.fromiter((code_of[s.request.adapter_id] for s in rows), np.int32, len(rows)),
            waiting_adapter=self._waiting.adapter_codes(code_of),
            max_batch_rows=max_batch_rows,
            merged_adapter=None if merged_adapter_id is None else code_of[merged_adapter_id],
            resident_adapter=np.array([code_of[a] for a in self.residency.resident_ids], np.int32),
            paused_steps=np.fromiter((s.num_paused for s in rows), np.int64, len(rows)),
            memory=self._admission.free_memory(expected) if self._shows_memory else None,
            waiting_tokens=expected,
            has_prompts=any(not s.is_decoding for s in rows),
        )

    def _expected_tokens(self) -> NDArray[np.float64] | None:
        """Tokens that each waiting row is expected to generate, learned from finished rows; None when no row waits, or
        none has finished.
        """
        if not self._waiting:
            return None
        rows = self._running.values()
        prompt = np.fromiter((s.prompt_tokens for s in rows), np.int64, len(rows))
        generated = np.fromiter((s.num_generated for s in rows), np.int64, len(rows))
        waiting = self._waiting.prompt_tokens()
        max_tokens = self._waiting.capacity_tokens() - waiting + 1
        return self._lengths.expected(waiting, max_tokens, prompt, generated)

    def grow(self) -> list[Sequence]:
        """Take pages for the next token of every running row. Where none are left, the rows that came last are
        preempted: they wait again, first of all, with what they have generated, and are returned.
        """
        if not self._rows_grow:
            return []
        short = [s for s in self._running.values() if s.total_tokens > s.held_tokens and not s.awaits_end]
        if not short:
            return []
        lost: list[Sequence] = []
        # The only row may have to wait too: an adapter that is merged and subtracted for others takes pages beside it.
        while short and not self._room.make_room_anywhere(len(short), self._admission.next_use):
            last = next(reversed(self._running.values()))
            self.release(last)
            short = [s for s in short if s is not last]
            lost.append(last.preempted())
            self.num_preempted += 1
        if lost:
            self._waiting.put_first(lost[::-1])
            if self.prefixes is not None:
                for sequence in lost:
                    self.prefixes.expect(sequence)
        for sequence in short:
            self.pool.extend(row_owner(sequence))
            sequence.held_tokens += self._layout.page_tokens
        return lost

    def finished(self, sequence: Sequence) -> None:
        """Learn from the length of a complete answer."""
        self._lengths.finished(np.array([sequence.prompt_tokens]), np.array([len(sequence.token_ids)]))

    def problem_with(
        self, row: ExportedRow, max_context_tokens: int, spare_tokens: Callable[[Request], int]
    ) -> str | None:
        """Why a row cannot be served, as a plain sentence; None for a row that can be. `spare_tokens`: function that
        returns the tokens that a row may store beyond its prompt and `max_tokens`.
        """
        request = row.request
        if request.adapter_id is not None and request.adapter_id not in self._registry:
            return f"adapter {request.adapter_id[:12]} is not known to this engine"
        vocab_size = self._registry.vocab_size(request.adapter_id)
        if problem := self._registry.task_problem(request):
            return problem
        problems = request.sampling.problems() or row.problems() or token_problems(request.sampling, vocab_size)
        if problems:
            return "; ".join(problems)
        ids = request.prompt_token_ids
        if not ids:
            return "the prompt has no tokens"
        if min(ids + row.token_ids) < 0 or max(ids + row.token_ids) >= vocab_size:
            return f"prompt_token_ids must be in 0..{vocab_size - 1}"
        max_tokens = request.sampling.max_tokens
        if len(ids) + max_tokens > max_context_tokens:
            return (
                f"prompt of {len(ids)} tokens + max_tokens={max_tokens} exceeds the context of {max_context_tokens} "
                "tokens"
            )
        sequence = Sequence.of(row, spare_tokens(request))
        if sequence.capacity_tokens > max_context_tokens:
            return (
                f"prompt of {len(ids)} tokens and the choice's texts exceed the context of {max_context_tokens} "
                "tokens; shorten the prompt, or give score_choices=False"
            )
        pages = self.pages_of_row(sequence)
        if pages > self.pool.num_pages:
            return f"the row and its adapter need {pages} pages, the pool has {self.pool.num_pages}; raise pool_bytes"
        return None

    def pages_of_row(self, sequence: Sequence) -> int:
        """Pages of the whole pool that one row occupies by itself, its adapter included unless it is always merged."""
        pages = self._layout.pages_for_row(sequence.capacity_tokens)
        adapter_id = sequence.request.adapter_id
        if adapter_id is None or self._merges_all or self._registry.must_merge_id(adapter_id):
            return pages
        return pages + self._room.adapter_pages(adapter_id)

    @property
    def is_mixture(self) -> bool:
        """Whether the merged adapter is in the pool too, to be subtracted for rows that must not see it."""
        return self._taken_out is not None

    def packed(self, adapter_id: str) -> ResidentAdapter:
        """An adapter in the pool, or a copy of it, see `AdapterResidency.packed`."""
        return self.residency.packed(adapter_id, self._admission.next_use())

    def _take_out(self, adapter_id: str | None) -> bool:
        """Keep the merged adapter in the pool too, to be subtracted for rows that must not see it; None: no longer.

        Returns False when memory does not allow it now.
        """
        if self._taken_out is not None and self._taken_out.adapter_id != adapter_id:
            self.residency.unpin(self._taken_out.adapter_id)
            self._taken_out = None
        if adapter_id is None or self._taken_out is not None:
            return True
        if not self._room.make_resident(adapter_id, self._admission.next_use()):
            return False
        self._taken_out = self.residency.get(adapter_id)
        assert self._taken_out is not None, f"{adapter_id} was made resident and is not there"
        self.residency.pin(adapter_id)
        self.residency.join(adapter_id)
        return True

    def admit(self, view: BatchView, plan: StepPlan) -> tuple[StepPlan, list[Sequence]]:
        """Admit the plan's rows as far as memory allows.

        Returns the plan for the rows that take part in the step, and these rows.
        """
        merged = None if plan.merged_adapter is None else self._registry.id_of(plan.merged_adapter)
        if not self._take_out(merged if plan.mode == "mixture" else None):
            return plan, []
        before = list(self._running.values())
        self.residency.loader.drop_unwanted(self._waiting.wants)
        self.residency.settle()
        paused = {id(s) for s, takes_part in zip(before, plan.serve, strict=True) if not takes_part}
        self._admission.admit(plan, view.waiting_tokens, is_mixture=self.is_mixture)
        if plan.mode != "merged" or self._merges_packed:
            self._admission.read_ahead(merged)
        served = [s for s in self._running.values() if id(s) not in paused and not s.awaits_token]
        present = np.array([self._registry.code_of[s.request.adapter_id] for s in served], np.int32)
        plan = without_vain_merge(plan, view.merged_adapter, present)
        if plan.mode != "mixture":
            self._take_out(None)
        return plan, served

    def entries(self, served: list[Sequence], plan: StepPlan, max_step_tokens: int) -> list[StepEntry]:
        """Build the step's entries: every served decoding row, then prompts in order of admission until
        `max_step_tokens`.

        All other rows pause.
        """
        taking_part = set(map(id, served))
        for sequence in self._running.values():
            sequence.num_paused += id(sequence) not in taking_part
        entries = [self._entry(s, 1, plan) for s in served if s.is_decoding]
        budget = max(max_step_tokens - len(entries), 1)
        for sequence in served:
            if sequence.is_decoding or not self._can_advance(sequence):
                continue
            num_tokens = min(budget, sequence.total_tokens - sequence.num_stored)
            if self.prefixes is not None:
                self.prefixes.compute(sequence, num_tokens, row_owner(sequence))
            entries.append(self._entry(sequence, num_tokens, plan))
            budget -= num_tokens
            if budget == 0:
                break
        return entries

    def after_step(self, entries: Collection[StepEntry]) -> None:
        """Note that the step's tokens are stored."""
        if self.prefixes is not None:
            self.prefixes.after_step(entries)

    def finish(self, sequence: Sequence) -> None:
        """Remove a running row that has its answer and free its pages, but for those that later rows will read."""
        if self.prefixes is None:
            self.release(sequence)
        else:
            self.prefixes.finish(sequence, row_owner(sequence), partial(self.release, sequence))

    def release(self, sequence: Sequence) -> None:
        """Remove a running row and free its pages."""
        del self._running[sequence.request.request_id]
        self.pool.release(row_owner(sequence))
        if self.prefixes is not None:
            self.prefixes.forget(sequence)
        if sequence.holds_adapter:
            assert sequence.request.adapter_id is not None, f"{sequence.request.request_id} holds no adapter"
            self.residency.unpin(sequence.request.adapter_id)
            sequence.holds_adapter = False

    def ids_of_adapter(self, adapter_id: str) -> list[str]:
        """Request ids of every row of an adapter."""
        rows = [*self._waiting, *self._running.values()]
        return [s.request.request_id for s in rows if s.request.adapter_id == adapter_id]

    def remove(self, request_ids: Collection[str]) -> list[Sequence]:
        """Remove rows, waiting or running; unknown ids are ignored."""
        removed = []
        for request_id in request_ids:
            if request_id in self._waiting:
                removed.append(self._waiting.remove(request_id))
                if self.prefixes is not None:
                    self.prefixes.forget(removed[-1])
            elif request_id in self._running:
                removed.append(self._running[request_id])
                self.release(self._running[request_id])
        return removed

    def check_integrity(self) -> None:
        """Assert that pool, pins and running rows agree with each other."""
        self.pool.check_integrity()
        held_adapters = [s.request.adapter_id for s in self._running.values() if s.holds_adapter]
        held_adapters += [self._taken_out.adapter_id] if self._taken_out else []
        self.residency.check_integrity([a for a in held_adapters if a is not None])
        if self.prefixes is not None:
            unfinished = [s.request.request_id for s in (*self._waiting, *self._running.values())]
            self.prefixes.check_integrity(unfinished)
        for sequence in self._running.values():
            pages = self.pool.num_pages_of(row_owner(sequence)) + len(self._shared_pages(sequence))
            held = self._layout.tokens_in(pages)
            noted = sequence.held_tokens
            assert held == noted, f"row {sequence.request.request_id} holds {held} token places, {noted} are noted"
            needed = sequence.num_stored if self._rows_grow else sequence.capacity_tokens
            assert held >= needed, f"row {sequence.request.request_id} holds {held} token places, needs {needed}"

    def _entry(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> StepEntry:
        adapter_id, owner = sequence.request.adapter_id, row_owner(sequence)
        (run, *rest), shared = self.pool.runs_of(owner), self._shared_pages(sequence)
        extensions = tuple(rest)
        if adapter_id is not None and self._registry.code_of[adapter_id] == plan.merged_adapter:
            sequence.served("merged")
            return StepEntry(sequence, num_tokens, run, None, None, shared, extensions)
        adapter = None if adapter_id is None else self.residency.get(adapter_id)
        assert adapter_id is None or adapter is not None, (
            f"row {sequence.request.request_id}: its adapter left the pool"
        )
        assert plan.mode != "merged", f"row {sequence.request.request_id} would see adapter {plan.merged_adapter}"
        if adapter_id is not None:
            self.residency.join(adapter_id)
        if plan.mode == "mixture":
            sequence.served("mixture")
            return StepEntry(sequence, num_tokens, run, adapter, self._taken_out, shared, extensions)
        sequence.served("base" if adapter is None else "unmerged")
        return StepEntry(sequence, num_tokens, run, adapter, None, shared, extensions)

    def _shared_pages(self, sequence: Sequence) -> tuple[int, ...]:
        return () if self.prefixes is None else self.prefixes.pages_of(sequence)

    def _can_advance(self, sequence: Sequence) -> bool:
        return self.prefixes is None or self.prefixes.advance(sequence, row_owner(sequence))
