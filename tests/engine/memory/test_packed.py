"""An adapter as one flat tensor: into the pool and out again without a number changed or wasted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lorabatch.benchmarks.gpu.shapes import LLAMA_3_8B, TINY, ModelShape
from lorabatch.engine.config import read_model_config
from lorabatch.engine.errors import AdapterRefusedError
from lorabatch.engine.memory.adapter_layout import lay_out
from lorabatch.engine.memory.copies import AdapterCopies, parts_in
from lorabatch.engine.memory.packed import PackedAdapter, pack_adapter, read_packed, shapes_of_audit
from lorabatch.engine.memory.pool import PageRange, page_layout
from lorabatch.engine.model_config.model import ModelConfig, packed_members
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import dummy_adapter_weights, dummy_audit
from lorabatch.engine.peft.weights import AdapterWeights, load_adapter
from lorabatch.kernels.native import adapter_type
from lorabatch.kernels.packed_weight.panels import has_panels, unpack
from lorabatch.kernels.segment_lora import AdapterSites, LoraSpan, PreparedLora

#: SmolLM2-135M: name, hidden size, heads, key heads, features of a head, intermediate size, layers, vocabulary.
SMOLLM2_135M = ModelShape("smollm2-135m", 576, 9, 3, 64, 1536, 30, 49152)
needs_library = pytest.mark.skipif(not has_panels(), reason="compiled kernels were not built on this machine")

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_llama: Path) -> ModelConfig:
    return read_model_config(tiny_llama)


def read(folder: Path, model: ModelConfig) -> AdapterWeights:
    return load_adapter(audit_adapter(folder, model, folder.name), "cpu")


def in_pool(packed: PackedAdapter, seed: int = 0) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Memory of NaN with the adapter in pages here and there, and these pages."""
    num_pages, size = packed.layout.num_pages, packed.layout.page_elements
    pages = np.random.default_rng(seed).permutation(3 * num_pages)[:num_pages]
    memory = torch.full((3 * num_pages * size,), torch.nan, dtype=packed.numbers.dtype)
    runs = [PageRange(page, 1) for page in pages.tolist()]
    AdapterCopies().to_pool(packed.numbers, memory, parts_in(runs, size, packed.layout.size))
    return memory, pages


