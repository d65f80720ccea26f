"""Is the engine right on this device? The same rows as on the CPU path, and launches that wait for nothing."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Literal

import torch

from lorabatch.benchmarks.gpu.model_folder import write_model_folder, write_weights
from lorabatch.benchmarks.gpu.shapes import LLAMA_3_2_1B, TINY, ModelShape
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.backend import GpuBackend
from lorabatch.engine.runner.gpu_graphs import GraphExecutor, GraphKey, StepExecutor

_RANKS = (1, 20, 64)
# Largest difference of log-probabilities after a few layers from those of the CPU path in fp32.
_LOGPROB_LIMITS = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-3}
_VOCAB = 4096
#: Four layers of a 1B, whose products and sums are deep enough to show what one layer hides.
DEEP = replace(LLAMA_3_2_1B, name="Llama-3.2-1B, 4 layers", num_layers=4, vocab=_VOCAB)


def check_engine(device: torch.device, max_tokens: int, shape: ModelShape = TINY) -> list[str]:
    """Compares tokens of greedy and drawn rows on the device with those on the CPU path, in fp32. Returns differences
    as sentences."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", shape)
        write_weights(folder)
        cpu = EngineConfig(device="cpu", mode="unmerged", pool_bytes=8 << 20, max_batch_rows=8, max_step_tokens=24)
        other = EngineConfig(
            device=device.type, dtype="float32", mode="unmerged", pool_bytes=8 << 20, max_batch_rows=8,
            max_step_tokens=24, kernels="triton" if device.type == "cpu" else "auto",
        )  # fmt: skip
        expected, found = (_serve(folder, config, max_tokens) for config in (cpu, other))
    problems = []
    for one, two in zip(expected, found, strict=True):
        if one.token_ids != two.token_ids:
            problems.append(f"engine, row {one.request_id}: tokens {two.token_ids}, on the CPU path {one.token_ids}")
    return problems


