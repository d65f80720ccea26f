"""One timed run of one system over an engine workload, in a process of its own.

`python -m lorabatch.benchmarks.engine.systems SYSTEM WORKLOAD.json` prints one JSON object, a `Run`: seconds of
serving, memory, and the tokens for comparison. When the clock starts, every system has read the base model and all
adapters and has answered a short row of each; merging weights is inside the time.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.engine.llama_cpp import run_llama_cpp
from lorabatch.benchmarks.engine.openvino import run_openvino
from lorabatch.benchmarks.engine.result import (
    CEILING,
    FORMAT_OPTIONS,
    LLAMA_CPP,
    LLAMA_CPP_NO_LORA,
    MERGED,
    MERGED_ONE,
    NO_LORA,
    OPENVINO,
    OPENVINO_FUSED,
    OPENVINO_NO_LORA,
    TORCH_CEILING,
    UNMERGED,
    Run,
    in_format,
)
from lorabatch.benchmarks.engine.workload import RANKS, BenchRow, EngineWorkload
from lorabatch.engine.config import EngineConfig, Mode, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.models.layers import Linear
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.kernels.packed_weight import Products, can_multiply, pack

PEFT_BATCH = 32
WARM_BYTES = 3 << 30
_WARM_PROMPT = (100, 101, 102)
_STATUS, _PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Tokens = list[list[int]]
Measured = tuple[float, Tokens, float]  # seconds, tokens of each row, seconds spent on merging weights


def run_ours(
    workload: EngineWorkload,
    mode: Mode,
    adapter_of: Callable[[BenchRow], str | None],
    products: Products = "float32",
) -> Measured:
    """Our engine, all rows in one batch; `adapter_of` says which adapter a row asks, None for the base."""
    config = EngineConfig(mode=mode, max_batch_rows=len(workload.rows), **FORMAT_OPTIONS[products])
    engine = Engine(Path(workload.model), config)
    ids: dict[str | None, str | None] = {None: None}
    for name, folder in workload.adapters.items():
        content = audit_adapter(Path(folder), engine.model, name).identity_sha256
        assert content is not None, f"{name}: refused"
        engine.register_adapter(content, Path(folder), name)
        ids[name] = content
    warm = SamplingParams(max_tokens=2, ignore_eos=True)
    asked = {ids[adapter_of(row)] for row in workload.rows}
    list(engine.run([Request(f"warm {i}", _WARM_PROMPT, adapter, warm) for i, adapter in enumerate(asked)]))
    switching_s = engine.switching_s
    requests = [
        Request(
            str(i),
            tuple(row.prompt_token_ids),
            ids[adapter_of(row)],
            SamplingParams(max_tokens=workload.limit_tokens or row.num_tokens, ignore_eos=True),
        )
        for i, row in enumerate(workload.rows)
    ]
    began = start_clock()
    found = serve(engine, requests, {str(i): row.num_tokens for i, row in enumerate(workload.rows)})
    seconds = time.perf_counter() - began
    return seconds, [list(found[str(i)].token_ids) for i in range(len(requests))], engine.switching_s - switching_s


def serve(engine: Engine, requests: list[Request], num_tokens: Mapping[str, int]) -> dict[str, Result | ExportedRow]:
    """Serve all requests; returns what becomes of each, by its id. A row leaves when it has its number of tokens,
    whether or not systems know that number; one without a number has a result of its own.
    """
    found: dict[str, Result | ExportedRow] = {}
    seen = {}
    engine.observe_step = lambda _, entries: seen.update({e.sequence.request.request_id: e.sequence for e in entries})
    engine.add(requests)
    while engine.num_unfinished:
        seen.clear()
        found.update({result.request_id: result for result in engine.step()})
        ended = [name for name, row in seen.items() if name in num_tokens and len(row.token_ids) >= num_tokens[name]]
        found.update({row.request.request_id: row for row in engine.export_rows(ended)})
    return found


def run_peft_merged(workload: EngineWorkload) -> Measured:
    """transformers + PEFT: one adapter after another, merged, batches of 32 rows, left-padded `generate`."""
    model = _peft_model(workload)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(workload.rows):
        rows_of[row.adapter].append(i)
    tokens: Tokens = [[] for _ in workload.rows]
    for name in rows_of:
        model.set_adapter(name)
        _generate(model, [BenchRow([*_WARM_PROMPT], name, 2)], {})
    began = start_clock()
    for name, rows in rows_of.items():
        model.set_adapter(name)
        model.merge_adapter([name])
        for batch in _batches(rows, workload):
            _answer(model, batch, workload, tokens, {})
        model.unmerge_adapter()
    return time.perf_counter() - began, tokens, 0.0


def run_peft_mixed(workload: EngineWorkload) -> Measured:
    """transformers + PEFT: mixed batches of 32 rows through `adapter_names`."""
    model = _peft_model(workload)
    tokens: Tokens = [[] for _ in workload.rows]
    warm = [BenchRow([*_WARM_PROMPT], name, 2) for name in workload.adapters]
    _generate(model, warm, {"adapter_names": list(workload.adapters)})
    began = start_clock()
    for batch in _batches(list(range(len(workload.rows))), workload):
        _answer(model, batch, workload, tokens, {"adapter_names": [workload.rows[i].adapter for i in batch]})
    return time.perf_counter() - began, tokens, 0.0


def run_vllm(workload: EngineWorkload) -> Measured:
    """vLLM with all adapters at once, in fp32 like the others. Rows end by `max_tokens`, which it does not plan by."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling
    from vllm.lora.request import LoRARequest

    adapters = {
        name: LoRARequest(name, number, folder) for number, (name, folder) in enumerate(workload.adapters.items(), 1)
    }
    model = LLM(
        workload.model,
        dtype="float32",
        enable_lora=True,
        max_loras=len(adapters),
        max_lora_rank=max(RANKS),
        max_num_seqs=len(workload.rows),
    )
    prompts = [{"prompt_token_ids": row.prompt_token_ids} for row in workload.rows]
    sampling = [VllmSampling(temperature=0, max_tokens=row.num_tokens, ignore_eos=True) for row in workload.rows]
    warm = [{"prompt_token_ids": list(_WARM_PROMPT)} for _ in adapters]
    model.generate(warm, VllmSampling(temperature=0, max_tokens=2), lora_request=list(adapters.values()))
    began = start_clock()
    outputs = model.generate(prompts, sampling, lora_request=[adapters[row.adapter] for row in workload.rows])
    return time.perf_counter() - began, [list(output.outputs[0].token_ids) for output in outputs], 0.0


