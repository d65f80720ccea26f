"""Reads `adapter_config.json`: strictly what takes part in the computation, and a judgement of every other key.

Keys, defaults and meaning are those of PEFT's `LoraConfig` up to 0.21. A key that takes no part is irrelevant or a
reason to refuse; one that no rule knows is refused unless it is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from .findings import Ledger
from .patterns import END, first_matches, why_invalid

T = TypeVar("T")
_MAX_LISTED_PATTERNS = 1000
Names = str | tuple[str, ...] | None  # a regular expression, a list of names, or not given


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Keys of `adapter_config.json` that take part in the computation, under PEFT's names. Defaults are ours."""

    #: Rank of the pairs.
    r: int = 8
    #: Numerator of the scaling, see `scalings`.
    lora_alpha: float = 8.0
    #: Whether the scaling is alpha/sqrt(r) instead of alpha/r.
    use_rslora: bool = False
    #: Whether pairs have DoRA's magnitude vectors.
    use_dora: bool = False
    #: Whether B has a bias.
    lora_bias: bool = False
    #: Biases of the base that were trained: `none`, `all`, or `lora_only` (layers with a pair).
    bias: str = "none"
    #: Pattern of module names -> rank; the first that matches wins over `r`.
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    #: Pattern of module names -> alpha; the first that matches wins over `lora_alpha`.
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    #: Modules with a pair; None: PEFT's default for the family.
    target_modules: Names = None
    #: Modules without a pair, though targeted.
    exclude_modules: Names = None
    #: Numbers of the layers with pairs; None: all.
    layers_to_transform: int | tuple[int, ...] | None = None
    #: Names behind which a module's layer number stands; empty: its first number.
    layers_pattern: tuple[str, ...] = ()
    #: Modules that are replaced as a whole.
    modules_to_save: tuple[str, ...] = ()
    #: Tokens whose rows of the embedding are replaced, by module name if it is a mapping; None: no tokens.
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None
    #: Whether changes of the embedding apply to a tied head, too.
    ensure_weight_tying: bool = False

    def ranks(self, modules: Collection[str]) -> dict[str, int]:
        """Rank of the pair at each module (its name in the trained model)."""
        return _first_match(self.rank_pattern, modules, self.r)

    def scalings(self, modules: Collection[str]) -> dict[str, float]:
        """Factor of B·A at each module: alpha/r, or alpha/sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv
        2312.03732).
        """
        ranks, alphas = self.ranks(modules), _first_match(self.alpha_pattern, modules, self.lora_alpha)
        return {name: alphas[name] / (math.sqrt(ranks[name]) if self.use_rslora else ranks[name]) for name in modules}


def _first_match(patterns: Mapping[str, T], modules: Collection[str], default: T) -> dict[str, T]:
    """Value of the first pattern that matches a module name, as PEFT's `get_pattern_key` chooses it."""
    found, values = first_matches(patterns, END, modules), tuple(patterns.values())
    return {name: values[found[name][0]] if name in found else default for name in modules}


def read_adapter_config(raw: Mapping[str, Any], ledger: Ledger) -> AdapterConfig:
    """Read the keys that take part; malformed values are entered as refusals and replaced by the default."""
    values: dict[str, Any] = {}
    for key in (f.name for f in fields(AdapterConfig)):
        if key not in raw:
            continue
        try:
            values[key] = _READERS[key](raw[key])
        except ValueError as error:
            ledger.refuse_key(key, raw[key], f"expected {error}. Correct {key} or save the adapter again")
        else:
            ledger.use_key(key)
    config = AdapterConfig(**values)
    _check_layer_keys(config, ledger)
    return config


def _check_layer_keys(config: AdapterConfig, ledger: Ledger) -> None:
    """PEFT refuses to load these combinations, so nothing says what they would mean."""
    if isinstance(config.target_modules, str):
        for key in ("layers_to_transform", "layers_pattern"):
            value = getattr(config, key)
            if value is not None and value != ():
                ledger.refuse_key(key, value, "expected null when target_modules is a regular expression")
    elif config.layers_pattern and config.layers_to_transform is None:
        ledger.refuse_key(
            "layers_pattern", config.layers_pattern, "expected layers_to_transform beside it. Add it or remove this key"
        )
    if config.lora_bias and config.use_dora:
        ledger.refuse_key("lora_bias", True, "expected false when use_dora is true; PEFT defines no such layer")


