"""The engine against its oracle: transformers and PEFT in fp32, row by row.

The expected length starts at half of what is allowed and follows what is seen.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from peft_oracle import Oracle, make_engine, prompts, register_all, serve, weights_sha256
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorabatch.engine.config import Mode, read_model_config
from lorabatch.engine.memory.registry import AdapterRegistry
from lorabatch.engine.model_config.names import PackedSite
from lorabatch.engine.models.layers import Linear
from lorabatch.engine.models.step_batch import StepEntry
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.kernels.native import native_function
from lorabatch.kernels.native.segments import SiteSegments
from lorabatch.scheduler.costs.cost import StepLoad, prompt_pairs


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> Oracle:
    return Oracle(tiny_llama, tiny_adapters)


@pytest.mark.parametrize("mode", ["unmerged", "merged", "auto", "exact"])
def test_greedy_tokens_of_a_mixed_batch_equal_peft_row_by_row(
    tiny_llama: Path, tiny_adapters: dict[str, Path], oracle: Oracle, mode: Mode
) -> None:
    engine = make_engine(tiny_llama, mode)
    ids = register_all(engine, tiny_adapters)
    names = [None, *tiny_adapters]
    rows = {f"row-{i}": (p, names[i % len(names)]) for i, p in enumerate(prompts(20, engine.model.vocab_size))}
    sampling = SamplingParams(max_tokens=12)
    results = serve(
        engine, [Request(key, p, None if name is None else ids[name], sampling) for key, (p, name) in rows.items()]
    )
    assert results.keys() == rows.keys()
    for key, (prompt, name) in rows.items():
        assert results[key].token_ids == oracle.greedy(prompt, name, 12, stop_id=2), f"{key} under {name}"
    modes = {results[key].mode for key, (_, name) in rows.items() if name is not None}
    assert modes == {"merged" if mode == "merged" else "unmerged"}


def test_without_compiled_kernels_torch_serves_the_same_tokens(
    tiny_llama: Path, tiny_adapters: dict[str, Path], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.kernels.native._library", lambda: None)
    native_function.cache_clear()
    engine = make_engine(tiny_llama)
    ids = register_all(engine, tiny_adapters)
    names = [None, *tiny_adapters]
    rows = {f"row-{i}": (p, names[i % len(names)]) for i, p in enumerate(prompts(20, engine.model.vocab_size))}
    requests = [Request(key, p, ids.get(name or ""), SamplingParams(max_tokens=12)) for key, (p, name) in rows.items()]
    results = serve(engine, requests)
    native_function.cache_clear()
    for key, (prompt, name) in rows.items():
        assert results[key].token_ids == oracle.greedy(prompt, name, 12, stop_id=2), f"{key} under {name}"


@pytest.mark.parametrize("mode", ["unmerged", "merged"])
def test_log_probabilities_equal_those_of_peft(
    tiny_llama: Path, tiny_adapters: dict[str, Path], oracle: Oracle, mode: Mode
) -> None:
    engine = make_engine(tiny_llama, mode)
    ids = register_all(engine, tiny_adapters)
    sampling = SamplingParams(max_tokens=6, logprobs=True, ignore_eos=True)
    for name in [None, *tiny_adapters]:
        (prompt,) = prompts(1, engine.model.vocab_size, seed=5)
        result = serve(engine, [Request("row", prompt, ids.get(name or ""), sampling)])["row"]
        assert result.token_logprobs is not None
        expected = oracle.scores(prompt, result.token_ids, name)
        assert result.token_logprobs == pytest.approx(expected, abs=1e-3)


def test_weights_are_identical_by_hash_after_a_thousand_random_switches(
    tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    engine = make_engine(tiny_llama)
    before = weights_sha256(engine)
    ids = [*register_all(engine, tiny_adapters).values(), None]
    merged_hashes: dict[str, str] = {}
    rng = random.Random(7)
    for switch in range(1000):
        adapter_id = rng.choice(ids)
        engine.switch_weights(adapter_id)
        if switch % 100 == 99 and adapter_id is not None:
            assert merged_hashes.setdefault(adapter_id, weights_sha256(engine)) == weights_sha256(engine) != before
    engine.switch_weights(None)
    assert weights_sha256(engine) == before


def test_a_sampled_row_draws_the_same_tokens_alone_and_in_any_company(
    tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    engine = make_engine(tiny_llama)
    ids = list(register_all(engine, tiny_adapters).values())
    requests = [
        Request(
            f"row-{i}",
            prompt,
            ids[i % len(ids)],
            SamplingParams(max_tokens=10, temperature=1.0, top_k=i % 3 * 20, top_p=(1.0, 0.9)[i % 2], seed=3),
            stream_id=1000 + i,
        )
        for i, prompt in enumerate(prompts(12, engine.model.vocab_size))
    ]
    together = serve(engine, requests)
    for request in requests:
        assert serve(engine, [request])[request.request_id].token_ids == together[request.request_id].token_ids
    assert len({r.token_ids for r in together.values()}) > 6


def test_rows_of_one_prompt_get_different_draws_from_different_streams(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    sampling = SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True)
    results = serve(engine, [Request(f"{i}", (5, 6, 7), None, sampling, stream_id=i) for i in range(8)])
    assert len({r.token_ids for r in results.values()}) > 4


def test_a_bad_row_becomes_an_error_and_leaves_the_others_alone(tiny_llama: Path, oracle: Oracle) -> None:
    engine = make_engine(tiny_llama)
    good = SamplingParams(max_tokens=5)
    results = serve(
        engine,
        [
            Request("good", (5, 6, 7), None, good),
            Request("unknown adapter", (5, 6, 7), "f" * 64, good),
            Request("empty", (), None, good),
            Request("outside vocabulary", (5, 10**6), None, good),
            Request("too long", tuple([5] * 300), None, good),
            Request("bad parameter", (5, 6), None, SamplingParams(temperature=-1)),
        ],
    )
    assert results["good"].token_ids == oracle.greedy((5, 6, 7), None, 5, stop_id=2)
    for key, word in {
        "unknown adapter": "adapter",
        "empty": "no tokens",
        "outside vocabulary": "prompt_token_ids",
        "too long": "context",
        "bad parameter": "temperature",
    }.items():
        assert results[key].finish_reason == "error"
        assert word in (results[key].error or "")


def test_a_row_may_come_again_under_its_id_only_after_it_is_finished(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    row = Request("row", (5, 6, 7), None, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.add([row])
    with pytest.raises(ValueError, match="row of this id is not finished yet"):
        engine.add([row])
    engine.step()
    with pytest.raises(ValueError, match="row of this id is not finished yet"):
        engine.add([row])
    first = serve(engine, [])
    assert serve(engine, [row]) == first


def test_many_adapters_pass_through_a_pool_that_holds_few(
    tiny_llama: Path, tiny_adapters: dict[str, Path], oracle: Oracle
) -> None:
    # room for a few rows and about one large adapter at a time
    engine = make_engine(tiny_llama, pool_bytes=650_000)
    ids = register_all(engine, tiny_adapters)
    names = list(tiny_adapters)
    rows = {f"row-{i}": (p, names[i % 4]) for i, p in enumerate(prompts(24, engine.model.vocab_size, seed=2))}
    sampling = SamplingParams(max_tokens=6)
    results = serve(engine, [Request(k, p, ids[n], sampling) for k, (p, n) in rows.items()])
    for key, (prompt, name) in rows.items():
        assert results[key].token_ids == oracle.greedy(prompt, name, 6, stop_id=2)


@pytest.mark.parametrize("mode", ["unmerged", "merged"])
def test_rows_of_an_adapter_that_changed_since_planning_are_errors_and_others_go_on(
    tiny_llama: Path, tiny_adapters: dict[str, Path], mode: Mode
) -> None:
    engine = make_engine(tiny_llama, mode)
    engine.register_adapter("0" * 64, tiny_adapters["rank8"], "rank8")
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    results = serve(engine, [Request("changed", (5, 6), "0" * 64, sampling), Request("base", (5, 6), None, sampling)])
    assert "have changed since they were audited" in (results["changed"].error or "")
    assert results["base"].error is None
    assert len(results["base"].token_ids) == 2


@pytest.mark.parametrize("mode", ["unmerged", "merged"])
@pytest.mark.parametrize("members", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_adapter_may_have_another_id_than_its_content(
    tiny_llama: Path, tiny_adapters: dict[str, Path], mode: Mode, members: int
) -> None:
    engine = make_engine(tiny_llama, mode, tensor_parallel=members, num_threads=members)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    contents = {
        name: audit_adapter(folder, engine.model, name).content_sha256 for name, folder in tiny_adapters.items()
    }
    for name, folder in tiny_adapters.items():
        engine.register_adapter(f"version-{name}", folder, name, contents[name] or "")
    engine.register_adapter("version-other", tiny_adapters["rank8"], "other", contents["rank1"] or "")
    rows = [Request(name, (5, 6), f"version-{name}", sampling) for name in (*tiny_adapters, "other")]
    results = serve(engine, rows)
    expected = make_engine(tiny_llama, mode)
    ids = register_all(expected, tiny_adapters)
    for name, result in serve(expected, [Request(n, (5, 6), ids[n], sampling) for n in tiny_adapters]).items():
        assert results[name].token_ids == result.token_ids
    assert "have changed since they were audited" in (results["other"].error or "")
    engine.close()


def test_stop_strings_end_a_completion_and_are_not_part_of_it(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    text = serve(engine, [Request("free", (5, 6, 7), None, free)])["free"].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = serve(
        engine, [Request("stopped", (5, 6, 7), None, SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))]
    )["stopped"]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_min_tokens_withholds_the_stop_token(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    # a prompt whose greedy continuation stops early under some seed: all rows must still reach min_tokens
    requests = [
        Request(f"{i}", p, None, SamplingParams(max_tokens=9, min_tokens=9, temperature=2.0), stream_id=i)
        for i, p in enumerate(prompts(16, engine.model.vocab_size, seed=9))
    ]
    results = serve(engine, requests)
    assert {r.completion_tokens for r in results.values()} == {9}
    assert all(2 not in r.token_ids[:-1] for r in results.values())


def test_aborted_rows_give_their_pages_back(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.add([Request(f"{i}", (5, 6, 7), None, sampling) for i in range(12)])
    for _ in range(3):
        engine.step()
    engine.abort([f"{i}" for i in range(12)] + ["unknown"])
    engine.check_integrity()
    assert engine.num_unfinished == 0
    assert engine.telemetry().pages_used == 0


def load_of(entries: list[StepEntry], rank_of: dict[str, float]) -> StepLoad:
    """What a step is about to do."""
    ranks = [rank_of[e.adapter.adapter_id] if e.adapter is not None else 0.0 for e in entries]
    present = {e.adapter.adapter_id for e in entries if e.adapter is not None}
    prompts = [(e.num_tokens, e.sequence.num_stored) for e in entries if not e.is_decode]
    return StepLoad(
        prefill_tokens=sum(e.num_tokens for e in entries if not e.is_decode),
        decode_rows=sum(e.is_decode for e in entries),
        context_tokens=sum(e.sequence.num_stored + e.num_tokens for e in entries),
        num_adapters=len(present),
        rank_sum=sum(rank_of[adapter_id] for adapter_id in present),
        rank_tokens=sum(rank * e.num_tokens for rank, e in zip(ranks, entries, strict=True)),
        prefill_pairs=sum(float(prompt_pairs(num_tokens, num_stored)) for num_tokens, num_stored in prompts),
        lora_tokens=sum(e.num_tokens for e in entries if e.adapter is not None),
        drawn_tokens=sum(e.yields_token and e.sequence.request.sampling.is_drawn for e in entries),
        scored_tokens=sum(len(e.sequence.positions_to_score(e.num_tokens)) for e in entries),
    )


def test_totals_of_steps_are_the_sum_of_what_each_step_does(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    engine = make_engine(tiny_llama)
    ids = register_all(engine, tiny_adapters)
    registry = AdapterRegistry(engine.model, engine.backend.dtype, engine.backend.device, 2048)
    for name, folder in tiny_adapters.items():
        registry.register(ids[name], folder, name)
    ranks = {registry.id_of(code): float(rank) for code, rank in enumerate(registry.ranks())}
    loads: list[StepLoad] = []
    seen: list[StepLoad] = []
    launch = engine._runner.launch
    engine._runner.launch = lambda entries: loads.append(load_of(entries, ranks)) or launch(entries)  # type: ignore
    engine.observe_step = lambda sample, _: seen.append(sample.load)
    requests = [
        Request(
            f"{i}",
            p,
            ids.get(["", *tiny_adapters][i % 5]),
            SamplingParams(max_tokens=3 + i, temperature=float(i % 3), ignore_eos=True, prompt_logprobs=i % 4 == 1),
        )
        for i, p in enumerate(prompts(12, engine.model.vocab_size, seed=3))
    ]
    serve(engine, requests)
    totals, telemetry = engine.telemetry().steps, engine.telemetry()
    assert totals.num_steps == len(loads) == telemetry.num_steps
    assert totals.num_lora_steps == sum(bool(load.num_adapters) for load in loads) > 0
    for name in [field.name for field in fields(StepLoad)]:
        assert [getattr(load, name) for load in seen] == pytest.approx([getattr(load, name) for load in loads]), name
        assert getattr(totals, name) == pytest.approx(sum(getattr(load, name) for load in loads)), name
    assert totals.decode_rows + len(requests) == telemetry.generated_tokens
    assert totals.drawn_tokens == sum(3 + i for i in range(12) if i % 3)
    assert totals.scored_tokens == sum(len(r.prompt_token_ids) - 1 for r in requests[1::4]) > 0


def test_logits_equal_transformers_within_a_thousandth(tiny_llama: Path, oracle: Oracle) -> None:
    engine = make_engine(tiny_llama)
    (prompt,) = prompts(1, engine.model.vocab_size, seed=11)
    seen: list[torch.Tensor] = []
    forward = engine.backend.decoder.forward
    engine.backend.decoder.forward = lambda batch, pool: seen.append(forward(batch, pool)) or seen[-1].clone()  # type: ignore
    result = serve(engine, [Request("row", prompt, None, SamplingParams(max_tokens=6, ignore_eos=True))])["row"]
    steps = [logits for logits in seen if len(logits)]
    assert len(steps) == 6
    for i, logits in enumerate(steps):
        expected = oracle.logits([*prompt, *result.token_ids[:i]], None)
        assert (logits[0] - expected).abs().max() < 1e-3


def test_the_last_layer_goes_on_with_rows_whose_logits_are_asked(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_step_tokens=32)
    last = engine.backend.decoder.layers[-1].linears
    rows = dict.fromkeys(last, 0)

    class Counted(Linear):
        """A layer with a plain weight, which is called by itself; others may be computed together."""

        def __init__(self, site: PackedSite, linear: Linear) -> None:
            super().__init__(linear.live, linear.bias)
            self.site = site

        def __call__(self, x: Tensor, lora: SiteSegments | None = None) -> Tensor:
            rows[self.site] += len(x)
            return super().__call__(x, lora)

    last.update({site: Counted(site, linear) for site, linear in last.items()})
    sampling = [SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=i == 0) for i in range(3)]
    requests = [Request(f"{i}", tuple(range(5 + i, 55 + 2 * i)), None, s) for i, s in enumerate(sampling)]
    serve(engine, requests)
    prompt_tokens = [len(request.prompt_token_ids) for request in requests]
    assert rows["qkv"] == sum(prompt_tokens) + 3 * 4
    # of the first prompt all places are scored, of the others the last token yields one
    assert rows["o"] == rows["gate_up"] == rows["down"] == prompt_tokens[0] + 1 + 1 + 3 * 4


def test_reading_the_model_needs_no_torch() -> None:
    assert read_model_config.__module__ == "lorabatch.engine.config"


def test_an_adapter_that_vanishes_costs_its_rows_only(
    tiny_llama: Path, tiny_adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    shutil.copytree(tiny_adapters["rank8"], tmp_path / "gone")
    for mode in ("unmerged", "merged"):
        engine = make_engine(tiny_llama, mode)  # type: ignore[arg-type]
        ids = register_all(engine, {"rank1": tiny_adapters["rank1"], "gone": tmp_path / "gone"})
        (tmp_path / "gone" / "adapter_model.safetensors").rename(tmp_path / "weights")
        sampling = SamplingParams(max_tokens=4)
        rows = {"a": "gone", "b": "rank1", "c": "gone", "d": "rank1"}
        results = serve(engine, [Request(key, (5, 6, 7), ids[name], sampling) for key, name in rows.items()])
        assert [results[key].finish_reason == "error" for key in "abcd"] == [True, False, True, False]
        assert results["b"].token_ids == oracle.greedy((5, 6, 7), "rank1", 4, stop_id=2)
        (tmp_path / "weights").rename(tmp_path / "gone" / "adapter_model.safetensors")


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("mode", ["unmerged", "exact"])
def test_rows_whose_numbers_overflow_are_errors_and_leave_no_trace(
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
    is_compiled: bool,
) -> None:
    huge = tmp_path / "huge"
    shutil.copytree(tiny_adapters["rank8"], huge)
    tensors = load_file(huge / "adapter_model.safetensors")
    save_file({name: tensor * 1e25 for name, tensor in tensors.items()}, huge / "adapter_model.safetensors")
    if not is_compiled:
        monkeypatch.setattr("lorabatch.kernels.native._library", lambda: None)
        native_function.cache_clear()
    # every page has held NaN before it is used again
    engine = make_engine(tiny_llama, mode, pool_bytes=60 * 8192)
    ids = register_all(engine, {"huge": huge, "rank8": tiny_adapters["rank8"]})
    sampling = SamplingParams(max_tokens=12, logprobs=True, ignore_eos=True)
    good = [Request(f"good-{i}", p, ids["rank8"], sampling) for i, p in enumerate(prompts(9, 300, seed=3))]
    bad = [Request(f"bad-{i}", p, ids["huge"], sampling) for i, p in enumerate(prompts(9, 300, seed=3))]
    expected = serve(engine, good)
    serve(engine, bad)
    results = serve(engine, [row for pair in zip(bad, good, strict=True) for row in pair])
    native_function.cache_clear()
    for i in range(9):
        assert results[f"bad-{i}"].finish_reason == "error"
        assert "NaN or infinite" in (results[f"bad-{i}"].error or "")
        found, alone = results[f"good-{i}"], expected[f"good-{i}"]
        assert found.token_ids == alone.token_ids
        assert found.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-3)
