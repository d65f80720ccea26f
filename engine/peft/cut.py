"""Cuts an adapter for one member of a tensor-parallel group, as `model_config.partition` splits the base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.merge import LoraPair
from ..model_config.partition import Partition, Piece, Pieces
from .sites import LoraSite, ParameterChange
from .weights import AdapterWeights


def taken(source: Tensor, axis: int, pieces: Pieces) -> Tensor:
    """Pieces of a tensor along its first dimension or its second, joined; a single one is a view. `source` may also be
    a slice of a file, of which no more is read."""
    parts: list[Tensor] = []
    for piece in pieces:
        # libraries that read files refuse to read nothing
        start, end = (piece.start, piece.end) if piece.end > piece.start else (0, 1)
        part = source[start:end] if axis == 0 else source[:, start:end]
        part = part.narrow(axis, 0, piece.end - piece.start)
        parts.append(part)
        if piece.num_zeros:
            shape = list(part.shape)
            shape[axis] = piece.num_zeros
            parts.append(part.new_zeros(shape))
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def cut_pairs(pairs: Mapping[str, LoraPair], partition: Partition) -> dict[str, LoraPair]:
    """A member's part of the pairs of linear layers in decoder layers."""
    found = {}
    for module, pair in pairs.items():
        outputs, inputs = partition.linear(module)
        a = pair.a if inputs is None else taken(pair.a, 1, inputs)
        b = pair.b if outputs is None else taken(pair.b, 0, outputs)
        found[module] = LoraPair(a, b, pair.scaling)
    return found


def cut_adapter(weights: AdapterWeights, partition: Partition) -> AdapterWeights:
    """The part of an adapter that a member merges. Its DoRA factors are right only where `needs_norms` does not name
    the parameter.
    """
    stored: dict[str, Tensor] = {}
    changes = {}
    for parameter, change in weights.changes.items():
        cut = _ChangeCut(weights.stored, change, partition, stored)
        if cut.is_there:
            changes[parameter] = cut.changed()
    pairs = cut_pairs(weights.pairs, partition)
    return AdapterWeights(weights.audit, stored, pairs, changes, identity_sha256=weights.identity_sha256)


def needs_norms(weights: AdapterWeights, partition: Partition) -> tuple[list[str], list[str]]:
    """Two lists of parameters of a cut adapter. For the first the member cannot find DoRA's norms alone, as it has only
    a part of the rows' features; for the second norms are zero, in rows of zeros that fill it up.
    """
    partial, padded = [], []
    for parameter, change in weights.changes.items():
        site = change.site
        if site is None or site.magnitude_key is None or parameter.endswith(".bias"):
            continue
        outputs, inputs = partition.linear(site.module)
        if site.is_embedding or inputs is not None:
            partial.append(parameter)
        elif any(piece.num_zeros for piece in outputs or ()):
            padded.append(parameter)
    return partial, padded


class _ChangeCut:
    """One change for one member. The tensors that it uses are put into `kept`, under names of its own."""

    def __init__(
        self, stored: Mapping[str, Tensor], change: ParameterChange, partition: Partition, kept: dict[str, Tensor]
    ) -> None:
        module, _, kind = change.parameter.rpartition(".")
        self._stored, self._change, self._kept = stored, change, kept
        self._is_bias = kind == "bias"
        self._first_token: int | None = None
        self._outputs, self._inputs = partition.parameter(change.parameter)
        if partition.is_by_token(module):
            start, end = partition.tokens(change.shape[0])
            self._outputs = (Piece(start, end),)
            self._first_token = start
        #: Whether the member has any of the parameter.
        self.is_there = partition.adds_bias(module) or not self._is_bias

    def changed(self) -> ParameterChange:
        """The change of the member's part."""
        change, inputs = self._change, self._inputs
        shape = list(change.shape)
        if self._outputs is not None:
            shape[0] = _size(self._outputs)
        if inputs is not None:
            shape[1] = _size(inputs)
        rows, rows_key = self._rows()
        return replace(
            change,
            shape=tuple(shape),
            replaced_by=self._part(change.replaced_by, self._outputs, inputs),
            rows=rows,
            rows_key=rows_key,
            site=None if change.site is None else self._site(change.site),
        )

    def _rows(self) -> tuple[tuple[int, ...], str | None]:
        change = self._change
        if change.rows_key is None:
            return (), None
        assert self._first_token is not None, f"{change.parameter}: rows of what is not split by tokens"
        assert self._outputs is not None, f"{change.parameter}: rows of what is not split by outputs"
        end = self._outputs[0].end
        mine = [i for i, row in enumerate(change.rows) if self._first_token <= row < end]
        if not mine:
            return (), None
        key = self._keep(change.rows_key, self._stored[change.rows_key][mine])
        return tuple(change.rows[i] - self._first_token for i in mine), key

    def _site(self, site: LoraSite) -> LoraSite:
        outputs, inputs = self._outputs, self._inputs
        if site.is_embedding:
            # A is [rank, vocab_size] here: what is split by tokens are the inputs
            outputs, inputs = None, outputs
        if self._is_bias:
            return replace(site, bias_key=self._part(site.bias_key, outputs))
        return replace(
            site,
            a_key=self._keep(
                site.a_key, self._stored[site.a_key] if inputs is None else taken(self._stored[site.a_key], 1, inputs)
            ),
            b_key=self._part(site.b_key, outputs) or "",
            in_features=site.in_features if inputs is None else _size(inputs),
            out_features=site.out_features if outputs is None else _size(outputs),
            magnitude_key=self._part(site.magnitude_key, outputs),
        )

    def _part(self, key: str | None, outputs: Pieces | None, inputs: Pieces | None = None) -> str | None:
        """The name of a tensor's part; None for no tensor."""
        if key is None:
            return None
        part = self._stored[key]
        if outputs is not None:
            part = taken(part, 0, outputs)
        if inputs is not None:
            part = taken(part, 1, inputs)
        return self._keep(key, part)

    def _keep(self, key: str, part: Tensor) -> str:
        name = f"{self._change.parameter}: {key}"
        self._kept[name] = part
        return name


def _size(pieces: Iterable[Piece]) -> int:
    return sum(piece.end - piece.start + piece.num_zeros for piece in pieces)
