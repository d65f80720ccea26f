"""What a base model offers to an adapter: its modules and parameters by checkpoint name, with shapes.

Shapes: linear weight [out_features, in_features], embedding [vocab_size, embedding_size], bias and norm [features].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model_config import HEAD, ModelConfig

__all__ = ["HEAD", "BaseLayout", "base_layout"]


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """Names and shapes of a base. A tied head is listed as a parameter of its own, with the embedding's shape.

    `batched` are the linear layers whose pairs the engine applies unmerged.
    """

    family: str
    embedding: str
    is_tied: bool
    linear: Mapping[str, tuple[int, int]]
    batched: frozenset[str]
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
    return BaseLayout(
        family=model.family,
        embedding=model.names.embedding,
        is_tied=model.is_tied,
        linear=model.linear_shapes(),
        batched=frozenset(model.batched_modules()),
        parameters=model.parameter_shapes(),
    )
