"""An engine of several members computes what one of one process does: the same tokens, logits within 1e-4 (5e-4 over
recurrent layers)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft_oracle import Oracle, last_logits, make_engine, prompts, register_all, serve, weights_sha256
from safetensors.torch import load_file, save_file
from threaded_group import make_group
from tiny_bases import DELTA, GEMMA4
from torch import Tensor

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.errors import EngineError
from lorabatch.engine.models.step_batch import StepBatch
from lorabatch.engine.parallel.backend import GroupBackend
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.kernels.packed_weight import Products, can_multiply
from lorabatch.scheduler.batchers.batching import BatchView, StepPlan

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "num_key_value_heads": 1},
    "phi3": {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 90},
    "opt": {"ffn_dim": 90, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "init_std": 0.2},
    "granite_swa": {"sliding_window": 20, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    "llama of 9 heads": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
    "phi": {},
    "qwen3_5_text": DELTA,
    # a key head too few for two members, and value heads that are not split evenly among four
    "qwen3_5_text of 3 key heads": DELTA | {"linear_num_key_heads": 3, "linear_num_value_heads": 9},
    "gemma4_text": GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4_text whose keys are values": GEMMA4
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
}
# Others have their adapters on all linear layers; OPT's projections would be merged.
TARGETS = {"opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]}
RANKS = {"rank 4": 4, "rank 12": 12, "rank 3": 3}
Logits = dict[tuple[str, tuple[int, ...]], Tensor]


@contextmanager
def open_group(*args: Any, **settings: Any) -> Iterator[Engine]:
    engine = make_group(*args, **settings)
    try:
        yield engine
    finally:
        engine.close()


def recorded(engine: Engine) -> Logits:
    """Logits of every row after the tokens so far, filled in while the engine runs."""
    found: Logits = {}
    forward = engine.backend.decoder.forward

    def record(batch: StepBatch, pool: Tensor) -> Tensor:
        logits = forward(batch, pool)
        for sequence, row in zip(batch.sampled, logits, strict=True):
            found[sequence.request.request_id, tuple(sequence.token_ids)] = row.clone()
        return logits

    engine.backend.decoder.forward = record  # type: ignore[method-assign]
    return found


def rows_of(ids: dict[str, str], count: int, vocab_size: int, max_tokens: int = 6, **sampling: Any) -> list[Request]:
    names = [None, *ids]
    shared = tuple(random.Random(1).randrange(3, vocab_size) for _ in range(40))
    wanted = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return [
        # every other row begins as others of its adapter do
        Request(f"row {i}", (*shared, *prompt) if i % 2 == 0 else prompt, ids.get(names[i % len(names)] or ""), wanted)
        for i, prompt in enumerate(prompts(count, vocab_size))
    ]


def assert_equal(engine: Engine, group: Engine, adapters: dict[str, Path], count: int = 12) -> dict[str, Result]:
    """Both serve the same rows; the group's results."""
    found = []
    for each in (engine, group):
        ids = register_all(each, adapters)
        logits = recorded(each)
        found.append((serve(each, rows_of(ids, count, each.model.vocab_size)), logits))
    (expected, expected_logits), (results, logits) = found
    for key, result in results.items():
        assert result.error is None, result.error
        assert result.token_ids == expected[key].token_ids, key
    assert logits.keys() == expected_logits.keys()
    # roundings grow in recurrent states: the modes of one process differ by 5e-4 there
    most = 5e-4 if engine.model.has_recurrent_layers else 1e-4
    assert max((logits[key] - expected_logits[key]).abs().max().item() for key in logits) < most
    return results


@pytest.fixture(scope="module")
def family_of(
    make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, Path]]]:
    made: dict[str, tuple[Path, dict[str, Path]]] = {}

    def get(name: str) -> tuple[Path, dict[str, Path]]:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            base = make_model(folder / "base", name.partition(" ")[0], **FAMILIES[name])
            lora = {"target_modules": TARGETS.get(name, "all-linear")}
            adapters = {n: make_adapter(folder / n, base, seed=r, r=r, **lora) for n, r in RANKS.items()}
            made[name] = base, adapters
        return made[name]

    return get


