"""Which of the tasks of lost workers is given up."""

from __future__ import annotations

import pytest

from lorabatch.pipeline.coordinator.losses import Losses, number_of, task_key

NAME = "index-a/job-20261123-1f"
OTHERS = ("lora_job-a-1", "('lora_shard-a-1', 3, 'b-0')")


def key(number: int, attempt: str = "b", name: str = NAME) -> str:
    return task_key(name, attempt, number, 1)


@pytest.mark.parametrize(
    ("lost", "deadly"),
    [
        ([[key(0)]], set()),
        ([[key(0)], [key(0, "c")]], {0}),
        ([[key(0), key(1)], [key(0)]], {0}),
        ([[key(0)], [key(0), *OTHERS]], {0}),
        # Together all the time, and never alone: until so many are lost that it must end.
        ([[key(0), key(1)]] * 3, set()),
        ([[key(0), key(1)]] * 4, {0, 1}),
        # Who shares two workers with one that ends them is not to blame.
        ([[key(0), key(1)], [key(0), key(1)], [key(0)]], {0}),
        ([[key(0), "a task of somebody else"]] * 2, set()),
        ([[key(0)], [key(0, name="count-a")]], set()),
        ([list(OTHERS)] * 9, set()),
    ],
)
def test_a_task_is_given_up_when_it_alone_has_lost_a_second_worker(lost: list[list[str]], deadly: set[int]) -> None:
    losses = Losses()
    for keys in lost:
        losses.add(keys)
    assert {item.number for item in losses.of(NAME) if item.is_deadly} == deadly


def test_a_key_says_its_item() -> None:
    assert number_of(key(17)) == 17
