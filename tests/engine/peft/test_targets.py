"""Target matching against PEFT's own function, on random configurations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

from lorabatch.engine.peft.config import AdapterConfig
from lorabatch.engine.peft.targets import (
    DEFAULT_TARGETS,
    is_saved_module,
    targeted,
    ties_saved,
    ties_targets,
    unmatched_targets,
)

SITES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
MODULES = [
    f"{root}.layers.{i}.{site}" for root in ("model", "model.language_model") for i in (0, 1, 11) for site in SITES
]
MODULES += ["model.embed_tokens", "lm_head", "model.layers.1.experts.0.q_proj"]
NAMES = st.sampled_from(
    ["q_proj", "proj", "mlp.up_proj", "self_attn", "embed_tokens", "lm_head", "head", "c_attn", *MODULES]
)
REGEXES = st.sampled_from(
    [
        r".*q_proj",
        r".*\.1\..*",
        r"model\.layers\.\d\.mlp\..*",
        r"lm_head|.*embed_tokens",
        r".*(up|down)_proj",
        r"nothing",
    ]
)


@st.composite
def configurations(draw: st.DrawFn) -> AdapterConfig:
    names = st.lists(NAMES, max_size=3).map(tuple)
    by_regex = draw(st.booleans())
    layers = (
        None if by_regex else draw(st.none() | st.integers(0, 2) | st.lists(st.integers(0, 12), max_size=3).map(tuple))
    )
    pattern = () if layers is None else draw(st.sampled_from([(), ("layers",), ("blocks",), ("blocks", "layers")]))
    return AdapterConfig(
        target_modules=draw(REGEXES) if by_regex else draw(names),
        exclude_modules=draw(st.none() | names | REGEXES),
        layers_to_transform=layers,
        layers_pattern=pattern,
        modules_to_save=draw(st.sampled_from([(), ("lm_head",), ("mlp",), ("embed_tokens", "q_proj")])),
    )


def as_peft(config: AdapterConfig) -> Any:
    def mutable(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    return SimpleNamespace(
        target_modules=mutable(config.target_modules),
        exclude_modules=mutable(config.exclude_modules),
        layers_to_transform=mutable(config.layers_to_transform),
        layers_pattern=mutable(config.layers_pattern),
        modules_to_save=mutable(config.modules_to_save),
        target_parameters=None,
    )


@settings(max_examples=300)
@given(configurations())
def test_modules_are_matched_as_peft_matches_them(config: AdapterConfig) -> None:
    peft_config = as_peft(config)
    results = {module: check_target_module_exists(peft_config, module) for module in MODULES}
    expected = {module for module, found in results.items() if found and not isinstance(found, _ExcludedModule)}
    assert targeted(config, MODULES, "lm_head", "llama") == expected


def test_the_layer_is_the_first_number_of_a_name() -> None:
    config = AdapterConfig(target_modules=("experts.0.q_proj",), layers_to_transform=(1,))
    assert targeted(config, MODULES, "lm_head", "llama") == {"model.layers.1.experts.0.q_proj"}


def test_all_linear_takes_every_layer_but_embedding_and_head() -> None:
    config = AdapterConfig(target_modules="All-Linear")
    assert targeted(config, MODULES, "lm_head", "llama") == set(MODULES) - {"model.embed_tokens", "lm_head"}


def test_all_linear_still_leaves_out_the_excluded() -> None:
    config = AdapterConfig(target_modules="all-linear", exclude_modules=("down_proj",), modules_to_save=("up_proj",))
    assert {name.rpartition(".")[2] for name in targeted(config, MODULES, "lm_head", "llama")} == {"q_proj", "k_proj"}


def test_null_targets_are_what_peft_takes_by_default_for_a_family() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    for family, names in DEFAULT_TARGETS.items():
        assert TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[family] == list(names)
    null = AdapterConfig()
    assert targeted(null, MODULES, "lm_head", "llama") == {m for m in MODULES if m.endswith("q_proj")}
    assert targeted(null, MODULES, "lm_head", "a family PEFT does not know") == set()


def test_modules_to_save_match_the_plain_ends_of_names_and_what_is_below() -> None:
    config = AdapterConfig(modules_to_save=("norm", "mlp"))
    assert is_saved_module(config, "model.layers.0.input_layernorm")
    assert is_saved_module(config, "model.layers.0.mlp.up_proj")
    assert not is_saved_module(config, "model.layers.0.self_attn.q_proj")


def test_list_entries_that_name_no_module_are_reported() -> None:
    config = AdapterConfig(target_modules=("q_proj", "c_attn", "wte"))
    assert unmatched_targets(config, MODULES) == ("c_attn", "wte")
    assert unmatched_targets(AdapterConfig(target_modules=".*wte"), MODULES) == ()


def test_tying_goes_to_saved_modules_first_then_to_targets() -> None:
    both = AdapterConfig(ensure_weight_tying=True, modules_to_save=("model.embed_tokens",), target_modules=("lm_head",))
    assert (ties_saved(both), ties_targets(both)) == (True, False)
    targets = AdapterConfig(ensure_weight_tying=True, target_modules=("lm_head",))
    assert (ties_saved(targets), ties_targets(targets)) == (False, True)
    # PEFT compares a regular expression with the bare names only.
    assert ties_targets(AdapterConfig(ensure_weight_tying=True, target_modules="(.*)embed_tokens"))
    assert not ties_targets(AdapterConfig(ensure_weight_tying=True, target_modules=r".*\.embed_tokens"))
    assert not ties_targets(AdapterConfig(target_modules=("lm_head",)))
