"""Computes one forward pass over a step, for all families. `model_config.model` describes a layer in formulas.

Legend: T tokens of the step, H query heads, K key/value heads, D head_dim. `pool` is the flat page memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.packed_weight import PackedWeight, Products
from ...kernels.paged_attention.cpu import paged_attention
from ...kernels.paged_attention.types import AttentionPlan
from ...kernels.rotary import rotate_and_store_
from ...kernels.segment_lora import LoraSpan, PreparedLora
from ..model_config.model import HEAD, PACKED_SITES, LayerNorms, ModelConfig, PackedSite, RopeConfig, packed_members
from ..model_config.partition import Partition
from .compiled_layers import CompiledLayers
from .gguf.blocks import Weight, joined, looked_up, pack_joined, plain
from .layers import DecoderLayer, Linear, activation_of, norm_of
from .rope import Rope
from .step_batch import StepBatch

Rotary = tuple[Tensor, Tensor]


class GroupSums(ABC):
    """Adds up and joins what the members of a tensor-parallel group compute. All members call the same in one order."""

    def __init__(self, partition: Partition) -> None:
        #: The part of the model that this member has.
        self.partition = partition
        #: First token of this member's part of the vocabulary.
        self.first_token = partition.tokens(partition.whole.vocab_size)[0]
        #: Outputs of the live head, of all members together.
        self.head_outputs = partition.whole.vocab_size

    @abstractmethod
    def add_up(self, x: Tensor) -> Tensor:
        """The sum of what all members give, the same numbers on each. `x` may be overwritten."""

    @abstractmethod
    def join_logits(self, x: Tensor) -> Tensor:
        """The columns of all members side by side on the leader; on other members their own columns."""


class Decoder:
    """Base model with live weights.

    `linears` holds the head and projections by checkpoint name, `tensors` what is no linear layer. Both, and the
    layers' linears, may be replaced between two steps.

    `weights`: weights by checkpoint name, taken out one by one; in `dtype` or, where linear layers are packed, as they
    are stored. `dtype`: number format of activations. `packed`: linear layers that were packed before, by
    `joined_name`; their plain weights need not be in `weights`. `products`: products for which all other linear layers
    are packed now (None: they are not). `sums`: those of the group, where the decoder is a member's part; `model` and
    `weights` are then those of the part.
    """

    #: Steps are built so that what a row computes depends on that row alone.
    is_exact: ClassVar[bool] = False
    #: All plain LoRA pairs merge in one launch, into buffers whose addresses stay.
    merges_by_kernel: ClassVar[bool] = False

    def __init__(
        self,
        model: ModelConfig,
        weights: dict[str, Weight],
        dtype: torch.dtype,
        *,
        products: Products | None,
        packed: Mapping[str, PackedWeight] | None = None,
        sums: GroupSums | None = None,
    ) -> None:
        self.model = model
        self._sums = sums
        #: Number format of activations.
        self.dtype = dtype
        source = _Weights(weights, packed or {}, dtype, products)
        embedding = weights[f"{model.names.embedding}.weight"]
        ropes: list[RopeConfig] = []
        self.layers = [
            DecoderLayer(
                index,
                {site: source.linear(modules_of_site(model, index, site)) for site in PACKED_SITES},
                _full_names(model, index),
                _number_of(rope, ropes),
            )
            for index, rope in enumerate(model.layer_ropes)
        ]
        weights[f"{model.names.embedding}.weight"] = embeddings = looked_up(embedding)
        self._ropes = [Rope(rope, embeddings.device) for rope in ropes]
        self.linears = {
            module: source.whole(module)
            for module in (model.names.project_in, model.names.project_out, None if model.is_tied else HEAD)
            if module is not None
        }
        if model.is_tied:
            self.linears[HEAD] = source.whole(HEAD, embedding)
        tables = {f"{name}.weight" for name in (model.names.embedding, model.names.positions)}
        self.tensors = {name: plain(w, None if name in tables else dtype) for name, w in weights.items()}
        self._norm_of_kind = norm_of(model, self.tensors)
        self._activation = activation_of(model)
        self._is_interleaved = model.has_interleaved_rope
        # a table, so that a position's factor has the same bits wherever it stands in a step
        self._growth = _growth_of(model).to(embeddings.device, dtype)
        #: Computes all layers but the last (or that, too) in one call; None: each is computed by itself.
        self.compiled_layers = CompiledLayers.of(model, self.layers, self.tensors)
        #: Last hidden states of the rows that the latest step pools, [num_pooled, embedding_size].
        self.states = torch.empty(0, model.embedding_size)
        self._lora_spans: tuple[LoraSpan, ...] = ()
        self._lora = PreparedLora([])
        # rounded to the dtype first, as the families that scale define it
        self._embedding_scale = float(torch.tensor(model.embedding_scale, dtype=dtype))

    def forward(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Logits of the rows that are asked for them, [num_logits, vocab_size]; stores the step's keys and values in
        `pool`, and the hidden states of pooled rows in `states`.
        """
        return self.logits(self._forward(batch, pool))

    def forward_in_blocks(self, batch: StepBatch, pool: Tensor) -> Iterator[Tensor]:
        """Logits as `forward` gives them, `batch.head_rows` rows at a time. All are to be taken: in a group, members
        compute them together.
        """
        if len(batch.head_rows) == 1:
            yield self.forward(batch, pool)
            return
        yield from map(self.logits, torch.split(self._forward(batch, pool), batch.head_rows))

    def _forward(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """The rows that are asked for logits as the head reads them, [num_logits, hidden]."""
        x = self._embed(batch.token_ids, batch.positions)  # [T, hidden]
        rotaries = [rope.tables(batch.positions, batch.row_lengths, self.dtype) for rope in self._ropes]
        spans = batch.spans
        num_done = 0
        if self.compiled_layers is not None:
            add_up = None if self._sums is None else self._sums.add_up
            num_done = self.compiled_layers.forward_(x, batch, pool, rotaries, self._lora_of(spans), add_up)
        for layer in self.layers[num_done:]:
            norms, plan = layer.norms, batch.attention[self.model.sliding_windows[layer.index]]
            h = self._norm(x, norms.before_attention)
            rotary = None if layer.rope is None else rotaries[layer.rope]
            q = self._queries(h, layer, batch, pool, rotary)
            if batch.asked is not None and layer is self.layers[-1]:
                rows, spans, plan = batch.asked
                x, q = x.index_select(0, rows), q.index_select(0, rows)
                if not len(x):
                    break
                h = h.index_select(0, rows) if self.model.is_parallel else h
            x = self._added(x, self._norm(self._attend(q, layer, pool, plan, spans), norms.attention_output))
            if not self.model.is_parallel:
                x = self._norm(x, norms.after_attention)
                h = self._norm(x, norms.before_mlp)
            x = self._added(x, self._norm(self._mlp(h, layer, spans), norms.mlp_output))
            x = self._norm(x, norms.after_mlp)
        return self._outputs(x.index_select(0, batch.sampled_rows), batch.num_logits)

    def _added(self, x: Tensor, output: Tensor) -> Tensor:
        """The residual stream with the output of attention or MLP. `x` may be overwritten."""
        scale = self.model.residual_scale
        return x.add_(output) if scale == 1.0 else x.add_(output.mul_(scale))

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        model, names = self.model, self.model.names
        x = self._looked_up(self.tensors[f"{names.embedding}.weight"], token_ids).to(self.dtype)
        if model.embedding_scale != 1.0:
            x *= self._embedding_scale
        if names.project_in is not None:
            x = self.linears[names.project_in](x)
        if names.positions is not None:
            x += self.tensors[f"{names.positions}.weight"][positions + model.position_offset]
        return x

    def _looked_up(self, table: Tensor, token_ids: Tensor) -> Tensor:
        if self._sums is None:
            return table[token_ids]
        rows = token_ids - self._sums.first_token
        is_here = (rows >= 0) & (rows < len(table))
        # shapes do not depend on the tokens: a graph may be captured of this
        if not len(table):
            x = torch.zeros(len(rows), table.shape[1], dtype=self.dtype, device=table.device)
        else:
            x = table[rows.where(is_here, 0)].to(self.dtype).masked_fill_(~is_here[:, None], 0.0)
        return self._sums.add_up(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [num_rows, vocab_size] of rows as the head reads them, [num_rows, hidden]."""
        logits = self.linears[HEAD](x)
        if self.model.logit_scale != 1.0:
            logits.mul_(self.model.logit_scale)
        cap = self.model.logit_softcap
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits if self._sums is None else self._sums.join_logits(logits)

    def _outputs(self, x: Tensor, num_logits: int) -> Tensor:
        """The first rows of the last layer's output, as the head reads them. The others' hidden states are left in
        `states`.
        """
        x = self._norm(x, self.model.names.final_norm)
        if self.model.names.project_out is not None:
            x = self.linears[self.model.names.project_out](x)
        self.states = x[num_logits:]
        return x[:num_logits]

    def _norm(self, x: Tensor, module: str | None) -> Tensor:
        return x if module is None else self._norm_of_kind(x, module)

    def _queries(self, h: Tensor, layer: DecoderLayer, batch: StepBatch, pool: Tensor, rotary: Rotary | None) -> Tensor:
        """Queries of all rows, [T, H, D]; stores their keys and values."""
        model, num_heads, num_kv_heads = self.model, self.model.num_heads, self.model.num_kv_heads
        qkv = self._with_lora(layer, "qkv", h, batch.spans).view(len(h), num_heads + 2 * num_kv_heads, model.head_dim)
        if layer.norms.query is not None and model.head_norm != "rotated_head":
            self._norm_heads_(qkv, layer)
        if model.query_growth is not None:
            # a factor, so that it may stand before the rotation
            qkv[:, :num_heads] *= self._query_factors(batch.positions)
        if rotary is not None and self._is_interleaved:
            _pair_halves_(qkv[:, :-num_kv_heads, : 2 * rotary[0].shape[-1]])
        rotate_and_store_(qkv, rotary, pool, batch.key_places, layer.index, num_heads)
        if layer.norms.query is not None and model.head_norm == "rotated_head":
            self._norm_heads_(qkv, layer)
            rotate_and_store_(qkv, None, pool, batch.key_places, layer.index, num_heads)
        return qkv[:, :num_heads]

    def _norm_heads_(self, qkv: Tensor, layer: DecoderLayer) -> None:
        """Norm the query and key heads of `qkv` [T, H + 2 K, D] in place."""
        model = self.model
        if model.head_norm == "whole":
            rows = qkv.view(len(qkv), -1)
            q, k = rows[:, : model.q_size], rows[:, model.q_size : model.q_size + model.kv_size]
        else:
            q, k = qkv[:, : model.num_heads], qkv[:, model.num_heads : -model.num_kv_heads]
        q.copy_(self._norm(q, layer.norms.query))
        k.copy_(self._norm(k, layer.norms.key))

    def _query_factors(self, positions: Tensor) -> Tensor:
        """Factor of each row's queries, [T, 1, 1]."""
        assert self.model.query_growth is not None, "queries do not grow"
        _, length = self.model.query_growth
        turns = torch.div(positions, length, rounding_mode="floor").clamp(0, len(self._growth) - 1)
        return self._growth[turns.long()][:, None, None]

    def _attend(
        self, q: Tensor, layer: DecoderLayer, pool: Tensor, plan: AttentionPlan, spans: tuple[LoraSpan, ...]
    ) -> Tensor:
        model = self.model
        attended = paged_attention(
            q, pool, plan, layer.index, model.num_kv_heads, model.attention_scale, model.attention_softcap
        )
        return self._added_up(self._with_lora(layer, "o", attended, spans))

    def _added_up(self, x: Tensor) -> Tensor:
        """The output of a layer that is split by inputs. The members' LoRA is in what they add up."""
        return x if self._sums is None else self._sums.add_up(x)

    def _with_lora(self, layer: DecoderLayer, site: PackedSite, x: Tensor, spans: tuple[LoraSpan, ...]) -> Tensor:
        """Packed linear layer with the unmerged LoRA of every adapter of the step."""
        if not spans:
            return layer.linears[site](x)
        lora, number = self._lora_of(spans), layer.site_number(site)
        linear = layer.linears[site]
        if linear.adds_lora:
            y = linear(x, lora.of_product(number))
            lora.add_rest_(y, x, number)
        else:
            y = linear(x)
            lora.add_(y, x, number)
        return y

    def _lora_of(self, spans: tuple[LoraSpan, ...]) -> PreparedLora:
        """The step's LoRA, prepared anew only when its rows are not those of the step before."""
        if spans is not self._lora_spans:
            if spans != self._lora_spans:
                self._lora = PreparedLora(spans)
            self._lora_spans = spans
        return self._lora

    def _mlp(self, h: Tensor, layer: DecoderLayer, spans: tuple[LoraSpan, ...]) -> Tensor:
        active = self._activation(self._with_lora(layer, "gate_up", h, spans))
        return self._added_up(self._with_lora(layer, "down", active, spans))


@dataclass(frozen=True, slots=True)
class _Weights:
    """Makes linear layers of a base's weights, see `Decoder`."""

    plain: dict[str, Weight]
    packed: Mapping[str, PackedWeight]
    dtype: torch.dtype
    products: Products | None

    def linear(self, modules: Sequence[str]) -> Linear:
        """One layer of the modules' weights, joined, and their biases (taken out of `plain`)."""
        biases = [plain(self.plain.pop(f"{module}.bias")) for module in modules if f"{module}.bias" in self.plain]
        assert len(biases) in (0, len(modules)), f"{modules}: {len(biases)} of {len(modules)} members have a bias"
        bias = torch.cat(biases).to(self.dtype) if biases else None
        packed = self.packed.get(joined_name(modules))
        if packed is not None:
            return Linear(packed, bias, self.products)
        return self._packed_now([self.plain.pop(f"{module}.weight") for module in modules], bias)

    def whole(self, module: str, shared: Weight | None = None) -> Linear:
        """A layer of one module in no decoder layer. `shared`: the weight where it has none of its own."""
        packed = self.packed.get(joined_name([module]))
        if packed is not None:
            return Linear(packed, None, self.products)
        weight = self.plain.pop(f"{module}.weight", shared)
        assert weight is not None, f"{module} has no weight"
        return self._packed_now([weight], None)

    def _packed_now(self, parts: Sequence[Weight], bias: Tensor | None) -> Linear:
        if self.products is None:
            return Linear(joined(parts), bias)
        return Linear(pack_joined(parts, self.products), bias, self.products)


def _growth_of(model: ModelConfig) -> Tensor:
    """Factors of queries by the number of whole lengths before their position; one factor where queries do not grow."""
    if model.query_growth is None:
        return torch.ones(1)
    beta, length = model.query_growth
    return torch.arange(model.max_context_tokens // length + 1).float().log1p_().mul_(beta).add_(1.0)


def _pair_halves_(heads: Tensor) -> None:
    """Reorder the features [T, heads, 2 F] of queries and keys from pairs to halves, as the rotation reads them. Both
    have the same new order, so that their products are the same.
    """
    heads.copy_(torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1))


def modules_of_site(model: ModelConfig, layer: int, site: PackedSite) -> list[str]:
    """The modules whose weights are joined at a site, in order."""
    return [member.module for member in packed_members(model, layer, site)]


def joined_name(modules: Sequence[str]) -> str:
    """The name of one linear layer of these modules' weights."""
    return "+".join(modules)


def _full_names(model: ModelConfig, layer: int) -> LayerNorms:
    """The layer's norms by their checkpoint names."""
    below = model.names.norms
    places = {place: getattr(below, place) for place in LayerNorms.__dataclass_fields__}
    return LayerNorms(**{place: name and f"{model.names.layers}.{layer}.{name}" for place, name in places.items()})


def _number_of(rope: RopeConfig | None, ropes: list[RopeConfig]) -> int | None:
    """The rope's place in `ropes`, where it is put if it is new."""
    if rope is None:
        return None
    if rope not in ropes:
        ropes.append(rope)
    return ropes.index(rope)
