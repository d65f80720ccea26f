"""Mends Triton's interpreter: the order of sums in products, and the type of masks.

The interpreter multiplies tiles by NumPy, whose library rounds a number by its place in a tile and by the tile's size.
Here each number of a tile is the sum of its products in their order, whatever is beside it, as a GPU's matrix units
have it. Slower, so only engines in mode `exact` and tests of their kernels ask for it.

A comparison of two integers is an integer once it is spread over a tile, and so is a mask that was made with it. From
Triton 3.9 on, loads and stores take boolean masks only. Every launch in the interpreter asks for this.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def fix_products() -> None:
    """Makes the interpreter in this process sum every product in order, from now on."""
    from triton.runtime.interpreter import interpreter_builder

    type(interpreter_builder).create_dot = _create_dot


@cache
def fix_masks() -> None:
    """Makes loads and stores of the interpreter in this process take masks of integers, from now on."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    builder = type(interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(np.bool_, copy=False), mask.dtype)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *others: Any, **options: Any) -> Any:
        return load(self, ptrs, as_bool(mask), *others, **options)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any, **options: Any) -> Any:
        return store(self, ptrs, value, as_bool(mask), *others, **options)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(sum_in_order(a.data, b.data, d.data), d.dtype.scalar)


def sum_in_order(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:
    """c + a b in the type of `c` [m, n]; `a` [m, k], `b` [k, n]."""
    columns, rows = np.ascontiguousarray(a.T, c.dtype), np.ascontiguousarray(b, c.dtype)
    total: NDArray[Any] = np.zeros_like(c)
    product = np.empty_like(c)
    for column, row in zip(columns, rows, strict=True):
        np.multiply(column[:, None], row[None, :], out=product)
        total += product
    total += c
    return total
