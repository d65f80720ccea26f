"""Parses tensor names of adapter files: the module of the base that a tensor adapts, and its role there.

`BaseLayout` is what a base model offers to an adapter: its modules and parameters by checkpoint name, with shapes.
Shapes: linear weight [out_features, in_features], embedding [vocab_size, embedding_size], bias and norm [features].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ...kernels.layouts.delta_sizes import DeltaSizes
from ..model_config.model import ModelConfig

Role = Literal[
    "lora_a",  # [rank, in_features]
    "lora_b",  # [out_features, rank]
    "lora_b_bias",  # [out_features]
    "embedding_a",  # [rank, vocab_size]
    "embedding_b",  # [hidden_size, rank]
    "magnitude",  # [out_features], DoRA
    "token_rows",  # [num_tokens, hidden_size], trainable_token_indices
    "saved_base",  # a whole parameter of the layer below the adapter
    "saved",  # a whole parameter: modules_to_save, a bias, or a saved embedding
    "saved_copy",  # the same once more, under modules_to_save's own name
    "original",  # the layer as it was before modules_to_save trained it
]
#: Last parts of the names of a base's parameters.
PARAMETERS = ("weight", "bias", "A_log", "dt_bias", "sinks", "layer_scalar")
_NO_ADAPTER = "|".join(f"{name}$" for name in PARAMETERS)
_ADAPTER = rf"(?:\.(?P<adapter>(?!{_NO_ADAPTER})[^.]+))?"
_PARAMETER = rf"\.(?P<parameter>{'|'.join(PARAMETERS)})"
# Tried in order: the last, bare one would also match the others.
_FORMS: tuple[tuple[Role, str], ...] = (
    ("lora_a", rf"lora_A{_ADAPTER}\.weight"),
    ("lora_b", rf"lora_B{_ADAPTER}\.weight"),
    ("lora_b_bias", rf"lora_B{_ADAPTER}\.bias"),
    ("embedding_a", rf"lora_embedding_A{_ADAPTER}"),
    ("embedding_b", rf"lora_embedding_B{_ADAPTER}"),
    ("magnitude", rf"lora_magnitude_vector{_ADAPTER}(?:\.weight)?"),
    ("token_rows", rf"token_adapter\.trainable_tokens_delta{_ADAPTER}"),
    ("saved_base", rf"(?:token_adapter\.)?base_layer{_PARAMETER}"),
    ("saved_copy", rf"modules_to_save{_ADAPTER}{_PARAMETER}"),
    ("original", rf"original_module{_PARAMETER}"),
)
_PATTERNS = tuple((role, re.compile(rf"(?P<module>.+?)\.{form}$")) for role, form in _FORMS)
_BARE = re.compile(rf"(?P<module>.+){_PARAMETER}$")
# Words only PEFT's own tensors carry: such a name is never a plain parameter of the base.
_PEFT_WORDS = re.compile(r"(?:^|\.)(?:lora_|base_layer|token_adapter|modules_to_save|original_module|prompt_)")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module)\.")
LORA_ROLES: frozenset[Role] = frozenset(("lora_a", "lora_b", "lora_b_bias", "embedding_a", "embedding_b", "magnitude"))


@dataclass(frozen=True, slots=True)
class TensorName:
    """The parsed name of one tensor."""

    #: Name in the file.
    key: str
    #: Module of the trained model.
    module: str
    #: Part that the tensor plays in the module.
    role: Role
    #: Name of the adapter within the key; None where there is none.
    adapter: str | None = None
    #: Parameter of the module, such as `weight`; None unless the tensor is a whole parameter.
    parameter: str | None = None


def trained_name(key: str) -> str:
    """A tensor's key without what PEFT, compilation and sharding put around the trained model."""
    return _WRAPPERS.sub("", key.removeprefix("base_model.model."))


def parse_name(key: str) -> TensorName | None:
    """Parse a tensor's key; None when it is not of any known form."""
    name = trained_name(key)
    for role, pattern in _PATTERNS:
        match = pattern.match(name)
        if match and not _PEFT_WORDS.search(match["module"]):
            found = match.groupdict()
            return TensorName(key, match["module"], role, found.get("adapter"), found.get("parameter"))
    match = _BARE.match(name)
    if match and not _PEFT_WORDS.search(name):
        return TensorName(key, match["module"], "saved", None, match["parameter"])
    return None


@dataclass(frozen=True, slots=True)
class Renaming:
    """How module names of the trained model differ from the base's: pairs of (trained prefix, base prefix)."""

    pairs: tuple[tuple[str, str], ...]
    note: str = ""

    def to_base(self, module: str) -> str:
        """The base's name for a module of the trained model."""
        for trained, base in self.pairs:
            if module.startswith(trained):
                return base + module[len(trained) :]
        return module

    def to_trained(self, module: str) -> str:
        """The trained model's name for a module of the base."""
        for trained, base in self.pairs:
            if module.startswith(base):
                return trained + module[len(base) :]
        return module


