"""The plain twin of `gated_delta`, for every device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ..layouts.delta_sizes import DeltaSizes
from .types import DeltaParameters, DeltaRows


def walk(projected: Tensor, sizes: DeltaSizes, parameters: DeltaParameters, states: Tensor, rows: DeltaRows) -> Tensor:
    """Outputs [num_tokens, num_values]; what the rows keep is updated in `states`."""
    out = projected.new_empty(len(projected), sizes.num_values)
    ends = rows.first_tokens.tolist()
    for number, (place, is_new) in enumerate(zip(rows.places.tolist(), rows.is_new.tolist(), strict=True)):
        kept, tokens = states[place : place + sizes.state_elements], slice(ends[number], ends[number + 1])
        if is_new:
            kept.zero_()
        out[tokens] = _row(projected[tokens].float(), sizes, parameters, kept)
    return out


def _row(projected: Tensor, sizes: DeltaSizes, parameters: DeltaParameters, kept: Tensor) -> Tensor:
    """Outputs of one row's tokens; updates `kept`."""
    x, gates, write, step = torch.split(projected, list(sizes.parts), -1)
    window = kept[: sizes.window_elements].view(-1, sizes.channels)
    inputs = torch.cat([window, x])
    window.copy_(inputs[len(x) :])
    x = silu(sum(inputs[tap : tap + len(x)] * weight for tap, weight in enumerate(parameters.conv)))
    query, key, value = torch.split(x, [sizes.num_keys, sizes.num_keys, sizes.num_values], -1)
    query, key = (_unit(part.view(-1, sizes.key_heads, sizes.key_size), sizes) for part in (query, key))
    query, value = query * sizes.key_size**-0.5, value.view(-1, sizes.value_heads, sizes.value_size)
    decay = torch.exp(-parameters.decay_log.exp() * softplus(step + parameters.step_bias))[..., None, None]
    state = kept[sizes.window_elements :].view(sizes.value_heads, sizes.key_size, sizes.value_size)
    out = torch.empty_like(value)
    for t in range(len(x)):
        state *= decay[t]
        change = (value[t] - torch.einsum("hk,hkv->hv", key[t], state)) * write[t, :, None].sigmoid()
        state += key[t, :, :, None] * change[:, None]
        out[t] = torch.einsum("hk,hkv->hv", query[t], state)
    out *= torch.rsqrt(out.square().mean(-1, keepdim=True) + parameters.eps) * parameters.norm
    return out.flatten(1) * silu(gates)


def _unit(heads: Tensor, sizes: DeltaSizes) -> Tensor:
    """Heads of unit length, one for each value head."""
    unit = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
    return unit.repeat_interleave(sizes.value_heads // sizes.key_heads, 1)
