"""How a GPU's memory is shared out: the pool gets what weights, merging and the largest step leave."""

from __future__ import annotations

from .model_config import PACKED_SITES, ModelConfig
from .step_limits import StepLimits

# For what torch's allocator cannot use, for graphs and compiled kernels.
_SLACK_SHARE = 0.05
_FP32_BYTES = 4


def gpu_pool_bytes(free_bytes: int, limits: StepLimits, model: ModelConfig, itemsize: int) -> int:
    """Bytes of the pool when `free_bytes` are left after the weights; 0 when nothing is left for it."""
    left = free_bytes * (1 - _SLACK_SHARE) - live_weight_bytes(model, itemsize) - step_bytes(limits, model, itemsize)
    return max(int(left), 0)


def live_weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Copies of the decoder layers' linear weights that adapters are merged into, kept once an adapter was merged."""
    sizes = (out * size for site in PACKED_SITES for out, size in model.members_of_site(site).values())
    return model.num_layers * sum(sizes) * itemsize


def step_bytes(limits: StepLimits, model: ModelConfig, itemsize: int) -> int:
    """Numbers of the largest step that live at once: a layer's, and the logits of every running row.

    Per token: residual stream, normed input and the product that joins it (3 hidden), and the wider of attention
    (qkv, queries' answers) and the MLP (its packed product and the activation). Per row: logits, their copy for
    log-probabilities, and one in fp32 for the sum of their exponentials.
    """
    attention = 2 * model.q_size + 2 * model.kv_size
    mlp = (3 if model.has_gate else 2) * model.intermediate_size
    per_token = (3 * model.hidden_size + max(attention, mlp)) * itemsize
    per_row = model.vocab_size * (2 * itemsize + _FP32_BYTES)
    return limits.step_tokens * per_token + limits.batch_rows * per_row
