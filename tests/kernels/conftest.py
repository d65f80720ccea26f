"""Random adapters in a poisoned pool, and one tolerance table for every kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lorabatch.engine.runner.gpu_plan import DECODE_TILE_ROWS, PREFILL_TILE_ROWS
from lorabatch.kernels.interpreted import fix_products
from lorabatch.kernels.launch import is_interpreted
from lorabatch.kernels.layouts.lora_table import CHUNK_FIELDS, CHUNK_RANK, NUM_SITES, AdapterRows, LoraTable
from lorabatch.kernels.layouts.segments import SegmentLimits, Segments, plan_segments

# Largest allowed error relative to the largest expected number: a few roundings of the dtype. The interpreter's bf16
# products are wrong: kernels widen there, and but for attention over prompts bf16 is tested on devices only.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float16] if is_interpreted() else list(TOLERANCES)

Member = tuple[int, int]  # columns of one linear layer in its packed site
Ranks = Sequence[int | None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]  # a name, or a tuple of them
    is_chosen = any(names == "dtype" or (isinstance(names, tuple) and "dtype" in names) for names in own)
    if "dtype" in metafunc.fixturenames and not is_chosen:
        # The interpreter takes as long for either; a GPU runs them all.
        short = [torch.float32] if is_interpreted() else DTYPES
        marks = {dtype: [] if dtype in short else [pytest.mark.long] for dtype in DTYPES}
        metafunc.parametrize("dtype", [pytest.param(dtype, marks=marks[dtype]) for dtype in DTYPES], ids=str)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CPU tensors in the interpreter; with TRITON_INTERPRET=0, a GPU."""
    return torch.device("cpu" if is_interpreted() else "cuda")


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own products round by a row's place in a tile."""
    if is_interpreted():
        from triton.runtime.interpreter import interpreter_builder

        builder = type(interpreter_builder)
        monkeypatch.setattr(builder, "create_dot", builder.create_dot)  # restored behind the test
        fix_products()


