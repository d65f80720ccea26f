"""Cuts the contraction of a product into splits by the shape of the weight alone, since splits decide about bits."""

from __future__ import annotations

import torch

# Least features of a split: with fewer, adding the splits would take longer than multiplying.
_LEAST_FEATURES = 512
# Planes of a product, each read and written once. Not tuned.
_MOST_SPLITS = 8
# Splits are for weights of few outputs, whose tiles of 128 rows and 128 outputs are too few to fill a GPU with a batch
# of 256 rows. A constant, and no property of the GPU: what is split decides about bits.
_PROGRAMS, _ROWS, _TILE = 128, 256, 128
# Bytes of a row of x and of W in one step of the sum: 64 features in 16 bits, four of a matrix instruction's 16. Not
# tuned.
_BLOCK_BYTES = 128


def block_features(dtype: torch.dtype) -> int:
    """Features of one step of the sum; splits begin at multiples of this number."""
    return _BLOCK_BYTES // dtype.itemsize


def split_features_of(weight: torch.Size, dtype: torch.dtype) -> int:
    """Features of one split (the last may have fewer) for a weight of this shape, a multiple of `block_features`."""
    out_features, in_features = weight
    num_tiles = -(-_ROWS // _TILE) * -(-out_features // _TILE)
    num_splits = max(1, min(_MOST_SPLITS, in_features // _LEAST_FEATURES, _PROGRAMS // num_tiles))
    num_blocks = -(-in_features // block_features(dtype))
    return -(-num_blocks // num_splits) * block_features(dtype)
