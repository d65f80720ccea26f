"""The plain twin of `PreparedLora.add_`: one token at a time, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .types import LoraSpan


def add_lora(y: Tensor, x: Tensor, spans: Sequence[LoraSpan], site: int) -> Tensor:
    """`y` plus every span's LoRA at packed layer number `site`, as a new fp64 tensor [num_tokens, out_features]."""
    result = y.double().clone()
    for span in spans:
        weights = span.adapter.sites[site]
        if weights is None:
            continue
        for token in range(span.start, span.end):
            for member in weights.members:
                a = torch.cat(weights.a)[member.rank_start : member.rank_end].double()
                update = (a @ x[token].double()) @ torch.cat(member.b).double()
                result[token, member.column_start : member.column_end] += member.scaling * update
    return result
