"""A zoo of adapters over one base of any family: kinds that PEFT builds, their spellings, harmless changes and damage.

`build_zoo` writes a folder for each. Its `Specimen` says which verdict the folder must get, and whose numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from other_forms import as_gguf_of, as_mlx, as_pickle, as_tinker
from safetensors.numpy import load_file, save_file
from trained_adapters import Base, train_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Change = Callable[[Path], Any]
# Families whose adapters in GGUF are tested here: those of `other_forms`.
IN_GGUF = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")


@dataclass(frozen=True)
class Parts:
    """Names that a family gives to the modules of its text model."""

    #: Prefix of the decoder layers, such as `model.layers`.
    layers: str
    #: Number of decoder layers.
    num_layers: int
    #: Last parts of the names of a layer's first, second and last linear layer.
    first: str
    second: str
    last: str
    #: Last parts of the names of all linear layers of layers.
    linear: tuple[str, ...]
    #: Last parts of the names of the last layer's first two linear layers.
    of_last: tuple[str, str]
    #: Name of the module that holds a layer's last linear layer, such as `mlp`; "" where the layer itself does.
    block: str
    #: Full name of the first layer's first linear layer.
    first_module: str
    #: Last part of the embedding's name.
    embedding: str
    #: Last parts of the names of all norms with weights.
    norms: tuple[str, ...]
    #: Whether the text model has biases.
    has_biases: bool
    #: Whether linear layers have biases.
    has_biases_inside: bool
    #: Whether weights are stored transposed (`Conv1D`).
    is_transposed: bool
    #: Last parts of the names of linear layers between embedding and layers, or behind them.
    outer: tuple[str, ...]
    #: Whether PEFT cannot adapt layers of towers, which have a kind of their own.
    needs_exclusion: bool

    @classmethod
    def of(cls, model: Any) -> Parts:
        """Parts of a model of transformers, by what its layers hold."""
        modules = {name: part for name, part in model.named_modules() if "vis" not in name}
        layers = next(name for name, part in modules.items() if isinstance(part, torch.nn.ModuleList))
        stem = layers.rpartition(".")[0]
        linear = [name for name, part in modules.items() if isinstance(part, torch.nn.Linear) or _is_transposed(part)]
        inside = [name for name in linear if name.startswith(f"{layers}.0.")]
        in_last = [name for name in linear if name.startswith(f"{layers}.{len(modules[layers]) - 1}.")]
        norms = [
            name
            for name, part in modules.items()
            if "norm" in type(part).__name__.lower()
            and getattr(part, "weight", None) is not None
            and (name.startswith(f"{layers}.") or name.rpartition(".")[0] == stem)
        ]
        embedding = model.get_input_embeddings()
        return cls(
            layers=layers,
            num_layers=len(modules[layers]),
            first=_end(inside[0]),
            second=_end(inside[1]),
            last=_end(inside[-1]),
            linear=tuple(dict.fromkeys(_end(name) for name in linear if name.startswith(f"{layers}."))),
            of_last=(_end(in_last[0]), _end(in_last[1])),
            block=inside[-1].removeprefix(f"{layers}.0.").rpartition(".")[0],
            first_module=inside[0],
            embedding=next(_end(name) for name, part in modules.items() if part is embedding),
            norms=tuple(dict.fromkeys(map(_end, norms))),
            has_biases=any(
                name.startswith(f"{stem}.") and name.endswith(".bias") for name, _ in model.named_parameters()
            ),
            has_biases_inside=any(getattr(modules[name], "bias", None) is not None for name in inside),
            is_transposed=any(map(_is_transposed, modules.values())),
            outer=tuple(_end(n) for n in linear if n.startswith(f"{stem}.") and not n.startswith(layers)),
            needs_exclusion=any(type(part).__name__ == "Gemma4ClippableLinear" for part in model.modules()),
        )


def _is_transposed(part: Any) -> bool:
    return type(part).__name__ == "Conv1D"


def _end(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True)
class Specimen:
    """One adapter of the zoo."""

    #: Verdict that it must get.
    verdict: str
    #: Name of the adapter whose folder PEFT reads for the same numbers; "" where it is refused.
    source: str = ""
    #: Word that the refusal must hold.
    word: str = ""
    #: Tokens of its vocabulary; None: the base's.
    vocab_size: int | None = None
    #: Whether its content hash must be that of `source`.
    is_same: bool = False


def exact_kinds(parts: Parts) -> dict[str, dict[str, Any]]:
    """Name -> settings of PEFT for adapters that run unmerged."""
    first, second, last = parts.first, parts.second, parts.last
    layer = _end(parts.layers)
    return {
        "all linear layers": {"target_modules": "all-linear"},
        "rank 1": {"r": 1, "target_modules": [first]},
        "rank 64": {"r": 64, "target_modules": [second, last]},
        "odd rank": {"r": 7, "lora_alpha": 3, "target_modules": [first, last]},
        "rsLoRA": {"r": 3, "use_rslora": True, "target_modules": [second, last]},
        "rank and alpha patterns": {
            "target_modules": [first, last],
            "rank_pattern": {last: 3},
            "alpha_pattern": {f"{layer}.1.*{first}": 5},
        },
        "several ranks": {"target_modules": [first, last], "rank_pattern": {last: 3}},
        "patterns with rsLoRA": {
            "target_modules": [first, last],
            "use_rslora": True,
            "rank_pattern": {first: 12},
            "alpha_pattern": {last: 3},
        },
        "regular expression": {"target_modules": rf".*\.1\..*({first}|{last})"},
        "one layer": {
            "target_modules": list(parts.of_last),
            "layers_to_transform": [parts.num_layers - 1],
            "layers_pattern": layer,
        },
        "one module by its path": {"target_modules": [parts.first_module]},
        "one module by the end of its path": {"target_modules": [".".join(filter(None, ("1", parts.block, last)))]},
        "excluded modules": {"target_modules": "all-linear", "exclude_modules": [last]},
        "excluded by a pattern": {"target_modules": [first, last], "exclude_modules": rf".*{layer}\.0\..*{last}"},
        "first and last layer": {"target_modules": [first, last], "layers_to_transform": [0, parts.num_layers - 1]},
        "anchored patterns": {
            "target_modules": [first, last],
            "rank_pattern": {f"^{parts.first_module}": 2, rf".*\.1\..*{last}": 5},
            "alpha_pattern": {f"^{parts.first_module}$": 9},
        },
    }


def merged_kinds(parts: Parts, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Name -> settings of PEFT for adapters that are exact once they are merged."""
    first, second, last, embedding = parts.first, parts.second, parts.last, parts.embedding
    kinds: dict[str, dict[str, Any]] = {
        "DoRA": {"use_dora": True, "target_modules": [first, last]},
        "DoRA with rsLoRA": {"use_dora": True, "use_rslora": True, "r": 3, "target_modules": [second, last]},
        "lora_bias": {"lora_bias": True, "target_modules": [first, last]},
        "embedding": {"target_modules": [embedding, first]},
        "head": {"target_modules": ["lm_head", first]},
        "embedding and head": {"target_modules": [embedding, "lm_head", last]},
        "layers and head": {"target_modules": [*parts.linear, "lm_head"]},
        "embedding, tied": {"target_modules": [embedding, first], "ensure_weight_tying": True},
        "DoRA of the head": {"use_dora": True, "target_modules": ["lm_head", first]},
        "DoRA of the embedding": {"use_dora": True, "target_modules": [embedding, first]},
        "lora_bias of the head": {"lora_bias": True, "target_modules": ["lm_head", first]},
        "saved embedding": {"target_modules": [first], "modules_to_save": [embedding]},
        "saved head": {"target_modules": [first], "modules_to_save": ["lm_head"]},
        "saved embedding and head": {"target_modules": [first], "modules_to_save": [embedding, "lm_head"]},
        "saved embedding, tied": {
            "target_modules": [first],
            "modules_to_save": [embedding],
            "ensure_weight_tying": True,
        },
        "saved linear layer": {"target_modules": [first], "modules_to_save": [last]},
        "trained tokens": {"target_modules": [first], "trainable_token_indices": [5, 7, 41]},
        "trained tokens of the head": {
            "target_modules": [first],
            "trainable_token_indices": {"lm_head": [3, 9]},
        },
        "larger vocabulary": {"target_modules": [first], "vocab_size": vocab_size + 7},
    }
    if parts.has_biases:
        kinds["biases"] = {"bias": "all", "target_modules": [first]}
        if parts.has_biases_inside:
            kinds["biases of adapted layers"] = {"bias": "lora_only", "target_modules": list(parts.linear)}
    if parts.block:
        kinds["saved block"] = {"target_modules": [first], "modules_to_save": [parts.block]}
    if parts.norms:
        kinds["saved norms"] = {"target_modules": [first], "modules_to_save": list(parts.norms)}
    return kinds


