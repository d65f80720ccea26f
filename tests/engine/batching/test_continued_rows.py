"""Rows that continue finished ones read their pages, prompt and answer, and answer as if nothing were kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft_oracle import serve
from scenarios import Alone, assert_same_answers, make_engine

from lorabatch.engine.config import EngineConfig, Mode, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.kernels.native import native_build
from lorabatch.scheduler.batchers.batching import clustered
from lorabatch.tests.engine.batching.test_growing_rows import Backend

PAGE = 16
PAGE_BYTES = 8192  # of the tiny model
PROMPT = tuple(3 + i * 7 % 200 for i in range(50))
ANSWER = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=True)
NEEDS_LIBRARY = pytest.mark.skipif(native_build() is None, reason="without compiled kernels nothing is shared")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Engines set torch's threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> dict[str, Path]:
    """Adapters by content hash."""
    model = read_model_config(tiny_llama)
    found = {audit_adapter(folder, model, name).identity_sha256: folder for name, folder in tiny_adapters.items()}
    return {identity: folder for identity, folder in found.items() if identity is not None}


def behind(request: Request, result: Result, tokens: Sequence[int], **changes: Any) -> Request:
    """The request that continues an answer with a user's next message."""
    prompt = (*request.prompt_token_ids, *result.token_ids, *tokens)
    return replace(
        request,
        **{"request_id": f"{request.request_id}+", "prompt_token_ids": prompt, "is_continuation": True} | changes,
    )


def answer(engine: Engine, request: Request) -> Result:
    """The result of one row; the engine proves itself after each step."""
    return serve(engine, [request])[request.request_id]


@NEEDS_LIBRARY
@pytest.mark.parametrize("adapter", [-1, 1])
def test_a_continued_row_computes_what_is_new_and_has_the_same_bits(
    tiny_llama: Path, folders: dict[str, Path], adapter: int
) -> None:
    engine, alone = (
        make_engine(tiny_llama, folders, "exact", pool_bytes=2 << 20, uses_prefix_cache=uses) for uses in (True, False)
    )
    first = Request("row", PROMPT, [*folders, None][adapter], ANSWER, will_continue=True)
    second = behind(first, answer(engine, first), (5, 6, 7), will_continue=True)
    third = behind(second, answer(engine, second), (8,) * 20, will_continue=False)
    for request, num_stored in ((second, 50 + 20 - 1), (third, 50 + 20 + 3 + 20 - 1)):
        result = answer(engine, replace(request, request_id="again"))
        assert result == replace(answer(alone, request), request_id="again")
        assert result.reused_prompt_tokens == num_stored // PAGE * PAGE, "the last token was never computed"


def test_without_the_flag_nothing_stays(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, {}, "unmerged", pool_bytes=2 << 20)
    first = Request("row", PROMPT, None, ANSWER)
    second = behind(first, answer(engine, first), (5, 6, 7))
    assert engine.telemetry().pages_used == 0
    assert answer(engine, second).reused_prompt_tokens == 0


def test_pages_are_read_as_far_as_tokens_agree(tiny_llama: Path) -> None:
    """A template that leaves the answer out, and one that changes the prompt's middle."""
    engine = make_engine(tiny_llama, {}, "unmerged", pool_bytes=2 << 20)
    first = Request("row", PROMPT, None, ANSWER, will_continue=True)
    answer(engine, first)
    for prompt, num_reused in (((*PROMPT, 9, 9, *PROMPT), 48), ((*PROMPT[:20], 9, *PROMPT[20:]), 16)):
        assert answer(engine, replace(first, prompt_token_ids=prompt)).reused_prompt_tokens == num_reused


