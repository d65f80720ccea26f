"""An adapter as one flat tensor: into the pool and out again without a number changed or wasted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lorabatch.engine.config import read_model_config
from lorabatch.engine.memory.packed import PackedAdapter, pack_adapter
from lorabatch.engine.model_config.model import ModelConfig, packed_members
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.weights import AdapterWeights, load_adapter
from lorabatch.kernels.native import adapter_type
from lorabatch.kernels.packed_weight.panels import has_panels, unpack

needs_library = pytest.mark.skipif(not has_panels(), reason="compiled kernels were not built on this machine")


@pytest.fixture
def model(tiny_llama: Path) -> ModelConfig:
    return read_model_config(tiny_llama)


def read(folder: Path, model: ModelConfig) -> AdapterWeights:
    return load_adapter(audit_adapter(folder, model, folder.name), "cpu")


def copied(packed: PackedAdapter, memory: torch.Tensor, start: int) -> torch.Tensor:
    numbers = memory[start : start + packed.numbers.numel()]
    return numbers.copy_(packed.numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_panels", [False, pytest.param(True, marks=needs_library)])
@pytest.mark.parametrize("name", ["rank1", "rank8", "rank20", "rank64"])
def test_every_matrix_arrives_where_the_views_say(
    tiny_adapters: dict[str, Path], model: ModelConfig, name: str, in_panels: bool, dtype: torch.dtype
) -> None:
    weights = read(tiny_adapters[name], model)
    packed = pack_adapter(weights, model, dtype, in_panels=in_panels, device=torch.device("cpu"))
    assert packed.numbers.numel() == sum(pair.a.numel() + pair.b.numel() for pair in weights.lora.values())
    memory = torch.full((packed.numbers.numel() + 100,), torch.nan, dtype=dtype)
    in_pool = copied(packed, memory, 60)
    packed.numbers.fill_(torch.nan)
    seen = set()
    for layer, sites in enumerate(packed.layout.sites(in_pool)):
        for site, found in sites.items():
            module_at = {member.start: member.module for member in packed_members(model, layer, site)}
            for member in found.members:
                pair = weights.lora[module_at[member.column_start]]
                rank = found.members[-1].rank_end
                width = found.a.numel() // rank
                kind = adapter_type(dtype, [width, *(m.rank_end - m.rank_start for m in found.members)])
                a = unpack(found.a, kind, (rank, width)) if in_panels else found.a
                b = unpack(member.b, kind, (len(pair.b), pair.rank)) if in_panels else member.b.t()
                assert found.in_panels == in_panels
                assert a[member.rank_start : member.rank_end].equal(pair.a.to(dtype).to(a.dtype))
                assert b.equal(pair.b.to(dtype).to(b.dtype))
                assert member.scaling == pair.scaling
                seen.add(module_at[member.column_start])
    assert seen == set(weights.lora)


def test_the_pool_around_an_adapter_is_left_alone(tiny_adapters: dict[str, Path], model: ModelConfig) -> None:
    weights = read(tiny_adapters["rank8"], model)
    packed = pack_adapter(weights, model, torch.float32, in_panels=False, device=torch.device("cpu"))
    size = packed.numbers.numel()
    memory = torch.zeros(size + 20)
    copied(packed, memory, 10)
    assert not memory[:10].any()
    assert not memory[10 + size :].any()