def run_gemm_ceiling(workload: EngineWorkload, products: Products | None) -> Measured:
    """Nothing but the base model's matrix multiplications for the same tokens, in steps of the same sizes: prompts in
    steps of 512 rows, answers as one batch that shrinks as rows end. `products`: by our engine's kernels, or by
    `torch.nn.functional.linear`."""
    model = read_model_config(Path(workload.model))
    shapes = model.linear_shapes()

    def layer(shape: tuple[int, ...]) -> Linear:
        weight = torch.randn(shape)
        return Linear(weight if products is None else pack(weight, products), None, products)

    head = layer(shapes.pop("lm_head"))
    linears = [layer(shape) for shape in shapes.values()]
    inputs = {n: torch.randn(512, n) for n in {linear.shape[1] for linear in [*linears, head]}}

    def multiply(rows: int, sampled: int) -> None:
        for linear in linears:
            linear(inputs[linear.shape[1]][:rows])
        head(inputs[head.shape[1]][:sampled])

    lengths = sorted(row.num_tokens for row in workload.rows)
    with torch.inference_mode():
        multiply(64, 64)
        began = start_clock()
        full, rest = divmod(workload.prompt_tokens, 512)
        for rows in [512] * full + ([rest] if rest else []):
            multiply(rows, 8)
        for position in range(1, lengths[-1]):
            alive = sum(length > position for length in lengths)
            multiply(alive, alive)
        return time.perf_counter() - began, [], 0.0


def _run_merged_alone(workload: EngineWorkload) -> Measured:
    """Every row asks the adapter of the largest rank: steps of merged rows at the batch of the other systems."""
    largest = list(workload.adapters)[min(len(workload.adapters), len(RANKS)) - 1]
    return run_ours(workload, "merged", lambda row: largest)


