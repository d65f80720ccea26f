"""Which linear layers of a decoder layer are computed as one packed layer, and where each one's outputs lie."""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig

# Packed site -> checkpoint names of its members below `model.layers.N.`, in the order of their outputs.
PACKED_SITES: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class PackedMember:
    """Linear layer `module` gives features `start:end` of its packed layer's output."""

    module: str
    start: int
    end: int


def packed_members(model: ModelConfig, layer: int, site: str) -> tuple[PackedMember, ...]:
    """Members of one packed site of one layer, in output order."""
    members, start = [], 0
    shapes = model.site_shapes()
    for name in PACKED_SITES[site]:
        out_features, _ = shapes[name]
        members.append(PackedMember(f"model.layers.{layer}.{name}", start, start + out_features))
        start += out_features
    return tuple(members)
