"""Allocates the pages of one pool for keys, values and adapters (unified paging, S-LoRA section 4.2, with exact sizes).

A page holds the keys and values of `page_tokens` tokens in all layers, or a part of the recurrent state that a row has
in layers of the gated delta rule, which is behind its tokens. An owner takes pages wherever they are free:
adapters always (`adapter_layout`), rows where block tables name pages one by one. On CPUs a row takes one run of pages,
whose keys and values attention reads as views.
Nothing is reserved for adapters or for keys and values: one free list serves both.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from ...kernels.layouts.pages import PageLayout
from ..model_config.model import ModelConfig

# Bytes of a number of a recurrent state, whatever the pool's own format.
_STATE_BYTES = 4


def page_layout(model: ModelConfig, page_tokens: int, itemsize: int) -> PageLayout:
    """How the pool of a model, or of a member's part of it, is cut into pages. `itemsize`: bytes of a number in it."""
    (first, num_layers), *others = model.key_shapes
    layout = PageLayout(model.num_heads, first.num_kv_heads, first.head_dim, num_layers, page_tokens, tuple(others))
    state_bytes = _STATE_BYTES * model.state_elements
    return replace(layout, row_pages=-(-state_bytes // (layout.page_elements * itemsize)))


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages `start` to `start + num_pages - 1` of the pool: a run of pages."""

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
        self._free: list[PageRange] = [PageRange(0, num_pages)]  # sorted by start, never adjacent
        self._owned: dict[Hashable, list[PageRange]] = {}  # in the order in which they were taken

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
        owned = (run for owner in owners for run in self._owned[owner])
        for run in sorted([*self._free, *owned], key=lambda run: run.start):
            if run.start == position:
                runs[-1] += run.num_pages
            else:
                runs.append(run.num_pages)
            position = run.end
        return runs

    def range_of(self, owner: Hashable) -> PageRange:
        """The first run of an owner. Raises KeyError when it holds none."""
        return self._owned[owner][0]

    def runs_of(self, owner: Hashable) -> tuple[PageRange, ...]:
        """All runs of an owner, in order. Raises KeyError when it holds none."""
        return tuple(self._owned[owner])

    def num_pages_of(self, owner: Hashable) -> int:
        """Pages that an owner holds. Raises KeyError when it holds none."""
        return sum(run.num_pages for run in self._owned[owner])

    def allocate(self, owner: Hashable, num_pages: int, *, from_end: bool = False) -> PageRange | None:
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
        taken = self._take(i, num_pages, from_end=from_end)
        self._owned[owner] = [taken]
        return taken

    def _take(self, i: int, num_pages: int, *, from_end: bool = False) -> PageRange:
        """Take pages of a gap, which has as many."""
        gap = self._free[i]
        left = gap.num_pages - num_pages
        taken = PageRange(gap.start + (left if from_end else 0), num_pages)
        if left:
            self._free[i] = PageRange(gap.start if from_end else taken.end, left)
        else:
            del self._free[i]
        return taken

    def release(self, owner: Hashable) -> None:
        """Free all pages of an owner and join them with free neighbours. Raises KeyError when it holds none."""
        for run in self._owned.pop(owner):
            self._free_run(run)

    def allocate_anywhere(self, owner: Hashable, num_pages: int) -> tuple[PageRange, ...]:
        """Give `owner` pages wherever they are free; at least `num_pages` must be free.

        They are one run if a gap is long enough, else the smallest gaps, so that long ones are left to those that need
        them.
        """
        assert self.num_free >= num_pages, f"owner {owner!r} asked for {num_pages} pages of {self.num_free} free ones"
        if self.allocate(owner, num_pages) is None:
            self._owned[owner] = runs = []
            while num_pages:
                smallest = min(range(len(self._free)), key=lambda i: self._free[i].num_pages)
                runs.append(self._take(smallest, min(num_pages, self._free[smallest].num_pages)))
                num_pages -= runs[-1].num_pages
        return tuple(self._owned[owner])

    def extend(self, owner: Hashable) -> None:
        """Give an owner one page more, of which one must be free: the one behind its last if it can be had, else of the
        smallest gap.
        """
        assert self._free, f"owner {owner!r} asked for a page of a full pool"
        runs = self._owned[owner]
        last = runs[-1]
        i = bisect.bisect_left(self._free, last.end, key=lambda free: free.start)
        if i == len(self._free) or self._free[i].start != last.end:
            i = min(range(len(self._free)), key=lambda i: self._free[i].num_pages)
        page = self._take(i, 1)
        if page.start == last.end:
            runs[-1] = PageRange(last.start, last.num_pages + 1)
        else:
            runs.append(page)

    def _free_run(self, run: PageRange) -> None:
        i = bisect.bisect_left(self._free, run.start, key=lambda free: free.start)
        start, end = run.start, run.end
        if i < len(self._free) and self._free[i].start == end:
            end = self._free.pop(i).end
        if i > 0 and self._free[i - 1].end == start:
            start = self._free.pop(i - 1).start
            i -= 1
        self._free.insert(i, PageRange(start, end - start))

    def pass_first(self, owner: Hashable, heir: Hashable) -> PageRange:
        """Make the first page of an owner, which has more, another owner's."""
        first = self._take_first(owner)
        assert heir not in self._owned, f"owner {heir!r} holds {self._owned[heir]} already"
        self._owned[heir] = [first]
        return first

    def release_first(self, owner: Hashable) -> None:
        """Free the first page of an owner, which has more."""
        self._free_run(self._take_first(owner))

    def _take_first(self, owner: Hashable) -> PageRange:
        runs = self._owned[owner]
        first = runs[0]
        assert first.num_pages > 1 or len(runs) > 1, f"owner {owner!r} would be left without a page of {first}"
        runs[:1] = [PageRange(first.start + 1, first.num_pages - 1)] if first.num_pages > 1 else []
        return PageRange(first.start, 1)

    def check_integrity(self) -> None:
        """Assert that every page is free or held by exactly one owner, and free runs are sorted and joined."""
        owned = (run for runs in self._owned.values() for run in runs)
        runs = sorted([*self._free, *owned], key=lambda run: run.start)
        position = 0
        for run in runs:
            assert run.start == position, f"page {position}: next run starts at {run.start} ({runs})"
            position = run.end
        assert position == self.num_pages, f"runs cover {position} of {self.num_pages} pages"
        for left, right in zip(self._free, self._free[1:], strict=False):
            assert left.end < right.start, f"free runs {left} and {right} are not sorted and joined"
