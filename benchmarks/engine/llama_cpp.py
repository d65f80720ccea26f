"""llama.cpp over an engine workload: its server in this process (package xllamacpp), with continuous batching."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

from gguf import GGMLQuantizationType

from lorabatch.benchmarks.engine.gguf_files import write_gguf_adapter, write_gguf_model
from lorabatch.benchmarks.engine.workload import BenchRow, EngineWorkload
from lorabatch.kernels.packed_weight import Products

_LIMIT_S = 3600.0
#: Formats of weights that are nearest to our formats of products.
TYPES: Mapping[Products, GGMLQuantizationType] = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,
    "int8": GGMLQuantizationType.Q8_0,
}


def run_llama_cpp(
    workload: EngineWorkload, products: Products, has_lora: bool, start_clock: Callable[[], float]
) -> tuple[float, list[list[int]], float]:
    """All rows at once, a slot each; rows end by `n_predict`, and steps have rows of one adapter. Returns seconds,
    tokens and no seconds of switching. `start_clock`: called when everything is loaded; returns the time.
    """
    import xllamacpp

    adapters = list(workload.adapters) if has_lora else []
    with tempfile.TemporaryDirectory(prefix="lorabatch-gguf-") as scratch:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(Path(scratch, "model.gguf"))
        write_gguf_model(Path(workload.model), Path(parameters.model.path), TYPES[products])
        loras = []
        for name in adapters:
            lora = xllamacpp.CommonAdapterLoraInfo(str(Path(scratch, f"{name}.gguf")), 0.0)
            write_gguf_adapter(Path(workload.model), Path(workload.adapters[name]), Path(lora.path))
            loras.append(lora)
        parameters.lora_adapters = loras
        parameters.lora_init_without_apply = True
        parameters.n_parallel = len(workload.rows)
        longest = max(len(row.prompt_token_ids) + row.num_tokens for row in workload.rows)
        parameters.n_ctx = len(workload.rows) * -(-(longest + 8) // 256) * 256
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = os.cpu_count()
        parameters.n_threads_http = len(workload.rows) + 2
        parameters.port = 0
        parameters.verbosity = -1
        server = xllamacpp.Server(parameters)

        def complete(row: BenchRow) -> list[int]:
            asked = {
                "prompt": row.prompt_token_ids,
                "n_predict": row.num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_tokens": True,
                "cache_prompt": False,
                "lora": [{"id": adapters.index(row.adapter), "scale": 1.0}] if has_lora else [],
            }
            request = Request(f"{server.listening_address}/completion", json.dumps(asked).encode(), method="POST")
            request.add_header("Content-Type", "application/json")
            with urlopen(request, timeout=_LIMIT_S) as reply:
                tokens: list[int] = json.load(reply)["tokens"]
                return tokens

        with ThreadPoolExecutor(len(workload.rows)) as pool:
            list(pool.map(complete, [BenchRow([100, 101, 102], name, 2) for name in adapters or [""]]))
            began = start_clock()
            tokens = list(pool.map(complete, workload.rows))
            return time.perf_counter() - began, tokens, 0.0
