"""Checks that a GGUF file can be converted exactly, before its weights are read; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping

from ....system.untrusted import STOPS, shown_name
from ...errors import EngineError, ModelFilesError
from ...model_config.family import Family
from ...model_config.gguf import linear_names, norm_names
from ...model_config.model import HEAD, ModelConfig
from .config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, flags, model_config
from .file import GgufFile
from .layers import passed_over, read_layers, tensor_names
from .tokenizer import check_tokenizer

# Tensors of a layer that come first, so that large models are cut into the same shards by every version.
_FIRST = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)


def check_convertible(gguf: GgufFile) -> None:
    """Raises `ModelFilesError` and `EngineError` as `convert_gguf` does, for what the metadata says."""
    try:
        checkpoint_names(gguf)
        model_config(gguf, "float32")
        check_tokenizer(gguf.metadata)
    except (*STOPS, EngineError):
        raise
    except Exception as error:
        raise unfitting(gguf, error) from None


def unfitting(gguf: GgufFile, error: BaseException) -> ModelFilesError:
    """The error for metadata that does not fit together: text where a number should be, a vocabulary without tokens, a
    panic of the tokenizer library.
    """
    return ModelFilesError(
        f"{gguf.path}: its metadata or tensors do not fit together ({type(error).__name__}: "
        f"{shown_name(str(error))}). Fetch the file again."
    )


def checkpoint_names(gguf: GgufFile) -> dict[str, tuple[str, ...]]:
    """GGUF tensor name -> names of the checkpoint's tensors that its rows are; missing and unknown ones are refused."""
    family, num_blocks = gguf.family, gguf.num_blocks
    if num_blocks > len(gguf.tensors):
        raise ModelFilesError(
            f"{gguf.path}: block_count={num_blocks} and {len(gguf.tensors)} tensors: it is incomplete. Fetch it again."
        )
    others = {ROPE_FACTORS} | ({LONG_FACTORS, SHORT_FACTORS} if family.name == "phi3" else set())
    if (model := model_of_layers(gguf)) is not None:
        names = tensor_names(gguf.architecture, model, family)
        others |= set(passed_over(gguf, model))
    else:
        names = _top_names(family) | _names_in_layers(gguf, family)
    unknown = sorted(gguf.tensors.keys() - names.keys() - others)
    if unknown:
        raise EngineError(
            f"{gguf.path}: tensors with no place in a {gguf.architecture} model: "
            f"{', '.join(map(shown_name, unknown[:5]))}{' …' if len(unknown) > 5 else ''}. "
            "Dense models only; give a Hugging Face folder instead."
        )
    missing = sorted(names.keys() - gguf.tensors.keys() - {"output.weight"})
    if missing:
        raise ModelFilesError(
            f"{gguf.path}: missing tensors: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}. "
            "The file is incomplete (or one of a split set); fetch or join it again."
        )
    found = {ours: theirs for ours, theirs in names.items() if ours in gguf.tensors}
    if model is not None:
        _check_shapes(gguf, found, model)
    return found


def _check_shapes(gguf: GgufFile, names: Mapping[str, tuple[str, ...]], model: ModelConfig) -> None:
    """Refuse tensors of other sizes than metadata says: they are cut by these sizes."""
    shapes = model.parameter_shapes()
    for ours, (theirs,) in names.items():
        # checkpoints have axes of one number, which files leave out
        found, expected = (
            [size for size in shape if size != 1] for shape in (gguf.tensors[ours].shape, shapes[theirs])
        )
        if found != expected:
            raise ModelFilesError(
                f"{gguf.path}: {ours} has shape {found}, and metadata says {expected}: they do not fit together. Fetch "
                "the file again."
            )


def model_of_layers(gguf: GgufFile) -> ModelConfig | None:
    """The model of a file whose layers differ from one another; else None."""
    return read_layers(model_config(gguf, "float32"), gguf.family)


def _names_in_layers(gguf: GgufFile, family: Family) -> dict[str, tuple[str, ...]]:
    of_layer = _layer_names(gguf, family)
    return {
        f"blk.{block}.{ours}": tuple(f"{family.names.layers}.{block}.{name}" for name in theirs)
        for block in range(gguf.num_blocks)
        for ours, theirs in of_layer.items()
    }


def _top_names(family: Family) -> dict[str, tuple[str, ...]]:
    names = family.names
    found = {
        "token_embd.weight": f"{names.embedding}.weight",
        **{f"output_norm.{part}": f"{names.final_norm}.{part}" for part in _parts_of_norm(family)},
        "output.weight": f"{HEAD}.weight",
        **({"output.bias": f"{HEAD}.bias"} if family.has_head_bias else {}),
        **({"position_embd.weight": f"{names.positions}.weight"} if names.positions else {}),
    }
    return {ours: (theirs,) for ours, theirs in found.items()}


def _layer_names(gguf: GgufFile, family: Family) -> dict[str, tuple[str, ...]]:
    """Names of one layer's tensors. What a family may leave out is expected where the file has any of it."""
    in_layers = gguf.in_layers
    settings = {**family.defaults, **flags(gguf, family)}
    rules = family.bias_rules
    has_head_norms = family.head_norm_key is None or bool(settings.get(family.head_norm_key))
    found: dict[str, tuple[str, ...]] = {}
    for name, module in norm_names(gguf.architecture, family).items():
        if has_head_norms or name not in ("attn_q_norm", "attn_k_norm"):
            found |= {f"{name}.{part}": (f"{module}.{part}",) for part in _parts_of_norm(family)}
    for site, name, modules in linear_names(family, in_layers):
        rule = rules[site]
        has_bias = bool(settings.get(rule)) if isinstance(rule, str) else rule
        for part in ("weight", "bias") if has_bias else ("weight",):
            found[f"{name}.{part}"] = tuple(f"{module}.{part}" for module in modules)
    places = {f"{name}.weight": place for place, name in enumerate(_FIRST)}
    return dict(sorted(found.items(), key=lambda item: places.get(item[0], len(places))))


def _parts_of_norm(family: Family) -> tuple[str, ...]:
    return ("weight", "bias") if family.norm_kind == "layer" else ("weight",)
