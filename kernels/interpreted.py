"""Gives products in Triton's interpreter one order of sums, as a GPU's matrix units have.

The interpreter multiplies tiles by NumPy, whose library rounds a number by its place in a tile and by the tile's size.
Here each number of a tile is the sum of its products in their order, whatever is beside it. Slower, so only engines
in mode `exact` and tests of their kernels ask for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def fix_products() -> None:
    """Makes the interpreter in this process sum every product in order, from now on."""
    from triton.runtime.interpreter import interpreter_builder

    type(interpreter_builder).create_dot = _create_dot


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
