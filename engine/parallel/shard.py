"""What leader and members of a group have alike: one member's part of the decoder, and how adapters merge into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.packed_weight.panels import StoredWeight, has_panels
from ..config import EngineConfig
from ..errors import DeviceError, ExactModeError
from ..model_config.model import PackedMember
from ..model_config.partition import Partition
from ..models.decoder import Decoder
from ..models.gguf.blocks import Weight
from ..models.layers import Linear
from ..models.load import load_weights, stored_weights
from ..models.merge import LiveWeights
from ..models.weight_cache import Packed
from ..peft.cut import cut_adapter, needs_norms
from ..peft.weights import AdapterWeights
from ..runner.backend import CpuBackend, choose_arithmetic
from .collectives import Collectives


class PartOfGroup:
    """See `models.decoder.Members`."""

    def __init__(self, collectives: Collectives, partition: Partition) -> None:
        self._collectives = collectives
        self.first_token = partition.tokens(partition.whole.vocab_size)[0]

    def add_up(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        return self._collectives.add_up(x)

    def join_logits(self, x: Tensor) -> Tensor:
        """All logits on the leader; on others their own."""
        joined = self._collectives.join_columns(x)
        return x if joined is None else joined


class ShardBackend(CpuBackend):
    """Steps of one member's part, on a CPU. `model`: the part."""

    def __init__(
        self, model_folder: Path, config: EngineConfig, partition: Partition, collectives: Collectives
    ) -> None:
        assert config.num_threads is not None, "members share the threads of the engine out"
        torch.set_num_threads(max(1, config.num_threads // config.tensor_parallel))
        self.partition = partition
        self.collectives = collectives
        #: Bytes of the base's tensors that this process has read, or mapped where they were packed before.
        self.weight_bytes = 0
        super().__init__(model_folder, config, partition.shard)

    def load(self, model_folder: Path) -> tuple[dict[str, Weight], Packed]:
        """See `Backend`."""
        whole = self.partition.whole
        weights: dict[str, Weight]
        packed: Packed = {}
        if self.config.load_format == "auto" and self.products is not None and has_panels():
            cached = self.weight_cache().weights(model_folder, whole, self.products, self.partition)
            weights, packed = cached or (stored_weights(model_folder, whole, self.partition), {})
        else:
            weights = load_weights(model_folder, whole, self.config, self.device, self.dtype, self.partition)
        tensors = [weight for weight in weights.values() if isinstance(weight, Tensor)]
        tensors += [weight.numbers for weight in packed.values() if isinstance(weight, StoredWeight)]
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors)
        return weights, packed

    def build_decoder(self, weights: dict[str, Weight], packed: Packed) -> Decoder:
        """See `Backend`."""
        members = PartOfGroup(self.collectives, self.partition)
        return Decoder(self.model, weights, self.dtype, products=self.products, packed=packed, members=members)

    def live_weights(self) -> LiveWeights:
        """See `Backend`."""
        return ShardWeights(self.decoder, self.partition, self.collectives)


class ShardWeights(LiveWeights):
    """Merges a member's part of adapters into its part of the decoder. All members merge the same at the same time."""

    def __init__(self, decoder: Decoder, partition: Partition, collectives: Collectives) -> None:
        super().__init__(decoder)
        self._partition = partition
        self._collectives = collectives

    def merge(self, adapter_id: str, adapter: AdapterWeights) -> None:
        """See `LiveWeights`. `adapter`: the whole."""
        if self.merged_adapter_id != adapter_id:
            super().merge(adapter_id, self._with_norms(cut_adapter(adapter, self._partition)))

    def _with_norms(self, adapter: AdapterWeights) -> AdapterWeights:
        """Finds what DoRA divides by where a member has a part of it: their squares add up. Nothing that is found wrong
        with an adapter later keeps a member from this one meeting."""
        split, padded = needs_norms(adapter, self._partition)
        if not split and not padded:
            return adapter
        places = dict(self._places())
        squares = {name: adapter.row_squares(name, places[name]()) for name in split + padded}
        if split:
            sizes = [len(squares[name]) for name in split]
            total = self._collectives.add_up(torch.cat([squares[name] for name in split]))
            squares |= dict(zip(split, torch.split(total, sizes), strict=True))
        norms = {name: value.sqrt() for name, value in squares.items()}
        for name in padded:
            # rows of zeros stay zeros
            outputs = self._partition.linear(name.rpartition(".")[0]).outputs or ()
            end = 0
            for piece in outputs:
                end += piece.end - piece.start
                norms[name][end : end + piece.num_zeros] = 1.0
                end += piece.num_zeros
        return replace(adapter, norms=norms)

    def _places(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Where the base's weights are, by parameter."""
        for name, tensor in self._pristine_tensors.items():
            yield name, partial(_same, tensor)
        for members, linear in (*self._packed_linears(), *self._whole_linears()):
            for member in members:
                yield f"{member.module}.weight", partial(_rows_of, linear, member)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _rows_of(linear: Linear, member: PackedMember) -> Tensor:
    return linear.pristine[member.start : member.end]


def check_served(config: EngineConfig) -> None:
    """Raises `DeviceError` or `ExactModeError` for what groups do not serve."""
    asked = f"tensor_parallel={config.tensor_parallel}"
    device = choose_arithmetic(config).device
    if device.type != "cpu" or config.kernels == "triton":
        raise DeviceError(f"{asked}, device='{device.type}': groups compute on CPUs only. Use device cpu.")
    if config.mode == "exact":
        raise ExactModeError(f"{asked}, mode='exact': what members add up rounds otherwise than the whole. Use 1.")
