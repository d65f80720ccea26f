"""Groups whose members have devices of their own, in Triton's interpreter: processes that add up by gloo compute what
one process on a CPU does, with logits within 1e-4 and the same tokens. NCCL and graphs run on no machine of ours."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from echo_job import wait_until
from peft_oracle import POOL_BYTES, make_engine, prompts, register_all, serve, weights_sha256
from torch import Tensor

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.errors import EngineError
from lorabatch.engine.parallel import device_copies
from lorabatch.engine.parallel.gpu_backend import GpuGroupBackend
from lorabatch.engine.parallel.shard import check_served, config_of_member
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.gpu_runner import GpuRunner
from lorabatch.kernels.launch import is_interpreted
from lorabatch.scheduler.batchers.batching import Batcher, BatchView, StepPlan
from lorabatch.tests.engine.parallel.test_group import Mixing

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="takes as many GPUs as members")
RANKS = {"rank 4": 4, "rank 20": 20, "rank 3": 3}
# 305 tokens and 41 features, which two members share unevenly, and one key head for both.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 41,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 305,
}
Logits = dict[tuple[str, int], Tensor]


@contextmanager
def open_group(
    model: Path, num_members: int = 2, mode: Mode = "unmerged", batcher: Batcher | None = None, **config: Any
) -> Iterator[Engine]:
    settings: dict[str, Any] = {"max_batch_rows": 8, "max_step_tokens": 24, "pool_bytes": POOL_BYTES, "page_tokens": 4}
    settings |= {"device": "cpu", "kernels": "triton", "num_threads": num_members} | config
    engine = Engine(model, EngineConfig(mode=mode, tensor_parallel=num_members, **settings), batcher)
    try:
        yield engine
    finally:
        engine.close()


def group_backend(engine: Engine) -> GpuGroupBackend:
    assert isinstance(engine.backend, GpuGroupBackend)
    return engine.backend


def logits_of_group(engine: Engine) -> Logits:
    """Logits of every row by the number of its tokens, filled in while the engine runs."""
    found: Logits = {}
    runner = engine._runner
    assert isinstance(runner, GpuRunner)
    choose = runner._choose_tokens

    def record(logits: Tensor, step: Any, planned: Any, count: int) -> None:
        for sequence, row in zip(planned.sampled, logits, strict=False):
            found[sequence.request.request_id, sequence.num_generated] = row.clone()
        choose(logits, step, planned, count)

    runner._choose_tokens = record  # type: ignore[method-assign]
    return found


def logits_of_one(engine: Engine) -> Logits:
    """The same of an engine of one process on a CPU."""
    found: Logits = {}
    forward = engine.backend.decoder.forward

    def record(batch: Any, pool: Tensor) -> Tensor:
        logits = forward(batch, pool)
        for sequence, row in zip(batch.sampled, logits, strict=False):
            found[sequence.request.request_id, sequence.num_generated] = row.clone()
        return logits

    engine.backend.decoder.forward = record  # type: ignore[method-assign]
    return found


def rows_of(adapter_ids: Sequence[str | None], vocab_size: int, options: Sequence[dict[str, Any]]) -> list[Request]:
    """Every other row begins as others of its adapter do."""
    shared = tuple(range(7, 16))
    return [
        Request(
            f"row {i}",
            (*shared, *prompt[:9]) if i % 2 == 0 else prompt[:14],
            adapter_ids[i % len(adapter_ids)],
            SamplingParams(**({"max_tokens": 3, "ignore_eos": True} | more)),
            i,
        )
        for i, (prompt, more) in enumerate(zip(prompts(len(options), vocab_size), options, strict=True))
    ]


def assert_equal(
    group: Engine, model: Path, adapters: dict[str, Path], options: Sequence[dict[str, Any]] = ({},) * 8
) -> dict[str, Result]:
    """The group serves rows as one process does; its results."""
    alone = make_engine(model, page_tokens=4)
    found = []
    for engine, logits in ((alone, logits_of_one(alone)), (group, logits_of_group(group))):
        ids = [None, *register_all(engine, adapters).values()]
        found.append((serve(engine, rows_of(ids, engine.model.vocab_size, options)), logits))
    (expected, expected_logits), (results, logits) = found
    assert {key: (r.error, r.token_ids, r.text) for key, r in results.items()} == {
        key: (r.error, r.token_ids, r.text) for key, r in expected.items()
    }
    assert logits.keys() >= expected_logits.keys()
    assert max((logits[key] - expected_logits[key]).abs().max().item() for key in expected_logits) < 1e-4
    for key, result in results.items():
        assert result.token_logprobs == pytest.approx(expected[key].token_logprobs, abs=1e-4)
        assert result.prompt_logprobs == pytest.approx(expected[key].prompt_logprobs, abs=1e-4)
    return results


@pytest.fixture(scope="module")
def small(
    make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Path]]:
    """A model of one layer, and adapters of mixed ranks on all its linear layers."""
    folder = tmp_path_factory.mktemp("small")
    base = make_model(folder / "base", **SMALL)
    return base, {name: make_adapter(folder / name, base, seed=rank, r=rank) for name, rank in RANKS.items()}


# What rows ask concerns the leader alone, except for how many places it takes.
ASKED: tuple[dict[str, Any], ...] = (
    {"logprobs": True},
    {"prompt_logprobs": True, "prompt_top_logprobs": 2},
    {"temperature": 0.8, "seed": 5},
    {"regex": "[a-c]{2,4}", "max_tokens": 5},
    {"min_tokens": 3, "ignore_eos": False},
    {"repetition_penalty": 1.5, "top_logprobs": 3, "logprobs": True},
    {},
    {},
)


@pytest.mark.long
def test_members_on_devices_compute_together_what_one_process_does(
    small: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters come through slots of a kilobyte, and leave a pool that does not hold all of them."""
    base, adapters = small
    monkeypatch.setattr(device_copies, "SLOT_BYTES", 1 << 10)
    with open_group(base, pool_bytes=84 << 10) as group:
        results = assert_equal(group, base, adapters, ASKED)
        assert {result.mode for result in results.values()} == {"base", "unmerged"}
        assert group.telemetry().reused_prompt_tokens > 0
        assert group_backend(group).collectives.least_copied() > 4 * len(adapters)
        assert_equal(group, base, adapters, ({},) * 6)
        assert group.telemetry().adapters.loads > len(adapters)


