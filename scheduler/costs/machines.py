"""Cost models by name of the machine and its model: presets where nothing was measured.

Presets of papers are derived from what the papers print, so that their experiments can be repeated; the project's own
carry the numbers of its benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .cost import CostModel

# SmolLM2-135M in fp32 on two cores of an AMD EPYC, one of two engines with a thread each: what `lorabatch profile`
# measured with the compiled kernels (benchmarks/results/2026-11-21-fidelity-2-cores.json), rounded. Its contexts are
# short and its fit gives KV slots nothing; reading one is taken to cost what a pair of tokens in a prompt does.
CPU_SMOLLM2_135M = CostModel(
    step_s=0.038,
    prefill_token_s=0.0022,
    decode_row_s=0.0027,
    context_token_s=9e-7,
    lora_step_s=0.0028,
    adapter_s=0.0018,
    rank_s=0.0,
    rank_token_s=6e-6,
    merge_s=0.36,
    load_s=0.0,
    host_bytes_per_s=1.8e8,
    peer_bytes_per_s=1.8e8,
    storage_bytes_per_s=1.8e8,
    prefill_pair_s=9e-7,
    lora_token_s=4.6e-5,
    first_merge_s=1.4,
    # 49,152 logits, by one thread (docs/internals/kernels.md)
    draw_s=3.5e-5,
)
# H200, Llama-3-8B bf16, by arithmetic from the compiled kernels (benchmarks/results/2026-11-26-h200-preset.md): no GPU
# has run them. A step with prompts and decoding rows is two passes, of which the second reads the weights once more,
# without a graph.
H200_LLAMA_3_8B = CostModel(
    step_s=0.0055,
    prefill_token_s=2.2e-5,
    decode_row_s=1.2e-5,
    context_token_s=3.3e-8,
    lora_step_s=0.0004,
    adapter_s=2e-6,
    rank_s=1.2e-6,
    rank_token_s=7e-8,
    merge_s=0.0085,
    load_s=0.002,
    host_bytes_per_s=4e10,
    peer_bytes_per_s=1e10,
    storage_bytes_per_s=1e9,
    prefill_pair_s=1.8e-9,
    mixed_step_s=0.005,
    # with top-p, at 256 rows (benchmarks/results/2026-11-26-gpu-sampling.md)
    draw_s=7e-7,
)
# dLoRA (OSDI 24): one A800 80 GB, Llama-2-7B, rank 8. An iteration of decode takes 50 ms (section 7.1: the SLO of 0.5 s
# is ten of them); the unmerged product costs 38.9 % of the base computation (section 4.1, figure 5), so the three
# unmerged coefficients are 0.389 of their base ones at rank 8; switching takes about two iterations (section 4.2's
# example).
DLORA_A800_LLAMA_2_7B = CostModel(
    step_s=0.040,
    prefill_token_s=1.0e-4,
    decode_row_s=2.5e-4,
    context_token_s=6e-7,
    lora_step_s=0.389 * 0.040,
    adapter_s=0.0,
    rank_s=0.0,
    rank_token_s=0.389 * 1.0e-4 / 8,
    merge_s=0.1,
    load_s=0.005,
    host_bytes_per_s=1.2e10,
    peer_bytes_per_s=1.2e10,
    storage_bytes_per_s=1e9,
)
# LoRAServe: Llama-7B on four A100 (TP 4, section V-B), S-LoRA's kernels, which run at the largest rank present. A
# prompt of 2,000 tokens takes 2.7 times as long at rank 128 as at rank 8 on one device (figure 3) and 1.2 times on
# eight (section III-A3): the excess falls as 1/TP, to 0.43 on four, so rank_token_s is 0.0037 of the base cost of a
# token. Figure 14: loads from a peer cost about what loads from the host do.
LORASERVE_A100_LLAMA_7B = CostModel(
    step_s=0.008,
    prefill_token_s=6.0e-5,
    decode_row_s=6.0e-5,
    context_token_s=6.5e-8,
    lora_step_s=0.001,
    adapter_s=0.0,
    rank_s=0.0,
    rank_token_s=0.0037 * 6.0e-5,
    merge_s=0.1,
    load_s=0.005,
    host_bytes_per_s=1.2e10,
    peer_bytes_per_s=1.0e10,
    storage_bytes_per_s=5e8,
    kernel="padded",
)
# Seconds of one core that a worker takes to fetch an adapter from an S3 server over HTTP, to check its values and to
# write it, and the bytes that it fetches beside that in a second: adapters of 1.6 and 6.2 MB on an AMD EPYC.
_FETCH_S, _FETCH_BYTES_PER_S = 0.019, 5.5e8


def fetch_core_seconds(weight_bytes: float) -> float:
    """Seconds of one core of a worker to fetch an adapter of `weight_bytes` from a store."""
    return _FETCH_S + weight_bytes / _FETCH_BYTES_PER_S


MACHINES: Mapping[str, CostModel] = MappingProxyType(
    {
        "cpu-smollm2-135m": CPU_SMOLLM2_135M,
        "h200-llama-3-8b": H200_LLAMA_3_8B,
        "dlora-a800-llama-2-7b": DLORA_A800_LLAMA_2_7B,
        "loraserve-a100-llama-7b": LORASERVE_A100_LLAMA_7B,
    }
)