def matrix_of(pieces: tuple[torch.Tensor, ...], width: int, kind: int | None) -> torch.Tensor:
    """A matrix with rows of `width` numbers from its pieces. `kind`: type of their panels."""
    if kind is None:
        return torch.cat(pieces)
    return torch.cat([unpack(piece.contiguous(), kind, (piece.numel() // width, width)) for piece in pieces])


# rows of some matrices alone in a page; a page of 16 tokens; a page for the whole adapter
@pytest.mark.parametrize("page_elements", [200, 2048, 1 << 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_panels", [False, pytest.param(True, marks=needs_library)])
@pytest.mark.parametrize("name", ["rank1", "rank8", "rank20", "rank64"])
def test_every_matrix_arrives_where_the_views_say(
    tiny_adapters: dict[str, Path],
    model: ModelConfig,
    name: str,
    in_panels: bool,
    dtype: torch.dtype,
    page_elements: int,
) -> None:
    weights = read(tiny_adapters[name], model)
    packed = pack_adapter(weights, model, dtype, page_elements, in_panels=in_panels, device=CPU)
    assert packed.layout.num_elements == sum(pair.a.numel() + pair.b.numel() for pair in weights.lora.values())
    memory, pages = in_pool(packed)
    packed.numbers.fill_(torch.nan)
    seen = set()
    for layer, sites in enumerate(packed.layout.sites(memory, pages)):
        for site, found in sites.items():
            module_at = {member.start: member.module for member in packed_members(model, layer, site)}
            width = sum(piece.numel() for piece in found.a) // found.rank
            kind = adapter_type(dtype, [width, *(m.rank_end - m.rank_start for m in found.members)])
            a = matrix_of(found.a, width, kind if in_panels else None)
            for member in found.members:
                pair = weights.lora[module_at[member.column_start]]
                b = matrix_of(member.b, pair.rank, kind) if in_panels else torch.cat(member.b).t()
                assert found.in_panels == in_panels
                assert a[member.rank_start : member.rank_end].equal(pair.a.to(dtype).to(a.dtype))
                assert b.equal(pair.b.to(dtype).to(b.dtype))
                assert member.scaling == pair.scaling
                seen.add(module_at[member.column_start])
    assert seen == set(weights.lora)


@pytest.mark.parametrize("in_panels", [False, pytest.param(True, marks=needs_library)])
@pytest.mark.parametrize("shape", [SMOLLM2_135M, LLAMA_3_8B], ids=lambda shape: shape.name)
@pytest.mark.parametrize("rank", [1, 4, 8, 16, 20, 64, 256])
def test_pages_are_full_but_for_the_last_and_a_few_numbers(
    tmp_path: Path, shape: ModelShape, rank: int, in_panels: bool
) -> None:
    """At most 1.5 % is lost, and a page or two, with blocks in the pages of real models."""
    (tmp_path / "config.json").write_text(json.dumps(shape.config_json()))
    model = read_model_config(tmp_path)
    page_elements = page_layout(model, 16, 4).page_elements
    layout = lay_out(shapes_of_audit(dummy_audit(model, rank, "any")), model, page_elements, in_panels=in_panels)
    assert layout.num_pages <= layout.num_elements / page_elements * 1.015 + 2


def test_a_row_that_is_longer_than_a_page_is_refused(tiny_adapters: dict[str, Path], model: ModelConfig) -> None:
    weights = read(tiny_adapters["rank8"], model)
    with pytest.raises(AdapterRefusedError, match=r"a page of the pool 60; raise page_tokens"):
        pack_adapter(weights, model, torch.float32, 60, in_panels=False, device=CPU)


def test_the_pool_around_an_adapter_is_left_alone(tiny_adapters: dict[str, Path], model: ModelConfig) -> None:
    packed = pack_adapter(read(tiny_adapters["rank8"], model), model, torch.float32, 2048, in_panels=False, device=CPU)
    packed.numbers.fill_(1.0)
    memory, pages = in_pool(packed)
    of_pages = memory.view(-1, 2048)
    last = packed.layout.size % 2048 or 2048
    for page, numbers in enumerate(of_pages):
        own = (last if page == pages[-1] else 2048) if page in pages else 0
        assert numbers[:own].eq(1.0).all()
        assert numbers[own:].isnan().all()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_elements", [200, 2048, 1 << 17])
def test_kernels_read_an_adapter_anywhere_as_they_read_its_views(
    tiny_adapters: dict[str, Path], model: ModelConfig, dtype: torch.dtype, page_elements: int
) -> None:
    """The second adapter's records are made from those of the first, which has the same layout."""
    weights = read(tiny_adapters["rank20"], model)
    packed = pack_adapter(weights, model, dtype, page_elements, in_panels=True, device=CPU)
    shapes = [model.members_of_site(0, site).values() for site in model.sites]
    for seed in range(2):
        memory, pages = in_pool(packed, seed)
        found = packed.layout.all_sites(memory, pages)
        expected = AdapterSites.of(found.sites)
        for site, of_site in enumerate(shapes * model.num_layers):
            (in_features,) = {inputs for _, inputs in of_site}
            x, y = torch.randn(7, in_features), torch.randn(7, sum(outputs for outputs, _ in of_site))
            results = [y.clone() for _ in range(2)]
            for result, adapter in zip(results, (found, expected), strict=True):
                PreparedLora([LoraSpan(1, 6, adapter)]).add_(result, x, site)
            assert results[0].equal(results[1])
            assert not results[0].isnan().any()
            assert results[0].equal(y) == (found.sites[site] is None)


def test_adapters_of_the_same_shapes_have_one_layout(tiny_adapters: dict[str, Path], model: ModelConfig) -> None:
    weights = read(tiny_adapters["rank8"], model)
    other = replace(weights, pairs={name: replace(p, a=p.a + 1) for name, p in weights.pairs.items()})
    scaled = replace(weights, pairs={name: replace(p, scaling=3.0) for name, p in weights.pairs.items()})
    first, second, third = (
        pack_adapter(each, model, torch.float32, 2048, in_panels=False, device=CPU) for each in (weights, other, scaled)
    )
    assert first.layout is second.layout
    assert first.layout is not third.layout
    of_first, *others = (
        torch.cat(
            [
                a
                for of in p.layout.sites(p.numbers, np.arange(p.layout.num_pages))
                for site in of.values()
                for a in site.a
            ]
        )
        for p in (first, second, third)
    )
    assert not of_first.equal(others[0])
    assert of_first.equal(others[1])


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rank_rows_are_the_same_by_compiled_kernels_and_by_torch(
    tiny_adapters: dict[str, Path], model: ModelConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = read(tiny_adapters["rank20"], model)
    compiled = pack_adapter(weights, model, dtype, 1 << 17, in_panels=False, device=CPU)
    monkeypatch.setattr("lorabatch.engine.memory.packed.has_panels", lambda: False)
    by_torch = pack_adapter(weights, model, dtype, 1 << 17, in_panels=False, device=CPU)
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
    pool = model, torch.bfloat16, 1 << 17
    audit = audit_adapter(tiny_adapters[name], model, name)
    packed = pack_adapter(load_adapter(audit, "cpu"), *pool, in_panels=in_panels, device=CPU)
    monkeypatch.setattr("lorabatch.engine.peft.weights._PART_BYTES", part_bytes)
    found = read_packed(audit, audit.identity_sha256 or "", *pool, in_panels=in_panels, device=CPU)
    assert found.layout is packed.layout
    assert found.numbers.equal(packed.numbers)
    with pytest.raises(AdapterRefusedError, match="have changed since they were audited"):
        read_packed(audit, "0" * 64, *pool, in_panels=in_panels, device=CPU)


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
        return pack_adapter(weights, wide, torch.bfloat16, 1 << 16, in_panels=in_panels, device=CPU)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(num_started, pack).result() == 0
        by_torch = thread.submit(num_started, lambda: weights.stored["model.layers.0.mlp.up_proj.B"].bfloat16())
        assert by_torch.result() > 0, "a team would have been seen"
