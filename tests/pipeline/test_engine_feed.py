"""What an engine process is told, and when."""

from __future__ import annotations

from pathlib import Path

from lorabatch.engine.exported_row import ExportedRow
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.pipeline.engine_feed import EngineFeed
from lorabatch.pipeline.messages import AdapterSource, LocalAdapter

ADAPTER = LocalAdapter(AdapterSource("sha-a", "a", "/a"), Path("/a"))


def row(request_id: str, adapter_id: str | None = "sha-a") -> ExportedRow:
    return ExportedRow(Request(request_id, (5,), adapter_id, SamplingParams()))


def ops(feed: EngineFeed, *rows: ExportedRow) -> list[str]:
    return [message["op"] for message in feed.messages(rows)]


def test_a_process_hears_of_an_adapter_before_its_first_row_and_once() -> None:
    feed = EngineFeed()
    feed.learn([ADAPTER])
    assert ops(feed, row("1"), row("2", None)) == ["adapter", "add"]
    assert ops(feed, row("3")) == ["add"]
    feed.new_process()
    assert ops(feed, row("4")) == ["adapter", "add"]


def test_announced_rows_are_told_with_the_next_rows_of_their_adapter() -> None:
    feed = EngineFeed()
    feed.learn([ADAPTER])
    feed.expect("sha-a", 70)
    assert ops(feed, row("1", None)) == ["add"]
    messages = feed.messages([row("2")])
    assert [message["op"] for message in messages] == ["adapter", "expect", "add"]
    assert (messages[1]["adapter_id"], messages[1]["num_rows"]) == ("sha-a", 70)
    feed.expect("sha-a", 0)
    assert ops(feed, row("3")) == ["expect", "add"]
