"""What a GPU's sampling reads about each row: tokens to withhold, and numbers as large and as small as may be asked
for. The CPU's answers are the measure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.backend import GpuBackend, MakeBackend, choose_backend
from lorabatch.engine.runner.gpu_graphs import StepExecutor
from lorabatch.kernels.launch import is_interpreted

FAR = tuple(f"<|far{i}|>" for i in range(12))  # special tokens behind the model's vocabulary


def make_engine(folder: Path, make_backend: MakeBackend = choose_backend, **config: Any) -> Engine:
    settings = {"max_batch_rows": 8, "max_step_tokens": 64, "pool_bytes": 4 << 20, "device": "cpu", "mode": "unmerged"}
    return Engine(folder, EngineConfig(**(settings | config)), make_backend=make_backend)


def device_engine(folder: Path, executor: StepExecutor | None = None) -> Engine:
    class Backend(GpuBackend):
        def executor(self) -> StepExecutor:
            return executor or super().executor()

    on_device = {"kernels": "triton"} if is_interpreted() else {"device": "cuda", "dtype": "float32"}
    return make_engine(folder, Backend, **on_device)


def registered(engine: Engine, folder: Path) -> str:
    adapter_id = audit_adapter(folder, engine.model, folder.name).identity_sha256
    assert adapter_id is not None
    engine.register_adapter(adapter_id, folder)
    return adapter_id


def answers(engine: Engine, requests: list[Request]) -> dict[str, Result]:
    return {result.request_id: result for result in engine.run(requests)}


@pytest.fixture
def ends_otherwise(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> Callable[[int], Path]:
    """An adapter whose own tokenizer ends rows by another token, and knows tokens that the model has not."""

    def make(end: int) -> Path:
        folder = tmp_path / f"ends-by-{end}"
        shutil.copytree(tiny_adapters["rank8"], folder)
        tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
        tokenizer.add_special_tokens(list(FAR))
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((tiny_llama / "tokenizer_config.json").read_text())
        config["eos_token"] = tokenizer.id_to_token(end)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return make


class Counting(StepExecutor):
    def __init__(self) -> None:
        self.num_graphs = 0

    def run(self, key: Any, work: Any) -> None:
        self.num_graphs += 1
        super().run(key, work)


@pytest.mark.long
def test_every_token_that_could_end_a_row_is_withheld(
    tiny_llama: Path, tiny_adapters: dict[str, Path], ends_otherwise: Callable[[int], Path]
) -> None:
    prompt = (5, 6, 7, 8)
    plain = make_engine(tiny_llama)
    row = Request("0", prompt, registered(plain, tiny_adapters["rank8"]), SamplingParams(max_tokens=1))
    end = answers(plain, [row])["0"].token_ids[0]

    folder, found, executor = ends_otherwise(end), {}, Counting()
    for kind in ("host", "device"):
        engine = make_engine(tiny_llama) if kind == "host" else device_engine(tiny_llama, executor)
        adapter_id = registered(engine, folder)
        requests = [
            Request("own end", prompt, adapter_id, SamplingParams(max_tokens=4, min_tokens=3)),
            Request("not its end", prompt, None, SamplingParams(max_tokens=4, min_tokens=3)),
            Request("many", prompt, adapter_id, SamplingParams(max_tokens=4, min_tokens=3, stop=FAR)),
            Request("special", prompt, None, SamplingParams(max_tokens=4, min_tokens=4, stop=("<|im_start|>",))),
            Request("no minimum", prompt, adapter_id, SamplingParams(max_tokens=4)),
        ]
        found[kind] = answers(engine, requests)
    assert found["device"] == found["host"]
    assert found["device"]["no minimum"].token_ids == (end,)
    assert end not in found["device"]["own end"].token_ids[:3]
    assert all(result.error is None for result in found["device"].values())
    many, before = next(r for r in requests if r.request_id == "many"), executor.num_graphs
    assert answers(engine, [many])["many"] == found["host"]["many"]
    num_graphs = executor.num_graphs - before
    assert num_graphs == 1, "steps with more withheld tokens than a bucket has room for run without a graph"


@pytest.mark.parametrize(
    "temperature", [1e-320, *(pytest.param(t, marks=pytest.mark.long) for t in (1e-50, 1e-38, 1e-12, 1e60))]
)
def test_no_temperature_and_no_count_is_too_small_or_too_large(tiny_llama: Path, temperature: float) -> None:
    """Withheld tokens are among the logits: minus infinity stays what it is."""
    cuts: list[dict[str, Any]] = [{}, {"top_k": 2**31}, {"top_k": 2**31, "top_p": 0.9}, {"top_k": 3}]
    requests = [
        Request(str(i), (5, 6, 7, 8), None, SamplingParams(3, min_tokens=3, temperature=temperature, seed=i, **cut), i)
        for i, cut in enumerate(cuts)
    ]
    expected = answers(make_engine(tiny_llama), requests)
    assert answers(device_engine(tiny_llama), requests) == expected
    assert all(result.error is None for result in expected.values())
