"""`Family`: how one family of dense models differs from Llama, and how its `config.json` is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .layer import Attention, LayerConfig, RopeConfig, RopeKind
from .model import Activation, HeadNorm, NormKind
from .names import ModuleNames
from .raw import RawConfig

# Layers that attend to a window of the latest tokens only. none; every_layer; every_layer_unless_listed: every layer,
# or those in layer_types; last_layers: those after max_window_layers where use_sliding_window allows;
# all_but_every_nth; all_but_first_of_n; unrotated_layers: those without a rope, where use_sliding_window allows.
WindowRule = Literal[
    "none",
    "every_layer",
    "every_layer_unless_listed",
    "last_layers",
    "all_but_every_nth",
    "all_but_first_of_n",
    "unrotated_layers",
]
# Layers that rotate queries and keys. windowed_layers: those with a window; windowed_layers_or_all: those, or all where
# config.json has no window; listed_layers: those that no_rope_layers does not leave out; if_asked: all where
# position_embedding_type is rope, else none; listed_thetas: those whose number in layer_rope_theta, the base of their
# frequencies, is not 0, or all where there is no list.
RopeRule = Literal[
    "no_layer",
    "every_layer",
    "windowed_layers",
    "windowed_layers_or_all",
    "listed_layers",
    "if_asked",
    "listed_thetas",
]
ALL_ROPES: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# Reads layers whose sizes differ, from the file, the heads that it gives to all, types, ropes by type, and the features
# of an MLP.
LayerReader = Callable[[RawConfig, Attention, tuple[str, ...], Mapping[str, RopeConfig], int], tuple[LayerConfig, ...]]
# Spellings of `hidden_act` and its like, and the function they mean.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
LLAMA_NAMES = ModuleNames(
    sites={
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
)

#: Values that transformers assumes for keys that most families lack.
PLAIN: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One family: how it differs from Llama, and how its `config.json` is read."""

    #: `model_type` in `config.json`.
    name: str
    #: Values that transformers assumes for keys that `config.json` lacks.
    defaults: Mapping[str, Any]
    #: Checkpoint names of the model's parts.
    names: ModuleNames = LLAMA_NAMES
    #: Published models, for the table of families.
    models: str = ""
    #: Difference from Llama in words, for the table of families.
    differs_by: str = ""
    #: Keys of `config.json` that this family alone reads, and what they decide.
    own_keys: Mapping[str, str] = field(default_factory=dict)
    #: Keys of layers that the family has besides, and that no model has which is served.
    other_layers: tuple[str, ...] = ()
    #: Key as Llama has it -> other names of it. A file has one of them.
    aliases: Mapping[str, str] = field(default_factory=dict)
    #: Formula of all norms.
    norm_kind: NormKind = "rms"
    #: Key of the number that norms add to the variance or the mean square.
    norm_eps_key: str = "rms_norm_eps"
    #: Heads and weights of the norms of queries and keys.
    head_norm: HeadNorm = "head"
    #: Key that decides whether there are norms of queries and keys; None: `names` says so.
    head_norm_key: str | None = None
    #: Key of the features inside the MLP.
    mlp_size_key: str = "intermediate_size"
    #: Whether these are four times the hidden size where the file says nothing.
    has_default_mlp_size: bool = False
    #: Whether the MLP is `down(act(gate) * up)`; else `down(act(up))`.
    has_gate: bool = True
    #: Whether several query heads may share a key head (`num_key_value_heads`).
    has_grouped_heads: bool = True
    #: Whether attention and MLP stand side by side.
    is_parallel: bool = False
    #: Whether queries, keys and values have a bias, or the name of the key that decides.
    qkv_bias: bool | str = False
    #: Whether attention's output has a bias, or the name of the key that decides.
    o_bias: bool | str = False
    #: Whether the MLP's layers have biases, or the name of the key that decides.
    mlp_bias: bool | str = False
    #: Whether the head has a bias.
    has_head_bias: bool = False
    #: Key that names the MLP's function.
    activation_key: str = "hidden_act"
    #: Names of functions in `config.json` -> the functions they mean.
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    #: Layers that attend to a window of the latest tokens.
    window_rule: WindowRule = "none"
    #: n of the rules `all_but_every_nth` and `all_but_first_of_n`.
    window_period: int = 0
    #: Key that overrides `window_period`; None: no key does.
    window_period_key: str | None = None
    #: Whether `layer_types` must name attention in every layer: the family has layers of other kinds, too.
    lists_attention: bool = False
    #: Reads the layers; None where all have the same sizes.
    read_layers: LayerReader | None = None
    #: Whether each layer has inputs of its own by token (`hidden_size_per_layer_input`), see `LayerInputs`.
    has_layer_inputs: bool = False
    #: Whether layers are of the gated delta rule where `layer_types` says `linear_attention`, or, where the file does
    #: not say it, all but every nth (`full_attention_interval`).
    has_delta_layers: bool = False
    #: Whether attention's output is multiplied by the sigmoid of a gate, see `Attention`.
    has_output_gate: bool = False
    #: Layers that rotate queries and keys.
    rope_rule: RopeRule = "every_layer"
    #: Whether neighbouring features are rotated together.
    is_rope_interleaved: bool = False
    #: Supported kinds of rotary embeddings.
    rope_kinds: tuple[RopeKind, ...] = ALL_ROPES
    #: Older names of rope kinds -> the kinds.
    rope_aliases: Mapping[str, RopeKind] = field(default_factory=dict)
    #: Whether windowed layers have a rope of their own.
    has_ropes_by_layer_type: bool = False
    #: Base of the frequencies in windowed layers that have a rope of their own; None: `rope_local_base_freq` says so.
    windowed_theta: float | None = None
    #: Whether positions have three axes, which are equal for text (`mrope_section`).
    has_position_axes: bool = False
    #: Whether `alpha` of a `dynamic` rope stretches the frequencies once and for all (NTK-aware scaling).
    has_fixed_stretch: bool = False
    #: Whether queries grow with their position by `llama_4_scaling_beta`.
    has_query_growth: bool = False
    #: Whether `partial_rotary_factor` may leave features of a head unrotated.
    can_rotate_partially: bool = False
    #: Whether embeddings are multiplied by the root of the hidden size.
    scales_embeddings: bool = False
    #: Whether `query_pre_attn_scalar`, instead of the head's size, scales the scores.
    has_query_scalar: bool = False
    #: Whether scores are not scaled.
    has_unit_scale: bool = False
    #: Fields of `ModelConfig` that are factors, and their keys. `logit_divisor` stands for 1 / `logit_scale`.
    factors: Mapping[str, str] = field(default_factory=dict)
    #: Whether `attn_logit_softcapping` is applied.
    has_attention_softcap: bool = False
    #: Whether `final_logit_softcapping` is applied.
    has_logit_softcap: bool = False
    #: Settings that are refused where they are set: transformers does not apply them, or they are not computed.
    ignored_keys: tuple[str, ...] = ()
    #: Flags that must be true where they are given.
    required_keys: tuple[str, ...] = ()

    @property
    def bias_rules(self) -> Mapping[str, bool | str]:
        """Packed site -> whether its linear layers have a bias, or the name of the key that decides."""
        return {"qkv": self.qkv_bias, "o": self.o_bias, "gate_up": self.mlp_bias, "down": self.mlp_bias}
