"""Adapters arrive while steps run: late copies that do at the last moment what a copy stream may do at any."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft_oracle import register_all
from torch import Tensor

from lorabatch.engine.batching.admission import MAX_AWAITED
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.memory.adapter_layout import AdapterLayout
from lorabatch.engine.memory.copies import AdapterCopies, CopyStream, Parts
from lorabatch.engine.memory.loader import MAX_AHEAD, AdapterLoader
from lorabatch.engine.memory.packed import PackedAdapter
from lorabatch.engine.memory.pool import PagePool
from lorabatch.engine.memory.residency import AdapterResidency
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.backend import CpuBackend
from lorabatch.scheduler.batchers.batching import Batcher, BatchView, StepPlan

PAGE_BYTES = 8192
POLLS = 3


class LateArrival:
    """Writes when it is joined, or when it has been asked about for the third time."""

    def __init__(self, copies: LateCopies, numbers: Tensor, memory: Tensor, parts: Parts) -> None:
        self._copies, self._numbers, self._memory, self._parts = copies, numbers, memory, parts
        self.is_copied = False
        self.polls = 0
        for start, count in parts:
            memory[start : start + count] = torch.nan

    def is_done(self) -> bool:
        self.polls += 1
        if self.polls >= POLLS:
            self._copies.finish_up_to(self)
        return self.is_copied

    def join(self) -> None:
        if not self.is_copied:
            self._copies.num_joined += 1
        self._copies.finish_up_to(self)

    def finish(self) -> None:
        AdapterCopies().to_pool(self._numbers, self._memory, self._parts)
        self.is_copied = True


class LateCopies:
    """Copies in order, as late as the contract allows."""

    are_aside = True
    keeps_sources = False

    def __init__(self) -> None:
        self.waiting: list[LateArrival] = []
        self.num_joined = 0

    def to_pool(self, numbers: Tensor, memory: Tensor, parts: Parts) -> LateArrival:
        self.waiting.append(LateArrival(self, numbers, memory, parts))
        return self.waiting[-1]

    def to_host(self, memory: Tensor, parts: Parts) -> Tensor:
        if self.waiting:
            self.finish_up_to(self.waiting[-1])
        return AdapterCopies().to_host(memory, parts)

    def finish_up_to(self, last: LateArrival) -> None:
        while not last.is_copied:
            self.waiting.pop(0).finish()


class LateBackend(CpuBackend):
    """A CPU whose adapters arrive late."""

    late: LateCopies

    def copies(self) -> LateCopies:
        self.late = LateCopies()
        return self.late


def make_engine(
    folder: Path, batcher: Batcher | None = None, backend: type[CpuBackend] = CpuBackend, **config: Any
) -> Engine:
    settings: dict[str, Any] = {"max_batch_rows": 6, "max_step_tokens": 48, "device": "cpu", "mode": "unmerged"}
    return Engine(folder, EngineConfig(num_threads=1, **(settings | config)), batcher, backend)


def late_engine(folder: Path, batcher: Batcher | None = None, **config: Any) -> Engine:
    return make_engine(folder, batcher, LateBackend, **config)


def rows(ids: list[str | None], count: int, max_tokens: int = 4) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(f"{i}", (5 + i, 9, 11 + i), ids[i % len(ids)], sampling) for i in range(count)]


def serve(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    engine.add(requests)
    results: dict[str, Result] = {}
    while engine.num_unfinished:
        results |= {result.request_id: result for result in engine.step()}
        engine.check_integrity()
    assert all(result.error is None for result in results.values())
    return {key: result.token_ids for key, result in results.items()}


@pytest.mark.parametrize("pool_pages", [64, 400], ids=["adapters make room for each other", "room for all"])
@pytest.mark.parametrize("host_tier_bytes", [0, 1 << 20])
def test_rows_are_answered_as_if_copies_took_no_time(
    tiny_llama: Path, tiny_adapters: dict[str, Path], pool_pages: int, host_tier_bytes: int
) -> None:
    """Pages of a late copy hold NaN until it is joined, and what another writes to them is overwritten by it."""
    engine = late_engine(tiny_llama, pool_bytes=pool_pages * PAGE_BYTES, host_tier_bytes=host_tier_bytes)
    plain = make_engine(tiny_llama, pool_bytes=400 * PAGE_BYTES)
    ids = [None, *register_all(engine, tiny_adapters).values()]
    register_all(plain, tiny_adapters)
    requests = rows(ids, 25)
    random.Random(3).shuffle(requests)
    assert serve(engine, requests) == serve(plain, requests)
    assert engine.telemetry().adapters.loads >= 4


def test_rows_wait_for_their_adapter_and_others_do_not(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    """With the base's row in the batch, no step joins a copy: the adapter's row enters when it has arrived."""
    engine = late_engine(tiny_llama, pool_bytes=17 * PAGE_BYTES, host_tier_bytes=1 << 20)
    (adapter_id,) = register_all(engine, {"rank8": tiny_adapters["rank8"]}).values()
    serve(engine, rows([adapter_id], 1))
    serve(engine, rows([None], 1, max_tokens=240))
    assert engine.telemetry().resident_adapter_ids == (), "in host memory, because the base's row took its pages"
    num_joined = engine.backend.late.num_joined
    engine.add(rows([None], 1, max_tokens=90))
    engine.step()
    (waiting,) = rows([adapter_id], 1)
    engine.add([Request("waits", waiting.prompt_token_ids, adapter_id, waiting.sampling)])
    running = []
    for _ in range(5):
        engine.step()
        running.append(engine.telemetry().num_running)
    assert running[0] == 1, "its copy has only begun"
    assert running[-1] == 2
    assert engine.backend.late.num_joined == num_joined


def test_alone_a_row_joins_its_adapter_s_copy(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    engine = late_engine(tiny_llama, pool_bytes=400 * PAGE_BYTES)
    (adapter_id,) = register_all(engine, {"rank8": tiny_adapters["rank8"]}).values()
    engine.add(rows([adapter_id], 1))
    engine.step()
    assert engine.telemetry().num_running == 1
    assert engine.backend.late.num_joined == 1


def test_a_merged_adapter_is_joined_before_it_is_taken_out_of_other_rows(
    tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    class Mixture:
        def __call__(self, view: BatchView) -> StepPlan:
            return StepPlan(
                "mixture", 0, np.ones(len(view.running_adapter), bool), np.arange(len(view.waiting_adapter))
            )

    found = []
    for make in (late_engine, make_engine):
        engine = make(tiny_llama, Mixture(), mode="auto", pool_bytes=400 * PAGE_BYTES)
        ids = register_all(engine, {name: tiny_adapters[name] for name in ("rank8", "rank20")})
        found.append(serve(engine, rows([None, *ids.values()], 6)))
    assert found[0] == found[1]


def test_pages_of_an_adapter_evicted_on_its_way_are_free_once_its_copy_is_done() -> None:
    pool, memory = PagePool(4), torch.zeros(16)
    layout = AdapterLayout(page_elements=4, size=6)
    loader = AdapterLoader(lambda adapter_id: PackedAdapter(torch.ones(6), layout), 0)
    residency = AdapterResidency(pool, memory, 4, loader, LateCopies())
    residency.load("a")
    assert not residency.has_arrived("a")
    residency.evict("a", lambda adapter_id: 0.0)
    pool.allocate("row", 2)
    memory[:8] = 7.0
    residency.load("b")
    residency.join("b")
    assert residency.has_arrived("b")
    residency.check_integrity([])
    assert memory.tolist() == [7.0] * 8 + [1.0] * 6 + [0.0] * 2


def test_a_cpu_copies_at_once() -> None:
    copies = AdapterCopies()
    memory, parts = torch.zeros(8), ((5, 2), (1, 3))
    assert copies.to_pool(torch.arange(1.0, 6.0), memory, parts).is_done()
    assert memory.tolist() == [0.0, 3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 0.0]
    back = copies.to_host(memory, parts)
    memory.zero_()
    assert back.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


class Stream:
    """What was asked of streams, in order: their calls are all there is to see without a GPU."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said
        self.events: list[Stream] = []
        self.has_passed = False

    def wait_stream(self, other: Stream) -> None:
        self._said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Stream) -> None:
        self._said.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Stream:
        self._said.append(f"event on {self.name}")
        self.events.append(Stream(f"event on {self.name}", self._said))
        return self.events[-1]

    def query(self) -> bool:
        return self.has_passed


