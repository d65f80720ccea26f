"""Where the outputs of each linear layer lie in the packed layer that computes it."""

from __future__ import annotations

from dataclasses import dataclass

from .model_config import ModelConfig, PackedSite


@dataclass(frozen=True, slots=True)
class PackedMember:
    """Linear layer `module` gives features `start:end` of its packed layer's output."""

    module: str
    start: int
    end: int


def packed_members(model: ModelConfig, layer: int, site: PackedSite) -> tuple[PackedMember, ...]:
    """Members of one packed site of one layer, in output order."""
    members, start = [], 0
    for name, (out_features, _) in model.members_of_site(site).items():
        members.append(PackedMember(f"{model.names.layers}.{layer}.{name}", start, start + out_features))
        start += out_features
    return tuple(members)