def test_another_adapter_and_the_base_read_none_of_them(tiny_llama: Path, folders: dict[str, Path]) -> None:
    engine = make_engine(tiny_llama, folders, "unmerged", pool_bytes=4 << 20)
    own, other, *_ = folders
    first = Request("row", PROMPT, own, ANSWER, will_continue=True)
    second = behind(first, answer(engine, first), (5,))
    for adapter_id, num_reused in ((None, 0), (other, 0), (own, 64)):
        assert answer(engine, replace(second, adapter_id=adapter_id)).reused_prompt_tokens == num_reused


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_logprobs": True},
        {"choice": ("ab", "cd", "ce"), "ignore_eos": False},
        {"choice": ("ab", "cd", "ce"), "ignore_eos": False, "score_choices": False},
        {"stop": ("a", "e"), "min_tokens": 18},
    ],
)
def test_pages_of_rows_with_other_options_hold_what_was_computed(tiny_llama: Path, options: dict[str, Any]) -> None:
    """Rows that are scored go to other tokens in the end; a row that scores its prompt copies nothing itself."""
    engine, alone = (
        make_engine(tiny_llama, {}, "unmerged", pool_bytes=2 << 20, uses_prefix_cache=uses) for uses in (True, False)
    )
    first = Request("row", PROMPT, None, replace(ANSWER, **options), will_continue=True)
    result = answer(engine, first)
    assert result.error is None, result.error
    second = behind(first, result, (5, 6, 7), sampling=ANSWER)
    found, expected = answer(engine, second), answer(alone, second)
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert found.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-4)
    assert found.reused_prompt_tokens >= 48


def test_continuations_enter_before_rows_that_wait(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, {}, "unmerged", pool_bytes=2 << 20, max_batch_rows=1)
    rows = [Request(f"{i}", PROMPT[i:], None, ANSWER, will_continue=True) for i in range(3)]
    engine.add(rows)
    order: list[str] = []
    while engine.num_unfinished:
        for result in engine.step():
            order.append(result.request_id)
            if "+" not in result.request_id:
                engine.add([behind(rows[int(result.request_id)], result, (5,), will_continue=False)])
        engine.check_integrity()
    assert order == ["0", "0+", "1", "1+", "2", "2+"]


def test_pages_of_rows_that_will_be_continued_leave_last(tiny_llama: Path, folders: dict[str, Path]) -> None:
    """A row that can wait for another leaves them; one that runs alone gets what it needs, adapters' pages first."""
    idle = next(iter(folders))
    engine = make_engine(tiny_llama, folders, "unmerged", pool_bytes=PAGE_BYTES * 16, max_batch_rows=2)
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    answer(engine, Request("short", (3, 4), idle, short))
    first = Request("row", PROMPT, None, ANSWER, will_continue=True)
    second = behind(first, answer(engine, first), (5,), will_continue=False)

    def rows_of(*num_pages: int) -> list[Request]:
        samplings = [replace(short, max_tokens=min(PAGE * n - 1, 254)) for n in num_pages]
        return [Request(f"{i}", (3, 4), None, sampling) for i, sampling in enumerate(samplings)]

    engine.add(rows_of(11, 5))
    engine.step()
    assert engine.telemetry().num_running == 1, "eleven, one and four pages are taken"
    assert engine.telemetry().resident_adapter_ids == (idle,)
    assert answer(engine, second).reused_prompt_tokens == 64
    answer(engine, first)
    engine.add(rows_of(12))
    engine.step()
    assert engine.telemetry().resident_adapter_ids == (), "the adapter has made room"
    assert answer(engine, second).reused_prompt_tokens == 64
    answer(engine, first)
    assert serve(engine, rows_of(16))["0"].error is None
    assert engine.telemetry().pages_used == 0, "a row that needs the whole pool gets it"
    assert answer(engine, second).reused_prompt_tokens == 0


def test_rows_are_continued_from_their_pages_though_memory_is_full_of_waiting_ones(tiny_llama: Path) -> None:
    """A finished row's pages go to places that it gives back, and rows that wait leave them to its continuation."""
    engine = make_engine(tiny_llama, {}, "unmerged", pool_bytes=PAGE_BYTES * 60)
    rng = random.Random(0)
    rows = [
        Request(
            f"{i}",
            tuple(rng.randrange(3, 250) for _ in range(100)),
            None,
            replace(ANSWER, max_tokens=rng.randrange(5, 40)),
            will_continue=True,
        )
        for i in range(24)
    ]
    engine.add(rows)
    num_running, continued = [], []
    while engine.num_unfinished:
        for result in engine.step():
            if "+" in result.request_id:
                continued.append(result)
            else:
                engine.add([behind(rows[int(result.request_id)], result, (5,), will_continue=False)])
        num_running.append(engine.telemetry().num_running)
    assert max(num_running) < 8, "memory is what limits them"
    assert sum(num_running) / len(num_running) > 3
    assert len(continued) == 24
    reused = sum(result.reused_prompt_tokens or 0 for result in continued)
    assert reused >= 0.7 * sum(result.prompt_tokens for result in continued)


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {"sliding_window": 20}),
        pytest.param("gemma2", {"head_dim": 16, "sliding_window": 20}, marks=pytest.mark.long),
        pytest.param("qwen3", {"head_dim": 16}, marks=pytest.mark.long),
    ],
)
def test_rows_with_sliding_windows_have_the_same_bits_when_continued(
    tmp_path: Path, make_model: Callable[..., Path], family: str, options: dict[str, Any]
) -> None:
    model = make_model(tmp_path / "model", family, **options)
    engine, alone = (
        make_engine(model, {}, "exact", pool_bytes=2 << 20, uses_prefix_cache=uses) for uses in (True, False)
    )
    first = Request("row", PROMPT, None, ANSWER, will_continue=True)
    second = behind(first, answer(engine, first), (5, 6, 7))
    result = answer(engine, second)
    assert result == answer(alone, second)
    assert result.reused_prompt_tokens == 64