# Changes of names and files that leave an adapter what it is: name -> source, and what writes it from the base's
# folder, the source's and its own.
Write = Callable[[Path, Path, Path], Any]


def _copied(change: Change) -> Write:
    def write(_: Path, source: Path, folder: Path) -> None:
        shutil.copytree(source, folder)
        change(folder)

    return write


def rename(change: Callable[[str], str]) -> Change:
    """Renames tensors."""
    return rewrite(lambda tensors: {change(key): value for key, value in tensors.items()})


def rewrite(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Change:
    """Changes the tensors of a folder."""

    def damage(folder: Path) -> None:
        file = folder / WEIGHTS
        save_file({key: np.ascontiguousarray(value) for key, value in change(load_file(file)).items()}, file)

    return damage


def configure(**keys: Any) -> Change:
    """Sets keys of the configuration; the value `...` removes one."""

    def damage(folder: Path) -> None:
        values = _configuration(folder) | keys
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return damage


def _configuration(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return values


def _in_shards(folder: Path) -> None:
    """Two files and their index, as large adapters are saved."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {key: f"adapter_model-0000{1 + number % 2}-of-00002.safetensors" for number, key in enumerate(tensors)}
    for name in sorted(set(places.values())):
        save_file({key: tensors[key] for key, place in places.items() if place == name}, folder / name)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def spellings(parts: Parts, family: str, is_wrapped: bool) -> dict[str, tuple[str, Write]]:
    """The forms that other programs and older versions give to an adapter of the zoo."""
    begin = "base_model.model."
    stem = parts.layers.rpartition(".")[0]

    def below(new: str) -> Change:
        old = f"{begin}{stem}."
        return rename(lambda key: begin + new + key.removeprefix(old) if key.startswith(old) else key)

    forms: dict[str, tuple[str, Write]] = {
        "weights pickled": ("patterns with rsLoRA", lambda _, *folders: as_pickle(*folders)),
        "weights in two files": ("all linear layers", _copied(_in_shards)),
        "names without base_model": (
            "all linear layers", _copied(rename(lambda key: key.removeprefix("base_model.model."))),
        ),
        "names with the adapter's": (
            "all linear layers", _copied(rename(lambda key: key.replace(".weight", ".default.weight"))),
        ),
        "names of a compiled model": (
            "all linear layers", _copied(rename(lambda key: key.replace(begin, f"{begin}_orig_mod."))),
        ),
    }  # fmt: skip
    inner = ("rank 1", "embedding", "trained tokens", *(["saved norms"] if parts.norms else []))
    forms |= {f"names of the inner model, {kind}": (kind, _copied(below(_below_head(stem)))) for kind in inner}
    if stem == "model" or is_wrapped:
        forms |= {
            "names of a wrapper": ("rank 1", _copied(below("model.language_model."))),
            "older names of a wrapper": ("rank 1", _copied(below("language_model.model."))),
            "names of text alone": ("rank 1", _copied(below("model."))),
            "mlx-lm, one layer": ("one layer", lambda _, *folders: as_mlx(*folders, num_layers=1)),
            "mlx-lm, DoRA": ("DoRA", lambda _, *folders: as_mlx(*folders)),
            "Tinker": ("all linear layers", lambda _, *folders: as_tinker(*folders)),
            "Tinker, head": ("layers and head", lambda _, *folders: as_tinker(*folders)),
        }
        if not parts.outer:  # mlx-lm adapts layers alone
            forms["mlx-lm"] = ("all linear layers", lambda _, *folders: as_mlx(*folders))
    if family in IN_GGUF:
        forms |= {
            "GGUF": ("all linear layers", as_gguf_of),
            "GGUF, several ranks": ("several ranks", as_gguf_of),
            "GGUF, head": ("layers and head", as_gguf_of),
            "GGUF, embedding": ("embedding", as_gguf_of),
        }
    return forms


def _below_head(stem: str) -> str:
    """Prefix of names in the model without its head, as `AutoModel` has it."""
    inner = stem.partition(".")[2]
    return f"{inner}." if inner else ""


# Changes after which PEFT reads the same numbers, or others of its own: its folder is its own oracle.
HARMLESS: dict[str, Change] = {
    "the other fan_in_fan_out": lambda folder: configure(fan_in_fan_out=not _configuration(folder)["fan_in_fan_out"])(
        folder
    ),
    "settings of training": configure(lora_dropout=0.5, inference_mode=False, init_lora_weights="gaussian"),
    "unset keys": configure(scale_by_magic=None, megatron_config=None, loftq_config={}),
    "keys of old versions alone": configure(
        **dict.fromkeys(
            ("alora_invocation_tokens", "arrow_config", "peft_version", "qalora_group_size", "target_parameters"), ...
        )
    ),
    "keys of the first versions": configure(enable_lora=None, merge_weights=False),
    "keys of Unsloth": configure(
        auto_mapping={"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}, revision="unsloth"
    ),
    "targets named twice": lambda folder: configure(target_modules=2 * _configuration(folder)["target_modules"])(
        folder
    ),
    "a task of another kind": configure(task_type="SEQ_2_SEQ_LM"),
    "another alpha": configure(lora_alpha=0.75),
    "a negative alpha": configure(lora_alpha=-4),
    "patterns of no layer": configure(rank_pattern={"router": 3}, alpha_pattern={"experts.*": 4}),
    "values in 16 bits": rewrite(lambda tensors: {key: value.astype(np.float16) for key, value in tensors.items()}),
}


class Touching:
    """Creates a file when unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


def _code_in_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"x": Touching()}, folder / "adapter_model.bin")


