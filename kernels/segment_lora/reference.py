"""The plain twin of `add_lora_`: one token at a time, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .types import LoraSegment


def add_lora(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> Tensor:
    """`y` plus every segment's LoRA, as a new fp64 tensor [num_tokens, out_features]."""
    result = y.double().clone()
    for segment in segments:
        if segment.site is None:
            continue
        for token in range(segment.start, segment.end):
            for member in segment.site.members:
                a = segment.site.a[member.rank_start : member.rank_end].double()
                update = (a @ x[token].double()) @ member.b.double()
                result[token, member.column_start : member.column_end] += member.scaling * update
    return result
