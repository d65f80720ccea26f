"""A member's part of a model in a tensor-parallel group, and how adapters merge into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..model_config.model import HEAD, PackedMember
from ..peft.cut import cut_adapter, needs_norms
from ..peft.weights import AdapterWeights
from .decoder import Decoder, GroupSums
from .layers import Linear
from .merge import LiveWeights


class PartWeights(LiveWeights):
    """Merges a member's part of adapters into its part of the decoder. All members merge the same adapter at the same
    time.
    """

    def __init__(self, decoder: Decoder, sums: GroupSums) -> None:
        super().__init__(decoder)
        self._sums = sums

    @property
    def takes_packed(self) -> bool:
        """False: members read what they merge from the adapter's files, so that it need not be in their pools."""
        return False

    def merge(self, adapter_id: str, adapter: AdapterWeights) -> None:
        """Merge the member's part of `adapter`, which is whole."""
        if self.merged_adapter_id != adapter_id:
            head = adapter.changes.get(f"{HEAD}.weight")
            super().merge(adapter_id, self._with_norms(cut_adapter(adapter, self._sums.partition)))
            self._sums.head_outputs = self._sums.partition.whole.vocab_size if head is None else head.shape[0]

    def restore(self) -> None:
        """Make the weights those of the base model, on all members at the same time."""
        super().restore()
        self._sums.head_outputs = self._sums.partition.whole.vocab_size

    def _with_norms(self, adapter: AdapterWeights) -> AdapterWeights:
        """The adapter with the norms that DoRA divides by, for parameters of which a member has only a part: the
        squares of all members are added up. All members meet here, whatever is found wrong with the adapter later.
        """
        partition = self._sums.partition
        split, padded = needs_norms(adapter, partition)
        if not split and not padded:
            return adapter
        places = dict(self._places())
        squares = {name: adapter.row_squares(name, places[name]()) for name in split + padded}
        if split:
            sizes = [len(squares[name]) for name in split]
            total = self._sums.add_up(torch.cat([squares[name] for name in split]))
            squares |= dict(zip(split, torch.split(total, sizes), strict=True))
        norms = {name: value.sqrt() for name, value in squares.items()}
        for name in padded:
            # rows of zeros stay zeros
            outputs, _ = partition.linear(name.rpartition(".")[0])
            end = 0
            for piece in outputs or ():
                end += piece.end - piece.start
                norms[name][end : end + piece.num_zeros] = 1.0
                end += piece.num_zeros
        return replace(adapter, norms=norms)

    def _places(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Name of each of the base's parameters, and a function that returns its weight."""
        for name, tensor in self._pristine_tensors.items():
            yield name, partial(_same, tensor)
        for members, linear in (*self._packed_linears(), *self._whole_linears()):
            for member in members:
                yield f"{member.module}.weight", partial(_rows_of, linear, member)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _rows_of(linear: Linear, member: PackedMember) -> Tensor:
    return linear.pristine[member.start : member.end]
