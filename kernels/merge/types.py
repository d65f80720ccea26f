"""The work of a merge pass: layers and the adapters' pairs that each takes in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MergePair:
    """One adapter's contribution to one layer."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class MergeJob:
    """One layer, or rows of a packed one: `live` and `base` are contiguous views of equal shape."""

    live: Tensor
    base: Tensor
    pairs: tuple[MergePair, ...]
