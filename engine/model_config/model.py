"""Describes a decoder-only transformer in the terms the engine needs. No torch here: audit and planner read it too.

A family is data: the names of its parts (`ModuleNames`) and the settings of `ModelConfig`. One decoder serves all.

    h = norm(x, before_attention)                          LayerNorms says which of the six norms a family has;
    x = x + norm(attention(h), attention_output)           a missing one leaves its input as it is
    x = norm(x, after_attention)
    h = norm(x, before_mlp)
    x = x + norm(mlp(h), mlp_output)
    x = norm(x, after_mlp)

Where attention and MLP stand side by side (`is_parallel`), the MLP reads attention's input, and both outputs are added.
Linear layers that read the same input are packed into one site; `packed_members` gives each its columns of the output.
Shapes: a linear layer's weight is `[out_features, in_features]`, as in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
# rms: x / rms(x) * w; rms_from_zero: x / rms(x) * (1 + w); layer: (x - mean) / deviation * w + b; layer_no_bias: no b
NormKind = Literal["rms", "rms_from_zero", "layer", "layer_no_bias"]
# Norms of queries and keys: head: of each head, before it is rotated, with the same weights; own_head: with weights for
# each head; rotated_head: of each head, behind its rotation; whole: of all heads together, before they are rotated.
HeadNorm = Literal["head", "own_head", "rotated_head", "whole"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
# A decoder layer's multiplications, in order. Linear layers that read the same input are computed as one.
PackedSite = Literal["qkv", "o", "gate_up", "down"]
PACKED_SITES: tuple[PackedSite, ...] = ("qkv", "o", "gate_up", "down")
HEAD = "lm_head"
#: Linear layer of a classifier, without a bias: a row for each label, applied to a prompt's last hidden state.
SCORE = "score"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer."""

    #: Features of each head that are rotated, from the first on.
    rotary_size: int
    #: Base of the frequencies.
    theta: float = 10_000.0
    #: How frequencies are scaled for long contexts.
    kind: RopeKind = "default"
    #: Factor of cosine and sine.
    attention_factor: float = 1.0
    #: Numbers of the kinds other than `default`, by their keys in `config.json`; all of them are filled in.
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    #: Whether features 2i and 2i + 1 are rotated together; else i and i + rotary_size / 2.
    is_interleaved: bool = False


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
    #: Norm of each query head, before it is rotated.
    query: str | None = None
    #: Norm of each key head, before it is rotated.
    key: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Checkpoint names of a model's parts; None where a family has no such part."""

    #: Packed site -> its linear layers below `<layers>.N.`, in the order of their outputs.
    sites: Mapping[PackedSite, tuple[str, ...]] = field(hash=False)
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
    #: Pairs of a prefix that names have in some checkpoints and the prefix that stands for it here. The first counts.
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    #: Pattern of the beginnings of names, in checkpoints, of what text does not reach; "" if there is nothing of it.
    passed_over: str = ""
    #: Whether checkpoints store the weights of decoder layers as `[in_features, out_features]`.
    is_transposed: bool = False

    def of_stored(self, name: str) -> str | None:
        """The name of a checkpoint's tensor here; None for a tensor that text does not reach."""
        if self.passed_over and re.match(self.passed_over, name):
            return None
        for stored, own in self.stored_prefixes:
            if name.startswith(stored):
                return own + name[len(stored) :]
        return name

    def spellings(self, name: str) -> tuple[str, ...]:
        """Names that checkpoints may have for the tensor `name`."""
        prefixes = ((stored, own) for stored, own in self.stored_prefixes if name.startswith(own))
        return tuple(dict.fromkeys([name, *(stored + name[len(own) :] for stored, own in prefixes)]))


