"""The device table holds the adapters in use, at their exact places in the pool, and gives rows of others away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.memory.adapter_layout import lay_out
from lorabatch.engine.memory.residency import ResidentAdapter
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.model_config.names import PACKED_SITES
from lorabatch.engine.runner.gpu_adapters import GpuAdapters
from lorabatch.engine.runner.gpu_runner import first_sizes

PAGE_ELEMENTS = 1104
_PAGES_EACH = 12


def resident(memory: torch.Tensor, model: ModelConfig, order: int, rank: int) -> ResidentAdapter:
    """An adapter on q and v of layer 0, in pages of its own of `memory`, from the last to the first."""
    q, _, v = (out_features for out_features, _ in model.members_of_site(0, "qkv").values())
    of_layer = "model.layers.0.self_attn"
    shapes = [
        (f"{of_layer}.q_proj", rank, model.hidden_size, q, 2.0),
        (f"{of_layer}.v_proj", rank, model.hidden_size, v, 0.5),
    ]
    layout = lay_out(shapes, model, PAGE_ELEMENTS, in_panels=False)
    pages = order * _PAGES_EACH + np.arange(layout.num_pages)[::-1]
    return ResidentAdapter(f"adapter {order}", order, memory, pages, layout)


@pytest.fixture
def model(tiny_llama: Path) -> ModelConfig:
    return read_model_config(tiny_llama)


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.arange(100_000, dtype=torch.float32)


def test_chunks_name_the_adapter_s_own_numbers(model: ModelConfig, memory: torch.Tensor) -> None:
    adapters = GpuAdapters(memory, model, num_rows=2, num_chunks=20)
    one = resident(memory, model, order=1, rank=20)
    row = adapters.rows_of([one])[1]
    weights = one.sites[0]["qkv"]
    first, count, *_ = adapters.table.sites[row, 0, PACKED_SITES.index("qkv")].tolist()
    assert count == 4, "20 rank rows are a chunk of 16 and one of 4, for each of two members"
    assert adapters.chunk_counts[row].tolist() == [4, 0, 0, 0]
    stacked = torch.cat(weights.a)
    expected = [
        (stacked[start : start + rows], torch.cat(member.b)[start - member.rank_start :][:rows], member)
        for member in weights.members
        for start, rows in ((member.rank_start, 16), (member.rank_start + 16, 4))
    ]
    for index, (a, b, member) in enumerate(expected, start=first):
        a_at, b_at, rows, column, width = adapters.table.chunks[index].tolist()
        assert memory[a_at : a_at + a.numel()].equal(a.flatten())
        assert memory[b_at : b_at + b.numel()].equal(b.flatten())
        assert (rows, column, width) == (len(a), member.column_start, b.shape[1])
        assert float(adapters.table.scales[index]) == member.scaling


def test_adapters_of_one_layout_are_entered_at_their_own_places(model: ModelConfig, memory: torch.Tensor) -> None:
    adapters = GpuAdapters(memory, model, num_rows=3, num_chunks=20)
    residents = [resident(memory, model, order, rank=20) for order in (1, 2, 3)]
    rows = adapters.rows_of(residents)
    found = []
    for order, adapter in enumerate(residents, start=1):
        begin, count, *_ = adapters.table.sites[rows[order], 0, PACKED_SITES.index("qkv")].tolist()
        chunks = adapters.table.chunks[begin : begin + count].clone()
        pages, places = chunks[:, :2] // PAGE_ELEMENTS, chunks[:, :2] % PAGE_ELEMENTS
        assert set(pages.flatten().tolist()) <= set(adapter.pages.tolist())
        chunks[:, :2] = (int(adapter.pages[0]) - pages) * PAGE_ELEMENTS + places
        found.append(chunks)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


def test_the_adapter_unused_for_longest_gives_its_row_away(model: ModelConfig, memory: torch.Tensor) -> None:
    adapters = GpuAdapters(memory, model, num_rows=2, num_chunks=20)
    zero, one, two = (resident(memory, model, order, rank=8) for order in range(3))
    first = adapters.rows_of([zero, one])
    adapters.rows_of([zero])
    assert adapters.rows_of([two]) == {2: first[1]}
    assert adapters.rows_of([zero]) == {0: first[0]}, "an adapter in use keeps its row"


def test_chunks_may_run_out_before_rows_do(model: ModelConfig, memory: torch.Tensor) -> None:
    adapters = GpuAdapters(memory, model, num_rows=5, num_chunks=5)
    big, small = resident(memory, model, 0, rank=20), resident(memory, model, 1, rank=16)
    adapters.rows_of([big])
    assert adapters.rows_of([small]).keys() == {1}


def test_a_step_of_more_adapters_than_the_table_holds_gets_a_larger_table(
    model: ModelConfig, memory: torch.Tensor
) -> None:
    adapters = GpuAdapters(memory, model, num_rows=2, num_chunks=2)
    first = adapters.table
    rows = adapters.rows_of([resident(memory, model, order, rank=20) for order in range(5)])
    assert adapters.table is not first
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert len(set(rows.values())) == 5
    assert [adapters.chunk_counts[row].tolist() for row in rows.values()] == [[4, 0, 0, 0]] * 5


def test_a_table_for_a_pool_of_nothing_can_grow(model: ModelConfig, memory: torch.Tensor) -> None:
    config = EngineConfig(max_batch_rows=1, max_step_tokens=1)
    num_residents, num_chunks, _ = first_sizes(config, model, pool_elements=10)
    adapters = GpuAdapters(memory, model, num_residents, num_chunks)
    assert len(adapters.rows_of([resident(memory, model, order, rank=20) for order in range(5)])) == 5
