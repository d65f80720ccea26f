"""Mode `exact`: a row's tokens, text and log-probabilities have the same bits alone, in company, and after a move; with
compiled kernels for any number of threads, without them (torch) for one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft_oracle import make_engine as make_small_engine
from peft_oracle import prompts, register_all, serve, weights_sha256
from scenarios import ANYTHING, Alone, Scenario, make_engine, play, renamed, scenarios

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.errors import EngineError
from lorabatch.engine.models.layers import Linear
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.kernels.native import native_build, native_function
from lorabatch.kernels.packed_weight import pack


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Engines set torch's threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


NEEDS_LIBRARY = pytest.mark.skipif(native_build() is None, reason="without compiled kernels threads may count")


@pytest.fixture(
    scope="module",
    params=[pytest.param("compiled", marks=NEEDS_LIBRARY), pytest.param("torch", marks=pytest.mark.long)],
)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("lorabatch.kernels.native._library", lambda: None)
            native_function.cache_clear()
        yield request.param
    native_function.cache_clear()


# Exact only when merged: their rows run in waves of their own.
MERGED_ONLY: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module", params=["plain", pytest.param("some merged", marks=pytest.mark.long)])
def folders(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    make_adapter: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Adapters by content hash."""
    model, chosen = read_model_config(tiny_llama), dict(tiny_adapters)
    if request.param == "some merged":
        root = tmp_path_factory.mktemp("merged")
        made = {n: make_adapter(root / n, tiny_llama, seed=9, **lora) for n, lora in MERGED_ONLY.items()}
        chosen = {"rank1": tiny_adapters["rank1"], **made, "rank20": tiny_adapters["rank20"]}
    found = {audit_adapter(folder, model, name).identity_sha256: folder for name, folder in chosen.items()}
    return {identity: folder for identity, folder in found.items() if identity is not None}


@pytest.fixture(scope="module")
def alone(kernels: str, tiny_llama: Path, folders: dict[str, Path]) -> Alone:
    return Alone(make_engine(tiny_llama, folders, "exact", pool_bytes=4 << 20))


@ANYTHING
@given(scenario=scenarios(draws_freely=True), num_threads=st.integers(1, 3))
def test_whatever_happens_around_a_row_it_has_the_same_bits(
    kernels: str, tiny_llama: Path, folders: dict[str, Path], alone: Alone, scenario: Scenario, num_threads: int
) -> None:
    config = scenario.config | {"num_threads": num_threads if kernels == "compiled" else 1}
    engines = [make_engine(tiny_llama, folders, "exact", **config) for _ in range(2)]
    results = play(engines, scenario, list(folders))
    for _, request in scenario.arrivals:
        if request.request_id in results:
            assert results[request.request_id] == alone.of(renamed(request, list(folders)))


@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.long)])
def test_shared_beginnings_are_computed_once_and_give_the_same_bits(
    kernels: str, tiny_llama: Path, folders: dict[str, Path], alone: Alone, num_threads: int
) -> None:
    """Rows begin alike for up to nine pages, in steps that cut their prompts anywhere."""
    rng, ids = random.Random(num_threads), [None, *folders]
    shared = [tuple(rng.randrange(3, 300) for _ in range(150)) for _ in range(2)]
    requests = []
    for i in range(24):
        beginning = rng.choice(shared)[: rng.choice((0, 16, 40, 100, 150))]
        prompt = beginning + tuple(rng.randrange(3, 300) for _ in range(rng.randrange(1, 30)))
        sampling = SamplingParams(8, temperature=0.8 * (i % 2), seed=i, logprobs=True, ignore_eos=True)
        requests.append(Request(f"row-{i}", prompt, rng.choice(ids), sampling, stream_id=i))
    torch.set_num_threads(num_threads if kernels == "compiled" else 1)
    for max_step_tokens in (17, 61, 200):
        config = {"max_batch_rows": 6, "max_step_tokens": max_step_tokens, "pool_bytes": 4 << 20}
        engine = make_engine(tiny_llama, folders, "exact", **config, num_threads=torch.get_num_threads())
        results = serve(engine, requests)
        assert results == {request.request_id: alone.of(request) for request in requests}
        has_reused = engine.telemetry().reused_prompt_tokens > 300
        assert has_reused == (kernels == "compiled"), "torch's attention rounds by where a prompt is cut"


