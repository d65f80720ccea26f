"""The plain twin of `rotate_and_store_`, for every device and dtype."""

from __future__ import annotations

from torch import Tensor


def rotate(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    pool: Tensor,
    places: tuple[Tensor, Tensor],
    layer: int,
    num_heads: int,
) -> None:
    """Rotate query and key heads of `qkv` in place, and copy its key and value heads to their places in `pool`."""
    first_rows, layer_strides = places
    rows = first_rows + layer * layer_strides
    num_rotated, head_dim = num_heads + rows.shape[1] // 2, qkv.shape[-1]
    if rotary is not None:
        _rotate_heads(qkv[:, :num_rotated, : 2 * rotary[0].shape[-1]], *rotary)
    pool.view(-1, head_dim).index_copy_(0, rows.reshape(-1), qkv[:, num_heads:].reshape(-1, head_dim).to(pool.dtype))


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `x` [num_tokens, heads, head_dim] in place by `cos`, `sin` [num_tokens, 1, head_dim // 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = first * cos
    turned.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
