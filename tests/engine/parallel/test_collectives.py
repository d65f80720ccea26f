"""Members add up and join tensors of any size, with the same bits on each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lorabatch.engine.parallel.collectives import (
    Collectives,
    buffer_numbers,
    event_counters,
    shared_memory,
    shared_memory_bytes,
)


def in_group(num_members: int, num_numbers: int, work: Callable[[int, Collectives], Any]) -> list[Any]:
    """What each member of a group of threads returns."""
    memory = shared_memory("test", shared_memory_bytes(num_members, num_numbers))
    counters = event_counters(num_members)
    results: list[Any] = [None] * num_members

    def run(member: int) -> None:
        results[member] = work(member, Collectives(member, num_members, memory, num_numbers, counters))

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in range(num_members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a member waits for ever"
    for counter in counters:
        os.close(counter)
    return results


@given(
    num_members=st.integers(2, 5),
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=6),
    seed=st.integers(0, 99),
)
def test_sums_are_equal_on_all_members_whatever_the_size_of_the_buffers(
    num_members: int, shapes: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    given_ = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(num_members)]

    def work(member: int, group: Collectives) -> list[Tensor]:
        return [group.add_up(x.clone()) for x in given_[member]]

    found = in_group(num_members, 32, work)
    for i in range(len(shapes)):
        expected = given_[0][i].clone()
        for member in range(1, num_members):
            expected += given_[member][i]
        assert all(torch.equal(found[member][i], expected) for member in range(num_members))


@given(
    widths=st.lists(st.integers(0, 70), min_size=2, max_size=4).filter(any),
    rows=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_columns_of_any_width_are_joined_on_the_leader(widths: list[int], rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(rows, width, generator=generator) for width in widths]
    found = in_group(len(widths), 32, lambda member, group: [group.join_columns(columns[member]) for _ in range(2)])
    assert all(torch.equal(joined, torch.cat(columns, 1)) for joined in found[0])
    assert all(joined is None for of_member in found[1:] for joined in of_member)


def test_a_member_that_waits_for_a_lost_one_is_told() -> None:
    def work(member: int, group: Collectives) -> str:
        if member == 1:
            return "gone"
        threading.Timer(0.05, group.lose, [RuntimeError("member 1 was lost")]).start()
        with pytest.raises(RuntimeError, match="member 1 was lost"):
            group.add_up(torch.ones(3))
        return "told"

    assert in_group(2, 32, work) == ["told", "gone"]


@pytest.mark.parametrize("so_on", [(), (2,), (0, 1, 2)])
def test_all_know_what_is_so_on_any(so_on: tuple[int, ...]) -> None:
    assert in_group(3, 32, lambda member, group: group.any_of(member in so_on)) == [bool(so_on)] * 3


def test_the_leader_knows_the_fewest_copies_of_any_other_member() -> None:
    def work(member: int, group: Collectives) -> int:
        group.note_copied((0, 7, 4)[member])
        group.any_of(False)
        return group.least_copied()

    assert in_group(3, 32, work)[0] == 4


def test_buffers_have_bounds() -> None:
    assert buffer_numbers(1) == 1 << 16
    assert buffer_numbers(1 << 40) == 1 << 22
