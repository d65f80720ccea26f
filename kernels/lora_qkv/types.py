"""What `lora_qkv_` does to heads after the linear layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadFinish:
    """What happens to a head after the linear layer. `cos`, `sin`: fp32 [num_tokens, rotary_dim // 2]; norm
    weights [head_dim] or None. `slots`: int32 [num_tokens], -1 stores nothing."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
