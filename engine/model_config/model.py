"""Describes a decoder-only transformer in the terms the engine needs. No torch here: audit and planner read it too.

A family is data: the names of its parts (`ModuleNames`) and the settings of `ModelConfig`, among them those of each
layer (`LayerConfig`). One decoder serves all. With attention or another mixer of tokens, a layer computes:

    h = norm(x, before_attention)                          LayerNorms says which of the six norms a family has;
    x = x + norm(mixer(h), attention_output)               a missing one leaves its input as it is
    x = norm(x, after_attention)
    h = norm(x, before_mlp)
    x = x + norm(mlp(h), mlp_output)
    x = norm(x, after_mlp)

Where attention and MLP stand side by side (`is_parallel`), the MLP reads attention's input, and both outputs are added.
Linear layers that read the same input are packed into one site; `packed_members` gives each its columns of the output.
Shapes: a linear layer's weight is `[out_features, in_features]`, as in the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from ...kernels.layouts.delta_sizes import DeltaSizes
from ...kernels.layouts.pages import HeadShape
from .layer import Attention, LayerConfig, RopeConfig
from .names import PACKED_SITES, ModuleNames, PackedSite

# rms: x / rms(x) * w; rms_from_zero: x / rms(x) * (1 + w); layer: (x - mean) / deviation * w + b; layer_no_bias: no b
NormKind = Literal["rms", "rms_from_zero", "layer", "layer_no_bias"]
# Norms of queries and keys: head: of each head, before it is rotated, with the same weights; own_head: with weights for
# each head; rotated_head: of each head, behind its rotation; whole: of all heads together, before they are rotated.
HeadNorm = Literal["head", "own_head", "rotated_head", "whole"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
HEAD = "lm_head"
#: Linear layer of a classifier, without a bias: a row for each label, applied to a prompt's last hidden state.
SCORE = "score"


@dataclass(frozen=True)
class ModelConfig:
    """One base model. Per-layer tuples have `num_layers` entries."""

    #: Name of the family: `model_type` in `config.json`.
    family: str
    #: Checkpoint names of its parts.
    names: ModuleNames
    #: Features of the residual stream.
    hidden_size: int
    #: Features of an embedding; differs from `hidden_size` only with projections between them.
    embedding_size: int
    #: Decoder layers.
    layers: tuple[LayerConfig, ...]
    #: Tokens, as rows of the embedding.
    vocab_size: int
    #: Longest row, prompt and completion together.
    max_context_tokens: int
    #: Formula of all norms.
    norm_kind: NormKind
    #: Number that norms add to the variance or the mean square.
    norm_eps: float
    #: Whether norms have weights (and biases, in the kind `layer`).
    has_norm_weights: bool
    #: Function of the MLP.
    activation: Activation
    #: Whether the MLP is `down(act(gate) * up)`; else `down(act(up))`.
    has_gate: bool
    #: Whether the head is the embedding.
    is_tied: bool
    #: Packed sites whose linear layers have a bias, but in layers of the gated delta rule.
    biased_sites: frozenset[PackedSite]
    #: Factor of the embeddings.
    embedding_scale: float
    #: Row of the position table for position 0.
    position_offset: int
    #: Factor of the attention scores.
    attention_scale: float
    #: `cap` of `cap * tanh(score / cap)` on attention scores; None: no cap.
    attention_softcap: float | None
    #: `cap` of `cap * tanh(logit / cap)` on logits; None: no cap.
    logit_softcap: float | None
    #: Tokens that end a completion.
    eos_token_ids: tuple[int, ...]
    #: Token that begins a prompt; None if there is none.
    bos_token_id: int | None
    #: Whether the head has a bias.
    has_head_bias: bool = False
    #: Whether `config.json` ties a head that the checkpoint stores apart, with other numbers than the embedding's.
    says_tied: bool = False
    #: Whether the checkpoint has a `score` layer in place of a head (`…ForSequenceClassification`). It makes no text
    #: then, and `is_tied` is true, since no head is stored.
    is_classifier: bool = False
    #: Labels by the rows of a `score` layer, as `id2label` of `config.json` names them; empty where it names none.
    labels: tuple[str, ...] = ()
    #: `problem_type` of `config.json`, which says what a classifier's numbers mean; "" where it is not given.
    problem_type: str = ""
    #: Token that fills up batches; a classifier reads the last token that is another one. None if there is none.
    pad_token_id: int | None = None
    #: `model_type` of the model with images whose text model this is; "" for a model of text alone.
    wrapper: str = ""
    #: Heads and weights of the norms of queries and keys, where there are such norms.
    head_norm: HeadNorm = "head"
    #: Whether the MLP reads attention's input, and both outputs are added to the residual stream at once.
    is_parallel: bool = False
    #: Factor of the outputs of attention and MLP, before they are added.
    residual_scale: float = 1.0
    #: Factor of the logits, before they are capped.
    logit_scale: float = 1.0
    #: (beta, length): queries at position p are multiplied by `1 + beta * log(1 + floor(p / length))`; None: they are
    #: not.
    query_growth: tuple[float, int] | None = None
    #: Features of a layer's own inputs; 0: layers have none.
    layer_input_size: int = 0
    #: Tokens that have inputs of layers; 0: layers have none.
    layer_vocab_size: int = 0

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all layers have plain attention with the same heads, and MLPs of the same size."""
        first = self.layers[0]
        return all(
            (attention := layer.attention) is not None
            and attention.is_plain
            and replace(attention, rope=None, window=None) == replace(self.attention, rope=None, window=None)
            and layer.intermediate_size == first.intermediate_size
            for layer in self.layers
        )

    @cached_property
    def attention(self) -> Attention:
        """Attention of the first layer that has it: that of all layers where they are uniform."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def num_heads(self) -> int:
        """Query heads of `attention`."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key (and value) heads of `attention`."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Features of a head of `attention`."""
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """Features inside the widest MLP."""
        return max(layer.intermediate_size for layer in self.layers)

    @cached_property
    def key_shapes(self) -> tuple[tuple[HeadShape, int], ...]:
        """Shapes of heads whose keys and values are stored, each with its number of layers: groups of layers."""
        return tuple(Counter(attention.stored for attention in self._storing_layers).items())

    @cached_property
    def key_places(self) -> tuple[tuple[int, int] | None, ...]:
        """Place of the keys and values that each layer reads: number of its group in `key_shapes`, and its number
        within the group. None for a layer that does not attend.
        """
        shapes, counts = [shape for shape, _ in self.key_shapes], Counter[HeadShape]()
        places: list[tuple[int, int] | None] = []
        for layer in self.layers:
            if layer.attention is None:
                places.append(None)
            elif layer.attention.source is not None:
                places.append(places[layer.attention.source])
            else:
                shape = layer.attention.stored
                places.append((shapes.index(shape), counts[shape]))
                counts[shape] += 1
        return tuple(places)

    def heads_of_group(self, number: int) -> int:
        """Query heads of the layers that read keys and values of a group of `key_shapes`, which is one number."""
        shape, _ = self.key_shapes[number]
        return next(attention.num_heads for attention in self._storing_layers if attention.stored == shape)

    @cached_property
    def attention_kinds(self) -> tuple[tuple[int, int | None], ...]:
        """Groups and windows of the layers that attend."""
        kinds = (
            (place[0], layer.attention.window)
            for place, layer in zip(self.key_places, self.layers, strict=True)
            if place is not None and layer.attention is not None
        )
        return tuple(dict.fromkeys(kinds))

    @property
    def _storing_layers(self) -> Iterator[Attention]:
        """Attention of the layers that store keys and values."""
        attentions = (layer.attention for layer in self.layers)
        return (attention for attention in attentions if attention is not None and attention.source is None)

    @cached_property
    def state_starts(self) -> tuple[int, ...]:
        """Place of what a row keeps in each layer, from the beginning of its state, in numbers; and at the end all."""
        sizes = (0 if layer.delta is None else layer.delta.state_elements for layer in self.layers)
        return tuple(accumulate(sizes, initial=0))

    @property
    def state_elements(self) -> int:
        """Numbers that a row keeps whatever its length: its recurrent state."""
        return self.state_starts[-1]

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        """Rotary embedding of each layer; None where nothing is rotated."""
        return tuple(None if layer.attention is None else layer.attention.rope for layer in self.layers)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Latest tokens that each layer that attends attends to; None: all."""
        return tuple(layer.attention.window for layer in self.layers if layer.attention is not None)

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether some layer keeps a state of each row, which depends on all of its tokens."""
        return self.state_elements > 0

    @property
    def has_interleaved_rope(self) -> bool:
        """Whether some layer rotates neighbouring features together."""
        return any(rope is not None and rope.is_interleaved for rope in self.layer_ropes)

    @property
    def has_length_dependent_rope(self) -> bool:
        """Whether some layer's angles depend on how long a row is."""
        return any(rope is not None and rope.kind in ("dynamic", "longrope") for rope in self.layer_ropes)

    @cached_property
    def sites(self) -> tuple[PackedSite, ...]:
        """Packed sites of a layer, in order."""
        return tuple(site for site in PACKED_SITES if site in self.names.sites)

    def names_of_site(self, layer: int, site: PackedSite) -> tuple[str, ...]:
        """Linear layers of a packed site below the decoder layer, in the order of their outputs."""
        config = self.layers[layer]
        if config.delta is not None and site in self.names.delta_sites:
            return self.names.delta_sites[site]
        names = self.names.sites[site]
        if site == "all_inputs" and layer:
            return ()
        # layers without keys or values of their own have the first members only
        return names[: len(config.mixer.parts)] if site == "qkv" and len(names) > 1 else names

    def parts_of_site(self, layer: int, site: PackedSite) -> tuple[int, ...]:
        """Columns of a packed site as a layer splits them: what the mixer reads; gate and up; else one part."""
        config, hidden = self.layers[layer], self.hidden_size
        inner = config.intermediate_size
        return {
            "qkv": config.mixer.parts,
            "o": (hidden,),
            "gate_up": (inner, inner) if self.has_gate else (inner,),
            "down": (hidden,),
            "input_gate": (self.layer_input_size,),
            "input_projection": (hidden,),
            "all_inputs": (self.num_layers * self.layer_input_size,),
        }[site]

    def members_of_site(self, layer: int, site: PackedSite) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of a packed site's linear layers, by name below the decoder layer."""
        config, hidden = self.layers[layer], self.hidden_size
        in_features = {
            "qkv": hidden,
            "o": config.mixed_size,
            "gate_up": hidden,
            "down": config.intermediate_size,
            "input_gate": hidden,
            "input_projection": self.layer_input_size,
            "all_inputs": hidden,
        }[site]
        members, parts = self.names_of_site(layer, site), self.parts_of_site(layer, site)
        if len(members) < 2:
            parts = (sum(parts),) * len(members)
        assert len(members) == len(parts), f"{site}: {members} for {len(parts)} outputs"
        return {name: (part, in_features) for name, part in zip(members, parts, strict=True)}

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of a layer's linear layers, by name below the decoder layer."""
        sites = (self.members_of_site(layer, site) for site in self.sites)
        return {name: shape for members in sites for name, shape in members.items()}

    @property
    def layer_table_elements(self) -> int:
        """Numbers in the table of inputs that layers have of their own; 0 where they have none."""
        return self.layer_vocab_size * self.num_layers * self.layer_input_size

    @property
    def layer_elements(self) -> int:
        """Numbers in the weights of all layers' linear layers."""
        return sum(
            out_features * in_features
            for layer in range(self.num_layers)
            for out_features, in_features in self.layer_shapes(layer).values()
        )

    def batched_modules(self) -> tuple[str, ...]:
        """Linear layers that can serve many adapters in one batch: those of the decoder layers."""
        return tuple(
            self.module_of(layer, member) for layer in range(self.num_layers) for member in self.layer_shapes(layer)
        )

    def module_of(self, layer: int, member: str) -> str:
        """Checkpoint name of a linear layer of a decoder layer."""
        inputs = self.names.layer_inputs
        return member if inputs and member == inputs.projection else f"{self.names.layers}.{layer}.{member}"

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of every linear layer, by its name in the checkpoint (no `.weight`)."""
        shapes = {
            self.module_of(layer, member): shape
            for layer in range(self.num_layers)
            for member, shape in self.layer_shapes(layer).items()
        }
        if self.names.project_in is not None:
            shapes[self.names.project_in] = (self.hidden_size, self.embedding_size)
        if self.names.project_out is not None:
            shapes[self.names.project_out] = (self.embedding_size, self.hidden_size)
        shapes[HEAD] = (self.vocab_size, self.embedding_size)
        return shapes

    @property
    def whole_modules(self) -> tuple[str, ...]:
        """Linear layers in no decoder layer: projections, and the head as the last."""
        return tuple(name for name in (self.names.project_in, self.names.project_out, HEAD) if name is not None)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by checkpoint name. A tied head is listed like any other."""
        names = self.names
        shapes: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (self.vocab_size, self.embedding_size)}
        if names.positions is not None:
            shapes[f"{names.positions}.weight"] = (self.max_context_tokens + self.position_offset, self.hidden_size)
        inputs = names.layer_inputs
        if inputs is not None:
            shapes[f"{inputs.table}.weight"] = (self.layer_vocab_size, self.num_layers * self.layer_input_size)
        if names.layer_scalar:
            shapes |= {f"{names.layers}.{i}.{names.layer_scalar}": (1,) for i in range(self.num_layers)}
        if names.sinks:
            shapes |= {
                f"{names.layers}.{i}.{names.sinks}": (layer.attention.num_heads,)
                for i, layer in enumerate(self.layers)
                if layer.attention is not None
            }
        biased = {member for site in self.biased_sites for member in names.sites[site]}
        for module, shape in self.linear_shapes().items():
            shapes[f"{module}.weight"] = shape
            if module.removeprefix(f"{names.layers}.").partition(".")[2] in biased:
                shapes[f"{module}.bias"] = shape[:1]
        for layer, config in enumerate(self.layers):
            if config.delta is not None:
                below = f"{names.layers}.{layer}.{names.delta}"
                shapes |= {f"{below}.{name}": shape for name, shape in delta_shapes(config.delta).items()}
        for module, shape_of_norm in self._norm_shapes().items():
            if self.has_norm_weights:
                shapes[f"{module}.weight"] = shape_of_norm
                if self.norm_kind == "layer":
                    shapes[f"{module}.bias"] = shape_of_norm
        if self.has_head_bias:
            shapes[f"{HEAD}.bias"] = (self.vocab_size,)
        if self.is_classifier:
            shapes[f"{SCORE}.weight"] = (len(self.labels), self.embedding_size)
        return shapes

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        norms, of_hidden = self.names.norms, (self.hidden_size,)
        of_layer = (
            norms.before_attention, norms.attention_output, norms.after_attention, norms.before_mlp, norms.mlp_output,
            norms.after_mlp, norms.layer_input,
        )  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, config in enumerate(self.layers):
            places: dict[str | None, tuple[int, ...]] = dict.fromkeys(of_layer, of_hidden)
            if config.attention is not None:
                places |= self._head_norm_shapes(config.attention)
            shapes |= {f"{self.names.layers}.{layer}.{name}": shape for name, shape in places.items() if name}
        if self.names.final_norm is not None:
            shapes[self.names.final_norm] = of_hidden
        if self.names.layer_inputs is not None:
            shapes[self.names.layer_inputs.norm] = (self.layer_input_size,)
        return shapes

    def _head_norm_shapes(self, attention: Attention) -> dict[str | None, tuple[int, ...]]:
        heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
        of_query, of_key = {
            "head": ((size,), (size,)),
            "rotated_head": ((size,), (size,)),
            "own_head": ((heads, size), (kv_heads, size)),
            "whole": ((attention.q_size,), (attention.kv_size,)),
        }[self.head_norm]
        norms = self.names.norms
        return {norms.query: of_query} | ({} if attention.source is not None else {norms.key: of_key})


@dataclass(frozen=True, slots=True)
class PackedMember:
    """Linear layer `module` gives features `start:end` of its packed layer's output."""

    module: str
    start: int
    end: int


def packed_members(model: ModelConfig, layer: int, site: PackedSite) -> tuple[PackedMember, ...]:
    """Members of one packed site of one layer, in output order."""
    members, start = [], 0
    for name, (out_features, _) in model.members_of_site(layer, site).items():
        members.append(PackedMember(model.module_of(layer, name), start, start + out_features))
        start += out_features
    return tuple(members)


def delta_shapes(sizes: DeltaSizes) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the gated delta rule that are no linear layers, by name below its module."""
    return {
        "conv1d.weight": (sizes.channels, 1, sizes.taps),
        "A_log": (sizes.value_heads,),
        "dt_bias": (sizes.value_heads,),
        "norm.weight": (sizes.value_size,),
    }