@pytest.mark.long
def test_members_on_devices_merge_and_serve_rows_beside_merged_adapters(
    small: tuple[Path, dict[str, Path]], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    base, adapters = small
    dora = make_adapter(tmp_path / "dora", base, seed=9, r=4, use_dora=True)
    with open_group(base, 2, "auto", Mixing()) as group:
        before = weights_sha256(group)
        results = assert_equal(group, base, adapters)
        assert "mixture" in {result.mode for result in results.values()}
        (dora_id,) = register_all(group, {"dora": dora}).values()
        group.switch_weights(dora_id)
        group.switch_weights(None)
        assert weights_sha256(group) == before


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16},
    "granite_swa": {"sliding_window": 8},
    "opt": {"ffn_dim": 42, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "init_std": 0.2},
}
BY_MERGE: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "bias": {"target_modules": ["q_proj", "down_proj"], "lora_bias": True},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("family", "num_members", "mode"),
    [
        ("llama", 2, "unmerged"),
        ("llama", 4, "merged"),
        ("qwen3", 2, "unmerged"),
        ("gemma2", 2, "unmerged"),
        ("gemma2", 2, "merged"),
        ("granite_swa", 2, "unmerged"),
        ("opt", 2, "unmerged"),
    ],
)
def test_every_family_equals_one_process(
    make_model: Callable[..., Path],
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    family: str,
    num_members: int,
    mode: Mode,
) -> None:
    """Adapters of mixed ranks, and for two members of Llama some that are exact only when merged."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4 if family == "opt" else 2}
    base = make_model(tmp_path / "base", family, **(SMALL | heads | FAMILIES[family]))
    targets = ["q_proj", "v_proj", "fc1", "fc2"] if family == "opt" else "all-linear"
    loras: dict[str, dict[str, Any]] = {name: {"r": rank, "target_modules": targets} for name, rank in RANKS.items()}
    if (family, num_members) == ("llama", 2):
        loras |= BY_MERGE
    adapters = {
        name: make_adapter(tmp_path / name, base, seed=i, **lora) for i, (name, lora) in enumerate(loras.items())
    }
    with open_group(base, num_members, mode) as group:
        results = assert_equal(group, base, adapters, ({"max_tokens": 2},) * (len(adapters) + 1))
        assert mode in {result.mode for result in results.values()}


@pytest.mark.long
def test_eight_bit_floats_of_parts_are_as_near_to_fp32_as_those_of_the_whole(
    make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    """The mean relative error of logits is at most a tenth larger than that of one process."""
    base = make_model(tmp_path / "base", **(SMALL | {"hidden_size": 64, "intermediate_size": 64}))
    adapters = {name: make_adapter(tmp_path / name, base, seed=rank, r=rank) for name, rank in RANKS.items()}
    found: list[Logits] = []
    for num_members, quantization in ((1, "none"), (1, "fp8"), (2, "fp8")):
        with open_group(base, num_members, base_quantization=quantization) as engine:
            logits = logits_of_group(engine)
            ids = [None, *register_all(engine, adapters).values()]
            serve(engine, rows_of(ids, engine.model.vocab_size, ({"max_tokens": 1},) * 12))
            found.append(logits)
    right, alone, group = found
    errors = [sum(float((of[key] - right[key]).norm() / right[key].norm()) for key in right) for of in (alone, group)]
    assert 0 < errors[1] <= 1.1 * errors[0], errors


@pytest.mark.long
def test_a_member_that_is_lost_while_the_leader_waits_for_its_sum_is_named(small: tuple[Path, dict[str, Path]]) -> None:
    """It is stopped before a step, which is seen while the leader is in it; then it is killed, which ends the step."""
    base, _ = small
    with open_group(base) as group:
        (pid,) = group_backend(group).members.pids
        seen: list[str | None] = []

        def strike() -> None:
            wait_until(lambda: group.hung_process is not None)
            seen.append(group.hung_process)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=strike)

        chosen = group.batcher

        class Stopping:
            def __call__(self, view: BatchView) -> StepPlan:
                os.kill(pid, signal.SIGSTOP)
                killer.start()
                return chosen(view)

        group.batcher = Stopping()
        group.add(rows_of([None], group.model.vocab_size, ({},) * 2))
        name = "member 1 of 2 of the tensor-parallel group"
        with pytest.raises(RuntimeError, match=f"{name} ended: it was killed by signal 9"):
            group.step()
        killer.join()
        assert seen == [name]
    assert not psutil.pid_exists(pid)


def test_each_member_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any here: what torch would say of four."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    config = EngineConfig(tensor_parallel=3, device="cuda")
    check_served(config)
    assert [config_of_member(config, member).device for member in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    behind = replace(config, device="cuda:1")
    check_served(behind)
    assert config_of_member(behind, 2).device == "cuda:3"
    words = r"tensor_parallel=5, device='cuda:0': torch sees 4 GPUs from there on, expected one for each .* Lower"
    with pytest.raises(EngineError, match=words):
        check_served(replace(config, tensor_parallel=5))
    with pytest.raises(EngineError, match="tensor_parallel=3, device='cuda:2': torch sees 2 GPUs"):
        check_served(replace(config, device="cuda:2"))