def read_positive_int(value: Any) -> int:
    """A whole number of at least 1. Raises `ValueError` with what was expected."""
    if type(value) is not int or value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def read_number(value: Any) -> float:
    """A finite number. Raises `ValueError` with what was expected."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("a finite number")
    return float(value)


def _flag(value: Any) -> bool:
    if value is None:
        return False
    if type(value) is not bool:
        raise ValueError("true or false")
    return value


def _bias(value: Any) -> str:
    if value not in ("none", "all", "lora_only"):
        raise ValueError("'none', 'all' or 'lora_only'")
    return str(value)


def _pattern(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError("a regular expression")
    return _valid((text,))[0]


def _valid(patterns: tuple[str, ...]) -> tuple[str, ...]:
    problem = why_invalid(patterns)
    if problem is not None:
        raise ValueError(f"a valid regular expression ({problem})")
    return patterns


def _patterns(read_value: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    def read(value: Any) -> dict[str, T]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError("an object of name patterns and values")
        _valid(tuple(value))
        return {key: read_value(item) for key, item in value.items()}

    return read


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError("a list of module names")
    return tuple(value)


def _names_or_pattern(value: Any) -> Names:
    if value is None:
        return None
    return _pattern(value) if isinstance(value, str) else _names(value)


def _layers(value: Any) -> int | tuple[int, ...] | None:
    if value is None or type(value) is int:
        return value
    return _indices(value)


def _layers_patterns(value: Any) -> tuple[str, ...]:
    if not value:
        return ()
    return _few((value,) if isinstance(value, str) else _names(value))


def _modules_to_save(value: Any) -> tuple[str, ...]:
    return _few(_names(value))


def _few(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if len(patterns) > _MAX_LISTED_PATTERNS:
        raise ValueError(f"at most {_MAX_LISTED_PATTERNS} names, not {len(patterns)}")
    return _valid(patterns)


def _indices(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("a list of whole numbers of at least 0")
    return tuple(value)


def _token_indices(value: Any) -> tuple[int, ...] | dict[str, tuple[int, ...]] | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: _unique(_indices(item)) for name, item in value.items()}
    return _unique(_indices(value))


def _unique(indices: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(indices)) != len(indices):
        raise ValueError("each token index once")
    return indices


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "r": read_positive_int,
    "lora_alpha": read_number,
    "use_rslora": _flag,
    "use_dora": _flag,
    "lora_bias": _flag,
    "bias": _bias,
    "rank_pattern": _patterns(read_positive_int),
    "alpha_pattern": _patterns(read_number),
    "target_modules": _names_or_pattern,
    "exclude_modules": _names_or_pattern,
    "layers_to_transform": _layers,
    "layers_pattern": _layers_patterns,
    "modules_to_save": _modules_to_save,
    "trainable_token_indices": _token_indices,
    "ensure_weight_tying": _flag,
}
_DESCRIPTIVE = "describes where the adapter comes from"
_TRAINING = "only acts during training"
_INITIAL = "only says how training started"
IRRELEVANT: Mapping[str, str] = {
    "auto_mapping": _DESCRIPTIVE,
    "base_model_name_or_path": f"{_DESCRIPTIVE}; shapes are checked against the base at hand",
    "revision": _DESCRIPTIVE,
    "peft_version": _DESCRIPTIVE,
    "inference_mode": _TRAINING,
    "lora_dropout": _TRAINING,
    "loftq_config": f"{_INITIAL} (init_lora_weights is judged)",
    "eva_config": _INITIAL,
    "corda_config": f"{_INITIAL} (init_lora_weights is judged)",
    "lora_ga_config": f"{_INITIAL} (init_lora_weights is judged)",
    "runtime_config": "PEFT ignores it in files",
    "megatron_core": "names a library, judged by megatron_config",
    "qalora_group_size": "judged by use_qalora",
    "fan_in_fan_out": "A and B are the same for both orders of the base's weights; PEFT sets it by the base",
}
_PLAIN = "Train or convert to plain LoRA"
REFUSED_WHEN_SET: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA acts on part of a prompt only, expected null. Use a plain LoRA",
    "layer_replication": "repeats layers of the base, expected null. Build that base first and name it as --model",
    "target_parameters": f"adapts bare parameters, expected null. {_PLAIN} on modules",
    "megatron_config": f"adapts Megatron's parallel layers, expected null. {_PLAIN}",
    "use_qalora": f"pools inputs for a quantised base, expected false. {_PLAIN}",
    "velora_config": f"VeLoRA layers, expected null. {_PLAIN}",
    "arrow_config": f"routes tokens between adapters, expected null. {_PLAIN}",
    "kasa_config": f"KaSA truncates the base's weights, expected null. {_PLAIN}",
    "monteclora_config": f"samples its weights at random, expected null. {_PLAIN}",
    "use_bdlora": f"stores block-diagonal factors, expected null. {_PLAIN}",
    "enable_lora": f"packs several projections into one pair (PEFT before 0.3), expected null. {_PLAIN}",
}
_HARMLESS_STARTS = ("gaussian", "eva", "orthogonal", "mica")
_BASE_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_GENERATING_TASKS = (None, "CAUSAL_LM")
#: Task of PEFT -> what rows of such an adapter ask, unless they say otherwise (`SamplingParams.task`).
OTHER_TASKS: Mapping[str, Literal["classify", "embed"]] = {"SEQ_CLS": "classify", "FEATURE_EXTRACTION": "embed"}
#: Keys of a model's `config.json` that some programs write here, too: names of labels and their meaning.
LABEL_KEYS = ("id2label", "problem_type")
# Methods of PEFT whose layers its `save_as_lora` converts; of all other methods it converts none.
CONVERTIBLE = (
    "C3A", "DELORA", "FOURIERFT", "GRALORA", "LOHA", "LOKR", "MISS", "RANDLORA", "TINYLORA", "UNILORA", "VBLORA",
    "VERA", "WAVEFT",
)  # fmt: skip


def judge_keys(raw: Mapping[str, Any], ledger: Ledger) -> None:
    """Enter every key of the configuration that `AdapterConfig` does not read."""
    _judge_peft_type(raw, ledger)
    read_elsewhere = {f.name for f in fields(AdapterConfig)} | {"peft_type"}
    for key, value in raw.items():
        if key in read_elsewhere:
            continue
        if key == "task_type":
            _judge_task(value, ledger)
        elif key in LABEL_KEYS and _is_set(value):
            ledger.use_key(key)
        elif key == "init_lora_weights":
            _judge_start(value, ledger)
        elif key in IRRELEVANT:
            ledger.ignore_key(key, IRRELEVANT[key])
        elif not _is_set(value):
            known = "not set" if key in REFUSED_WHEN_SET else "not known here, but not set"
            ledger.ignore_key(key, known)
        else:
            why = REFUSED_WHEN_SET.get(
                key, "this key is not known, so what it changes is not known. Remove it if it does not matter"
            )
            ledger.refuse_key(key, value, why)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _judge_peft_type(raw: Mapping[str, Any], ledger: Ledger) -> None:
    if raw.get("peft_type") == "LORA":
        ledger.use_key("peft_type")
        return
    found = raw.get("peft_type")
    what_to_do = "Train a LoRA adapter"
    if found in CONVERTIBLE:
        what_to_do = (
            "Convert it where it was trained, with a recent PEFT: save_as_lora(folder, model, rank=...), the closest "
            "LoRA adapter of that rank"
        )
    ledger.refuse_key("peft_type", found, f"expected 'LORA'; other methods are not computed here. {what_to_do}")


def _judge_task(value: Any, ledger: Ledger) -> None:
    if value in _GENERATING_TASKS:
        ledger.ignore_key("task_type", "the adapter is for text generation, or does not say")
    elif value == "SEQ_2_SEQ_LM":
        # PEFT wraps no layer otherwise for it; an adapter of an encoder and decoder has other layers than the base.
        ledger.ignore_key("task_type", "a name for text generation too; the tensors are those of the base's layers")
    elif isinstance(value, str) and value in OTHER_TASKS:
        ledger.use_key("task_type")
    else:
        ledger.refuse_key(
            "task_type",
            value,
            f"expected 'CAUSAL_LM', {' or '.join(map(repr, OTHER_TASKS))}; what this adapter was trained for is not "
            "computed",
        )


def _judge_start(value: Any, ledger: Ledger) -> None:
    """Judge how training started: some starts move part of the base's weights into the adapter, which would be wrong on
    the plain base.
    """
    key = "init_lora_weights"
    name = value.lower() if isinstance(value, str) else value
    if name is None or isinstance(name, bool) or name in _HARMLESS_STARTS:
        ledger.ignore_key(key, f"{_INITIAL}, the base's weights stayed as they were")
    elif isinstance(name, str) and name.startswith(_BASE_CHANGING_STARTS):
        ledger.refuse_key(
            key,
            value,
            "this start changed the base's weights, so the tensors do not fit the plain base. Convert with "
            "PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...), which writes true here",
        )
    else:
        expected = ", ".join(repr(name) for name in _HARMLESS_STARTS)
        ledger.refuse_key(key, value, f"expected true, false or one of {expected}")