@dataclass(frozen=True, slots=True)
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
    num_layers: int
    #: Query heads.
    num_heads: int
    #: Key (and value) heads.
    num_kv_heads: int
    #: Features of a head.
    head_dim: int
    #: Features inside the MLP.
    intermediate_size: int
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
    #: Packed sites whose linear layers have a bias.
    biased_sites: frozenset[PackedSite]
    #: Rotary embedding of each layer; None where queries and keys are not rotated.
    layer_ropes: tuple[RopeConfig | None, ...]
    #: Latest tokens that each layer attends to; None: all.
    sliding_windows: tuple[int | None, ...]
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

    @property
    def q_size(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def has_interleaved_rope(self) -> bool:
        """Whether some layer rotates neighbouring features together."""
        return any(rope is not None and rope.is_interleaved for rope in self.layer_ropes)

    @property
    def has_length_dependent_rope(self) -> bool:
        """Whether some layer's angles depend on how long a row is."""
        return any(rope is not None and rope.kind in ("dynamic", "longrope") for rope in self.layer_ropes)

    def parts_of_site(self, site: PackedSite) -> tuple[int, ...]:
        """Columns of a packed site as a layer splits them: queries, keys and values; gate and up; else one part."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "qkv": (self.q_size, self.kv_size, self.kv_size),
            "o": (hidden,),
            "gate_up": (inner, inner) if self.has_gate else (inner,),
            "down": (hidden,),
        }[site]

    def members_of_site(self, site: PackedSite) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of a packed site's linear layers, by name below the decoder layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        in_features = {"qkv": hidden, "o": self.q_size, "gate_up": hidden, "down": inner}[site]
        members, parts = self.names.sites[site], self.parts_of_site(site)
        if len(members) == 1:
            parts = (sum(parts),)
        assert len(members) == len(parts), f"{site}: {members} for {len(parts)} outputs"
        return {name: (part, in_features) for name, part in zip(members, parts, strict=True)}

    def batched_modules(self) -> tuple[str, ...]:
        """Linear layers that can serve many adapters in one batch: those of the decoder layers."""
        return tuple(
            f"{self.names.layers}.{layer}.{member}"
            for layer in range(self.num_layers)
            for site in PACKED_SITES
            for member in self.names.sites[site]
        )

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of every linear layer, by its name in the checkpoint (no `.weight`)."""
        of_layer = {name: shape for site in PACKED_SITES for name, shape in self.members_of_site(site).items()}
        shapes = {
            f"{self.names.layers}.{layer}.{member}": shape
            for layer in range(self.num_layers)
            for member, shape in of_layer.items()
        }
        if self.names.project_in is not None:
            shapes[self.names.project_in] = (self.hidden_size, self.embedding_size)
        if self.names.project_out is not None:
            shapes[self.names.project_out] = (self.embedding_size, self.hidden_size)
        shapes[HEAD] = (self.vocab_size, self.embedding_size)
        return shapes

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by checkpoint name. A tied head is listed like any other."""
        names = self.names
        shapes: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (self.vocab_size, self.embedding_size)}
        if names.positions is not None:
            shapes[f"{names.positions}.weight"] = (self.max_context_tokens + self.position_offset, self.hidden_size)
        biased = {member for site in self.biased_sites for member in names.sites[site]}
        for module, shape in self.linear_shapes().items():
            shapes[f"{module}.weight"] = shape
            if module.removeprefix(f"{names.layers}.").partition(".")[2] in biased:
                shapes[f"{module}.bias"] = shape[:1]
        for module, shape_of_norm in self._norm_shapes().items():
            if self.has_norm_weights:
                shapes[f"{module}.weight"] = shape_of_norm
                if self.norm_kind == "layer":
                    shapes[f"{module}.bias"] = shape_of_norm
        if self.is_classifier:
            shapes[f"{SCORE}.weight"] = (len(self.labels), self.embedding_size)
        return shapes

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        norms, of_hidden = self.names.norms, (self.hidden_size,)
        of_query, of_key = {
            "head": ((self.head_dim,), (self.head_dim,)),
            "rotated_head": ((self.head_dim,), (self.head_dim,)),
            "own_head": ((self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)),
            "whole": ((self.q_size,), (self.kv_size,)),
        }[self.head_norm]
        places: tuple[tuple[str | None, tuple[int, ...]], ...] = (
            (norms.before_attention, of_hidden),
            (norms.query, of_query),
            (norms.key, of_key),
            (norms.attention_output, of_hidden),
            (norms.after_attention, of_hidden),
            (norms.before_mlp, of_hidden),
            (norms.mlp_output, of_hidden),
            (norms.after_mlp, of_hidden),
        )
        shapes = {
            f"{self.names.layers}.{layer}.{name}": shape
            for layer in range(self.num_layers)
            for name, shape in places
            if name is not None
        }
        if self.names.final_norm is not None:
            shapes[self.names.final_norm] = of_hidden
        return shapes


@dataclass(frozen=True, slots=True)
class PackedMember:
    """Linear layer `module` gives features `start:end` of its packed layer's output."""

    module: str
    start: int
    end: int


def packed_members(model: ModelConfig, layer: int, site: PackedSite) -> tuple[PackedMember, ...]:
    """Members of one packed site of one layer, in output order."""
    members, start = [], 0
    for name, (out_features, _) in model.members_of_site(site).items():
        members.append(PackedMember(f"{model.names.layers}.{layer}.{name}", start, start + out_features))
        start += out_features
    return tuple(members)
