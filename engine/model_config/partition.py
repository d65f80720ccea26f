"""Splits a model among the members of a tensor-parallel group, as Megatron does (Shoeybi 2019, section 3).

Layers that widen (queries, keys, values; gate, up) are split by outputs, layers that narrow again (o, down) by inputs,
so that a member needs no other's numbers between the two, and the sum of what the members get is the layer's output.
Adapters follow: of a layer split by outputs every member has the whole A and its rows of B, of one split by inputs its
columns of A and the whole B. What the members add up then has the LoRA in it already. (S-LoRA, section 5, shards what
is whole here, too.)

A layer of the gated delta rule is split by its key heads, with the channels of its convolution and the value heads
that share a key head, as attention is by key/value heads. Embeddings and head are split by tokens. Heads and features
that a number of members does not divide are filled up with zeros, which add nothing: every member has layers of the
same shapes. Where there are fewer key heads than members, several members have the same one, each for some of its
queries or values. Norms, positions, projections, and what takes a layer's own inputs, are whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ...kernels.layouts.delta_sizes import DeltaSizes
from .layer import Attention, LayerConfig
from .model import HEAD, ModelConfig
from .names import PackedSite

# Every member waits for every other: event counters grow with the square of the number of members.
_MOST_MEMBERS = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows (or columns) `start:end` of a whole tensor, and then `num_zeros` of zeros."""

    start: int
    end: int
    num_zeros: int = 0


Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Partition:
    """Member number `member` of `num_members` (0 leads), and its part of `whole`."""

    whole: ModelConfig
    num_members: int
    member: int

    @property
    def shard(self) -> ModelConfig:
        """The member's part as a model with fewer heads, features and tokens."""
        if self.num_members == 1:
            return self.whole
        start, end = self.tokens(self.whole.vocab_size)
        first, last = self.tokens(self.whole.layer_vocab_size)
        layers = tuple(self._layer(layer) for layer in self.whole.layers)
        return replace(self.whole, layers=layers, vocab_size=end - start, layer_vocab_size=last - first)

    def tokens(self, vocab_size: int) -> tuple[int, int]:
        """First token of the member, and the one after its last. If an adapter has a vocabulary of another size, the
        last member takes the difference and other members keep their tokens.
        """
        each = -(-self.whole.vocab_size // self.num_members)
        start = min(self.member * each, vocab_size)
        is_last = self.member == self.num_members - 1
        return start, vocab_size if is_last else min(start + each, vocab_size)

    def linear(self, module: str) -> tuple[Pieces | None, Pieces | None]:
        """Outputs and inputs of the part of a linear layer, by its checkpoint name (None: all). For the head see
        `tokens`.
        """
        number, _, below = module.removeprefix(f"{self.whole.names.layers}.").partition(".")
        return self._of_layers[int(number)].get(below, (None, None)) if number.isdecimal() else (None, None)

    def parameter(self, name: str) -> tuple[Pieces | None, Pieces | None]:
        """Pieces along the first and the second dimension of the part of a parameter, by its checkpoint name (None:
        all). For embeddings and the head see `tokens`.
        """
        module, _, kind = name.rpartition(".")
        outputs, inputs = self.linear(module)
        return (outputs, inputs if kind == "weight" else None) if kind in ("weight", "bias") else self.linear(name)

    def adds_bias(self, module: str) -> bool:
        """Whether the member adds a linear layer's bias: where members' outputs are summed, one member does."""
        return self.member == 0 or self.linear(module)[1] is None

    def is_by_token(self, module: str) -> bool:
        """Whether a module is split by tokens: embeddings and head."""
        inputs = self.whole.names.layer_inputs
        return module in (self.whole.names.embedding, HEAD) or (inputs is not None and module == inputs.table)

    def _layer(self, layer: LayerConfig) -> LayerConfig:
        share = self._heads_of(layer)
        num_keys, num_queries = share.keys_each, share.keys_each * share.group_each
        if isinstance(layer.mixer, Attention):
            mixer: Attention | DeltaSizes = replace(layer.mixer, num_heads=num_queries, num_kv_heads=num_keys)
        else:
            mixer = replace(layer.mixer, key_heads=num_keys, value_heads=num_queries)
        return LayerConfig(mixer, -(-layer.intermediate_size // self.num_members))

    def _heads_of(self, layer: LayerConfig) -> _HeadShare:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            num_keys, num_queries = mixer.num_kv_heads, mixer.num_heads
        else:
            num_keys, num_queries = mixer.key_heads, mixer.value_heads
        return _HeadShare(num_keys, num_queries // num_keys, self.num_members, self.member)

    @cached_property
    def _of_layers(self) -> tuple[dict[str, tuple[Pieces | None, Pieces | None]], ...]:
        """Outputs and inputs of each decoder layer's linear layers, by name below the layer, and of other parameters
        that are split."""
        return tuple(map(self._of_layer, range(self.whole.num_layers)))

    def _of_layer(self, number: int) -> dict[str, tuple[Pieces | None, Pieces | None]]:
        layer, names = self.whole.layers[number], self.whole.names
        queries, keys = self._heads_of(layer).pieces()
        features = self._feature_pieces(layer.intermediate_size)
        cuts: dict[str, tuple[Pieces | None, Pieces | None]] = {}
        if isinstance(layer.mixer, Attention):
            mixed = _scaled(queries, layer.mixer.head_dim)
            projected = _of_attention(layer.mixer, queries, keys)
            if names.sinks:
                cuts[names.sinks] = queries, None
        else:
            mixed = _scaled(queries, layer.mixer.value_size)
            projected = _of_delta(layer.mixer, queries, keys)
            cuts |= {f"{names.delta}.{name}": (queries, None) for name in ("A_log", "dt_bias")}
            cuts[f"{names.delta}.conv1d"] = projected[0], None
        parts: dict[PackedSite, list[Pieces]] = {
            "qkv": projected,
            "gate_up": [features] * len(self.whole.parts_of_site(number, "gate_up")),
        }
        for site, outputs in parts.items():
            members = self.whole.names_of_site(number, site)
            if len(members) == 1:
                outputs = [_joined(outputs, self.whole.parts_of_site(number, site))]
            cuts |= {name: (pieces, None) for name, pieces in zip(members, outputs, strict=True)}
        for site, inputs in (("o", mixed), ("down", features)):
            for name in self.whole.names_of_site(number, site):
                cuts[name] = None, inputs
        return cuts

    def _feature_pieces(self, size: int) -> Pieces:
        each = -(-size // self.num_members)
        start = min(self.member * each, size)
        end = min(start + each, size)
        return (Piece(start, end, each - (end - start)),)


@dataclass(frozen=True, slots=True)
class _HeadShare:
    """A member's share of `num_keys` key heads, each of which `group` consecutive query (or value) heads share."""

    num_keys: int
    group: int
    num_members: int
    member: int

    @property
    def replicas(self) -> int:
        """Members that have the same key head."""
        return max(1, self.num_members // self.num_keys)

    @property
    def keys_each(self) -> int:
        """Key heads of a member."""
        return -(-self.num_keys * self.replicas // self.num_members)

    @property
    def group_each(self) -> int:
        """Queries of each key head that a member has."""
        return -(-self.group // self.replicas)

    def pieces(self) -> tuple[Pieces, Pieces]:
        """The member's query heads, and its key heads, in the order of its heads."""
        queries, keys = [], []
        first = self.member * self.keys_each
        for place in range(first, first + self.keys_each):
            head, part = divmod(place, self.replicas)
            is_there = head < self.num_keys
            start = min(part * self.group_each, self.group)
            end = min(start + self.group_each, self.group) if is_there else start
            base = head * self.group if is_there else 0
            queries.append(Piece(base + start, base + end, self.group_each - (end - start)))
            keys.append(Piece(head, head + 1) if is_there else Piece(0, 0, 1))
        return tuple(queries), tuple(keys)


def _of_attention(attention: Attention, queries: Pieces, keys: Pieces) -> list[Pieces]:
    """Outputs of what attention's input is projected to. `queries`, `keys`: the member's heads."""
    size = attention.head_dim
    of_queries = _scaled(queries, 2 * size if attention.has_output_gate else size)
    return [of_queries, *[_scaled(keys, size)] * (len(attention.parts) - 1)]


def _of_delta(sizes: DeltaSizes, values: Pieces, keys: Pieces) -> list[Pieces]:
    """Outputs of what the gated delta rule's input is projected to. `values`, `keys`: the member's heads."""
    of_keys, of_values = _scaled(keys, sizes.key_size), _scaled(values, sizes.value_size)
    channels = _joined([of_keys, of_keys, of_values], (sizes.num_keys, sizes.num_keys, sizes.num_values))
    return [channels, of_values, values, values]


def _scaled(heads: Pieces, size: int) -> Pieces:
    """Features of heads, `size` each."""
    return tuple(Piece(piece.start * size, piece.end * size, piece.num_zeros * size) for piece in heads)


def _joined(parts: list[Pieces], sizes: tuple[int, ...]) -> Pieces:
    """Pieces of one layer that computes several parts of these sizes."""
    starts = accumulate(sizes, initial=0)
    return tuple(
        Piece(piece.start + start, piece.end + start, piece.num_zeros)
        for pieces, start in zip(parts, starts, strict=False)
        for piece in pieces
    )


def partition_problem(model: ModelConfig, num_members: int, *, has_blocks: bool) -> str | None:
    """Why a model is not split among `num_members`, as a plain sentence; None when it is. `has_blocks`: it is stored in
    blocks of few bits.
    """
    if num_members == 1:
        return None
    asked = f"tensor_parallel={num_members}"
    if num_members > min(model.num_heads, _MOST_MEMBERS):
        return (
            f"{asked}: the model has {model.num_heads} query heads, expected at most one process for each, and at most "
            f"{_MOST_MEMBERS}. Lower it."
        )
    if _has_mixed_groups(Partition(model, num_members, 0).shard):
        return (
            f"{asked}: layers of {model.family} that keep keys of one shape would have unlike numbers of query heads "
            "in a process. Use another number."
        )
    if model.names.is_transposed or model.head_norm in ("own_head", "whole"):
        what = "weights that are stored transposed" if model.names.is_transposed else "norms over all heads"
        return f"{asked}: {model.family} has {what}, which are not split. Use tensor_parallel 1."
    if has_blocks:
        return (
            f"{asked}: weights in blocks of few bits (GGUF) are not split. Use the model's safetensors files, or "
            "tensor_parallel 1."
        )
    return None


def _has_mixed_groups(model: ModelConfig) -> bool:
    """Whether layers whose keys are stored alike have unlike numbers of query heads."""
    attentions = [layer.attention for layer in model.layers if layer.attention is not None]
    return len({(each.stored, each.num_heads) for each in attentions}) > len({each.stored for each in attentions})


def partitions_of(model: ModelConfig, num_members: int) -> tuple[Partition, ...]:
    """The members' parts, in order."""
    return tuple(Partition(model, num_members, member) for member in range(num_members))