def check_graphs(device: torch.device, max_tokens: int, shape: ModelShape = TINY) -> list[str]:
    """Whether steps that replay graphs give the bits of steps launched kernel by kernel: rows of many lengths and
    adapters, some with rules, which end one after the other, so that a graph serves many mixes."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", shape)
        write_weights(folder)
        config = EngineConfig(
            device=device.type, mode="unmerged", pool_bytes=8 << 20, max_batch_rows=8, max_step_tokens=24,
            kernels="triton" if device.type == "cpu" else "auto",
        )  # fmt: skip
        expected, found = (
            _mixed_rows(Engine(folder, config, None, kind), folder, max_tokens) for kind in (_Eager, _Graphs)
        )
    return [
        f"graphs, row {one.request_id}: {two.token_ids} {two.token_logprobs}, without graphs {one.token_ids} "
        f"{one.token_logprobs}"
        for one, two in zip(expected, found, strict=True)
        if (one.token_ids, one.token_logprobs) != (two.token_ids, two.token_logprobs)
    ]


#: Two layers of a 1B, whose products are split in mode `exact`.
WIDE = replace(LLAMA_3_2_1B, name="Llama-3.2-1B, 2 layers", num_layers=2, vocab=_VOCAB)


def check_exact(
    device: torch.device, max_tokens: int, shape: ModelShape = TINY, mode: Literal["exact", "unmerged"] = "exact"
) -> list[str]:
    """Whether rows of mode `exact` have the same bits alone, in company, with prompts cut into steps, and moved to
    another engine half way: tokens and log-probabilities, in bf16 on a GPU and in fp32 elsewhere.

    On a GPU, steps have up to thousands of tokens, and models of long contexts get a prompt of 5,000. `shape`: with
    2,048 features and more, products of few outputs are split, and splits are added in both ways. `mode`: unmerged
    shows that the rows tell the modes apart.
    """
    is_gpu = device.type == "cuda"
    shape = shape if is_gpu else replace(shape, num_layers=1)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", shape)
        write_weights(folder)
        config = EngineConfig(
            device=device.type, mode=mode, pool_bytes=512 << 20 if is_gpu else 8 << 20,
            max_batch_rows=64, max_step_tokens=8192, kernels="auto" if is_gpu else "triton",
        )  # fmt: skip
        engine = Engine(folder, config)
        rows = _rows_of_many_lengths(engine, _registered(engine, folder), max_tokens, is_gpu=is_gpu)
        alone = {row.request_id: result for row in rows for result in engine.run([row])}
        found = {"in company": {result.request_id: result for result in engine.run(rows)}}
        for max_step_tokens in (9, 100, 700) if is_gpu else (9,):
            engine = Engine(folder, replace(config, max_step_tokens=max_step_tokens))
            _registered(engine, folder)
            results = {result.request_id: result for result in engine.run(rows)}
            found[f"with steps of {max_step_tokens} tokens"] = results
        found["moved"] = _moved(folder, config, rows, num_steps=2 + max_tokens // 2)
    return [
        f"mode {mode}, row {request_id} {how}: {two.error or (two.token_ids, two.token_logprobs)}, alone "
        f"{one.error or (one.token_ids, one.token_logprobs)}"
        for how, results in found.items()
        for request_id, one in alone.items()
        if (two := results[request_id]).error
        or (one.token_ids, one.token_logprobs) != (two.token_ids, two.token_logprobs)
    ]


def _rows_of_many_lengths(engine: Engine, ids: list[str | None], max_tokens: int, *, is_gpu: bool) -> list[Request]:
    lengths = [1 + (i * 37) % 200 for i in range(40)] if is_gpu else [3, 17, 6, 2]
    if is_gpu and engine.model.max_context_tokens > 6000:
        lengths += [5000]
    vocab = engine.model.vocab_size
    rows = []
    for i, length in enumerate(lengths):
        sampling = SamplingParams(max_tokens, ignore_eos=True, logprobs=True)
        if is_gpu and i % 3 == 2:
            sampling = replace(sampling, temperature=0.8, top_p=0.9, seed=i)
        prompt = tuple((i * 7919 + place * 31) % (vocab - 1) + 1 for place in range(length))
        rows.append(Request(f"{i}", prompt, ids[i % len(ids)], sampling, i))
    return rows


def _moved(folder: Path, config: EngineConfig, rows: list[Request], num_steps: int) -> dict[str, Result]:
    """Results of rows that leave their engine after some steps, and go on in another one whose steps are shorter."""
    first, second = Engine(folder, config), Engine(folder, replace(config, max_step_tokens=64))
    for engine in (first, second):
        _registered(engine, folder)
    first.add(rows)
    results = [result for _ in range(num_steps) for result in first.step()]
    ended = {result.request_id for result in results}
    second.import_rows(first.export_rows([row.request_id for row in rows if row.request_id not in ended]))
    while second.num_unfinished:
        results += second.step()
    return {result.request_id: result for result in results}


class _Eager(GpuBackend):
    """Steps of the same buckets, kernel by kernel."""

    def executor(self) -> StepExecutor:
        """An executor that launches steps kernel by kernel."""
        return StepExecutor()


class _Graphs(GpuBackend):
    """Every bucket has its graph from the first visit on: a larger one's would round differently."""

    def executor(self) -> StepExecutor:
        """An executor with a graph for each bucket; without a GPU one that launches kernel by kernel."""
        return _OwnGraphs() if self.device.type == "cuda" else StepExecutor()


class _OwnGraphs(GraphExecutor):
    def choose(self, key: GraphKey) -> GraphKey:
        return key


