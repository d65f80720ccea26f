"""An adapter as one flat tensor: into the pool and out again without a number changed or wasted."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lorabatch.benchmarks.gpu.shapes import TINY
from lorabatch.engine.config import read_model_config
from lorabatch.engine.errors import AdapterRefusedError
from lorabatch.engine.memory.packed import PackedAdapter, pack_adapter, read_packed
from lorabatch.engine.model_config.model import ModelConfig, packed_members
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import dummy_adapter_weights, dummy_audit
from lorabatch.engine.peft.weights import AdapterWeights, load_adapter
from lorabatch.kernels.native import adapter_type
from lorabatch.kernels.native.segments import SITE
from lorabatch.kernels.packed_weight.panels import has_panels, unpack
from lorabatch.kernels.segment_lora import site_records

needs_library = pytest.mark.skipif(not has_panels(), reason="compiled kernels were not built on this machine")

CPU = torch.device("cpu")


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


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_records_of_a_whole_adapter_are_those_of_its_sites(
    tiny_adapters: dict[str, Path], model: ModelConfig, dtype: torch.dtype
) -> None:
    """The second adapter's are made from those of the first, which has the same layout elsewhere in memory."""
    weights = read(tiny_adapters["rank20"], model)
    for _ in range(2):
        packed = pack_adapter(weights, model, dtype, in_panels=True, device=torch.device("cpu"))
        found = packed.layout.all_sites(packed.numbers)
        expected = site_records(found.sites)
        assert expected["rank"].any()
        assert found.records is not None
        for (address, rank), record in zip(found.records.tolist(), expected, strict=True):
            assert rank == record["rank"]
            if rank:
                moved = np.frombuffer(ctypes.string_at(address, SITE.itemsize), SITE)[0]
                used = record["num_members"]
                assert moved["members"][:used].tolist() == record["members"][:used].tolist()
                assert moved.tolist()[:-1] == record.tolist()[:-1]


def test_adapters_of_the_same_shapes_have_one_layout(tiny_adapters: dict[str, Path], model: ModelConfig) -> None:
    weights = read(tiny_adapters["rank8"], model)
    other = replace(weights, pairs={name: replace(p, a=p.a + 1) for name, p in weights.pairs.items()})
    scaled = replace(weights, pairs={name: replace(p, scaling=3.0) for name, p in weights.pairs.items()})
    first, second, third = (
        pack_adapter(each, model, torch.float32, in_panels=False, device=torch.device("cpu"))
        for each in (weights, other, scaled)
    )
    assert first.layout is second.layout
    assert first.layout is not third.layout
    assert not first.numbers.equal(second.numbers)
    assert first.numbers.equal(third.numbers)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rank_rows_are_the_same_by_compiled_kernels_and_by_torch(
    tiny_adapters: dict[str, Path], model: ModelConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = read(tiny_adapters["rank20"], model)
    compiled = pack_adapter(weights, model, dtype, in_panels=False, device=torch.device("cpu"))
    monkeypatch.setattr("lorabatch.engine.memory.packed.has_panels", lambda: False)
    by_torch = pack_adapter(weights, model, dtype, in_panels=False, device=torch.device("cpu"))
    assert compiled.numbers.equal(by_torch.numbers)


# every tensor by itself, several at a time, all at once
@pytest.mark.parametrize("part_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("in_panels", [False, pytest.param(True, marks=needs_library)])
@pytest.mark.parametrize("name", ["rank1", "rank20"])
def test_an_adapter_that_is_packed_while_it_is_read_has_the_same_numbers(
    tiny_adapters: dict[str, Path],
    model: ModelConfig,
    name: str,
    in_panels: bool,
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit = audit_adapter(tiny_adapters[name], model, name)
    packed = pack_adapter(load_adapter(audit, "cpu"), model, torch.bfloat16, in_panels=in_panels, device=CPU)
    monkeypatch.setattr("lorabatch.engine.peft.weights._PART_BYTES", part_bytes)
    found = read_packed(audit, audit.identity_sha256 or "", model, torch.bfloat16, in_panels=in_panels, device=CPU)
    assert found.layout is packed.layout
    assert found.numbers.equal(packed.numbers)
    with pytest.raises(AdapterRefusedError, match="have changed since they were audited"):
        read_packed(audit, "0" * 64, model, torch.bfloat16, in_panels=in_panels, device=CPU)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_library
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("in_panels", [False, True])
def test_a_thread_that_packs_starts_no_other(tmp_path: Path, in_panels: bool) -> None:
    """Torch starts a team of threads for copies of this size, in every thread that makes some."""
    settings = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(TINY.config_json() | settings))
    wide = read_model_config(tmp_path)
    weights = dummy_adapter_weights(dummy_audit(wide, 64, "wide"), torch.float32, torch.device("cpu"))

    def num_started(copy: Callable[[], object]) -> int:
        before = set(os.listdir("/proc/self/task"))
        copy()
        # threads of earlier tests may end meanwhile
        return len(set(os.listdir("/proc/self/task")) - before)

    def pack() -> object:
        return pack_adapter(weights, wide, torch.bfloat16, in_panels=in_panels, device=torch.device("cpu"))

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(num_started, pack).result() == 0
        by_torch = thread.submit(num_started, lambda: weights.stored["model.layers.0.mlp.up_proj.B"].bfloat16())
        assert by_torch.result() > 0, "a team would have been seen"
