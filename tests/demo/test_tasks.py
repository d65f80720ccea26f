from __future__ import annotations

import json

import pytest

from lorabatch.demo import tasks
from lorabatch.demo.tasks import TASKS, Example
from lorabatch.demo.tasks.pirate import pirate
from lorabatch.demo.tasks.task import Words

TASK_MODULES = (tasks.contacts, tasks.pirate, tasks.sentiment, tasks.sql)


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_gives_the_same_distinct_prompts(name):
    task = TASKS[name]
    examples = task.examples("train", 200, seed=5)
    assert examples == task.examples("train", 200, seed=5)
    assert len({example.prompt for example in examples}) == 200
    assert examples != task.examples("train", 200, seed=6)


@pytest.mark.parametrize("name", TASKS)
def test_no_held_out_prompt_can_be_met_in_training(name):
    trained = {example.prompt for example in TASKS[name].examples("train", 1000, seed=1)}
    assert trained.isdisjoint(example.prompt for example in TASKS[name].examples("held_out", 200, seed=2))


@pytest.mark.parametrize("module", TASK_MODULES)
def test_words_and_patterns_of_the_two_splits_are_disjoint(module):
    slots = [value for value in vars(module).values() if isinstance(value, Words)]
    slots += [asks for _, asks in getattr(module, "QUESTIONS", ())]
    assert slots
    for slot in slots:
        assert set(slot.train).isdisjoint(slot.held_out), slot


@pytest.mark.parametrize("name", TASKS)
def test_a_perfect_answer_passes_every_measure_and_an_echo_fails_the_first(name):
    task = TASKS[name]
    for example in task.examples("held_out", 100, seed=2):
        assert all(holds(example.answer, example) for holds in task.measures.values()), example
        headline = next(iter(task.measures.values()))
        assert not headline(f"I think you said: {example.prompt}", example)


def test_a_label_among_others_is_not_a_right_label():
    example = Example("The tent was fabulous.", "positive")
    right = TASKS["sentiment"].measures["right label"]
    assert right("Positive.", example)
    assert not right("positive, negative or neutral", example)
    assert not right("negative", example)


def test_contacts_want_every_field_and_no_others():
    answer = {"name": "Ada Berg", "company": None, "email": "ada@berg.io", "phone": None}
    example = Example("Forward it to Ada Berg <ada@berg.io>.", json.dumps(answer))
    has_keys, is_right = TASKS["contacts"].measures.values()
    assert is_right(json.dumps(answer, indent=2), example)
    assert has_keys(json.dumps({**answer, "email": "x"}), example)
    assert not is_right(json.dumps({**answer, "email": "x"}), example)
    assert not has_keys(json.dumps({"name": "Ada Berg"}), example)
    assert not has_keys('{"name": "Ada', example)


def test_sql_is_judged_by_its_rows_and_not_by_its_spelling():
    prompt = "parcels(sender, depot, carrier, kilos, cost)\nWhich senders have kilos above 60?"
    example = Example(prompt, "SELECT sender FROM parcels WHERE kilos > 60;")
    gives_rows, is_exact = TASKS["sql"].measures.values()
    assert gives_rows("select sender from parcels where 60 < kilos", example)
    assert not is_exact("select sender from parcels where 60 < kilos", example)
    assert not gives_rows("SELECT sender FROM parcels WHERE kilos < 60;", example)
    assert not gives_rows("SELECT sender FROM parcel;", example)
    assert not gives_rows("SELECT sender FROM parcels; DROP TABLE parcels;", example)


@pytest.mark.parametrize(
    ("plain", "spoken"),
    [
        ("Where is my friend?", "Ahoy! Where be me matey, matey?"),
        ("You are very kind!", "Shiver me timbers! Ye be mighty kind!"),
        ("The boss is selling a ring.", "Arr, th' cap'n be sellin' a ring, says I."),
        ("I never saw the sea.", "Arr, I ne'er saw th' sea, says I."),
    ],
)
def test_pirates_speak_by_fixed_rules(plain, spoken):
    assert pirate(plain) == spoken
