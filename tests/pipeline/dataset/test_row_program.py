"""The stages of one row: what is asked when, and what comes out."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.request import Request, SamplingParams
from lorabatch.jobs.options.stages import stages_of, until_of
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.dataset.answers import RowAnswer
from lorabatch.pipeline.dataset.row_program import Ask, Flow, Picked, RowProgram

COLUMNS = {"body": "where is it", "priority": 3}
DRAFT = {"messages": "{{ body }}", "n": 3}
JUDGE = {"for_each": "draft", "messages": "{{ draft.completion }}", "choice": ["good", "bad"]}
BEST = {"pick": "draft", "by": "judge.probability.good"}
Reply = Callable[[Ask, int], str | None]


def flow_of(stages: dict[str, Any], until: dict[str, Any] | None = None) -> Flow:
    spec = JobSpec(model="m", input="i", output="o", stages=stages, until=until)
    return Flow.of(stages_of(spec.stages), until_of(spec.until), list(COLUMNS))


def answer_of(text: str | None, choice: bool = False) -> RowAnswer:
    """The answer with a text; an error for None. Of a choice, "good" by a probability that the text gives."""
    share = int(hashlib.sha256((text or "").encode()).hexdigest()[:2], 16) / 256
    return RowAnswer(
        fingerprint=b"",
        adapter_sha256=None,
        completion=text,
        finish_reason="error" if text is None else "stop",
        prompt_tokens=1,
        completion_tokens=1,
        mode="base",
        attempts=1,
        error="it failed" if text is None else None,
        choice_logprobs=(share - 2, -1.5) if choice and text is not None else None,
    )


def play(flow: Flow, reply: Reply, shuffle: random.Random | None = None) -> tuple[RowProgram, list[tuple[Any, ...]]]:
    """Run a row to its end. `reply`: text of each answer. `shuffle`: of the order in which answers come."""
    program, asked, waiting = RowProgram(flow, COLUMNS), [], []
    while True:
        for ask in program.asks():
            asked.append((ask.stage.name, ask.round, ask.item))
            waiting += [(ask, sample) for sample in range(ask.stage.num_samples)]
        if not waiting:
            return program, asked
        place = shuffle.randrange(len(waiting)) if shuffle else 0
        ask, sample = waiting.pop(place)
        choice = tuple(dict(ask.stage.options).get("choice", ()))
        request = Request("r", (1,), None, SamplingParams(choice=choice))
        program.answer(ask, sample, answer_of(reply(ask, sample), bool(choice)), request)
        program.keep_conversation(ask, [*ask.before, {"role": "user", "content": f"turn of {ask.stage.name}"}])


def text_of(ask: Ask, sample: int) -> str:
    if dict(ask.stage.options).get("choice"):
        return "good"
    return f"{ask.stage.name} {ask.round} {ask.item} {sample}"


def texts(result: Any) -> Any:
    if isinstance(result, list):
        return [texts(item) for item in result]
    if isinstance(result, Picked):
        return result.answer.completion
    return result and result[0].completion


def test_each_result_is_judged_as_soon_as_it_is_there_and_the_best_goes_on() -> None:
    flow = flow_of({"draft": DRAFT, "judge": JUDGE, "best": BEST, "fix": {"continues": "best", "messages": "Shorter."}})
    program, asked = play(flow, text_of)
    assert Counter(asked) == Counter([("draft", 0, 0), *(("judge", 0, item) for item in range(3)), ("fix", 0, 0)])
    assert program.is_done
    assert texts(program.results["draft"]) == ["draft 0 0 0", "draft 0 0 1", "draft 0 0 2"]
    shares = [answer_of(text, True).choice_logprobs for text in ("good", "good", "good")]
    assert len(set(shares)) == 1
    assert texts(program.results["best"]) == "draft 0 0 0"  # the first of equal ones


def test_a_conversation_goes_on_with_the_answer_that_was_picked() -> None:
    flow = flow_of({"draft": DRAFT, "judge": JUDGE, "best": BEST, "fix": {"continues": "best", "messages": "Shorter."}})
    seen: list[Any] = []

    def reply(ask: Ask, sample: int) -> str:
        if ask.stage.name == "fix":
            seen.extend(ask.before)
        return text_of(ask, sample)

    play(flow, reply)
    assert seen == [
        {"role": "user", "content": "turn of draft"},
        {"role": "assistant", "content": "draft 0 0 0"},
    ]


def test_turns_that_follow_each_other_are_one_conversation() -> None:
    stages = {
        "one": {"messages": "{{ body }}"},
        "two": {"continues": "one", "messages": "More."},
        "three": {"continues": "two", "messages": "And more."},
    }
    before: dict[str, int] = {}

    def reply(ask: Ask, sample: int) -> str:
        before[ask.stage.name] = len(ask.before)
        return text_of(ask, sample)

    play(flow_of(stages), reply)
    assert before == {"one": 0, "two": 2, "three": 4}


@pytest.mark.parametrize(("when", "runs"), [("priority > 2", True), ("priority > 3", False), ("body.x > 1", False)])
def test_a_stage_is_skipped_without_its_condition(when: str, runs: bool) -> None:
    program, asked = play(
        flow_of({"draft": {"messages": "x {{ body }}"}, "fix": {"when": when, "messages": "y"}}), text_of
    )
    assert (("fix", 0, 0) in asked) is runs
    assert texts(program.results["fix"]) == ("fix 0 0 0" if runs else None)
    assert program.is_done


def test_what_a_skipped_stage_would_have_said_is_null_for_later_ones() -> None:
    stages = {
        "draft": {"messages": "{{ body }}"},
        "fix": {"when": "priority > 9", "messages": "{{ draft.completion }}"},
        "last": {"messages": "{{ (fix or draft).completion }}"},
    }
    seen = {}

    def reply(ask: Ask, sample: int) -> str:
        seen[ask.stage.name] = dict(ask.scope)
        return text_of(ask, sample)

    play(flow_of(stages), reply)
    assert seen["last"]["fix"] is None
    assert seen["last"]["draft"]["completion"] == "draft 0 0 0"


def test_an_error_makes_null_of_all_that_reads_it_and_of_nothing_else() -> None:
    stages = {
        "draft": {"messages": "{{ body }}"},
        "judge": {"messages": "{{ draft.completion }}"},
        "after": {"messages": "{{ judge.completion }}"},
        "other": {"messages": "{{ body }} again"},
    }
    program, asked = play(
        flow_of(stages), lambda ask, sample: None if ask.stage.name == "draft" else text_of(ask, sample)
    )
    assert [name for name, *_ in asked] == ["draft", "other"]
    assert (program.results["judge"], program.results["after"]) == (None, None)
    assert texts(program.results["other"]) == "other 0 0 0"
    assert program.is_done


def test_one_error_among_several_results_costs_only_itself() -> None:
    flow = flow_of({"draft": DRAFT, "judge": JUDGE, "best": BEST})
    program, asked = play(
        flow, lambda ask, sample: None if (ask.stage.name, sample) == ("draft", 1) else text_of(ask, sample)
    )
    assert [item for name, _, item in asked if name == "judge"] == [0, 2]
    assert texts(program.results["judge"]) == ["good", None, "good"]
    assert texts(program.results["best"]) == "draft 0 0 0"


@pytest.mark.parametrize(("good_in", "rounds"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_rounds_end_when_their_condition_holds(good_in: int, rounds: int) -> None:
    until = {"stage": "judge", "is": "any(judge.choice == 'good')", "rounds": 3}
    flow = flow_of({"draft": DRAFT, "judge": JUDGE, "best": BEST}, until)

    def reply(ask: Ask, sample: int) -> str:
        if ask.stage.name == "judge":
            return "good" if ask.round >= good_in else "bad"
        return text_of(ask, sample)

    program, asked = play(flow, reply)
    assert sum(name == "draft" for name, *_ in asked) == rounds
    assert texts(program.results["draft"]) == [f"draft {rounds - 1} 0 {sample}" for sample in range(3)]
    assert texts(program.results["best"]).startswith(f"draft {rounds - 1} ")


@given(
    st.integers(0, 10_000),
    st.sets(st.tuples(st.sampled_from(["draft", "judge", "fix"]), st.integers(0, 2), st.integers(0, 2))),
    st.integers(2, 3),
)
def test_the_order_of_answers_changes_nothing(seed: int, failing: set[tuple[str, int, int]], rounds: int) -> None:
    until = {"stage": "judge", "is": "any(judge.choice == 'good')", "rounds": rounds}
    stages = {
        "draft": DRAFT,
        "judge": JUDGE,
        "best": BEST,
        "fix": {"when": "best.by > 0.5", "continues": "best", "messages": "S"},
    }
    flow = flow_of(stages, until)

    def reply(ask: Ask, sample: int) -> str | None:
        if (ask.stage.name, ask.round, ask.item + sample) in failing:
            return None
        if ask.stage.name == "judge":
            return "good" if (seed + ask.round * 7 + ask.item) % 5 == 0 else "bad"
        return text_of(ask, sample)

    first, asked = play(flow, reply)
    second, again = play(flow, reply, random.Random(seed))
    assert first.is_done
    assert second.is_done
    assert Counter(asked) == Counter(again)
    assert max(Counter(asked).values()) == 1
    assert {name: texts(result) for name, result in first.results.items()} == {
        name: texts(result) for name, result in second.results.items()
    }
