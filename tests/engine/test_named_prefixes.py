"""Block tables that name each other's pages: whatever rows come and go, a row's table holds its own prompt."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.engine.batching.admission import row_owner
from lorabatch.engine.batching.prefix_sharing import NamedPrefixes
from lorabatch.engine.config import read_model_config
from lorabatch.engine.memory.pool import PagePool, page_layout
from lorabatch.engine.memory.prefix_cache import PageUse
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.models.step_batch import StepEntry
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.sequence import Sequence

PAGE = 4


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> ModelConfig:
    return read_model_config(tiny_llama)


class Rows:
    """A batch without tensors. `content[page][place]`: which (adapter, tokens so far) wrote there last."""

    def __init__(self, model: ModelConfig, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self._layout = page_layout(model, PAGE, 4)
        self.prefixes = NamedPrefixes(self.pool, self._layout, model)
        self.running: list[Sequence] = []
        self.content: dict[tuple[int, int], tuple[str | None, tuple[int, ...]]] = {}
        self.num_computed = 0

    def queue(self, number: int, adapter_id: str | None, prompt: tuple[int, ...]) -> Sequence:
        sequence = Sequence(Request(f"{number}", prompt, adapter_id, SamplingParams(max_tokens=3)))
        self.prefixes.expect(sequence)
        return sequence

    def admit(self, sequence: Sequence) -> bool:
        pages = self._layout.pages_for_tokens(sequence.capacity_tokens)
        self.prefixes.cache.make_room(lambda: self.pool.largest_free_run >= pages, PageUse.AWAITED)
        if self.pool.allocate(row_owner(sequence), pages) is None:
            return False
        self.running.append(sequence)
        return True

    def step(self, chunk: int) -> None:
        entries = []
        for sequence in self.running:
            if sequence.num_stored >= sequence.prompt_tokens:
                continue
            if not self.prefixes.advance(sequence, row_owner(sequence)):
                continue
            count = min(chunk, sequence.prompt_tokens - sequence.num_stored)
            self.prefixes.compute(sequence, count, row_owner(sequence))
            shared = self.prefixes.pages_of(sequence)
            entries.append(StepEntry(sequence, count, self.pool.range_of(row_owner(sequence)), None, None, shared))
        for entry in entries:
            table = self.table(entry.sequence)
            for place in range(entry.sequence.num_stored, entry.sequence.num_stored + entry.num_tokens):
                self.content[table[place // PAGE], place % PAGE] = self.written(entry.sequence, place)
                self.num_computed += 1
        for entry in entries:
            entry.sequence.num_stored += entry.num_tokens
        self.prefixes.after_step(entries)

    def table(self, sequence: Sequence) -> list[int]:
        run = self.pool.range_of(row_owner(sequence))
        return [*self.prefixes.pages_of(sequence), *range(run.start, run.end)]

    def written(self, sequence: Sequence, place: int) -> tuple[str | None, tuple[int, ...]]:
        return sequence.request.adapter_id, sequence.request.prompt_token_ids[: place + 1]

    def end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(row_owner(sequence))
        self.prefixes.forget(sequence)

    def check(self, waiting: list[Sequence]) -> None:
        self.pool.check_integrity()
        self.prefixes.check_integrity([s.request.request_id for s in (*self.running, *waiting)])
        for sequence in self.running:
            table = self.table(sequence)
            assert len(table) >= self._layout.pages_for_tokens(sequence.capacity_tokens)
            for place in range(sequence.num_stored):
                assert self.content[table[place // PAGE], place % PAGE] == self.written(sequence, place)


@settings(max_examples=80, deadline=None)
@given(st.integers(8, 40), st.integers(0, 10**6))
def test_a_row_s_table_holds_what_its_own_prompt_says(model: ModelConfig, num_pages: int, seed: int) -> None:
    rng = random.Random(seed)
    rows = Rows(model, num_pages)
    shared = [rng.randrange(9) for _ in range(24)]
    waiting = []
    for number in range(16):
        prompt = (*shared[: rng.randrange(25)], *(rng.randrange(9) for _ in range(rng.randrange(1, 6))))
        waiting.append(rows.queue(number, rng.choice(("a", "b", None)), prompt))
    while waiting or rows.running:
        while waiting and rng.random() < 0.7 and rows.admit(waiting[0]):
            waiting.pop(0)
        rows.step(rng.choice((1, 3, PAGE, 9, 30)))
        rows.check(waiting)
        for sequence in [s for s in rows.running if rng.random() < 0.2 or s.num_stored == s.prompt_tokens]:
            if rng.random() < 0.5 or not waiting:
                rows.end(sequence)
        rows.check(waiting)
    assert rows.prefixes.cache.make_room(lambda: rows.pool.num_free == num_pages, PageUse.NONE)


def test_a_shared_beginning_takes_its_pages_once_and_goes_with_its_last_row(model: ModelConfig) -> None:
    rows = Rows(model, 40)
    beginning = tuple(range(12))
    sequences = [rows.queue(i, None, (*beginning, 20 + i)) for i in range(4)]
    assert all(rows.admit(sequence) for sequence in sequences)
    alone = rows.pool.num_pages - rows.pool.num_free
    assert alone == 4 * 4
    rows.step(64)
    assert rows.num_computed == 13, "the others wait for the first row's pages"
    rows.step(64)
    rows.check([])
    assert rows.num_computed == 13 + 3
    assert rows.pool.num_pages - rows.pool.num_free == 3 + 4, "three pages for all, one for each"
    assert rows.prefixes.num_reused_tokens == 3 * 12
    for sequence in sequences[:3]:
        rows.end(sequence)
    assert not rows.prefixes.cache.make_room(lambda: rows.pool.num_free > 36, PageUse.AWAITED)
    rows.check([])
    rows.end(sequences[3])
    assert rows.prefixes.cache.make_room(lambda: rows.pool.num_free == 40, PageUse.NONE)
