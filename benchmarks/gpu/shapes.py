"""The models that are measured: their sizes and configurations, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lorabatch.kernels.layouts.pages import PageLayout

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama-shaped decoder."""

    #: Name of the model.
    name: str
    #: Features of the residual stream.
    hidden: int
    #: Query heads of a layer.
    num_heads: int
    #: Key and value heads of a layer.
    num_kv_heads: int
    #: Features of a head.
    head_dim: int
    #: Features between the projections of the feed-forward block.
    intermediate: int
    #: Decoder layers.
    num_layers: int
    #: Tokens of the vocabulary.
    vocab: int
    #: Entries of `config.json` that sizes do not determine.
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def config_json(self) -> dict[str, Any]:
        """The model's `config.json`: its sizes and a Llama's usual entries, over which `settings` take precedence."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "eos_token_id": 0,
            **self.settings,
        }

    @property
    def layout(self) -> PageLayout:
        """Heads and pages of a pool that holds one layer."""
        return PageLayout(self.num_heads, self.num_kv_heads, self.head_dim, 1, PAGE_TOKENS)

    @property
    def sites(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Per packed site (qkv, o, gate_up, down): in_features, out_features of its members."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            (self.hidden, (q, kv, kv)),
            (q, (self.hidden,)),
            (self.hidden, (self.intermediate, self.intermediate)),
            (self.intermediate, (self.hidden,)),
        )

    @property
    def layer_weights(self) -> int:
        """Numbers in the linear layers of one decoder layer."""
        return sum(in_features * sum(members) for in_features, members in self.sites)

    def adapter_numbers(self, rank: int) -> int:
        """Numbers in A and B of one layer, all linear layers targeted."""
        return sum(rank * (in_features + out) for in_features, members in self.sites for out in members)


LLAMA_3_8B = ModelShape(
    "Llama-3-8B",
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate=14336,
    num_layers=32,
    vocab=128256,
    settings={"max_position_embeddings": 8192, "rope_theta": 500_000.0},
)
QWEN_2_5_7B = ModelShape(
    "Qwen2.5-7B",
    hidden=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    intermediate=18944,
    num_layers=28,
    vocab=152064,
    settings={
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
    },
)
LLAMA_3_2_1B = ModelShape(
    "Llama-3.2-1B",
    hidden=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate=8192,
    num_layers=16,
    vocab=128256,
    settings={
        "max_position_embeddings": 131072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
)
TINY = ModelShape("tiny", 48, 4, 2, 16, 64, 2, 96, settings={"max_position_embeddings": 256})
MODELS = {shape.name: shape for shape in (LLAMA_3_8B, QWEN_2_5_7B, LLAMA_3_2_1B, TINY)}