def test_angles_that_depend_on_length_keep_nothing(make_model: Callable[..., Path], tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    engine = make_engine(make_model(tmp_path / "dynamic", rope_parameters=scaling), {}, "unmerged")
    first = Request("row", PROMPT, None, ANSWER, will_continue=True)
    assert answer(engine, behind(first, answer(engine, first), (5,))).reused_prompt_tokens == 0


@dataclass
class Conversations:
    """Rows whose next turns follow from their answers, in engines among which they move."""

    rng: random.Random
    adapter_ids: list[str | None]
    draws_freely: bool

    def begin(self, number: int) -> Request:
        """The first turn of a conversation; some begin alike."""
        rng = self.rng
        prompt = PROMPT[: rng.choice((0, 16, 40, 50))] + tuple(
            rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))
        )
        return self._asked(Request(f"{number}.0", prompt, rng.choice(self.adapter_ids), ANSWER))

    def follow(self, request: Request, result: Result) -> Request:
        """The next turn: behind the answer, without it, or with a part of the prompt left out."""
        rng = self.rng
        known = (*request.prompt_token_ids, *result.token_ids)
        agreed = rng.choice(
            (len(known), len(known), len(known) - 1, len(request.prompt_token_ids), rng.randrange(len(known)))
        )
        prompt = known[:agreed] + tuple(rng.randrange(3, 250) for _ in range(rng.randrange(1, 20)))
        number, _, turn = request.request_id.partition(".")
        row_id = f"{number}.{int(turn) + 1}"
        return self._asked(replace(request, request_id=row_id, prompt_token_ids=prompt[-150:]))

    def _asked(self, request: Request) -> Request:
        rng = self.rng
        sampling = SamplingParams(rng.randrange(1, 30), ignore_eos=rng.random() < 0.8, logprobs=True)
        if self.draws_freely and rng.random() < 0.4:
            sampling = replace(sampling, temperature=0.8, seed=rng.randrange(99))
        return replace(
            request,
            sampling=sampling,
            stream_id=rng.getrandbits(64),
            will_continue=rng.random() < 0.8,
            is_continuation=not request.request_id.endswith(".0") and rng.random() < 0.8,
        )

    def play(
        self, engines: Sequence[Engine], num_conversations: int, num_turns: int
    ) -> dict[str, tuple[Request, Result]]:
        """Requests and results by id. Rows are aborted and moved at random; all books are checked after each step."""
        rng, asked, found = self.rng, {}, {}
        to_come = [self.begin(number) for number in range(num_conversations)]
        for _ in range(5000):
            now = [request for request in to_come if rng.random() < 0.4]
            to_come = [request for request in to_come if request not in now]
            asked |= {request.request_id: request for request in now}
            engines[0].add(now)
            self._disturb(engines, [name for name in asked if name not in found])
            for engine in engines:
                for result in engine.step():
                    request = asked[result.request_id]
                    assert result.request_id not in found
                    found[result.request_id] = request, result
                    if int(result.request_id.partition(".")[2]) + 1 < num_turns:
                        to_come.append(self.follow(request, result))
                engine.check_integrity()
            if not to_come and not any(engine.num_unfinished for engine in engines):
                return found
        raise AssertionError("conversations do not come to an end")

    def _disturb(self, engines: Sequence[Engine], row_ids: list[str]) -> None:
        rng = self.rng
        if row_ids and rng.random() < 0.03:
            aborted = [rng.choice(row_ids)]
            for engine in engines:
                engine.abort(aborted)
        if rng.random() < 0.1:
            moving: list[list[ExportedRow]] = [
                engine.export_rows(rng.sample(row_ids, min(len(row_ids), 2))) for engine in engines
            ]
            for engine, rows in zip([*engines[1:], engines[0]], moving, strict=True):
                engine.import_rows(rows)


