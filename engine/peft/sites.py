"""Finds the LoRA pairs of an adapter in its tensors, and checks them against the base and the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model_config.model import HEAD
from .config import AdapterConfig
from .findings import OTHER_BASE, Ledger
from .names import LORA_ROLES, BaseLayout, Renaming, Role, TensorName
from .targets import targeted, ties_targets, unmatched_targets
from .tensor_file import TensorEntry

MAX_NAMES_IN_NOTE = 5
# Layers that some bases have as one, and others as several whose outputs stand one behind the other in it.
_PACKED_LAYERS: Mapping[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# Names that other programs give the projections of the gated delta rule, or parts of them.
_DELTA_SPELLINGS: Mapping[str, str] = {
    **dict.fromkeys(
        ("in_proj_q", "in_proj_k", "in_proj_v"),
        "it is a part of in_proj_qkv, and is read only as one of the three plain pairs that Tinker trains for it",
    ),
    **dict.fromkeys(
        ("in_proj_qkvz", "in_proj_ba"),
        "Qwen3-Next and SGLang pack the projections so, with the rows of each key head together",
    ),
    "in_proj": "Megatron packs all projections so",
}
_ITS_BASE = "Use the base this adapter was trained on"


@dataclass(frozen=True, slots=True)
class Contents:
    """All that is known of an adapter before its values are read."""

    #: Keys of the configuration that take part.
    config: AdapterConfig
    #: Names and shapes of the base.
    layout: BaseLayout
    #: How module names differ from the base's.
    renaming: Renaming
    #: Parsed names of all tensors of a known form.
    names: tuple[TensorName, ...]
    #: Places of all tensors in the files, by key.
    entries: Mapping[str, TensorEntry]
    #: Shapes of the base's parameters as this adapter changes them (a resized vocabulary).
    shapes: Mapping[str, tuple[int, ...]]
    #: Modules with tensors that no answer depends on, which are passed over.
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoraSite:
    """One pair: the layer's output gains `scaling * B·A·x`, A [rank, in_features], B [out_features, rank].

    Keys are tensor names in the adapter's files.
    """

    #: The base's layer, by checkpoint name.
    module: str
    #: Rows of A.
    rank: int
    #: Factor of B·A.
    scaling: float
    #: Tensor of A.
    a_key: str
    #: Tensor of B.
    b_key: str
    #: Features of x; for the embedding, the vocabulary (x is one-hot).
    in_features: int
    #: Features of the output.
    out_features: int
    #: Tensor of DoRA's magnitudes [out_features]; None without DoRA.
    magnitude_key: str | None = None
    #: Tensor of B's bias [out_features], which is scaled like B; None without one.
    bias_key: str | None = None
    #: Whether the layer is the embedding.
    is_embedding: bool = False


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """The change of one base parameter.

    Computed in this order: start from the base's value, or from tensor `replaced_by`; put row i of `rows_key` in place
    of row `rows[i]`; add the pair of `site` (for a weight: scaling·B·A, then DoRA; for a bias: scaling times B's bias).
    A bias may be new to the base; its value there counts as zeros.
    """

    #: Checkpoint name of the parameter.
    parameter: str
    #: Shape of the result.
    shape: tuple[int, ...]
    #: Tensor that stands for the base's value; None: the base's value is kept.
    replaced_by: str | None = None
    #: Numbers of the rows that are replaced.
    rows: tuple[int, ...] = ()
    #: Tensor of these rows; None where no rows are replaced.
    rows_key: str | None = None
    #: Pair that is added; None: none is.
    site: LoraSite | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Tensors that take part, in a fixed order."""
        site = self.site
        parts: tuple[str | None, ...] = (self.replaced_by, self.rows_key)
        if site and self.parameter.endswith(".bias"):
            parts += (site.bias_key,)
        elif site:
            parts += (site.a_key, site.b_key, site.magnitude_key)
        return tuple(key for key in parts if key is not None)


def find_sites(contents: Contents, ledger: Ledger) -> tuple[LoraSite, ...]:
    """All LoRA pairs that can be applied; everything that stands against one is entered in the ledger."""
    found: dict[str, dict[Role, TensorName]] = {}
    for name in contents.names:
        if name.role in LORA_ROLES:
            found.setdefault(name.module, {})[name.role] = name
    sites = []
    known = [module for module in found if contents.renaming.to_base(module) in contents.layout.adaptable]
    ranks, scalings = contents.config.ranks(known), contents.config.scalings(known)
    for module, parts in found.items():
        scale = (ranks.get(module, 0), scalings.get(module, 0.0))
        site = _site(contents, module, parts, scale, ledger)
        if site is not None:
            sites.append(site)
            continue
        for name in parts.values():
            ledger.tensor_uses.setdefault(name.key, "refused: its partner is refused")
    _compare_with_targets(contents, set(found), ledger)
    return tuple(sorted(sites, key=lambda site: site.module))


def _why_absent(module: str, layout: BaseLayout) -> tuple[str, str]:
    """Cause and reason of a refusal of tensors for a module that the base lacks."""
    absent = f"the base has no linear layer {module!r}"
    if f"{module}.weight" in layout.parameters:
        return "no linear layer", (
            f"{module!r} is no linear layer of the base, and LoRA on it is not computed. Train the adapter on linear "
            "layers, or save this one whole (modules_to_save)"
        )
    layer, is_delta, projection = module.rpartition(".linear_attn.")
    if is_delta:
        if f"{layer}.linear_attn.in_proj_qkv" not in layout.linear:
            return (
                "linear attention",
                f"{absent}: it is of linear attention, which this base does not have. {_ITS_BASE}",
            )
        whose = _DELTA_SPELLINGS.get(projection, "no known spelling of Qwen 3.5's projections")
        return "spelling of linear attention", (
            f"{absent}: {whose}. This base has in_proj_qkv, in_proj_z, in_proj_b and in_proj_a. Convert the adapter to "
            "transformers' names, or train it with PEFT"
        )
    for packed, parts in _PACKED_LAYERS.items():
        stem = module.removesuffix(packed)
        if stem != module and {f"{stem}{part}" for part in parts} <= layout.linear.keys():
            return packed, f"{absent}: it packs {' and '.join(parts)}, which this base has apart. {_ITS_BASE}"
        part = next((part for part in parts if module.endswith(part)), None)
        if part is not None and module.removesuffix(part) + packed in layout.linear:
            return packed, f"{absent}: it is a part of {packed}, which this base has as one layer. {_ITS_BASE}"
    return "no such layer", f"{absent}. {_ITS_BASE}"


def _site(
    contents: Contents, trained: str, parts: Mapping[Role, TensorName], scale: tuple[int, float], ledger: Ledger
) -> LoraSite | None:
    """The pair of one module, or None where something stands against it. `scale`: rank and scaling by the
    configuration.
    """
    rank, scaling = scale
    module = contents.renaming.to_base(trained)
    keys = [name.key for name in parts.values()]
    if module not in contents.layout.adaptable:
        ledger.refuse_tensors(keys, *_why_absent(module, contents.layout))
        return None
    is_embedding = module == contents.layout.embedding
    a_role: Role = "embedding_a" if is_embedding else "lora_a"
    b_role: Role = "embedding_b" if is_embedding else "lora_b"
    if not _has_pair(parts, a_role, b_role, ledger):
        return None
    a, b = contents.entries[parts[a_role].key], contents.entries[parts[b_role].key]
    if not _check_shapes(contents, trained, (a, b), rank, ledger):
        return None
    weight = contents.shapes[f"{module}.weight"]
    out_features, in_features = reversed(weight) if is_embedding else weight
    magnitude, bias = _extras(contents, trained, parts, out_features, ledger)
    for name in parts.values():
        ledger.use_tensor(name.key)
    return LoraSite(module, rank, scaling, a.key, b.key, in_features, out_features, magnitude, bias, is_embedding)


def _has_pair(parts: Mapping[Role, TensorName], a_role: Role, b_role: Role, ledger: Ledger) -> bool:
    allowed = {a_role, b_role, "magnitude", "lora_b_bias"}
    stray = [name.key for role, name in parts.items() if role not in allowed]
    if stray:
        ledger.refuse_tensors(
            stray, "kind of layer", f"expected {a_role} and {b_role} for this kind of layer. Save the adapter again"
        )
        return False
    missing = [role for role in (a_role, b_role) if role not in parts]
    if missing:
        why = f"its partner {' and '.join(missing)} is missing. The adapter was not saved whole, save it again"
        ledger.refuse_tensors([name.key for name in parts.values()], "missing partner", why)
    return not missing


def _check_shapes(
    contents: Contents, trained: str, pair: tuple[TensorEntry, TensorEntry], rank: int, ledger: Ledger
) -> bool:
    """Compare A and B with the base's layer and the configured rank."""
    a, b = pair
    module = contents.renaming.to_base(trained)
    weight = contents.shapes[f"{module}.weight"]
    out_features, in_features = reversed(weight) if module == contents.layout.embedding else weight
    stored = a.shape[0] if len(a.shape) == 2 else None
    if a.shape == (rank, in_features) and b.shape == (out_features, rank):
        return True
    for entry, expected in ((a, (stored, in_features)), (b, (out_features, stored))):
        if entry.shape != expected:
            wanted = f"[{', '.join('rank' if n is None else str(n) for n in expected)}]"
            why = f"has shape {list(entry.shape)}, expected {wanted}. {OTHER_BASE}"
            ledger.refuse_tensors([entry.key], "shape", why)
    if stored is not None and stored != rank:
        why = (
            f"has rank {stored}, expected {rank} by r, rank_pattern of the configuration. "
            "Put configuration and weights of the same training run together"
        )
        ledger.refuse_tensors([a.key, b.key], "rank", why)
    return False


def _extras(
    contents: Contents, trained: str, parts: Mapping[Role, TensorName], out_features: int, ledger: Ledger
) -> tuple[str | None, str | None]:
    """Keys of DoRA's magnitude and of B's bias; each must be there exactly when the configuration says so."""
    magnitude, bias = parts.get("magnitude"), parts.get("lora_b_bias")
    wanted = (
        ("use_dora", contents.config.use_dora, magnitude, "lora_magnitude_vector"),
        ("lora_bias", contents.config.lora_bias, bias, "lora_B.bias"),
    )
    for key, is_on, name, tensor in wanted:
        if is_on and name is None:
            ledger.refuse(
                f"{trained}.{tensor}: missing, expected because {key}=True. Save the adapter again", f"{key} missing"
            )
        elif name is not None and not is_on:
            why = f"not expected, {key} is not true in the configuration. Correct {key} or save the adapter again"
            ledger.refuse_tensors([name.key], f"{key} unexpected", why)
        elif name is not None and contents.entries[name.key].shape != (out_features,):
            why = f"has shape {list(contents.entries[name.key].shape)}, expected [{out_features}]"
            ledger.refuse_tensors([name.key], f"{key} shape", why)
    return (magnitude.key if magnitude else None, bias.key if bias else None)


def targeted_modules(contents: Contents) -> set[str]:
    """The modules of the trained model that the configuration gives a pair."""
    layout, config, renaming = contents.layout, contents.config, contents.renaming
    modules = [renaming.to_trained(module) for module in layout.adaptable]
    found = targeted(config, modules, renaming.to_trained(HEAD), layout.family)
    if layout.is_tied and ties_targets(config):
        found |= {renaming.to_trained(layout.embedding), renaming.to_trained(HEAD)}
    return found


def _compare_with_targets(contents: Contents, found: set[str], ledger: Ledger) -> None:
    """Compare the modules with tensors to the modules that the configuration targets: they must be the same."""
    modules = [contents.renaming.to_trained(module) for module in contents.layout.adaptable]
    expected = targeted_modules(contents)
    for module in sorted(expected - found):
        ledger.refuse(
            f"{module}: the configuration targets it but the file has no tensors for it. "
            "The adapter was not saved whole, save it again",
            "target without tensors",
        )
    outside = (found & set(modules)) - expected
    ledger.refuse_tensors(
        sorted(name.key for name in contents.names if name.module in outside and name.role in LORA_ROLES),
        "tensors outside the targets",
        "not among the modules the configuration targets (target_modules, exclude_modules, layers_to_transform, "
        "modules_to_save). Put configuration and weights of the same training run together",
    )
    unmatched = unmatched_targets(contents.config, [*modules, *contents.passed_over])
    if unmatched:
        names = ", ".join(unmatched[:MAX_NAMES_IN_NOTE])
        ledger.notes.append(f"target_modules names {names}, which this base does not have; PEFT ignores them too")
