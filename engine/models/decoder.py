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

from ...kernels.gated import sigmoid_gate_
from ...kernels.packed_weight import PackedWeight, Products
from ...kernels.paged_attention.cpu import paged_attention
from ...kernels.paged_attention.types import AttentionPlan
from ...kernels.rms_norm import rms_norm
from ...kernels.rotary import rotate_and_store_
from ...kernels.segment_lora import LoraSpan, PreparedLora
from ..model_config.layer import Attention, RopeConfig
from ..model_config.model import HEAD, ModelConfig, packed_members
from ..model_config.names import LayerNorms, PackedSite
from ..model_config.partition import Partition
from .compiled_layers import CompiledLayers
from .delta import DeltaLayers
from .gguf.blocks import Weight, joined, looked_up, pack_joined, plain
from .layers import FUNCTIONS, DecoderLayer, Linear, activation_of, norm_of
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
                model.layers[index],
                {
                    site: source.linear(modules)
                    for site in model.sites
                    if (modules := modules_of_site(model, index, site))
                },
                _full_names(model, index),
                f"{model.names.layers}.{index}.{model.names.sinks}" if model.names.sinks else "",
                _number_of(rope, ropes),
                model.sites,
                model.key_places[index],
            )
            for index, rope in enumerate(model.layer_ropes)
        ]
        weights[f"{model.names.embedding}.weight"] = embeddings = looked_up(embedding)
        self._ropes = [Rope(rope, embeddings.device) for rope in ropes]
        self.linears = {
            module: source.whole(module) for module in model.whole_modules if not (model.is_tied and module == HEAD)
        }
        if model.is_tied:
            self.linears[HEAD] = source.whole(HEAD, embedding)
        inputs = model.names.layer_inputs
        tables = {
            f"{name}.weight" for name in (model.names.embedding, model.names.positions, inputs and inputs.table) if name
        }
        self.tensors = {name: looked_up(w) if name in tables else plain(w, dtype) for name, w in weights.items()}
        self._norm_of_kind = norm_of(model, self.tensors)
        self._delta_layers = DeltaLayers(model, self.tensors)
        self._activation = activation_of(model)
        self._plain_activation = FUNCTIONS[model.activation]
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
        self._layer_input_scale = float(torch.tensor(model.layer_input_size**0.5, dtype=dtype))

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
        inputs = self._layer_inputs(x, batch.token_ids, spans)
        num_done = 0
        if self.compiled_layers is not None:
            add_up = None if self._sums is None else self._sums.add_up
            num_done = self.compiled_layers.forward_(x, batch, pool, rotaries, self._lora_of(spans), add_up)
        for layer in self.layers[num_done:]:
            norms = layer.norms
            h = self._norm(x, norms.before_attention)
            mixed = self._mix(h, layer, batch, pool, rotaries)
            if batch.asked is not None and layer is self.layers[-1]:
                rows, spans, plan = batch.asked
                x = x.index_select(0, rows)
                if not len(x):
                    break
                mixed = mixed.at(rows, plan)
                h = h.index_select(0, rows) if self.model.is_parallel else h
                inputs = None if inputs is None else inputs.index_select(0, rows)
            mixed_tokens = self._mixed(mixed, layer, pool)
            output = self._added_up(self._with_lora(layer, "o", mixed_tokens, spans))
            x = self._added(x, self._norm(output, norms.attention_output))
            if not self.model.is_parallel:
                x = self._norm(x, norms.after_attention)
                h = self._norm(x, norms.before_mlp)
            x = self._added(x, self._norm(self._mlp(h, layer, spans), norms.mlp_output))
            x = self._with_inputs(self._norm(x, norms.after_mlp), inputs, layer, spans)
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

    def _layer_inputs(self, x: Tensor, token_ids: Tensor, spans: tuple[LoraSpan, ...]) -> Tensor | None:
        """Inputs of all layers, [T, num_layers, layer_input_size], where layers have some; `x`: embeddings."""
        model, names = self.model, self.model.names.layer_inputs
        if names is None:
            return None
        shape = (len(x), model.num_layers, model.layer_input_size)
        projected = self._with_lora(self.layers[0], "all_inputs", x, spans).mul_(model.hidden_size**-0.5).view(shape)
        rows = self._looked_up(self.tensors[f"{names.table}.weight"], token_ids).to(self.dtype)
        rows.mul_(self._layer_input_scale)
        return self._norm(projected, names.norm).add_(rows.view(shape)).mul_(2**-0.5)

    def _with_inputs(
        self, x: Tensor, inputs: Tensor | None, layer: DecoderLayer, spans: tuple[LoraSpan, ...]
    ) -> Tensor:
        """A layer's output with its own inputs, and scaled, where the model does either."""
        if inputs is not None:
            gate = self._plain_activation(self._with_lora(layer, "input_gate", x, spans))
            gated = gate.mul_(inputs[:, layer.index])
            added = self._with_lora(layer, "input_projection", gated, spans)
            x = self._added(x, self._norm(added, layer.norms.layer_input))
        names = self.model.names
        if names.layer_scalar:
            x = x.mul_(self.tensors[f"{names.layers}.{layer.index}.{names.layer_scalar}"])
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

    def _mix(
        self, h: Tensor, layer: DecoderLayer, batch: StepBatch, pool: Tensor, rotaries: Sequence[Rotary]
    ) -> _Mixing:
        """The part of a layer's mixer that all rows take, which stores what later tokens read of them."""
        projected = self._with_lora(layer, "qkv", h, batch.spans)
        if layer.config.attention is None:
            assert batch.states is not None, "the step has no rows with states"
            return _Mixing(self._delta_layers.walk(projected, layer.index, pool, batch.states))
        q, gate = self._queries(projected, layer.config.attention, layer, batch, pool, rotaries)
        assert layer.keys is not None, f"layer {layer.index} attends to nothing"
        return _Mixing(q, gate, batch.attention[layer.keys[0], layer.config.attention.window])

    def _mixed(self, mixing: _Mixing, layer: DecoderLayer, pool: Tensor) -> Tensor:
        """Mixed tokens, [num_rows, mixed_size], as they are projected to the residual stream."""
        attention, keys = layer.config.attention, layer.keys
        if attention is None or keys is None or mixing.plan is None:
            return mixing.heads
        model = self.model
        attended = paged_attention(
            mixing.heads, pool, mixing.plan, keys[1], attention.num_kv_heads, model.attention_scale,
            model.attention_softcap, self._sinks(layer),
        )  # fmt: skip
        if mixing.gate is not None:
            sigmoid_gate_(attended.view(mixing.gate.shape), mixing.gate)
        return attended

    def _sinks(self, layer: DecoderLayer) -> Tensor | None:
        """Attention sinks of a layer's heads, fp32 [H]; None without."""
        return self.tensors[layer.sinks].float() if layer.sinks else None

    def _queries(
        self,
        projected: Tensor,
        attention: Attention,
        layer: DecoderLayer,
        batch: StepBatch,
        pool: Tensor,
        rotaries: Sequence[Rotary],
    ) -> tuple[Tensor, Tensor | None]:
        """Queries of all rows, [T, H, D], and the gates of what they find; stores their keys and values."""
        model, num_heads = self.model, attention.num_heads
        heads, gate = self._heads(projected, attention)
        rotary = None if layer.rope is None else rotaries[layer.rope]
        if layer.norms.query is not None and model.head_norm != "rotated_head":
            self._norm_heads_(heads, attention, layer)
        if model.query_growth is not None:
            # a factor, so that it may stand before the rotation
            heads[:, :num_heads] *= self._query_factors(batch.positions)
        num_rotated = num_heads + (0 if attention.source is not None else attention.num_kv_heads)
        if rotary is not None and self._is_interleaved:
            _pair_halves_(heads[:, :num_rotated, : 2 * rotary[0].shape[-1]])
        assert layer.keys is not None, f"layer {layer.index} attends to nothing"
        group, number = layer.keys
        first, strides = batch.key_places[group]
        places = (first if attention.source is None else first[:, :0], strides)
        rotate_and_store_(heads, rotary, pool, places, number, num_heads)
        if layer.norms.query is not None and model.head_norm == "rotated_head":
            self._norm_heads_(heads, attention, layer)
            rotate_and_store_(heads, None, pool, places, number, num_heads)
        return heads[:, :num_heads], gate

    def _heads(self, projected: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]:
        """Heads of queries, keys and values, [T, H + 2 K, D], of queries alone where the layer stores no keys; and the
        gates, [T, H, D], where there are some.
        """
        size = attention.head_dim
        if attention.is_plain:
            return projected.view(len(projected), -1, size), None
        parts = [part.view(len(part), -1, size) for part in torch.split(projected, list(attention.parts), 1)]
        gate = None
        if attention.has_output_gate:
            queries = parts[0].view(len(projected), -1, 2, size)
            parts[0], gate = queries[:, :, 0], queries[:, :, 1]
        if attention.keys_are_values and attention.source is None:
            parts.append(parts[1])
        heads = torch.cat(parts, 1)
        if attention.has_value_norm and attention.source is None:
            values = heads[:, -attention.num_kv_heads :]
            values.copy_(rms_norm(values, torch.ones(size, dtype=values.dtype), self.model.norm_eps))
        return heads, gate

    def _norm_heads_(self, heads: Tensor, attention: Attention, layer: DecoderLayer) -> None:
        """Norm the query and key heads of `heads`, [T, H + 2 K, D] or [T, H, D], in place."""
        if self.model.head_norm == "whole":
            rows = heads.view(len(heads), -1)
            q, k = rows[:, : attention.q_size], rows[:, attention.q_size : attention.q_size + attention.kv_size]
        else:
            q, k = heads[:, : attention.num_heads], heads[:, attention.num_heads : -attention.num_kv_heads]
        q.copy_(self._norm(q, layer.norms.query))
        if attention.source is None:
            k.copy_(self._norm(k, layer.norms.key))

    def _query_factors(self, positions: Tensor) -> Tensor:
        """Factor of each row's queries, [T, 1, 1]."""
        assert self.model.query_growth is not None, "queries do not grow"
        _, length = self.model.query_growth
        turns = torch.div(positions, length, rounding_mode="floor").clamp(0, len(self._growth) - 1)
        return self._growth[turns.long()][:, None, None]

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
class _Mixing:
    """A step's tokens within a mixer, once all that later tokens read of them is stored."""

    #: Queries [T, H, D] of attention; of the gated delta rule the mixed tokens, [T, num_values].
    heads: Tensor
    #: Gates of what the queries find, [T, H, D]; None without gates.
    gate: Tensor | None = None
    #: The step's attention; None for the gated delta rule.
    plan: AttentionPlan | None = None

    def at(self, rows: Tensor, plan: AttentionPlan) -> _Mixing:
        """Some of the rows. `plan`: their attention."""
        gate = None if self.gate is None else self.gate.index_select(0, rows)
        return _Mixing(self.heads.index_select(0, rows), gate, None if self.plan is None else plan)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Makes linear layers of a base's weights, see `Decoder`."""

    plain: dict[str, Weight]
    packed: Mapping[str, PackedWeight]
    dtype: torch.dtype
    products: Products | None

    def linear(self, modules: Sequence[str]) -> Linear:
        """One layer of the modules' weights, joined, and their biases (taken out of `plain`)."""
        bias = self._bias(modules)
        packed = self.packed.get(joined_name(modules))
        if packed is not None:
            return Linear(packed, bias, self.products)
        return self._packed_now([self.plain.pop(f"{module}.weight") for module in modules], bias)

    def whole(self, module: str, shared: Weight | None = None) -> Linear:
        """A layer of one module in no decoder layer. `shared`: the weight where it has none of its own."""
        bias = self._bias([module])
        packed = self.packed.get(joined_name([module]))
        if packed is not None:
            return Linear(packed, bias, self.products)
        weight = self.plain.pop(f"{module}.weight", shared)
        assert weight is not None, f"{module} has no weight"
        return self._packed_now([weight], bias)

    def _bias(self, modules: Sequence[str]) -> Tensor | None:
        biases = [plain(self.plain.pop(f"{module}.bias")) for module in modules if f"{module}.bias" in self.plain]
        assert len(biases) in (0, len(modules)), f"{modules}: {len(biases)} of {len(modules)} members have a bias"
        return torch.cat(biases).to(self.dtype) if biases else None

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