def test_a_copy_stream_waits_for_steps_before_it_and_later_steps_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    compute, copy = Stream("compute", said), Stream("copy", said)
    active: list[Stream] = [compute]

    class Entered:
        def __init__(self, stream: Stream) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            active.append(self._stream)

        def __exit__(self, *_: object) -> None:
            active.pop()

    class Noting(torch.Tensor):
        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
            said.append(f"copied on {active[-1].name}{'' if non_blocking else ', waiting'}")
            return super().copy_(source)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copy)
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: active[-1])
    copies, pool = CopyStream(torch.device("cpu")), torch.zeros(8).as_subclass(Noting)
    numbers = torch.ones(8)
    source = weakref.ref(numbers)
    arrival = copies.to_pool(numbers, pool, ((0, 8),))
    del numbers
    assert said == ["copy waits for compute", "copied on copy", "event on copy"]
    assert not arrival.is_done()
    assert source() is not None, "what is being copied from lives"
    arrival.join()
    assert said[3:] == ["compute waits for event on copy"]
    copy.events[0].has_passed = True
    assert arrival.is_done()
    assert source() is None
    del said[:]
    assert copies.to_host(pool, ((0, 8),)).tolist() == [1.0] * 8
    assert said == ["copy waits for compute", "compute waits for copy"]


def test_adapters_that_many_rows_wait_for_are_not_all_read_at_once(tiny_llama: Path) -> None:
    """Each that has been read and not copied takes memory beside the pool."""
    engine = make_engine(tiny_llama, pool_bytes=400 * PAGE_BYTES, max_batch_rows=60, load_format="dummy")
    ids: list[str | None] = [engine.register_dummy_adapter(f"a{i}", 2) for i in range(50)]
    engine.add(rows(ids, 50))
    most, answered = 0, 0
    while engine.num_unfinished:
        answered += sum(result.error is None for result in engine.step())
        telemetry = engine.telemetry()
        most = max(most, telemetry.adapters.disk_reads - telemetry.adapters.loads)
    assert answered == 50
    assert 0 < most <= MAX_AWAITED + MAX_AHEAD
