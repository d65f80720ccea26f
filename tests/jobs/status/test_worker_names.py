"""What workers are called."""

from __future__ import annotations

import pytest

from lorabatch.jobs.status.worker_names import WorkerNames, host_of

A, B = "tcp://10.0.0.5:4000", "tcp://10.0.0.6:4000"


def test_workers_are_numbered_in_the_order_in_which_they_are_seen_once() -> None:
    names = WorkerNames([A])
    assert names.see([A, B]) == [B]
    assert names.see([B, A]) == []
    assert [names.name(A), names.name(B)] == ["w0 10.0.0.5", "w1 10.0.0.6"]
    assert WorkerNames(names.addresses).name(B) == "w1 10.0.0.6"
    assert names.name("tcp://10.0.0.7:1") == "10.0.0.7:1"


def test_addresses_in_a_text_become_names() -> None:
    text = f"Worker {A}, then {B}. s3://bucket/x stays, and {A}0 is another"
    found = WorkerNames([A, B]).in_text(text)
    assert found == f"Worker w0 10.0.0.5, then w1 10.0.0.6. s3://bucket/x stays, and {A}0 is another"


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://10.0.0.5:4000", "10.0.0.5"),
        ("tls://[fe80::1]:4000", "fe80::1"),
        ("tls://worker-0.team.svc.cluster.local:12345", "worker-0"),
        ("ucx://" + "a-very-long-name-of-a-node-7" + ":1", "…ong-name-of-a-node-7"[:20]),
        ("inproc://127.0.0.1/4711/8", "127.0.0.1"),
        ("w", "w"),
    ],
)
def test_the_host_is_an_address_or_the_first_label_of_a_name(address: str, host: str) -> None:
    found = host_of(address)
    assert len(found) <= 20
    assert found == host or found.startswith("…")
