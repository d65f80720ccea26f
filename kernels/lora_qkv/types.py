"""`HeadFinish`: the work of `lora_qkv_` on heads after the linear layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadFinish:
    """The bias, norms, rotation and slots with which a step's heads are finished in one layer."""

    #: Cosine of each token's angles, fp32 [num_tokens, rotary_dim // 2].
    cos: Tensor
    #: Sine of each token's angles, fp32 [num_tokens, rotary_dim // 2].
    sin: Tensor
    #: Slot in the pool for each token's keys and values, int32 [num_tokens]; -1 stores nothing.
    slots: Tensor
    #: Bias of the packed linear layer, [(H + 2K) * head_dim]; None for no bias.
    bias: Tensor | None = None
    #: Weight of the norm of query heads, [head_dim]; None for no norm.
    q_norm: Tensor | None = None
    #: Weight of the norm of key heads, [head_dim]; None for no norm.
    k_norm: Tensor | None = None
    #: Number added to the mean square in norms.
    norm_eps: float = 1e-6
    #: Number added to norm weights; 1 for Gemma.
    norm_offset: float = 0.0