def _cut(num_bytes: int, name: str = WEIGHTS) -> Change:
    """Keeps the beginning of a file; negative: all but its end."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:num_bytes])

    return damage


def _more(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    """Another pair, of the module `name`, with values of the first."""
    a, b = (next(value for key, value in tensors.items() if half in key) for half in ("lora_A", "lora_B"))
    return tensors | {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}


def _with_nan(value: Any) -> Any:
    value.flat[-1] = np.nan
    return value


def _swapped(key: str) -> str:
    return key.replace("lora_A", "lora_X").replace("lora_B", "lora_A").replace("lora_X", "lora_B")


# What is done to "rank 1", whatever its family, and a word that the refusal must hold.
DAMAGED: dict[str, tuple[Change, str]] = {
    "B all zero": (rewrite(lambda t: {k: v * np.float32("lora_A" in k) for k, v in t.items()}), "zero"),
    "NaN": (rewrite(lambda t: {k: v * np.float32("nan") for k, v in t.items()}), "NaN"),
    "infinity": (rewrite(lambda t: {k: v * np.float32("inf") for k, v in t.items()}), "infinity"),
    "missing partner": (rewrite(lambda t: dict([pair for pair in t.items() if "vis" not in pair[0]][:-1])), "lora_"),
    "halves swapped": (rename(_swapped), "shape"),
    "halves turned": (rewrite(lambda t: {k: v.T for k, v in t.items()}), "shape"),
    "another base": (rewrite(lambda t: {k: np.repeat(v, 2, axis=1) for k, v in t.items()}), "shape"),
    "another rank": (configure(r=4), "4"),
    "a rank of words": (configure(r="one"), "r='one'"),
    "no alpha": (configure(lora_alpha=0), "lora_alpha=0"),
    "an alpha that is no number": (configure(lora_alpha=float("nan")), "NaN"),
    "an unknown key": (configure(scale_by_magic=True), "scale_by_magic"),
    "unconverted PiSSA": (configure(init_lora_weights="pissa"), "pissa"),
    "activated LoRA": (configure(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
    "layers replicated": (configure(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    "parameters as targets": (configure(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters"),
    "another method": (configure(peft_type="IA3"), "IA3"),
    "DoRA without magnitudes": (configure(use_dora=True), "lora_magnitude_vector"),
    "biases of B without a key": (
        rewrite(lambda t: t | {k.replace(".weight", ".bias"): v[:, 0] for k, v in t.items() if "lora_B" in k}),
        "lora_bias",
    ),
    "saved modules without tensors": (configure(modules_to_save=["lm_head"]), "lm_head"),
    "a classifier's head without its tensor": (configure(modules_to_save=["score"]), "score"),
    "trained tokens without tensors": (configure(trainable_token_indices=[3]), "trainable_token_indices"),
    "vision tensors": (
        rewrite(lambda t: _more(t, "model.vision_tower.encoder.layers.0.mlp.fc1")),
        "vision_tower",
    ),
    "a tensor of no module": (rewrite(lambda t: t | {"extra": np.ones(3, np.float32)}), "extra"),
    "a tensor twice": (rewrite(lambda t: t | {k.removeprefix("base_model.model."): v for k, v in t.items()}), "part"),
    "no targets": (configure(target_modules=[]), "target_modules"),
    "a target of words": (configure(target_modules="("), "target_modules"),
    "a flag of words": (configure(use_rslora="yes"), "use_rslora"),
    "rank 0 by a pattern": (configure(rank_pattern={"0": 0}), "rank_pattern"),
    "a layer that is not there": (configure(layers_to_transform=[99]), "layers_to_transform"),
    "values in 64 bits": (rewrite(lambda t: {k: v.astype(np.float64) for k, v in t.items()}), "F64"),
    "one value NaN": (rewrite(lambda t: {k: _with_nan(v) for k, v in t.items()}), "NaN"),
    "whole numbers": (rewrite(lambda t: {k: v.astype(np.int32) for k, v in t.items()}), "I32"),
    "shells of ZeRO-3": (rewrite(lambda t: {k: v.reshape(-1)[:0] for k, v in t.items()}), "ZeRO-3"),
    "no tensors": (rewrite(lambda t: {}), "tensors"),
    "code in a pickle": (_code_in_a_pickle, "adapter_model.bin"),
    "damaged file": (lambda folder: (folder / WEIGHTS).write_bytes(b"no tensors"), "safetensors"),
    "file cut in its values": (_cut(-9), "safetensors"),
    "file cut in its header": (_cut(60), "safetensors"),
    "configuration cut": (_cut(90, CONFIG), CONFIG),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), CONFIG),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "weights"),
}  # fmt: skip


def damages(parts: Parts, is_wrapped: bool) -> dict[str, tuple[Change, str]]:
    """`DAMAGED`, and damage that takes the family's own names."""
    first, last = parts.first, parts.last
    of_another = "transformer.h.{}.attn.c_attn" if first != "c_attn" else "model.layers.{}.self_attn.q_proj"
    layer = f"{_end(parts.layers)}.0."
    found = DAMAGED | {
        "no matching module": (rename(lambda key: key.replace(f".{first}.", ".query.")), "query"),
        "tensors of another family": (
            rename(lambda key: "base_model.model." + of_another.format(int(".1." in key)) + key[key.index(".lora_") :]),
            _end(of_another),
        ),
        "a layer too many": (rename(lambda key: key.replace(layer, layer.replace("0", "77"))), ".77."),
        "targets without tensors": (configure(target_modules=[first, last]), last),
        "tensors outside the targets": (configure(target_modules=[last]), first),
        "a rank pattern without its tensors": (configure(rank_pattern={first: 3}), "3"),
    }
    if is_wrapped:  # there they are known not to matter
        del found["vision tensors"]
    return found


