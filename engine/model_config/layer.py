"""Describes one decoder layer: how tokens are mixed, and the sizes of its parts. No torch here.

A layer mixes tokens by attention or by the gated delta rule (`kernels.gated_delta`), and its MLP follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...kernels.layouts.delta_sizes import DeltaSizes
from ...kernels.layouts.pages import HeadShape

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]


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
class Attention:
    """Attention of one layer to keys and values of a row's tokens."""

    #: Query heads.
    num_heads: int
    #: Key (and value) heads.
    num_kv_heads: int
    #: Features of a head.
    head_dim: int
    #: Rotary embedding; None where queries and keys are not rotated.
    rope: RopeConfig | None = None
    #: Latest tokens that a token attends to; None: all.
    window: int | None = None
    #: Whether heads' outputs are multiplied by the sigmoid of a gate, whose features follow each query head's.
    has_output_gate: bool = False
    #: Whether value heads are divided by their root mean square.
    has_value_norm: bool = False
    #: Whether values are the keys as projected, before their norm and rotation.
    keys_are_values: bool = False
    #: Number of the earlier layer whose keys and values it reads; None: it computes and stores its own.
    source: int | None = None

    @property
    def q_size(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of the projections that its input goes through: queries, keys and values, as far as it has them."""
        queries = 2 * self.q_size if self.has_output_gate else self.q_size
        num_others = 0 if self.source is not None else 1 if self.keys_are_values else 2
        return (queries, *[self.kv_size] * num_others)

    @property
    def stored(self) -> HeadShape:
        """Shape of the heads that it stores or reads."""
        return HeadShape(self.num_kv_heads, self.head_dim)

    @property
    def is_plain(self) -> bool:
        """Whether it has queries, keys and values of its own, and no gate or norm of values."""
        return not (self.has_output_gate or self.has_value_norm or self.keys_are_values) and self.source is None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer."""

    #: How it mixes tokens.
    mixer: Attention | DeltaSizes
    #: Features inside the MLP.
    intermediate_size: int

    @property
    def attention(self) -> Attention | None:
        """Its attention; None for another kind of layer."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def delta(self) -> DeltaSizes | None:
        """Its sizes as a layer of the gated delta rule; None for another kind of layer."""
        return self.mixer if isinstance(self.mixer, DeltaSizes) else None

    @property
    def mixed_size(self) -> int:
        """Features of a token behind the mixer, before they are projected to the residual stream."""
        return self.mixer.q_size if isinstance(self.mixer, Attention) else self.mixer.num_values
