"""Names the parts of a model as its checkpoint does. No torch here: audit and planner read it too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# A decoder layer's multiplications, in order. Linear layers that read the same input are computed as one. The last ones
# are of inputs that layers have of their own (`LayerInputs`); all_inputs is in the first layer alone.
PackedSite = Literal["qkv", "o", "gate_up", "down", "input_gate", "input_projection", "all_inputs"]
#: Sites that each layer of every model has.
COMMON_SITES: tuple[PackedSite, ...] = ("qkv", "o", "gate_up", "down")
#: Sites that layers may have, in order.
PACKED_SITES: tuple[PackedSite, ...] = (*COMMON_SITES, "input_gate", "input_projection", "all_inputs")


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Norms of a decoder layer by their place, named below the layer; None where a family has none."""

    #: Norm of attention's input.
    before_attention: str | None = "input_layernorm"
    #: Norm of attention's output, before it is added.
    attention_output: str | None = None
    #: Norm of the sum behind attention.
    after_attention: str | None = None
    #: Norm of the MLP's input.
    before_mlp: str | None = "post_attention_layernorm"
    #: Norm of the MLP's output, before it is added.
    mlp_output: str | None = None
    #: Norm of the sum behind the MLP.
    after_mlp: str | None = None
    #: Norm of the layer's own inputs once they are gated and projected, before they are added.
    layer_input: str | None = None
    #: Norm of each query head, before it is rotated.
    query: str | None = None
    #: Norm of each key head, before it is rotated.
    key: str | None = None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Checkpoint names of what gives each layer inputs of its own.

    With e the embedding of a token, and t its row of the table, both scaled by the roots of their sizes, a layer's
    inputs are its part of `(norm(projection(e) / root of hidden_size) + t) / root of 2`. Behind the MLP,
    `x = x + norm(input_projection(activation(input_gate(x)) * inputs), layer_input)`.
    """

    #: Table of tokens, [layer_vocab_size, num_layers * layer_input_size].
    table: str = "model.embed_tokens_per_layer"
    #: Linear layer of embeddings, to [num_layers * layer_input_size].
    projection: str = "model.per_layer_model_projection"
    #: Norm of each layer's part of the projection.
    norm: str = "model.per_layer_projection_norm"


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Checkpoint names of a model's parts; None where a family has no such part."""

    #: Packed site -> its linear layers below `<layers>.N.`, in the order of their outputs.
    sites: Mapping[PackedSite, tuple[str, ...]] = field(hash=False)
    #: Sites of layers of the gated delta rule, where they differ; empty where there are no such layers.
    delta_sites: Mapping[PackedSite, tuple[str, ...]] = field(default_factory=dict, hash=False)
    #: Module of the gated delta rule below the layer, whose other parameters are named as in `delta_shapes`.
    delta: str = ""
    #: Norms of a decoder layer.
    norms: LayerNorms = LayerNorms()
    #: Embedding of tokens.
    embedding: str = "model.embed_tokens"
    #: Decoder layers, which are numbered below it.
    layers: str = "model.layers"
    #: Norm behind the last layer.
    final_norm: str | None = "model.norm"
    #: Table of learned positions.
    positions: str | None = None
    #: Projection from `embedding_size` to `hidden_size`.
    project_in: str | None = None
    #: Projection from `hidden_size` to `embedding_size`.
    project_out: str | None = None
    #: Inputs of each layer; None where layers have none.
    layer_inputs: LayerInputs | None = None
    #: Attention sinks [num_heads], learned scores that join the denominator of each head's softmax, below the layer; ""
    #: where there are none.
    sinks: str = ""
    #: Factor [1] of a layer's output, below the layer; "" where there is none.
    layer_scalar: str = ""
    #: Pairs of a prefix that names have in some checkpoints and the prefix that stands for it here. The first counts.
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    #: Pattern of the beginnings of names, in checkpoints, of what text does not reach; "" if there is nothing of it.
    passed_over: str = ""
    #: Pattern of the beginnings of names, in checkpoints, of keys and values that a layer has and does not read, since
    #: it reads those of another layer; "" where there are none.
    unread: str = ""
    #: Whether checkpoints store the weights of decoder layers as `[in_features, out_features]`.
    is_transposed: bool = False

    def of_stored(self, name: str) -> str | None:
        """The name of a checkpoint's tensor here; None for a tensor that text does not reach."""
        if any(pattern and re.match(pattern, name) for pattern in (self.passed_over, self.unread)):
            return None
        for stored, own in self.stored_prefixes:
            if name.startswith(stored):
                return own + name[len(stored) :]
        return name

    def spellings(self, name: str) -> tuple[str, ...]:
        """Names that checkpoints may have for the tensor `name`."""
        prefixes = ((stored, own) for stored, own in self.stored_prefixes if name.startswith(own))
        return tuple(dict.fromkeys([name, *(stored + name[len(own) :] for stored, own in prefixes)]))