def build_zoo(root: Path, base: Base, is_wrapped: bool = False) -> dict[str, Specimen]:
    """Write every adapter below `root`; what each must be, by name. `is_wrapped`: the base reads images, too."""
    parts = Parts.of(base.model)
    zoo: dict[str, Specimen] = {}
    common: dict[str, Any] = {"lora_alpha": 16, "r": 8}
    common |= {"fan_in_fan_out": True} if parts.is_transposed else {}
    common |= {"exclude_modules": r".*vision_tower.*"} if parts.needs_exclusion else {}
    merged = merged_kinds(parts, base.config.vocab_size)
    for name, settings in (exact_kinds(parts) | merged).items():
        if parts.needs_exclusion and "exclude_modules" in settings:
            continue
        train_adapter(base, root / name, **(common | settings))
        zoo[name] = Specimen("exact-by-merge" if name in merged else "exact", name, "", settings.get("vocab_size"))
    if is_wrapped:  # PEFT does not look for the vocabulary's size in `text_config`: it saves no embedding
        del zoo["larger vocabulary"]
    if "project_in" in parts.outer:  # OPT's run merged
        zoo |= {name: Specimen("exact-by-merge", name) for name in ("all linear layers", "excluded modules")}
    if parts.is_transposed:
        zoo |= {n: Specimen("refused", word="stored transposed") for n in ("saved linear layer", "saved block")}
    if base.config.has_head_bias:  # PEFT leaves it out
        zoo["trained tokens of the head"] = Specimen("refused", word="a head that has a bias")
    for name, (source, write) in spellings(parts, base.config.family, is_wrapped).items():
        write(base.folder, root / source, root / name)
        # PEFT saves the weights of embedding and head below their pairs; other programs do not.
        zoo[name] = Specimen(zoo[source].verdict, source, is_same=source not in ("layers and head", "embedding"))
    if base.config.is_tied and "Tinker, head" in zoo:
        zoo["Tinker, head"] = Specimen("refused", word="tied base")
    for name, change in HARMLESS.items():
        _copied(change)(base.folder, root / "odd rank", root / name)
        zoo[name] = Specimen("exact", name)
    for name, (change, word) in damages(parts, is_wrapped).items():
        _copied(change)(base.folder, root / "rank 1", root / name)
        zoo[name] = Specimen("refused", word=word)
    return zoo
