"""The work of a merge pass: layers and the adapters' pairs that each takes in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapter's matrices for one linear layer: `y += scaling * (x A^T) B^T`."""

    #: A, [rank, in_features].
    a: Tensor
    #: B, [out_features, rank].
    b: Tensor
    #: Factor of their product.
    scaling: float
    #: Whether the next pair is of further rank rows of the same adapter, whose products are summed before they are
    #: scaled.
    goes_on: bool = False

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class MergeJob:
    """One layer, or rows of a packed one, with the adapters' pairs that are merged into it."""

    #: The merged weights, [out_features, in_features], a contiguous view that is overwritten.
    live: Tensor
    #: The pristine weights, a contiguous view of the shape of `live`.
    base: Tensor
    #: The pairs to add.
    pairs: tuple[LoraPair, ...]