def _in_format(products: Products) -> dict[str, Callable[[EngineWorkload], Measured]]:
    """Rows of the base and of adapters, with products in one format."""
    return {
        in_format(NO_LORA, products): lambda w: run_ours(w, "unmerged", lambda row: None, products),
        in_format(UNMERGED, products): lambda w: run_ours(w, "unmerged", lambda row: row.adapter, products),
        in_format(LLAMA_CPP_NO_LORA, products): lambda w: run_llama_cpp(w, products, False, start_clock),
        in_format(LLAMA_CPP, products): lambda w: run_llama_cpp(w, products, True, start_clock),
        in_format(MERGED, products): lambda w: run_ours(w, "merged", lambda row: row.adapter, products),
        in_format(OPENVINO_NO_LORA, products): lambda w: run_openvino(w, products, "base", start_clock),
        in_format(OPENVINO, products): lambda w: run_openvino(w, products, "adapters", start_clock),
        in_format(OPENVINO_FUSED, products): lambda w: run_openvino(w, products, "fused", start_clock),
    }


SYSTEMS: dict[str, Callable[[EngineWorkload], Measured]] = {
    **_in_format("float32"),
    **_in_format("bfloat16"),
    **_in_format("int8"),
    MERGED_ONE: _run_merged_alone,
    "PEFT merged": run_peft_merged,
    "PEFT mixed": run_peft_mixed,
    "vLLM": run_vllm,
    CEILING: lambda w: run_gemm_ceiling(w, "float32" if can_multiply("float32") else None),
    TORCH_CEILING: lambda w: run_gemm_ceiling(w, None),
}


def start_clock(warm_bytes: int = WARM_BYTES) -> float:
    """The time at which serving begins, with free memory that the machine really has.

    The host of a virtual machine takes free memory back within seconds, and the first write to it then takes ten times
    as long (measured: 1 s and 0.1 s per 300 MB). Every system finds some that was in use a moment ago.
    """
    torch.ones(warm_bytes // 4)
    if _PEAK_RESET.exists():
        _PEAK_RESET.write_text("5")  # that memory is not the system's
    return time.perf_counter()


def peak_bytes() -> int:
    """The most memory the process has held since the clock started (`proc_pid_status(5)`); not on Linux: ever."""
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _peft_model(workload: EngineWorkload) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    names = list(workload.adapters)
    model = PeftModel.from_pretrained(base, workload.adapters[names[0]], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(workload.adapters[name], adapter_name=name)
    return model.eval()


def _batches(rows: list[int], workload: EngineWorkload) -> list[list[int]]:
    """Batches of rows of similar answer length, the favourable order for a batch that ends with its longest row; in
    order of input where lengths are not known."""
    is_known = workload.limit_tokens is None
    ordered = sorted(rows, key=lambda i: workload.rows[i].num_tokens) if is_known else rows
    return [ordered[i : i + PEFT_BATCH] for i in range(0, len(ordered), PEFT_BATCH)]


def _answer(model: Any, batch: list[int], workload: EngineWorkload, tokens: Tokens, extra: dict[str, Any]) -> None:
    rows = [workload.rows[i] for i in batch]
    for i, row, generated in zip(batch, rows, _generate(model, rows, extra), strict=True):
        tokens[i] = generated[: row.num_tokens]


@torch.inference_mode()
def _generate(model: Any, rows: list[BenchRow], extra: dict[str, Any]) -> Tokens:
    """Generates greedily for every row. All rows get as many tokens as the longest answer among them has."""
    width = max(len(r.prompt_token_ids) for r in rows)
    ids = torch.tensor([[0] * (width - len(r.prompt_token_ids)) + r.prompt_token_ids for r in rows])
    mask = torch.tensor([[0] * (width - len(r.prompt_token_ids)) + [1] * len(r.prompt_token_ids) for r in rows])
    longest = max(r.num_tokens for r in rows)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=0,
        **extra,
    )
    generated: Tokens = out[:, width:].tolist()
    return generated


def main() -> None:
    """Run the named system once and print its measurement."""
    system, path = sys.argv[1], Path(sys.argv[2])
    workload = EngineWorkload.read(path)
    seconds, tokens, switching_s = SYSTEMS[system](workload)
    print(json.dumps(asdict(Run(seconds, peak_bytes(), tokens, switching_s))))


if __name__ == "__main__":
    main()
