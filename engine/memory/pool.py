"""Allocates the pages of one pool for keys, values and adapters (unified paging, S-LoRA section 4.2, with exact sizes).

A page holds the keys and values of `page_tokens` tokens in all layers. An owner (a sequence or an adapter) takes a
run of pages; on CPU the run is contiguous, so that its owner lays it out as it likes and reads it as views.
Nothing is reserved for adapters or for keys and values: one free list serves both.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ..model_config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Geometry of the pool: `page_elements` numbers per page of `page_tokens` tokens. Rows' runs are multiples of
    `run_pages` where memory allows."""

    page_tokens: int
    page_elements: int
    run_pages: int = 1

    @classmethod
    def of(cls, model: ModelConfig, page_tokens: int, *, run_pages: int = 1) -> PageLayout:
        return cls(page_tokens, page_tokens * 2 * model.num_layers * model.kv_size, run_pages)

    def pages_for_tokens(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def pages_for_elements(self, num_elements: int) -> int:
        return -(-num_elements // self.page_elements)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages `start` to `start + num_pages - 1` of the pool, held by one owner."""

    start: int
    num_pages: int

    @property
    def end(self) -> int:
        return self.start + self.num_pages


class PagePool:
    """Tracks the owner of each page. Pure bookkeeping: the memory itself is the engine's flat tensor."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: a pool needs at least one page")
        self.num_pages = num_pages
        self._free: list[PageRun] = [PageRun(0, num_pages)]  # sorted by start, never adjacent
        self._owned: dict[Hashable, PageRun] = {}

    @property
    def num_free(self) -> int:
        """Free pages, of all runs together."""
        return sum(run.num_pages for run in self._free)

    @property
    def largest_free_run(self) -> int:
        """Pages of the largest contiguous free run."""
        return max((run.num_pages for run in self._free), default=0)

    def free_runs_without(self, owners: Iterable[Hashable]) -> list[int]:
        """Pages of each contiguous free run there would be if these owners gave theirs back."""
        runs: list[int] = []
        position = -1
        for run in sorted([*self._free, *map(self.run_of, owners)], key=lambda run: run.start):
            if run.start == position:
                runs[-1] += run.num_pages
            else:
                runs.append(run.num_pages)
            position = run.end
        return runs

    def run_of(self, owner: Hashable) -> PageRun:
        """The run an owner holds. Raises KeyError when it holds none."""
        return self._owned[owner]

    def allocate(self, owner: Hashable, num_pages: int, *, from_end: bool = False) -> PageRun | None:
        """A contiguous run for `owner`, or None when no free run is long enough.

        The smallest fitting gap is taken, the leftmost of equals: sequences of equal size refill each other's
        gaps and stay evenly spaced, which lets one attention call serve several of them. `from_end` takes the end
        of the last gap instead: what comes one page at a time stays out of the way of long runs.
        """
        assert num_pages > 0, f"owner {owner!r} asked for {num_pages} pages"
        assert owner not in self._owned, f"owner {owner!r} holds {self._owned[owner]} already"
        fitting = [i for i, run in enumerate(self._free) if run.num_pages >= num_pages]
        if not fitting:
            return None
        i = fitting[-1] if from_end else min(fitting, key=lambda i: (self._free[i].num_pages, self._free[i].start))
        gap = self._free[i]
        left = gap.num_pages - num_pages
        taken = PageRun(gap.start + (left if from_end else 0), num_pages)
        if left:
            self._free[i] = PageRun(gap.start if from_end else taken.end, left)
        else:
            del self._free[i]
        self._owned[owner] = taken
        return taken

    def release(self, owner: Hashable) -> None:
        """Free an owner's run and join it with free neighbours. Raises KeyError when it holds none."""
        self._free_run(self._owned.pop(owner))

    def _free_run(self, run: PageRun) -> None:
        i = bisect.bisect_left(self._free, run.start, key=lambda free: free.start)
        start, end = run.start, run.end
        if i < len(self._free) and self._free[i].start == end:
            end = self._free.pop(i).end
        if i > 0 and self._free[i - 1].end == start:
            start = self._free.pop(i - 1).start
            i -= 1
        self._free.insert(i, PageRun(start, end - start))

    def pass_first(self, owner: Hashable, heir: Hashable) -> PageRun:
        """Make the first page of an owner's run, which has more, another owner's."""
        first = self._take_first(owner)
        assert heir not in self._owned, f"owner {heir!r} holds {self._owned[heir]} already"
        self._owned[heir] = first
        return first

    def release_first(self, owner: Hashable) -> None:
        """Free the first page of an owner's run, which has more."""
        self._free_run(self._take_first(owner))

    def _take_first(self, owner: Hashable) -> PageRun:
        run = self._owned[owner]
        assert run.num_pages > 1, f"owner {owner!r} would be left without a page of {run}"
        self._owned[owner] = PageRun(run.start + 1, run.num_pages - 1)
        return PageRun(run.start, 1)

    def check_integrity(self) -> None:
        """Assert that every page is free or held by exactly one owner, and free runs are sorted and joined."""
        runs = sorted([*self._free, *self._owned.values()], key=lambda run: run.start)
        position = 0
        for run in runs:
            assert run.start == position, f"page {position}: next run starts at {run.start} ({runs})"
            position = run.end
        assert position == self.num_pages, f"runs cover {position} of {self.num_pages} pages"
        for left, right in zip(self._free, self._free[1:], strict=False):
            assert left.end < right.start, f"free runs {left} and {right} are not sorted and joined"