# The text decoder inside a vision-language model goes by other names than the same decoder alone, and a model without
# its head (`AutoModel`) by names that begin below it.
RENAMINGS: tuple[Renaming, ...] = (
    Renaming(()),
    Renaming((("model.language_model.", "model."),), "tensor names begin with model.language_model, read as model"),
    Renaming((("language_model.", ""),), "tensor names begin with language_model, which is left out"),
    Renaming((("language_model.", "model."),), "tensor names begin with language_model, read as model"),
    Renaming((("lm_head", "lm_head"), ("", "model.")), "tensor names begin below model, which is put in front"),
    Renaming(
        (("lm_head", "lm_head"), ("", "transformer.")), "tensor names begin below transformer, which is put in front"
    ),
    Renaming((("model.text_model.", "model."),), "tensor names begin with model.text_model, read as model"),
    Renaming((("text_model.", "model."),), "tensor names begin with text_model, read as model"),
)


def choose_renaming(modules: Iterable[str], base_modules: Collection[str]) -> Renaming:
    """The one renaming under which most modules are found in the base; the plainest wins a draw."""
    names = tuple(modules)
    found: dict[Renaming, int] = {}
    for renaming in RENAMINGS:
        found[renaming] = sum(renaming.to_base(name) in base_modules for name in names)
        if found[renaming] == len(names):
            return renaming
    return max(RENAMINGS, key=lambda renaming: found[renaming])  # the first of equals


@dataclass(frozen=True, slots=True, eq=False)
class BaseLayout:
    """Names and shapes of a base. One base has one layout, which is compared by identity."""

    #: Name of the family: `model_type` in `config.json`.
    family: str
    #: Name of the embedding.
    embedding: str
    #: Whether the head is the embedding.
    is_tied: bool
    #: Shape [out_features, in_features] of each linear layer, head included, by name.
    linear: Mapping[str, tuple[int, int]]
    #: Linear layers whose pairs the engine applies unmerged.
    batched: frozenset[str]
    #: Shape of every parameter by name; a tied head is listed on its own, with the embedding's shape.
    parameters: Mapping[str, tuple[int, ...]]
    #: Whether `config.json` ties a head that the checkpoint stores apart, see `ModelConfig`.
    says_tied: bool = False
    #: Name of the decoder layers, which are numbered below it.
    layers: str = "model.layers"
    #: Number of decoder layers.
    num_layers: int = 0
    #: Query heads.
    num_heads: int = 0
    #: Key heads.
    num_kv_heads: int = 0
    #: Features that a head reads.
    embedding_size: int = 0
    #: Sizes of the layers of the gated delta rule; None where there are none.
    delta: DeltaSizes | None = None
    #: Whether the base is a classifier with a head of its own.
    has_score: bool = False
    #: Names of the base's labels; empty where it names none.
    labels: tuple[str, ...] = ()
    #: Kind of a classifier's numbers by the base's configuration; "" where it says nothing.
    problem_type: str = ""
    #: `model_type` of the model with images whose text model the base is; "" for a model of text alone.
    wrapper: str = ""
    #: Pattern of the beginnings of names of a wrapper's modules that text does not reach.
    towers: str = ""
    #: Pattern of the beginnings of names of keys and values that layers have and do not read.
    unread: str = ""
    #: Whether checkpoints, and adapters that save whole layers, have weights of decoder layers transposed.
    is_transposed: bool = False

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.parameters[f"{self.embedding}.weight"][0]

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that owns a parameter, in checkpoint order."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.parameters))

    def is_in_tower(self, key: str) -> bool:
        """Whether a tensor of an adapter is of a module that no token of text reaches."""
        return bool(self.towers and re.match(self.towers, trained_name(key)))

    def is_unread(self, key: str) -> bool:
        """Whether a tensor of an adapter is of keys or values of a layer that reads those of another."""
        return bool(self.unread and re.match(self.unread, trained_name(key)))

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Modules that can carry a LoRA pair: the linear layers, the head and the embedding."""
        return (self.embedding, *self.linear)


@lru_cache(maxsize=8)
def base_layout(model: ModelConfig) -> BaseLayout:
    """The layout of one base model, from its configuration alone."""
    return BaseLayout(
        family=model.family,
        embedding=model.names.embedding,
        is_tied=model.is_tied,
        linear=model.linear_shapes(),
        batched=frozenset(model.batched_modules()),
        parameters=model.parameter_shapes(),
        says_tied=model.says_tied,
        layers=model.names.layers,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        embedding_size=model.embedding_size,
        delta=next((layer.delta for layer in model.layers if layer.delta is not None), None),
        has_score=model.is_classifier,
        labels=model.labels,
        problem_type=model.problem_type,
        wrapper=model.wrapper,
        towers=model.names.passed_over if model.wrapper else "",
        unread=model.names.unread,
        is_transposed=model.names.is_transposed,
    )
