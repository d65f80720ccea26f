"""Names of a journal's segments."""

from __future__ import annotations

from lorabatch.jobs.journal_segments import SegmentNames, segments_of


def nothing() -> list[str]:
    return []


def test_segments_sort_in_the_order_of_writing_even_within_one_tick_of_the_clock() -> None:
    names = SegmentNames()
    written = [names.next("log", now_ns, nothing) for now_ns in (5, 5, 4, 10**19)]
    assert segments_of("log", reversed(written)) == written


def test_a_writer_whose_clock_is_behind_goes_on_after_those_before_it() -> None:
    first, second = SegmentNames(), SegmentNames()
    before = [first.next("log", 1000, nothing) for _ in range(2)]
    after = [second.next("log", 10, lambda: before) for _ in range(2)]
    assert segments_of("log", [*after, *before]) == [*before, *after]


def test_other_journals_and_a_file_of_the_journals_own_name_do_not_disturb() -> None:
    present = ["log", "log2.00000000000000009999-aa", "log.note", "other"]
    name = SegmentNames().next("log", 7, lambda: present)
    assert name.startswith("log.00000000000000000007-")
    assert segments_of("log", [*present, name]) == ["log", name, "log.note"]
