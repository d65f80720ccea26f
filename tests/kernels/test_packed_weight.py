"""Packed weights multiply as plain ones do, each row by itself, and come out of their layout as they went in."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

from lorabatch.kernels.native import POOL_TYPES, adapter_type
from lorabatch.kernels.packed_weight import PackedWeight, Products, can_multiply, pack
from lorabatch.kernels.packed_weight.onednn import OneDnnWeight, has_onednn
from lorabatch.kernels.packed_weight.panels import (
    IN_COLUMNS,
    IN_PANELS,
    IN_ROWS,
    MatrixRows,
    PanelWeight,
    has_panels,
    pack_matrices_,
    unpack,
)
from lorabatch.kernels.packed_weight.reference import multiply

needs_library = pytest.mark.skipif(not has_panels(), reason="compiled kernels were not built on this machine")
Layout = type[PanelWeight] | type[OneDnnWeight]


@pytest.fixture(
    params=[
        pytest.param(PanelWeight, marks=needs_library),
        pytest.param(OneDnnWeight, marks=pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")),
    ]
)
def layout(request: pytest.FixtureRequest) -> Layout:
    chosen: Layout = request.param
    return chosen


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 12, 13, 40])
# columns: less than a vector, a panel and a bit, several panels; depth: one part and more than one
@pytest.mark.parametrize("shape", [(1, 7), (24, 16), (37, 33), (96, 64), (45, 2100)], ids=str)
def test_the_product_is_that_of_the_plain_weight(
    layout: Layout, shape: tuple[int, int], num_rows: int, has_bias: bool
) -> None:
    weight, x = random(*shape), random(num_rows, shape[1])
    bias = random(shape[0]) if has_bias else None
    packed: PackedWeight = layout(weight)
    result = packed.multiply(x, bias)
    assert result.shape == (num_rows, shape[0])
    assert torch.allclose(result.double(), multiply(weight, x, bias), atol=1e-5 * shape[1])


def test_the_plain_weight_comes_back_bit_for_bit(layout: Layout) -> None:
    for shape in [(1, 7), (37, 33), (96, 64)]:
        assert layout(random(*shape)).dense().equal(random(*shape))


@needs_library
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 12, 13, 40])
@pytest.mark.parametrize("shape", [(1, 8), (24, 16), (37, 34), (50, 33), (96, 64), (45, 2100)], ids=str)
def test_a_weight_of_16_bits_stays_so_and_is_multiplied_with_the_bits_of_fp32(
    shape: tuple[int, int], num_rows: int, stored: torch.dtype
) -> None:
    exponents = torch.randint(-6, 3, shape, generator=torch.Generator().manual_seed(1))
    weight, x = (random(*shape) * 10.0**exponents).to(stored), random(num_rows, shape[1])
    packed, wide = PanelWeight(weight), PanelWeight(weight.float())
    is_odd_pair = stored == torch.bfloat16 and shape[1] % 2
    assert packed.numbers.nbytes == weight.numel() * (4 if is_odd_pair else 2)
    assert packed.dense().equal(weight.float())
    for bias in (None, random(shape[0])):
        assert packed.multiply(x, bias).equal(wide.multiply(x, bias))


@pytest.fixture(params=["bfloat16", "int8"])
def products(request: pytest.FixtureRequest) -> Products:
    chosen: Products = request.param
    if not can_multiply(chosen):
        pytest.skip(f"this processor has no instructions for products in {chosen}")
    return chosen


def encoded(x: torch.Tensor, products: Products) -> torch.Tensor:
    """The numbers for which the rows' codes stand, in fp64."""
    if products == "bfloat16":
        return x.bfloat16().double()
    scales = x.abs().amax(1, keepdim=True).double() / 127
    return (x / scales.float().clamp(min=1e-30)).round().double() * scales


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 12, 13, 40])
@pytest.mark.parametrize("shape", [(1, 7), (24, 16), (37, 33), (50, 34), (96, 64), (45, 2100)], ids=str)
def test_dot_products_are_those_of_the_codes_for_any_company_and_number_of_threads(
    products: Products, shape: tuple[int, int], num_rows: int, stored: torch.dtype
) -> None:
    weight, x, bias = random(*shape).to(stored), random(num_rows, shape[1]), random(shape[0])
    packed, before = pack(weight, products), torch.get_num_threads()
    plain = packed.dense()
    assert packed.shape == shape
    assert ((plain - weight.double()).norm(dim=1) <= 0.02 * weight.double().norm(dim=1)).all()
    codes = encoded(x, products)
    whole = packed.multiply(x, None)
    assert torch.allclose(whole.double(), multiply(plain, codes, None), atol=1e-4 * shape[1] ** 0.5)
    shifted = packed.multiply(x, bias)
    assert torch.allclose(shifted.double(), multiply(plain, codes, bias), atol=1e-4 * shape[1] ** 0.5)
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for first, last in ((0, num_rows), (0, 1), (num_rows // 2, num_rows)):
                assert packed.multiply(x[first:last], None).equal(whole[first:last])
                assert packed.multiply(x[first:last], bias).equal(shifted[first:last])
    finally:
        torch.set_num_threads(before)


def test_numbers_at_the_edges_of_codes(products: Products) -> None:
    weight = random(40, 32)
    weight[3] = 0.0
    weight[5] *= 1e-38  # a scale below the smallest normal number
    packed, x = pack(weight, products), random(9, 32)
    x[1] = 0.0
    x[2, 7] = 1e30
    y = packed.multiply(x, None)
    assert y.isfinite().all()
    assert not y[:, 3].any()
    assert not y[1].any()
    assert torch.allclose(y[2], 1e30 * packed.dense()[:, 7], rtol=0.02, atol=1e27)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_row_that_is_not_finite_gives_nothing_finite_and_spoils_no_other(products: Products, poison: float) -> None:
    packed, x = pack(random(40, 33), products), random(9, 33)
    expected = packed.multiply(x, None)
    x[4, 32] = poison
    y = packed.multiply(x, None)
    assert not y[4].isfinite().any()
    assert torch.cat([y[:4], y[5:]]).equal(torch.cat([expected[:4], expected[5:]]))


@needs_library
@pytest.mark.parametrize(("shape", "num_rows"), [((1, 7), 5), ((37, 3), 12), ((96, 64), 300), ((45, 2100), 33)])
def test_a_scaled_product_is_added_with_the_same_bits_for_any_number_of_threads(
    shape: tuple[int, int], num_rows: int
) -> None:
    weight, x, y = random(*shape), random(num_rows, shape[1]), random(num_rows, shape[0])
    packed, before, results = PanelWeight(weight), torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(y.clone())
            packed.add_product_(results[-1], x, 0.7)
    finally:
        torch.set_num_threads(before)
    expected = y + 0.7 * multiply(weight, x, None)
    assert torch.allclose(results[0].double(), expected, atol=1e-5 * shape[1])
    assert all(torch.equal(result, results[0]) for result in results)


@needs_library
@pytest.mark.parametrize("shape", [(37, 33), (200, 2100)], ids=str)
def test_a_row_has_the_same_bits_whatever_stands_beside_it_and_however_many_threads_share(
    shape: tuple[int, int],
) -> None:
    packed, x, before = PanelWeight(random(*shape)), random(70, shape[1]), torch.get_num_threads()
    whole = packed.multiply(x, None)
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            for num_rows in (1, 2, 11, 12, 13, 25, 70):
                assert torch.equal(packed.multiply(x[:num_rows], None), whole[:num_rows]), (num_threads, num_rows)
    finally:
        torch.set_num_threads(before)


@needs_library
def test_rows_that_do_not_lie_dense_are_multiplied_too() -> None:
    weight, x = random(40, 24), random(24, 5).t()
    assert torch.allclose(PanelWeight(weight).multiply(x, None), x @ weight.T, atol=1e-4)


@needs_library
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(1,), (8, 8, 8), (20, 3, 64), (33, 31)], ids=str)
@pytest.mark.parametrize("depth", [19, 24])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_a_weight_are_packed_one_by_one_whatever_type_they_have(
    sizes: tuple[int, ...], pool: torch.dtype, depth: int, stored: torch.dtype
) -> None:
    panels_type = adapter_type(pool, [depth])
    parts = [(random(size, depth) * 10.0 ** torch.randint(-7, 4, (size, depth))).to(stored) for size in sizes]
    around = torch.full((sum(sizes) * depth + 8,), torch.nan, dtype=pool)
    firsts = accumulate(sizes[:-1], initial=0)
    places = np.array([MatrixRows(0, panels_type, first, sum(sizes)) for first in firsts])
    pack_matrices_(around[4:-4], places, parts)
    assert unpack(around[4:-4], panels_type, (sum(sizes), depth)).equal(torch.cat(parts).to(pool).float())
    assert around[:4].isnan().all()
    assert around[-4:].isnan().all()


