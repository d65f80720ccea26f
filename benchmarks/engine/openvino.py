"""OpenVINO GenAI over an engine workload: its continuous batching, adapter after adapter, or one adapter fused.

Its own converter needs an older transformers than ours. It reads GGUF files as well, but gives the products of such a
model no names, by which it finds what an adapter belongs to; they get the names of their weights here.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType

from lorabatch.benchmarks.engine.gguf_files import write_gguf_model
from lorabatch.benchmarks.engine.workload import BenchRow, EngineWorkload
from lorabatch.engine.config import read_model_config
from lorabatch.kernels.packed_weight import Products

# Number formats in which OpenVINO multiplies and keeps keys and values. With int8 both are its own defaults.
_PROPERTIES: dict[Products, dict[str, Any]] = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "int8": {},
}
#: Rows of the base; of adapters that calls choose; of one adapter that is added to the weights when they are loaded.
Served = Literal["base", "adapters", "fused"]
_WEIGHT_NAME = re.compile(r"(?:model\.layers\[(\d+)\]\.|)(.+)\.weight")


def run_openvino(
    workload: EngineWorkload, products: Products, served: Served, start_clock: Callable[[], float]
) -> tuple[float, list[list[int]], float]:
    """Rows of one adapter at once: a call takes one for all of its rows. Returns seconds, tokens and no seconds of
    switching, which are inside. `start_clock`: called when everything is loaded; returns the time.
    """
    import openvino
    import openvino_genai

    adapters = {
        name: openvino_genai.Adapter(Path(folder, "adapter_model.safetensors"))
        for name, folder in workload.adapters.items()
        if served != "base"
    }
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = len(workload.rows)
    scheduler.max_num_batched_tokens = 512 + len(workload.rows)
    scheduler.cache_size = -(-_kv_bytes(workload) // 2**30)
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": os.cpu_count(), **_PROPERTIES[products]}
    if served == "fused":
        (adapter,) = adapters.values()
        fused = openvino_genai.AdapterConfig.Mode.MODE_FUSE
        properties["adapters"] = openvino_genai.AdapterConfig(adapter, fused)
    elif adapters:
        properties["adapters"] = openvino_genai.AdapterConfig(list(adapters.values()))
    with tempfile.TemporaryDirectory(prefix="lorabatch-openvino-") as scratch:
        _convert(Path(workload.model), Path(scratch), in_bytes=products == "int8")
        pipeline = openvino_genai.ContinuousBatchingPipeline(scratch, scheduler, "CPU", properties)

    def answer(rows: list[BenchRow]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([row.prompt_token_ids], dtype=np.int64)) for row in rows]
        asked = []
        for row in rows:
            config = openvino_genai.GenerationConfig()
            config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, row.num_tokens
            if served == "adapters":
                config.adapters = openvino_genai.AdapterConfig(adapters[row.adapter])
            asked.append(config)
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(prompts, asked)]

    rows_of: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(workload.rows):
        rows_of[row.adapter if adapters else ""].append(i)
    for name in rows_of:
        answer([BenchRow([100, 101, 102], name, 2)])
    tokens: list[list[int]] = [[] for _ in workload.rows]
    began = start_clock()
    for rows in rows_of.values():
        for i, answered in zip(rows, answer([workload.rows[i] for i in rows]), strict=True):
            tokens[i] = answered
    return time.perf_counter() - began, tokens, 0.0


def _kv_bytes(workload: EngineWorkload) -> int:
    """Keys and values of all rows at their ends, in fp32, blocks of 32 tokens."""
    model = read_model_config(Path(workload.model))
    tokens = sum(len(row.prompt_token_ids) + row.num_tokens + 32 for row in workload.rows)
    return tokens * model.num_layers * 2 * model.num_kv_heads * model.head_dim * 4


def _convert(model: Path, folder: Path, *, in_bytes: bool) -> None:
    """Write a checkpoint in fp16 as OpenVINO's files. `in_bytes`: weights in 8 bits, a scale for each output channel,
    symmetric, as its compressor (NNCF, `INT8_SYM`) has them.
    """
    import openvino
    import openvino_genai

    write_gguf_model(model, folder / "model.gguf", GGMLQuantizationType.F16)
    openvino_genai.LLMPipeline(folder / "model.gguf", "CPU", enable_save_ov_model=True)
    (folder / "model.gguf").unlink()
    graph = openvino.Core().read_model(folder / "openvino_model.xml")
    for product in [op for op in graph.get_ordered_ops() if op.get_type_name() == "MatMul"]:
        weight = product.input_value(1).get_node()
        while weight.get_type_name() == "Convert":
            weight = weight.input_value(0).get_node()
        if found := _WEIGHT_NAME.fullmatch(weight.get_friendly_name()):
            layer = f"model.layers.{found[1]}." if found[1] else ""
            product.set_friendly_name(f"__module.{layer}{found[2]}/aten::linear/MatMul")
            if in_bytes:
                product.input(1).replace_source_output(_in_bytes(weight.data).output(0))
    # A file that is mapped is not written over.
    openvino.save_model(graph, folder / "named.xml", compress_to_fp16=False)
    del graph
    for suffix in (".xml", ".bin"):
        (folder / f"named{suffix}").replace(folder / f"openvino_model{suffix}")


def _in_bytes(weight: Any) -> Any:
    from openvino import opset13

    numbers = weight.astype(np.float32)
    scales = np.maximum(np.abs(numbers).max(1, keepdims=True) / 127, 1e-12)
    codes = opset13.constant(np.rint(numbers / scales).astype(np.int8))
    return opset13.multiply(opset13.convert(codes, np.float32), opset13.constant(scales.astype(np.float32)))