def _mixed_rows(engine: Engine, folder: Path, max_tokens: int) -> list[Result]:
    ids = _registered(engine, folder)
    # adapters are there before the rows that count, whose steps would follow from the threads that read them else
    short = SamplingParams(1, ignore_eos=True)
    for result in engine.run([Request(f"first {i}", (1, 2), adapter_id, short, i) for i, adapter_id in enumerate(ids)]):
        assert result.error is None, result.error
    rows = []
    for i in range(4 * max_tokens):
        penalty = 1.5 if i % 5 == 0 else 1.0
        sampling = SamplingParams(1 + (i * 5) % max_tokens, ignore_eos=True, logprobs=True, repetition_penalty=penalty)
        prompt = tuple((i * 13 + j * 7) % 90 + 1 for j in range(1 + (3 * i) % 11))
        rows.append(Request(f"{i:04}", prompt, ids[(i * i + i // 3) % len(ids)], sampling, i))
    return sorted(engine.run(rows), key=lambda result: result.request_id)


def check_launches(device: torch.device, shape: ModelShape = TINY) -> list[str]:
    """Whether a launch makes the host wait for the device, as CUDA's sync debug mode finds. Checks nothing without a
    GPU."""
    if device.type != "cuda":
        return []
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", shape)
        config = EngineConfig(device=device.type, pool_bytes=64 << 20, load_format="dummy", mode="unmerged")
        engine = Engine(folder, config)
        ids = [None, engine.register_dummy_adapter("a", 16), engine.register_dummy_adapter("b", 8)]
        sampling = SamplingParams(max_tokens=230, ignore_eos=True)
        engine.add([Request(str(i), (1, 2, 3), adapter_id, sampling) for i, adapter_id in enumerate(ids)])
        # adapters come in a thread; compiling kernels and capturing graphs may wait
        for _ in range(200):
            engine.step()
            if engine.telemetry().num_running == len(ids):
                break
        for _ in range(4):
            engine.step()
        launch = engine._runner.launch
        problems: list[str] = []

        def watched(entries: object) -> object:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(entries)  # type: ignore[arg-type]
            except RuntimeError as error:
                problems.append(f"a launch waits for the device: {str(error).splitlines()[0]}")
                raise
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine._runner.launch = watched  # type: ignore[assignment, method-assign]
        try:
            for _ in range(4):
                engine.step()
        except RuntimeError as error:
            problems = problems or [f"a launch failed: {error}"]
        return problems


def one_layer(shape: ModelShape) -> ModelShape:
    """The shape with one layer and a small vocabulary, which a CPU can check."""
    return replace(shape, num_layers=1, vocab=min(_VOCAB, shape.vocab))


def check_real_widths(device: torch.device, shape: ModelShape, dtype: torch.dtype) -> list[str]:
    """Whether layers of real widths say what the CPU path says in fp32: prompts of 300 tokens, some of them begun
    alike, and decode steps, of the base and of three ranks. In `dtype` on a GPU, in 16 bits with torch's attention too.
    """
    is_gpu = device.type == "cuda"
    length = 300 if is_gpu else 20
    sampling = SamplingParams(max_tokens=6 if is_gpu else 2, ignore_eos=True, logprobs=True)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", shape)
        write_weights(folder)
        pool_bytes = 256 << 20 if is_gpu else 8 << 20
        cpu = EngineConfig(device="cpu", mode="unmerged", pool_bytes=pool_bytes, max_batch_rows=8)
        other = replace(
            cpu,
            device=device.type,
            dtype=str(dtype).removeprefix("torch.") if is_gpu else "float32",
            kernels="auto" if is_gpu else "triton",
        )
        expected = _long_rows(Engine(folder, cpu), folder, length, sampling)
        problems = []
        for attention in ("own", "varlen") if is_gpu and dtype.itemsize == 2 else ("own",):
            engine = _attending_by(attention, folder, other)
            if attention != "own" and getattr(engine._runner, "_prompt_attention", None) is None:
                problems.append(f"attention over prompts by {attention} does not serve here")
                continue
            found = _long_rows(engine, folder, length, sampling)
            problems += _off(f"{shape.name}, {attention} attention", expected, found, _LOGPROB_LIMITS[dtype])
    return problems


def _attending_by(attention: str, folder: Path, config: EngineConfig) -> Engine:
    """An engine, with a library's attention over prompts unless it is `own`."""
    before = os.environ.get("LORABATCH_PROMPT_ATTENTION")
    os.environ["LORABATCH_PROMPT_ATTENTION"] = attention
    try:
        return Engine(folder, config)
    finally:
        os.environ.pop("LORABATCH_PROMPT_ATTENTION")
        if before is not None:
            os.environ["LORABATCH_PROMPT_ATTENTION"] = before


def _off(name: str, expected: list[Result], found: list[Result], limit: float) -> list[str]:
    """Rows whose log-probabilities differ by more than `limit`, as sentences."""
    problems = []
    for one, two in zip(expected, found, strict=True):
        if two.error is not None:
            problems.append(f"{name}, row {one.request_id}: {two.error}")
            continue
        assert one.token_logprobs is not None
        assert two.token_logprobs is not None
        # up to the first token that differs; that one is as likely, or the row is wrong
        tokens = zip(one.token_ids, two.token_ids, strict=True)
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens))
        pairs = list(zip(one.token_logprobs, two.token_logprobs, strict=True))[: num_same + 1]
        worst = max(abs(a - b) for a, b in pairs)
        if not worst <= limit:
            problems.append(f"{name}, row {one.request_id}: log-probability off by {worst:.3g}, allowed {limit:.3g}")
    return problems


def check_ahead(device: torch.device, max_tokens: int, shape: ModelShape = TINY) -> list[str]:
    """Whether rows say the same when a step is launched before the one before it is read, in fp32."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / "model", shape)
        write_weights(folder)
        config = EngineConfig(
            device=device.type, dtype="float32", mode="unmerged", pool_bytes=8 << 20, max_batch_rows=8,
            max_step_tokens=24, kernels="triton" if device.type == "cpu" else "auto",
        )  # fmt: skip
        expected, found = (
            _mixed_rows(Engine(folder, replace(config, launches_ahead=is_ahead)), folder, max_tokens)
            for is_ahead in (False, True)
        )
    return _off("one step ahead", expected, found, _LOGPROB_LIMITS[torch.float32])


def _long_rows(engine: Engine, folder: Path, length: int, sampling: SamplingParams) -> list[Result]:
    ids = _registered(engine, folder)
    vocab = engine.model.vocab_size
    rows = []
    for i in range(6):
        own = length // 2 if i % 2 else 0  # half of them begin alike
        prompt = tuple((place * 31 + (i * 7919 if place >= own else 0)) % (vocab - 1) + 1 for place in range(length))
        rows.append(Request(f"{i}", prompt, ids[i % len(ids)], sampling, i))
    return sorted(engine.run(rows), key=lambda result: result.request_id)


def _serve(folder: Path, config: EngineConfig, max_tokens: int) -> list[Result]:
    engine = Engine(folder, config)
    ids = _registered(engine, folder)
    greedy = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    drawn = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, seed=3)
    rows = [
        Request(f"{i}", tuple((i * 13 + j * 7) % 90 + 1 for j in range(5 + 7 * i)), ids[i % len(ids)], sampling, i)
        for i, sampling in enumerate([greedy, greedy, greedy, greedy, drawn, drawn])
    ]
    return sorted(engine.run(rows), key=lambda result: result.request_id)


def _registered(engine: Engine, folder: Path) -> list[str | None]:
    """None for the base, and random adapters of `_RANKS`."""
    ids: list[str | None] = [None]
    for rank in _RANKS:
        path = write_random_adapter(folder.parent / f"rank{rank}", engine.model, rank, seed=rank)
        content = audit_adapter(path, engine.model, path.name).content_sha256
        assert content is not None, f"the random adapter of rank {rank} was refused"
        engine.register_adapter(content, path)
        ids.append(content)
    return ids