@pytest.mark.parametrize("num_members", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_members_compute_together_what_one_process_does(
    family_of: Callable[[str], tuple[Path, dict[str, Path]]], family: str, num_members: int
) -> None:
    base, adapters = family_of(family)
    with open_group(base, num_members) as group:
        results = assert_equal(make_engine(base), group, adapters)
        assert {result.mode for result in results.values()} == {"base", "unmerged"}
        # no prefix is shared over recurrent layers
        assert (group.telemetry().reused_prompt_tokens > 0) == (not group.model.has_recurrent_layers)


@pytest.mark.parametrize("num_members", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["merged", "auto"])
def test_modes_that_merge_equal_those_of_one_process(
    tiny_llama: Path, tiny_adapters: dict[str, Path], mode: Mode, num_members: int
) -> None:
    with open_group(tiny_llama, num_members, mode) as group:
        before = weights_sha256(group)
        assert_equal(make_engine(tiny_llama, mode), group, tiny_adapters)
        group.switch_weights(None)
        assert weights_sha256(group) == before


@pytest.mark.parametrize("mode", ["merged", pytest.param("auto", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_merges_as_one_process_does(
    family_of: Callable[[str], tuple[Path, dict[str, Path]]], family: str, mode: Mode
) -> None:
    base, adapters = family_of(family)
    with open_group(base, 2, mode) as group:
        assert_equal(make_engine(base, mode), group, adapters)


@pytest.mark.parametrize("num_members", [2, pytest.param(4, marks=pytest.mark.long)])
def test_log_probabilities_of_prompts_are_those_of_one_process(
    tiny_llama: Path, tiny_adapters: dict[str, Path], num_members: int
) -> None:
    scored = {"prompt_logprobs": True, "prompt_top_logprobs": 2}
    with open_group(tiny_llama, num_members, max_step_tokens=16) as group:
        found = []
        for each in (make_engine(tiny_llama, max_step_tokens=16), group):
            ids = register_all(each, tiny_adapters)
            rows = rows_of(ids, 10, each.model.vocab_size, **scored)
            found.append(serve(each, rows))
    expected, results = found
    for key, result in results.items():
        assert result.error is None, result.error
        assert result.token_ids == expected[key].token_ids
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs == pytest.approx(expected[key].prompt_logprobs, abs=1e-4)


class Mixing:
    """A batcher that merges another adapter every other step, and serves all rows beside it."""

    def __init__(self) -> None:
        self._num_steps = 0

    def __call__(self, view: BatchView) -> StepPlan:
        self._num_steps += 1
        merged = self._num_steps // 2 % 4
        free = max(0, view.max_batch_rows - len(view.running_adapter))
        admit = np.arange(min(free, len(view.waiting_adapter)))
        mode = "unmerged" if merged == 3 else "mixture"
        chosen = None if merged == 3 else merged
        return StepPlan(mode, chosen, np.ones(len(view.running_adapter), bool), admit)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_members", [2, pytest.param(4, marks=pytest.mark.long)])
def test_rows_beside_a_merged_adapter_equal_those_of_one_process(
    tiny_llama: Path, tiny_adapters: dict[str, Path], num_members: int
) -> None:
    plain = make_engine(tiny_llama)
    with open_group(tiny_llama, num_members, "auto", Mixing()) as group:
        results = assert_equal(plain, group, tiny_adapters)
        assert "mixture" in {result.mode for result in results.values()}


BY_MERGE: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "bias": {"target_modules": ["q_proj", "down_proj"], "lora_bias": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "dora on the embedding": {"target_modules": ["v_proj", "embed_tokens"], "use_dora": True},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 311]},
}


@pytest.mark.parametrize("num_members", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_that_are_exact_only_when_merged_equal_those_of_one_process(
    make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path, num_members: int
) -> None:
    """Three key heads are one too many for two members, so that rows of zeros are merged too."""
    base = make_model(
        tmp_path / "base", "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=1
    )
    adapters = {
        name: make_adapter(tmp_path / name, base, seed=seed, **lora)
        for seed, (name, lora) in enumerate(BY_MERGE.items())
    }
    with open_group(base, num_members) as group:
        before = weights_sha256(group)
        results = assert_equal(make_engine(base), group, adapters, count=18)
        assert {result.mode for result in results.values()} == {"base", "merged"}
        group.switch_weights(None)
        assert weights_sha256(group) == before


# family -> adapters: parameters that are split and are no linear layers, and tables that are split by tokens
SAVED: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_5_text of 3 key heads": {
        "dora": {"target_modules": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"], "use_dora": True},
        "convolution": {"target_modules": ["v_proj"], "modules_to_save": ["conv1d"]},
        "mixer": {"target_modules": ["v_proj"], "modules_to_save": ["linear_attn"]},
    },
    "gemma4_text": {
        "dora": {"target_modules": "all-linear", "use_dora": True},
        "gates": {"target_modules": ["q_proj"], "modules_to_save": ["per_layer_input_gate"]},
        "table": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens_per_layer"]},
    },
    "granite_swa": {"attention": {"target_modules": ["up_proj"], "modules_to_save": ["self_attn"]}},
}


@pytest.mark.parametrize("family", SAVED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_adapters_save_of_layers_is_split_as_the_base_is(
    family_of: Callable[[str], tuple[Path, dict[str, Path]]],
    make_adapter: Callable[..., Path],
    family: str,
    tmp_path: Path,
) -> None:
    base, _ = family_of(family)
    adapters = {
        n: make_adapter(tmp_path / n, base, seed=i, **lora) for i, (n, lora) in enumerate(SAVED[family].items())
    }
    with open_group(base, 2) as group:
        results = assert_equal(make_engine(base), group, adapters)
        assert "merged" in {result.mode for result in results.values()}


FORMATS: dict[Products, dict[str, Any]] = {"bfloat16": {"dtype": "bfloat16"}, "int8": {"base_quantization": "int8"}}


@pytest.mark.parametrize("num_members", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("products", FORMATS)
def test_products_of_fewer_bits_are_as_near_to_fp32_as_those_of_one_process(
    products: Products,
    num_members: int,
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    make_adapter: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Beside transformers and PEFT in fp32: the mean relative error of logits is at most a tenth larger than that of
    one process. From one process they are no farther than that one is from fp32."""
    if not can_multiply(products):
        pytest.skip(f"this processor has no instructions for products in {products}")
    adapters = tiny_adapters | {"dora": make_adapter(tmp_path / "dora", tiny_llama, seed=9, use_dora=True)}
    oracle, alone = Oracle(tiny_llama, adapters), make_engine(tiny_llama, **FORMATS[products])
    errors: dict[str, float] = {"group": 0.0, "alone": 0.0, "between": 0.0}
    with open_group(tiny_llama, num_members, **FORMATS[products]) as group:
        ids = register_all(alone, adapters)
        assert register_all(group, adapters) == ids
        for i, prompt in enumerate(prompts(24, 300)):
            adapter = [None, *adapters][i % (1 + len(adapters))]
            expected = oracle.logits(prompt, adapter)
            ours, theirs = (last_logits(each, prompt, ids.get(adapter or "")) for each in (group, alone))
            pairs = {"group": (ours, expected), "alone": (theirs, expected), "between": (ours, theirs)}
            for name, (found, right) in pairs.items():
                errors[name] += float((found - right).norm() / right.norm())
    assert errors["group"] <= 1.1 * errors["alone"], errors
    assert errors["between"] <= errors["alone"], errors


def test_what_one_member_cannot_merge_none_does(
    tiny_llama: Path, make_adapter: Callable[..., Path], tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    bad = make_adapter(tmp_path / "overflows", tiny_llama, target_modules=["gate_proj"])
    file = bad / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "lora_A" in name:
            tensor[:] = 1e30
        else:
            # of the last member's rows
            tensor[-1] = 1e30
    save_file(tensors, file, {"format": "pt"})
    adapters = {"bad": bad, "good": tiny_adapters["rank8"]}
    plain = make_engine(tiny_llama, "merged")
    with open_group(tiny_llama, 2, "merged") as group:
        found = []
        for engine in (plain, group):
            ids = register_all(engine, adapters)
            found.append(serve(engine, rows_of(ids, 9, engine.model.vocab_size)))
    for key, expected in found[0].items():
        assert found[1][key].token_ids == expected.token_ids
        assert (found[1][key].error is None) == (expected.error is None)
        assert expected.error is None or "not finite" in str(found[1][key].error)
    assert 0 < sum(result.error is not None for result in found[0].values()) < 9


def test_rows_move_between_groups_and_engines_of_one_process(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    plain = make_engine(tiny_llama)
    ids = register_all(plain, tiny_adapters)
    rows = rows_of(ids, 8, plain.model.vocab_size, max_tokens=10)
    expected = serve(plain, rows)
    with open_group(tiny_llama, 2) as group, open_group(tiny_llama, 4) as other:
        moved: list[ExportedRow] = [ExportedRow(row) for row in rows]
        results: dict[str, Result] = {}
        for engine in (group, other, plain, group):
            register_all(engine, tiny_adapters)
            engine.import_rows(moved)
            for _ in range(3):
                results |= {result.request_id: result for result in engine.step()}
            moved = engine.export_rows([row.request_id for row in rows])
            engine.check_integrity()
        group.import_rows(moved)
        while group.num_unfinished:
            results |= {result.request_id: result for result in group.step()}
    assert {key: result.token_ids for key, result in results.items()} == {
        key: result.token_ids for key, result in expected.items()
    }


def test_adapters_that_leave_the_pool_come_back_to_every_member(
    tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    """The pool does not hold all of them at once: some go to host memory, and return for later rows."""
    plain = make_engine(tiny_llama)
    with open_group(tiny_llama, 2, pool_bytes=744 << 10, host_tier_bytes=8 << 20) as group:
        for _ in range(2):
            assert_equal(plain, group, tiny_adapters, count=20)
        telemetry = group.telemetry()
        assert telemetry.adapters.loads > telemetry.adapters.disk_reads


@pytest.mark.parametrize("num_members", [2, pytest.param(4, marks=pytest.mark.long)])
def test_adapters_cost_no_meeting_and_members_have_their_share(
    tiny_llama: Path, tiny_adapters: dict[str, Path], num_members: int
) -> None:
    with open_group(tiny_llama, num_members) as group:
        backend = group.backend
        assert isinstance(backend, GroupBackend)
        ids = register_all(group, tiny_adapters)
        forward, asked = backend.decoder.forward, list[int]()

        def counted(batch: StepBatch, pool: Tensor) -> Tensor:
            asked.append(len(batch.sampled_rows))
            return forward(batch, pool)

        backend.decoder.forward = counted  # type: ignore[method-assign]
        layers = group.model.num_layers
        for wanted in ({}, ids):
            asked.clear()
            before = backend.collectives.num_sums, backend.collectives.num_joins
            serve(group, rows_of(wanted, 5, group.model.vocab_size))
            after = backend.collectives.num_sums, backend.collectives.num_joins
            sums, joins = (now - then for now, then in zip(after, before, strict=True))
            # two in each layer and the embedding, without the last two where no logits are asked; the logits
            assert sums == (2 * layers + 1) * len(asked) - 2 * asked.count(0)
            assert joins == len(asked) > asked.count(0) > 0
        total = sum(tensor.numel() * 4 for tensor in load_file(tiny_llama / "model.safetensors").values())
        assert max(backend.weight_bytes_of) < total / num_members * 1.1
        assert sum(backend.weight_bytes_of) >= total


def test_merging_takes_no_more_meetings_than_dora_needs(
    tiny_llama: Path, tiny_adapters: dict[str, Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    with open_group(tiny_llama, 2) as group:
        backend = group.backend
        assert isinstance(backend, GroupBackend)
        ids = register_all(group, {**tiny_adapters, "dora": make_adapter(tmp_path / "dora", tiny_llama, use_dora=True)})
        for name, expected in (("rank8", 0), ("dora", 1)):
            before = backend.collectives.num_sums
            group.switch_weights(ids[name])
            assert backend.collectives.num_sums - before == expected


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"mode": "exact"}, EngineError, "tensor_parallel=2, mode='exact'"),
        ({"base_quantization": "fp8"}, EngineError, "base_quantization='fp8': served on GPUs only"),
        ({"tensor_parallel": 5}, EngineError, "the model has 4 query heads"),
    ],
)
def test_what_groups_do_not_serve_is_refused_by_name(
    tiny_llama: Path, settings: dict[str, Any], error: type[EngineError], words: str
) -> None:
    config = EngineConfig(**{"tensor_parallel": 2, "num_threads": 1} | settings)
    with pytest.raises(error, match=words):
        Engine(tiny_llama, config)


def test_a_damaged_model_is_named_before_any_member_waits_for_ever(tiny_llama: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_llama, damaged)
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=r"o_proj\.weight: missing"):
        make_group(damaged, 2)
