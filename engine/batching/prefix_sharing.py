"""Shares the computed beginnings of prompts among rows of one adapter (docs/adr/0030), and keeps those of finished rows
that will be continued, with their answers (docs/adr/0131).

On a CPU a row's keys and values are in one contiguous run, so shared pages are copied into it: a copy costs less than a
hundredth of computing the page. On a GPU a row's block table names them, and a row that computes a page that others
wait for passes its own page on. While a row computes such a page, the others hold back for that one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from ...kernels.layouts.pages import PageLayout
from ..memory.pool import PagePool, PageRange
from ..memory.prefix_cache import PrefixCache
from ..model_config.model import ModelConfig
from ..models.step_batch import StepEntry
from ..sequence import Sequence

# Most bytes of a finished row's pages that are copied aside, where its own pages are the only room for them.
_MOST_LIFTED_BYTES = 64 << 20


@dataclass(slots=True)
class _PrefixReader:
    """A row's progress through the pages of its prompt.

    Pages of `path` before `num_passed` are computed or copied. `pages`: the cached pages that begin its block table.
    """

    path: tuple[bytes, ...]
    num_passed: int = 0
    pages: list[int] = field(default_factory=list)


class PrefixSharing(ABC):
    """Follows every unfinished row through the pages of its prompt. `owner`: the pool's owner of a row's run."""

    def __init__(self, pool: PagePool, layout: PageLayout, model: ModelConfig) -> None:
        self.cache = PrefixCache(pool, layout.page_tokens, lambda number: page_flops(model, layout.page_tokens, number))
        self._pool = pool
        self._page_tokens = layout.page_tokens
        self._readers: dict[str, _PrefixReader] = {}
        self._being_computed: set[bytes] = set()  # pages that have their place and no content yet
        self.num_reused_tokens = 0

    def expect(self, sequence: Sequence) -> None:
        """Note that a row was queued."""
        reader = _PrefixReader(self.cache.path(sequence.request.adapter_id, sequence.request.prompt_token_ids))
        self._readers[sequence.request.request_id] = reader
        self.cache.expect(reader.path)

    def forget(self, sequence: Sequence) -> None:
        """Note that a row is finished or gone."""
        reader = self._readers.pop(sequence.request.request_id)
        self.cache.release(reader.path[reader.num_passed :])
        self.cache.leave(reader.path[: len(reader.pages)])

    def pages_of(self, sequence: Sequence) -> tuple[int, ...]:
        """The cached pages that begin the row's block table; its own run continues them."""
        return tuple(self._readers[sequence.request.request_id].pages)

    def advance(self, sequence: Sequence, owner: Hashable) -> bool:
        """Give the row the cached pages that come next in its prompt.

        Returns False when another row of this step computes the next page, so that the row should wait for it. A row
        whose prompt is scored, or pooled as a whole, computes all of it: pages hold no numbers of that kind.
        """
        if sequence.needs_all_places:
            return True
        reader = self._readers[sequence.request.request_id]
        path = reader.path
        first, rest = divmod(sequence.num_stored, self._page_tokens)
        number = first
        # the last token known is always computed: its logits choose the next one
        last = min(len(path), sequence.next_asked // self._page_tokens)
        while rest == 0 and number < last:
            page = self.cache.find(path[number])
            if page is None or path[number] in self._being_computed or not self._have(reader, number, page, owner):
                break
            self.cache.touch(path[number])
            sequence.num_stored += self._page_tokens
            sequence.num_reused += self._page_tokens
            self.num_reused_tokens += self._page_tokens
            number += 1
        if sequence.request.is_continuation and number > first:
            self.cache.continued(path, number - 1)
        self._pass(sequence)
        return not (rest == 0 and number < last and path[number] in self._being_computed)

    def compute(self, sequence: Sequence, num_tokens: int, owner: Hashable) -> None:
        """Find places in the cache for the pages that the row completes by its next `num_tokens` tokens."""
        reader = self._readers[sequence.request.request_id]
        first = sequence.num_stored // self._page_tokens
        end = min((sequence.num_stored + num_tokens) // self._page_tokens, len(reader.path))
        self._being_computed.update(reader.path[n] for n in range(first, end) if self._keep(reader, n, owner))

    def after_step(self, entries: Collection[StepEntry]) -> None:
        """Fill the pages that the step completed."""
        for entry in entries:
            path = self._readers[entry.sequence.request.request_id].path
            for number in self._pass(entry.sequence):
                page = self.cache.find(path[number]) if path[number] in self._being_computed else None
                if page is not None:
                    self._fill(page, entry.pages, number)
        self._being_computed.clear()

    def finish(self, sequence: Sequence, owner: Hashable, free: Callable[[], None]) -> None:
        """Keep whole pages of a row that has its answer: all of them if it will be continued, else those that rows wait
        for. `free`: gives the row's own pages back to the pool, and forgets the row.
        """
        will_continue = sequence.request.will_continue
        path = self._readers[sequence.request.request_id].path
        if will_continue or len(self._wanted(path)) == len(path):
            num_known = sequence.prompt_tokens + len(sequence.token_ids)
            tokens = sequence.tokens(0, min(sequence.num_stored, num_known))
            path = self.cache.path(sequence.request.adapter_id, tokens)
        if will_continue:
            self.cache.make_reservable(len(path))
        path = path if will_continue else self._wanted(path)
        self._retain(path, len(self.pages_of(sequence)), owner, free)
        if will_continue:
            self.cache.reserve(path)

    def _wanted(self, path: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The first pages of a path, as far as they are there or rows wait for them."""
        readers = self.cache.readers
        return tuple(takewhile(lambda key: key in readers or self.cache.find(key) is not None, path))

    def check_integrity(self, unfinished_ids: Collection[str]) -> None:
        """Assert that the cache is sound, readers are the unfinished rows, and pages awaited or used are theirs."""
        self.cache.check_integrity()
        assert self._readers.keys() == set(unfinished_ids), f"{len(self._readers)} readers, {len(unfinished_ids)} rows"
        awaited = Counter(key for reader in self._readers.values() for key in reader.path[reader.num_passed :])
        assert awaited == self.cache.readers, f"rows wait for {awaited}, counted are {self.cache.readers}"
        named = Counter(key for reader in self._readers.values() for key in reader.path[: len(reader.pages)])
        assert named == self.cache.users, f"rows name {named}, counted are {self.cache.users}"
        for reader in self._readers.values():
            for key, page in zip(reader.path, reader.pages, strict=False):
                assert self.cache.find(key) == PageRange(page, 1), f"prefix page {key.hex()} is not page {page}"

    def _pass(self, sequence: Sequence) -> range:
        """Numbers of the pages that the row has completed since the last call."""
        reader = self._readers[sequence.request.request_id]
        before = reader.num_passed
        reader.num_passed = max(before, min(len(reader.path), sequence.num_stored // self._page_tokens))
        self.cache.release(reader.path[before : reader.num_passed])
        return range(before, reader.num_passed)

    @abstractmethod
    def _have(self, reader: _PrefixReader, number: int, page: PageRange, owner: Hashable) -> bool:
        """Make a cached page the row's page `number`, if that is possible."""

    @abstractmethod
    def _keep(self, reader: _PrefixReader, number: int, owner: Hashable) -> bool:
        """Enter a page that the row computes in this step, if others wait for it."""

    @abstractmethod
    def _fill(self, page: PageRange, run: PageRange, number: int) -> None:
        """Note that the row of `run` has computed its page `number`, whose place in the cache is `page`."""

    @abstractmethod
    def _retain(self, path: tuple[bytes, ...], num_named: int, owner: Hashable, free: Callable[[], None]) -> None:
        """Enter a finished row's pages in the cache, as far as memory allows, and call `free`. `num_named`: number of
        cached pages that begin its block table."""


class CopiedPrefixes(PrefixSharing):
    """Copies pages between the cache and rows, in the memory of a CPU: in `pools` [num_members, numbers of a pool]."""

    def __init__(self, pool: PagePool, layout: PageLayout, model: ModelConfig, pools: Tensor) -> None:
        super().__init__(pool, layout, model)
        self._pools = pools
        self._page_elements = layout.page_elements
        self._layout = layout

    def _have(self, reader: _PrefixReader, number: int, page: PageRange, owner: Hashable) -> bool:
        self._copy(page, 0, self._pool.range_of(owner), number)
        return True

    def _keep(self, reader: _PrefixReader, number: int, owner: Hashable) -> bool:
        return self.cache.keep(reader.path, number) is not None

    def _fill(self, page: PageRange, run: PageRange, number: int) -> None:
        self._copy(run, number, page, 0)

    def _retain(self, path: tuple[bytes, ...], num_named: int, owner: Hashable, free: Callable[[], None]) -> None:
        run, first = self._pool.range_of(owner), 0
        while first < len(path):
            if self.cache.find(path[first]) is None:
                page = self.cache.keep_finished(path, first)
                if page is None:
                    break
                self._fill(page, run, first)
            first += 1
        # The rest go to places that the row gives back.
        page_bytes = self._page_elements * self._pools.itemsize * len(self._pools)
        end = min(len(path), first + _MOST_LIFTED_BYTES // page_bytes)
        lifted = [[part.clone() for part in self._slots(run, number)] for number in range(first, end)]
        free()
        for number, content in enumerate(lifted, first):
            page = self.cache.keep_finished(path, number)
            if page is None:
                break
            for part, kept in zip(self._slots(page, 0), content, strict=True):
                part.copy_(kept)

    def _copy(self, source: PageRange, number: int, target: PageRange, place: int) -> None:
        """Copy page `number` of one run to page `place` of another."""
        for part, content in zip(self._slots(target, place), self._slots(source, number), strict=True):
            part.copy_(content)

    def _slots(self, run: PageRange, number: int) -> list[Tensor]:
        """Keys and values of a run's page `number` in all pools, by groups of layers, each [num_members, num_layers * 2
        * num_kv_heads, page_tokens, head_dim]."""
        capacity, tokens = run.num_pages * self._page_tokens, slice(number * self._page_tokens, None)
        first, slots = run.start * self._page_elements, []
        for (shape, num_layers), start in zip(self._layout.groups, self._layout.group_starts, strict=False):
            begin = first + capacity * start
            heads = num_layers * 2 * shape.num_kv_heads
            whole = self._pools[:, begin : begin + heads * capacity * shape.head_dim]
            slots.append(whole.view(-1, heads, capacity, shape.head_dim)[:, :, tokens][:, :, : self._page_tokens])
        return slots


class NamedPrefixes(PrefixSharing):
    """Names cached pages in block tables; a page stays while any row names it.

    Nothing is copied, and a row frees the pages of its own that it does not need. Steps run in order on the device, so
    a page may be named as soon as the step that computes it is launched.
    """

    def _have(self, reader: _PrefixReader, number: int, page: PageRange, owner: Hashable) -> bool:
        # a row that has a page of its own names no cached page behind it
        if number != len(reader.pages):
            return False
        self._pool.release_first(owner)
        self.cache.use(reader.path[number])
        reader.pages.append(page.start)
        return True

    def _keep(self, reader: _PrefixReader, number: int, owner: Hashable) -> bool:
        if number != len(reader.pages):
            return False
        page = self.cache.adopt(reader.path, number, owner)
        if page is not None:
            reader.pages.append(page.start)
        return page is not None

    def _fill(self, page: PageRange, run: PageRange, number: int) -> None:
        """Do nothing: the cached page is the row's own."""

    def _retain(self, path: tuple[bytes, ...], num_named: int, owner: Hashable, free: Callable[[], None]) -> None:
        for number in range(num_named, len(path)):
            if not self.cache.inherit(path, number, owner):
                break
        free()


def page_flops(model: ModelConfig, page_tokens: int, number: int) -> float:
    """Floating point operations of computing page `number` of a prompt: linear layers, and attention to all tokens
    before."""
    queries = sum(layer.attention.q_size for layer in model.layers if layer.attention is not None)
    mean_context = (number + 0.5) * page_tokens
    return 2.0 * page_tokens * (model.layer_elements + 2 * queries * mean_context)