# Every activation, kind of norm, window, softcap and rope that a family has.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None, "intermediate_size": None}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 20}),
    "granite": ("granite", {"residual_multiplier": 0.22, "logits_scaling": 2.0}),
    "granite_swa": ("granite_swa", {"sliding_window": 20}),
    "cohere2": ("cohere2", {"sliding_window": 20, "num_hidden_layers": 4}),
    "olmo2": ("olmo2", {}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 20,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 320,
        },
    ),
    "gemma with gelu": ("gemma", {"head_dim": 16, "hidden_activation": "gelu"}),
    "dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
}


LATER = ("gemma4", "granite", "granite_swa", "cohere2", "olmo2", "hunyuan", "ministral3")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.long if name in LATER else ()) for name in FAMILIES]
)
def test_rows_of_every_family_have_the_same_bits_alone_and_in_company(
    kernels: str, family: str, tmp_path: Path, make_model: Any, make_adapter: Any
) -> None:
    name, settings = FAMILIES[family]
    model = make_model(tmp_path / "model", name, **{k: v for k, v in settings.items() if v is not None})
    adapters = {
        f"rank{r}": make_adapter(tmp_path / f"rank{r}", model, seed=r, r=r, target_modules=["q_proj", "v_proj"])
        for r in (1, 12)
    }
    torch.set_num_threads(1)
    if kernels == "torch" and family == "qwen3.5":
        with pytest.raises(EngineError, match="without which layers of the gated delta rule round by the rows beside"):
            make_small_engine(model, "exact")
        return
    alone = make_small_engine(model, "exact", max_batch_rows=1, max_step_tokens=100)
    ids = [None, *register_all(alone, adapters).values()]
    sampling = SamplingParams(max_tokens=10, temperature=0.7, logprobs=True, ignore_eos=True)
    requests = [
        Request(f"row-{i}", prompt, ids[i % len(ids)], sampling, stream_id=i)
        for i, prompt in enumerate(prompts(12, alone.model.vocab_size, seed=4))
    ]
    expected = serve(alone, requests)
    torch.set_num_threads(3 if kernels == "compiled" else 1)
    company = make_small_engine(model, "exact", max_batch_rows=12, max_step_tokens=50)
    register_all(company, adapters)
    assert serve(company, requests) == expected


@NEEDS_LIBRARY
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_are_merged_to_the_same_bits_by_any_number_of_threads(
    tmp_path: Path, make_model: Any, make_adapter: Any
) -> None:
    """Large enough for threads to share the work."""
    model = make_model(
        tmp_path / "model", hidden_size=320, intermediate_size=650, head_dim=64, num_hidden_layers=1, vocab_size=1203
    )
    adapter = make_adapter(
        tmp_path / "dora", model, use_dora=True, r=13, target_modules=["q_proj", "down_proj", "lm_head", "embed_tokens"]
    )
    torch.set_num_threads(1)
    hashes = []
    for num_threads in (1, 2, 3, 5):
        engine = make_small_engine(model, "exact", num_threads=num_threads)
        (adapter_id,) = register_all(engine, {"dora": adapter}).values()
        engine.switch_weights(adapter_id)
        hashes.append(weights_sha256(engine))
    assert set(hashes) == {hashes[0]}


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(960, 576), (576, 1536), pytest.param(49152, 576, marks=pytest.mark.long)]
)
def test_packed_layers_of_a_real_size_round_alike_for_any_number_of_rows_and_threads(outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(pack(torch.randn(outputs, inputs, generator=generator), "float32"), None, "float32")
    x = torch.randn(530, inputs, generator=generator)
    torch.set_num_threads(1)
    whole = layer(x)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 2, 3, 15, 16, 17, 33, 64, 100, 257, 512):
            assert torch.equal(layer(x[:num_rows].clone()), whole[:num_rows]), (num_threads, num_rows)


@pytest.mark.long
@pytest.mark.real_model
def test_rows_of_the_demo_model_have_the_same_bits_alone_and_in_company() -> None:
    from lorabatch.demo.base_model import base_model_folder

    config = EngineConfig(mode="exact", num_threads=1, pool_bytes=256 << 20)
    alone = Engine(base_model_folder(), config)
    sampling = SamplingParams(max_tokens=6, logprobs=True, ignore_eos=True)
    requests = [
        Request(f"row-{i}", prompt, None, sampling)
        for i, prompt in enumerate(prompts(5, alone.model.vocab_size, seed=2))
    ]
    expected = [result for request in requests for result in alone.run([request])]
    torch.set_num_threads(2)
    assert sorted(alone.run(requests), key=lambda r: r.request_id) == expected
