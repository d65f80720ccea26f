"""Every key of `config.json` that transformers' classes of the supported families read is classified."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig, modeling_rope_utils

from lorabatch.engine.config import read_model_config, unknown_config_keys
from lorabatch.engine.errors import EngineError
from lorabatch.engine.model_config.families import FAMILIES
from lorabatch.engine.model_config.keys import IRRELEVANT, READ, REFUSED, ROPE_READ, unknown_keys

FOLDER_OF = {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "qwen3_5_text": "qwen3_5"}
# Attributes of configuration objects that are no keys of a file.
METHODS = {
    "kv_sharing_modes",
    # of Gemma 4's towers
    "standardize",
    "use_clipped_linears",
    "get_text_config",
    "to_dict",
    "rope_type",
    "standardize_rope_params",
    "validate_rope",
    "num_labels",
}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def keys_of_configuration(model_type: str) -> set[str]:
    kind = CONFIG_MAPPING[model_type]
    return set(kind().to_dict()) | inspect.signature(kind.__init__).parameters.keys() | set(kind.attribute_map)


def keys_of_model(model_type: str) -> set[str]:
    """Attributes of the configuration that the family's model reads."""
    folder = FOLDER_OF.get(model_type, model_type)
    source = inspect.getsource(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"))
    # Models of images and sound in the same file have a configuration of their own.
    texts = [
        part
        for part in re.split(r"\n(?=class )", source)
        if not re.search(r"Vision|Projector|Conditional|Audio|Multimodal|Gemma4Model\b", part[:80])
    ]
    found = re.findall(r"\bconfig\.(\w+)|getattr\((?:self\.)?config, \"(\w+)\"", "\n".join(texts))
    return {name for names in found for name in names if name}


@pytest.mark.reference("transformers")
@pytest.mark.parametrize("model_type", [*FAMILIES, "opt"])
def test_every_key_that_transformers_reads_is_classified(
    model_type: str, unclassified: Callable[[Iterable[str]], None]
) -> None:
    found = keys_of_configuration(model_type) | keys_of_model(model_type) | set(PreTrainedConfig().to_dict())
    own = set[str]()
    if model_type in FAMILIES:
        own = {*FAMILIES[model_type].own_keys, *FAMILIES[model_type].other_layers, *FAMILIES[model_type].aliases}
    unclassified(found - READ.keys() - IRRELEVANT.keys() - REFUSED.keys() - own - METHODS - {"self", "kwargs"})


@pytest.mark.reference("transformers")
def test_every_rotary_setting_that_transformers_reads_is_classified(
    unclassified: Callable[[Iterable[str]], None],
) -> None:
    source = inspect.getsource(modeling_rope_utils)
    found = set(re.findall(r"rope_parameters(?:_dict)?(?:\.get\(|\[)\"(\w+)\"", source))
    assert len(found) > 8
    unclassified(found - ROPE_READ.keys())


def test_a_key_has_one_meaning() -> None:
    assert not READ.keys() & IRRELEVANT.keys()
    assert not (READ.keys() | IRRELEVANT.keys()) & REFUSED.keys()


@pytest.mark.parametrize("key", [key for key in REFUSED if key != "quantization_config"])
def test_what_is_refused_is_refused_by_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES, key: None}))
    read_model_config(tmp_path)
    path.write_text(json.dumps({"model_type": "llama", **SIZES, key: "x" if key == "transformers_weights" else True}))
    with pytest.raises(EngineError, match=f"{key}=.* is not supported"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"residual_multiplier": 0.2, "use_cache": True}, ["residual_multiplier"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2, "alpha": 1000}}, ["rope_scaling.alpha"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "mrope_section": [1]}}},
            ["rope_parameters.full_attention.mrope_section"],
        ),
        ({"no_such_thing": None, "nor_this": False}, []),
    ],
)
def test_keys_that_nothing_reads_are_named(tmp_path: Path, raw: dict[str, object], expected: list[str]) -> None:
    assert unknown_keys(raw) == expected
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert unknown_config_keys(tmp_path) == expected
