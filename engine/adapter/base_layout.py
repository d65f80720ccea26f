"""What a base model offers to an adapter: its modules and parameters by checkpoint name, with shapes.

Shapes: linear weight [out_features, in_features], embedding [vocab_size, hidden_size], bias and norm [features].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import ModelConfig

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """Names and shapes of a base. A tied head is listed as a parameter of its own, with the embedding's shape."""

    family: str
    embedding: str
    is_tied: bool
    linear: Mapping[str, tuple[int, int]]
    parameters: Mapping[str, tuple[int, ...]]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.parameters[f"{self.embedding}.weight"][0]

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that owns a parameter, in checkpoint order."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.parameters))

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Modules that can carry a LoRA pair: the linear layers, the head and the embedding."""
        return (self.embedding, *self.linear)


def base_layout(model: ModelConfig) -> BaseLayout:
    """The layout of one base model, from its configuration alone."""
    embedding = "model.embed_tokens"
    linear = model.linear_shapes()
    parameters: dict[str, tuple[int, ...]] = {f"{embedding}.weight": (model.vocab_size, model.hidden_size)}
    for name, shape in linear.items():
        parameters[f"{name}.weight"] = shape
        if _has_bias(model, name):
            parameters[f"{name}.bias"] = shape[:1]
    parameters |= _norms(model)
    return BaseLayout(model.family, embedding, model.is_tied, linear, parameters)


def _has_bias(model: ModelConfig, name: str) -> bool:
    site = name.rpartition(".")[2]
    if site in ("q_proj", "k_proj", "v_proj"):
        return model.has_qkv_bias
    if site == "o_proj":
        return model.has_o_bias
    return site in ("gate_proj", "up_proj", "down_proj") and model.has_mlp_bias


def _norms(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    norms: dict[str, tuple[int, ...]] = {}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        norms[f"{prefix}.input_layernorm.weight"] = (model.hidden_size,)
        norms[f"{prefix}.post_attention_layernorm.weight"] = (model.hidden_size,)
        if model.has_qk_norm:
            norms[f"{prefix}.self_attn.q_norm.weight"] = (model.head_dim,)
            norms[f"{prefix}.self_attn.k_norm.weight"] = (model.head_dim,)
    norms["model.norm.weight"] = (model.hidden_size,)
    return norms
