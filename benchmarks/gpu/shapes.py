"""Sizes of the models that are measured: of their decoder layers, no weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.lora_qkv import HeadLayout

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-shaped decoder."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    num_layers: int
    vocab: int

    @property
    def layout(self) -> HeadLayout:
        """Heads and pages of a pool that holds one layer."""
        return HeadLayout(self.num_heads, self.num_kv_heads, self.head_dim, 1, PAGE_TOKENS)

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


LLAMA_3_8B = ModelShape("Llama-3-8B", 4096, 32, 8, 128, 14336, 32, 128256)
QWEN_2_5_7B = ModelShape("Qwen2.5-7B", 3584, 28, 4, 128, 18944, 28, 152064)
LLAMA_3_2_1B = ModelShape("Llama-3.2-1B", 2048, 32, 8, 64, 8192, 16, 128256)
MODELS = {shape.name: shape for shape in (LLAMA_3_8B, QWEN_2_5_7B, LLAMA_3_2_1B)}
TINY = ModelShape("tiny", 48, 4, 2, 16, 64, 2, 96)