CONVERSATIONS = settings(
    max_examples=examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LIMITS = st.fixed_dictionaries(
    {
        "max_batch_rows": st.integers(1, 6),
        "max_step_tokens": st.sampled_from((7, 24, 64)),
        # an adapter of rank 64 takes 58 pages, a row at most 12
        "pool_bytes": st.sampled_from((72, 90, 120, 400)).map(lambda num_pages: num_pages * PAGE_BYTES),
    }
)


@NEEDS_LIBRARY
@CONVERSATIONS
@given(seed=st.integers(0, 10**6), limits=LIMITS)
def test_conversations_have_the_same_bits_whatever_is_kept(
    tiny_llama: Path, folders: dict[str, Path], seed: int, limits: dict[str, int]
) -> None:
    conversations = Conversations(random.Random(seed), [None, *folders], draws_freely=True)
    engines = [make_engine(tiny_llama, folders, "exact", **limits) for _ in range(2)]
    found = conversations.play(engines, num_conversations=6, num_turns=3)
    alone = make_engine(tiny_llama, folders, "exact", pool_bytes=4 << 20, uses_prefix_cache=False)
    for request, result in found.values():
        assert result == answer(alone, request)


@pytest.mark.parametrize("mode", ["auto", pytest.param("merged", marks=pytest.mark.long)])
@CONVERSATIONS
@given(seed=st.integers(0, 10**6), limits=LIMITS)
def test_conversations_have_the_same_answers_in_every_mode(
    tiny_llama: Path, folders: dict[str, Path], mode: Mode, seed: int, limits: dict[str, int]
) -> None:
    conversations = Conversations(random.Random(seed), [None, *folders], draws_freely=False)
    engines = [make_engine(tiny_llama, folders, mode, **limits) for _ in range(2)]
    found = conversations.play(engines, num_conversations=5, num_turns=3)
    alone = Alone(make_engine(tiny_llama, folders, "unmerged", pool_bytes=4 << 20, uses_prefix_cache=False))
    requests = [request for request, _ in found.values()]
    assert_same_answers({name: result for name, (_, result) in found.items()}, alone, requests)


@CONVERSATIONS
@given(
    seed=st.integers(0, 10**6),
    num_pages=st.integers(14, 60),
    batch_rows=st.integers(1, 6),
    step_tokens=st.sampled_from([16, 50]),
    steps_ahead=st.integers(0, 1),
)
def test_block_tables_of_continued_rows_hold_their_own_tokens(
    tiny_llama: Path, seed: int, num_pages: int, batch_rows: int, step_tokens: int, steps_ahead: int
) -> None:
    """As on a GPU, where pages pass to the cache as they are and rows are preempted; the runner reads all of them."""
    rng = random.Random(seed)
    answers = {f"{number}.{turn}": rng.randrange(1, 30) for number in range(6) for turn in range(3)}
    kind = type("Tables", (Backend,), {"steps_ahead": steps_ahead, "answer_tokens": answers})
    config = EngineConfig(
        max_batch_rows=batch_rows, max_step_tokens=step_tokens, pool_bytes=PAGE_BYTES * num_pages, num_threads=1,
        mode="unmerged",
    )  # fmt: skip
    engine = Engine(tiny_llama, config, clustered, kind)
    found = Conversations(rng, [None], draws_freely=False).play([engine], num_conversations=6, num_turns=3)
    assert all(result.error is None for _, result in found.values())


def test_pages_pass_to_the_cache_as_they_are_where_tables_name_them(tiny_llama: Path) -> None:
    kind = type("Tables", (Backend,), {"answer_tokens": {"row": 20, "row+": 20}})
    config = EngineConfig(max_batch_rows=2, pool_bytes=PAGE_BYTES * 20, num_threads=1, mode="unmerged")
    engine = Engine(tiny_llama, config, clustered, kind)
    first = Request("row", PROMPT, None, SamplingParams(max_tokens=20), will_continue=True)
    result = answer(engine, first)
    assert engine.telemetry().pages_used == 4
    assert answer(engine, behind(first, result, (5,), will_continue=False)).reused_prompt_tokens == 64
    assert engine.telemetry().pages_used == 4