@needs_library
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# columns are written 64 at a time
@pytest.mark.parametrize("sizes", [(1,), (8, 8, 8), (20, 3, 64), (63, 130)], ids=str)
@pytest.mark.parametrize("depth", [1, 19, 48])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_a_matrix_are_put_down_as_rows_or_as_columns(
    sizes: tuple[int, ...], pool: torch.dtype, depth: int, stored: torch.dtype
) -> None:
    parts = [(random(size, depth) * 10.0 ** torch.randint(-7, 4, (size, depth))).to(stored) for size in sizes]
    whole = torch.cat(parts).to(pool)
    for form, expected in ((IN_ROWS, whole), (IN_COLUMNS, whole.t())):
        around = torch.full((sum(sizes) * depth + 8,), torch.nan, dtype=pool)
        firsts = accumulate(sizes[:-1], initial=0)
        places = np.array([MatrixRows(4, POOL_TYPES[pool], first, sum(sizes), form) for first in firsts])
        pack_matrices_(around, places, parts)
        assert around[4:-4].view(expected.shape).equal(expected)
        assert around[:4].isnan().all()
        assert around[-4:].isnan().all()


@needs_library
@pytest.mark.parametrize("form", [IN_PANELS, IN_ROWS, IN_COLUMNS])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
def test_packed_numbers_are_rounded_as_torch_rounds_them(stored: torch.dtype, form: int) -> None:
    # halfway between two numbers of bf16, above each other; and what is no number
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]
    rows = torch.tensor([ties], dtype=stored)
    panels = torch.empty(8, dtype=torch.bfloat16)
    pack_matrices_(panels, np.array([MatrixRows(0, adapter_type(panels.dtype, [1]), 0, 1, form)]), [rows])
    assert panels.isnan().equal(rows[0].isnan())
    assert panels[:-1].view(torch.int16).equal(rows.to(torch.bfloat16)[0, :-1].view(torch.int16))


@needs_library
def test_rows_that_do_not_fit_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="matrices end at 40 of 35 numbers"):
        pack_matrices_(torch.empty(35), np.array([MatrixRows(0, 0, 0, 5)]), [torch.empty(2, 8)])
    with pytest.raises(AssertionError, match=r"\[2\] rows from \[4\] of \[5\]"):
        pack_matrices_(torch.empty(40), np.array([MatrixRows(0, 0, 4, 5)]), [torch.empty(2, 8)])


@needs_library
def test_matrices_lie_where_their_places_begin() -> None:
    first, second = random(5, 8), random(20, 12)
    memory = torch.full((4 + 40 + 240 + 4,), torch.nan, dtype=torch.bfloat16)
    kind = adapter_type(memory.dtype, [8, 12])
    pack_matrices_(memory, np.array([MatrixRows(4, kind, 0, 5), MatrixRows(44, kind, 0, 20)]), [first, second])
    assert unpack(memory[4:44], kind, (5, 8)).equal(first.bfloat16().float())
    assert unpack(memory[44:-4], kind, (20, 12)).equal(second.bfloat16().float())
    assert memory[:4].isnan().all()
    assert memory[-4:].isnan().all()
