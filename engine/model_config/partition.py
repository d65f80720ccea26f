"""Splits a model among the members of a tensor-parallel group, as Megatron does (Shoeybi 2019, section 3).

Layers that widen (queries, keys, values; gate, up) are split by outputs, layers that narrow again (o, down) by inputs,
so that a member needs no other's numbers between the two, and the sum of what the members get is the layer's output.
Adapters follow: of a layer split by outputs every member has the whole A and its rows of B, of one split by inputs its
columns of A and the whole B. What the members add up then has the LoRA in it already. (S-LoRA, section 5, shards what
is whole here, too.)

Embedding and head are split by tokens. Heads and features that a number of members does not divide are filled up with
zeros, which add nothing: every member has layers of the same shapes. Where there are fewer key/value heads than
members, several members have the same one, each for some of its queries. Norms, positions and projections are whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

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
        start, end = self.tokens(self.whole.vocab_size)
        if self.num_members == 1:
            return self.whole
        heads = {"num_heads": self._kv_heads_each * self._group_each, "num_kv_heads": self._kv_heads_each}
        model = self.whole.with_attention(**heads)
        layers = tuple(replace(layer, intermediate_size=self._features_each) for layer in model.layers)
        return replace(model, layers=layers, vocab_size=end - start)

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
        return self._of_member.get(self._below_layer(module), (None, None))

    def sinks(self, name: str) -> Pieces | None:
        """Heads of the part of a parameter that has a number for each query head; None for another parameter."""
        if not self.whole.names.sinks or self._below_layer(name) != self.whole.names.sinks:
            return None
        size = self.whole.head_dim
        queries, _ = self._heads()
        return tuple(Piece(p.start // size, p.end // size, p.num_zeros // size) for p in queries)

    def _below_layer(self, name: str) -> str:
        return name.removeprefix(f"{self.whole.names.layers}.").partition(".")[2]

    def adds_bias(self, module: str) -> bool:
        """Whether the member adds a linear layer's bias: where members' outputs are summed, one member does."""
        return self.member == 0 or self.linear(module)[1] is None

    def is_by_token(self, module: str) -> bool:
        """Whether a module is split by tokens: embedding and head."""
        return module in (self.whole.names.embedding, HEAD)

    @property
    def _replicas(self) -> int:
        """Members that have the same key/value head."""
        return max(1, self.num_members // self.whole.num_kv_heads)

    @property
    def _kv_heads_each(self) -> int:
        return -(-self.whole.num_kv_heads * self._replicas // self.num_members)

    @property
    def _group_each(self) -> int:
        """Queries of each key/value head that a member has."""
        return -(-self._group // self._replicas)

    @property
    def _group(self) -> int:
        return self.whole.num_heads // self.whole.num_kv_heads

    @property
    def _features_each(self) -> int:
        return -(-self.whole.intermediate_size // self.num_members)

    @cached_property
    def _of_member(self) -> dict[str, tuple[Pieces | None, Pieces | None]]:
        """Outputs and inputs of a decoder layer's linear layers, by name below the layer."""
        queries, keys = self._heads()
        features = self._feature_pieces()
        parts: dict[PackedSite, list[Pieces]] = {
            "qkv": [queries, keys, keys],
            "gate_up": [features] * len(self.whole.parts_of_site(0, "gate_up")),
        }
        cuts: dict[str, tuple[Pieces | None, Pieces | None]] = {}
        for site, outputs in parts.items():
            names = self.whole.names.sites[site]
            if len(names) == 1:
                outputs = [_joined(outputs, self.whole.parts_of_site(0, site))]
            cuts |= {name: (pieces, None) for name, pieces in zip(names, outputs, strict=True)}
        for site, inputs in (("o", queries), ("down", features)):
            for name in self.whole.names.sites[site]:
                cuts[name] = None, inputs
        return cuts

    def _heads(self) -> tuple[Pieces, Pieces]:
        """Features of the member's queries, and of its keys (or values), in the order of its heads."""
        size, group_each = self.whole.head_dim, self._group_each
        queries, keys = [], []
        first = self.member * self._kv_heads_each
        for place in range(first, first + self._kv_heads_each):
            head, part = divmod(place, self._replicas)
            is_there = head < self.whole.num_kv_heads
            start = min(part * group_each, self._group)
            end = min(start + group_each, self._group) if is_there else start
            base = head * self._group if is_there else 0
            zeros = (group_each - (end - start)) * size
            queries.append(Piece((base + start) * size, (base + end) * size, zeros))
            keys.append(Piece(head * size, (head + 1) * size) if is_there else Piece(0, 0, size))
        return tuple(queries), tuple(keys)

    def _feature_pieces(self) -> Pieces:
        size, each = self.whole.intermediate_size, self._features_each
        start = min(self.member * each, size)
        end = min(start + each, size)
        return (Piece(start, end, each - (end - start)),)


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
    if not model.is_uniform:
        return f"{asked}: {model.family} has layers of several kinds, which are not split. Use tensor_parallel 1."
    if model.names.is_transposed or model.head_norm in ("own_head", "whole"):
        what = "weights that are stored transposed" if model.names.is_transposed else "norms over all heads"
        return f"{asked}: {model.family} has {what}, which are not split. Use tensor_parallel 1."
    if has_blocks:
        return (
            f"{asked}: weights in blocks of few bits (GGUF) are not split. Use the model's safetensors files, or "
            "tensor_parallel 1."
        )
    return None


def partitions_of(model: ModelConfig, num_members: int) -> tuple[Partition, ...]:
    """The members' parts, in order."""
    return tuple(Partition(model, num_members, member) for member in range(num_members))
