"""Rows of one adapter whose prompts begin alike compute the beginning once (docs/adr/0030-prefix-pages.md).

A row's keys and values lie in one contiguous run, so shared pages are copied into it: a copy costs less than a
hundredth of computing the page. While a row computes a page that others wait for, they hold back for that one step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from .config import EngineConfig
from .model_config import ModelConfig
from .pool import PagePool, PageRun
from .prefix_cache import PrefixCache
from .sequence import Sequence
from .step_batch import PageLayout, StepEntry


@dataclass(slots=True)
class _Reader:
    """A row on its way through its prompt: pages of `path` before `num_passed` are behind it."""

    path: tuple[bytes, ...]
    num_passed: int = 0


class PrefixSharing:
    """Follows every unfinished row through the pages of its prompt."""

    def __init__(self, pool: PagePool, memory: Tensor, layout: PageLayout, model: ModelConfig) -> None:
        self.cache = PrefixCache(pool, layout.page_tokens, lambda number: page_flops(model, layout.page_tokens, number))
        self._memory = memory
        self._layout = layout
        self._model = model
        self._readers: dict[str, _Reader] = {}
        self._being_computed: set[bytes] = set()  # pages that have their place and no content yet
        self.num_reused_tokens = 0

    def expect(self, sequence: Sequence) -> None:
        """A row was queued."""
        reader = _Reader(self.cache.path(sequence.request.adapter_id, sequence.request.prompt_token_ids))
        self._readers[sequence.request.request_id] = reader
        self.cache.expect(reader.path)

    def forget(self, sequence: Sequence) -> None:
        """A row is finished or gone."""
        reader = self._readers.pop(sequence.request.request_id)
        self.cache.release(reader.path[reader.num_passed :])

    def advance(self, sequence: Sequence, run: PageRun) -> bool:
        """Copy the cached pages that come next into the row's run. False: another row of this step computes the page
        that comes next, so the row had better wait for it."""
        page_tokens = self._layout.page_tokens
        path = self._readers[sequence.request.request_id].path
        number, rest = divmod(sequence.num_stored, page_tokens)
        # the last token known is always computed: its logits choose the next one
        last = min(len(path), (sequence.total_tokens - 1) // page_tokens)
        while rest == 0 and number < last:
            page = self.cache.find(path[number])
            if page is None or path[number] in self._being_computed:
                break
            self._slot(run, number).copy_(self._slot(page, 0))
            sequence.num_stored += page_tokens
            self.num_reused_tokens += page_tokens
            number += 1
        self._pass(sequence)
        return not (rest == 0 and number < last and path[number] in self._being_computed)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """The row computes its next `num_tokens` tokens in this step: find places for the pages it completes."""
        path = self._readers[sequence.request.request_id].path
        first = sequence.num_stored // self._layout.page_tokens
        end = min((sequence.num_stored + num_tokens) // self._layout.page_tokens, len(path))
        self._being_computed.update(path[n] for n in range(first, end) if self.cache.keep(path, n) is not None)

    def after_step(self, entries: Collection[StepEntry]) -> None:
        """Fill the pages that the step completed."""
        for entry in entries:
            path = self._readers[entry.sequence.request.request_id].path
            for number in self._pass(entry.sequence):
                page = self.cache.find(path[number]) if path[number] in self._being_computed else None
                if page is not None:
                    self._slot(page, 0).copy_(self._slot(entry.run, number))
        self._being_computed.clear()

    def check_integrity(self, unfinished_ids: Collection[str]) -> None:
        """The cache agrees with itself, and readers are the unfinished rows."""
        self.cache.check_integrity()
        assert self._readers.keys() == set(unfinished_ids), f"{len(self._readers)} readers, {len(unfinished_ids)} rows"

    def _pass(self, sequence: Sequence) -> range:
        """Numbers of the pages that the row has put behind it since the last call."""
        reader = self._readers[sequence.request.request_id]
        before = reader.num_passed
        reader.num_passed = max(before, min(len(reader.path), sequence.num_stored // self._layout.page_tokens))
        self.cache.release(reader.path[before : reader.num_passed])
        return range(before, reader.num_passed)

    def _slot(self, run: PageRun, number: int) -> Tensor:
        """Keys and values of a run's page `number`, [num_layers * 2 * num_kv_heads, page_tokens, head_dim]."""
        model, size, page_tokens = self._model, self._layout.page_elements, self._layout.page_tokens
        if self._layout.is_page_wise:
            run, number = PageRun(run.start + number, 1), 0
        shape = (model.num_layers * 2 * model.num_kv_heads, run.num_pages * page_tokens, model.head_dim)
        whole = self._memory[run.start * size : run.end * size].view(shape)
        return whole[:, number * page_tokens : (number + 1) * page_tokens]


def shares_prefixes(config: EngineConfig, model: ModelConfig) -> bool:
    """Not where keys depend on a row's length, nor where bits may not depend on how a prompt was cut."""
    return config.uses_prefix_cache and config.mode != "exact" and not model.has_length_dependent_rope


def page_flops(model: ModelConfig, page_tokens: int, number: int) -> float:
    """Multiplications and additions to compute page `number` of a prompt: linear layers, and attention to all
    tokens before."""
    members = (shape for site in model.names.sites for shape in model.members_of_site(site).values())
    linear = model.num_layers * sum(out_features * in_features for out_features, in_features in members)
    mean_context = (number + 0.5) * page_tokens
    return 2.0 * page_tokens * (linear + 2 * model.num_layers * model.q_size * mean_context)