@pytest.fixture
def assert_close(dtype: torch.dtype) -> Callable[[Tensor, Tensor], None]:
    """Compare with a reference by the one tolerance table."""

    def check(found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape
        if expected.numel():
            error = (found.double() - expected.double()).abs().max()
            limit = TOLERANCES[dtype] * max(float(expected.double().abs().max()), 1e-3)
            assert error <= limit, f"error {float(error):.3g}, at most {limit:.3g} is allowed"

    return check


@pytest.fixture
def make_table(device: torch.device, dtype: torch.dtype) -> Callable[..., LoraTable]:
    """`make_table(site, in_features, members, ranks_of_residents, vectors=())`: adapters on layer 1 of 2.

    Chunks have poisoned gaps between them, so that reading beside a chunk shows. Residents named in `vectors` also get
    column factors and biases. `parts`: columns of the site's parts, where they are not those of `members`.
    """

    def make(
        site: int,
        in_features: int,
        members: Sequence[Member],
        ranks_of_residents: Sequence[Ranks],
        vectors: Sequence[int] = (),
        biases: Sequence[int] = (),
        parts: Sequence[int] | None = None,
    ) -> LoraTable:
        num_columns = max(end for _, end in members)
        total = sum(r or 0 for ranks in ranks_of_residents for r in ranks)
        size = 2 * (total + 8) * (in_features + num_columns + 8) + 8 * num_columns * len(ranks_of_residents)
        pool = torch.full((size,), torch.nan, dtype=dtype, device=device)
        of_this = parts or [end - start for start, end in members]
        of_sites = [of_this if number == site else [1] for number in range(NUM_SITES)]
        table = LoraTable.allocate(pool, len(ranks_of_residents), 2, total + len(ranks_of_residents) + 1, of_sites)
        placer = _Placer(table)
        first = 0
        for resident, ranks in enumerate(ranks_of_residents):
            pairs = [(placer.pair(in_features, m, r), r) for m, r in zip(members, ranks, strict=True) if r]
            chunks = [chunk for of_pair, _ in pairs for chunk in of_pair]
            scales = [0.5 + 0.25 * rank**0.5 for of_pair, rank in pairs for _ in of_pair]
            place = NUM_SITES + site  # on layer 1
            rows = AdapterRows(
                np.zeros(2 * NUM_SITES, np.int32),
                np.array(chunks, np.int64).reshape(-1, CHUNK_FIELDS),
                np.array(scales, np.float32),
                np.full((2 * NUM_SITES, 2), -1, np.int64),
            )
            rows.counts[place] = len(chunks)
            assert rows.vectors is not None
            rows.vectors[place] = (
                placer.vector(num_columns, 1.0) if resident in vectors else -1,
                placer.vector(num_columns, 0.0) if resident in vectors or resident in biases else -1,
            )
            table.write(resident, first, rows)
            first += len(chunks)
        return table

    return make


class _Placer:
    """Puts random numbers into the pool, leaving gaps."""

    def __init__(self, table: LoraTable) -> None:
        self._table = table
        self._next = 6
        self._generator = torch.Generator().manual_seed(7)

    def pair(self, in_features: int, member: Member, rank: int) -> list[tuple[int, ...]]:
        """Fields of each chunk."""
        start, end = member
        chunks = []
        for first in range(0, rank, CHUNK_RANK):
            rows = min(CHUNK_RANK, rank - first)
            b = self._place(rows * (end - start), rank**-0.5)
            a = self._place(rows * in_features, in_features**-0.5)
            chunks.append((a, b, rows, start, end - start))
        return chunks

    def vector(self, length: int, mean: float) -> int:
        width = self._table.pool.element_size()
        start = -(-self._next * width // 4)
        values = torch.randn(length, generator=self._generator) * 0.3 + mean
        self._table.pool_fp32[start : start + length] = values
        self._next = -(-(start + length) * 4 // width) + 2
        return start

    def _place(self, size: int, deviation: float) -> int:
        start = self._next
        values = torch.randn(size, generator=self._generator) * deviation
        self._table.pool[start : start + size] = values.to(self._table.pool.dtype)
        self._next = start + size + 4  # even, for the vectors' sake
        return start


# Rows of a tile, and of tiles whose rows are computed one by one.
TILES = [(DECODE_TILE_ROWS, 0), (DECODE_TILE_ROWS, 4), pytest.param((PREFILL_TILE_ROWS, 4), marks=pytest.mark.long)]


@pytest.fixture(params=TILES, ids=str)
def group(request: pytest.FixtureRequest) -> Callable[..., Segments]:
    """`group(table, plus, minus=None, num_programs=1)`: the step's segments on the table's device, in tiles of steps
    without prompts or of those with prompts, as tiles alone or row by row where there are few."""
    tile_rows, few_rows = request.param

    def make(
        table: LoraTable, plus: Sequence[int], minus: Sequence[int] | None = None, num_programs: int = 1
    ) -> Segments:
        minus = minus if minus is not None else [-1] * len(plus)
        chunk_counts = table.sites[..., 1].amax(1).cpu().numpy().astype(np.int32)
        limits = SegmentLimits(len(plus) + 3, max_items=200, scratch_rows=2000, tile_rows=tile_rows, few_rows=few_rows)
        host = plan_segments(np.array(plus, np.int32), np.array(minus, np.int32), chunk_counts, limits, num_programs)
        return Segments(limits, host.buffer.to(table.pool.device))

    return make


# Rows of a step by adapter, -1 for the base: mixed, identical, alternating, one token, base only.
POPULARITIES = {
    "mixed": [2, -1, 0, 0, 3, 0, -1, 1] + [0] * 17,
    "identical": [1] * 19,
    "all distinct": [3, 1, 0, 2],
    "one token": [2],
    "base only": [-1, -1, -1],
}


@pytest.fixture(params=POPULARITIES.values(), ids=POPULARITIES.keys())
def popularity(request: pytest.FixtureRequest) -> list[int]:
    """Resident number per row."""
    rows: list[int] = request.param
    return rows
