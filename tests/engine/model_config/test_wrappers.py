"""Text of models with images (wrappers) against transformers' whole models, with adapters saved from either."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bases import TEXT, WRAPPED, whole_model, write_wrapper
from transformers import CONFIG_MAPPING

from lorabatch.engine.config import read_model_config, unknown_config_keys
from lorabatch.engine.errors import EngineError, ModelFilesError
from lorabatch.engine.model_config import parse_model_config
from lorabatch.engine.model_config.keys import IRRELEVANT, READ, REFUSED
from lorabatch.engine.model_config.wrappers import WRAPPERS
from lorabatch.engine.models.load import stored_weights
from lorabatch.engine.peft import AdapterAudit, audit_adapter

MakeFolder = Callable[..., Path]
ALWAYS = ("gemma3", "qwen2_5_vl")
EVERY = [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.long) for case in WRAPPED]


@pytest.fixture(scope="module")
def wrapper(make_model: MakeFolder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`wrapper(case)`: the folder of a random model with images; each is made once."""
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            made[case] = write_wrapper(tmp_path_factory.mktemp("wrapper") / "base", case, make_model)
        return made[case]

    return get


def train(folder: Path, model: Any, **lora: Any) -> Path:
    """A random adapter that PEFT saves from `model`, whose pairs are on towers, too."""
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    trained = get_peft_model(model, LoraConfig(**(settings | lora)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    trained.create_or_update_model_card = lambda folder: None
    trained.save_pretrained(folder)
    return folder


def rename(file: Path, new_name: Callable[[str], str]) -> None:
    tensors = load_file(file)
    save_file({new_name(name): tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})


def audit(adapter: Path, base: Path) -> AdapterAudit:
    return audit_adapter(adapter, read_model_config(base), "adapter")


@pytest.mark.parametrize("case", EVERY)
def test_logits_and_adapters_of_text_equal_the_whole_model(
    case: str, wrapper: Callable[[str], Path], tmp_path: Path, compare: Any
) -> None:
    """Positions on three axes are those on one axis, for text."""
    base = wrapper(case)
    assert read_model_config(base).wrapper == WRAPPED[case][0]
    adapter = train(tmp_path / "adapter", whole_model(base))
    compare.equal_with_and_without(base, adapter, whole_model(base), whole_model(base, adapter))


@pytest.mark.long
@pytest.mark.parametrize("case", WRAPPED)
def test_rows_of_other_lengths_in_the_same_batch_change_nothing(
    case: str, wrapper: Callable[[str], Path], compare: Any
) -> None:
    base = wrapper(case)
    compare.equal_in_one_batch(compare.engine(base), whole_model(base))


# Names of the text model's tensors in checkpoints: of transformers 4, 4.52 and later, 5, and of a model without a head.
LLAVA_NAMES = [("language_model.model.", "language_model."), ("model.language_model.", ""), ("language_model.", "")]
QWEN_NAMES = [("model.", ""), ("model.language_model.", ""), ("language_model.", "")]
IDEFICS_NAMES = [("model.", ""), ("model.text_model.", ""), ("text_model.", "")]


@pytest.mark.parametrize("case", ["gemma3", "idefics3", "mistral3 of mistral", "qwen2_vl", "qwen3_vl"])
def test_every_spelling_of_a_checkpoint_gives_the_same_weights(
    case: str, wrapper: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = wrapper(case)
    model = read_model_config(base)
    weights = stored_weights(base, model)
    towers = {n: t for n, t in load_file(base / "model.safetensors").items() if model.names.of_stored(n) is None}
    assert towers
    names = QWEN_NAMES if "qwen" in case else IDEFICS_NAMES if "idefics" in case else LLAVA_NAMES
    for number, (inner, head) in enumerate(names):
        for prefix in ("", "model."):
            folder = tmp_path / f"{number}{prefix}"
            folder.mkdir()
            (folder / "config.json").write_text((base / "config.json").read_text())
            stored = {
                (head + name if name.startswith("lm_head") else inner + name.removeprefix("model.")): tensor.clone()
                for name, tensor in weights.items()
            }
            stored |= {prefix + name.removeprefix("model."): tensor for name, tensor in towers.items()}
            save_file(stored, folder / "model.safetensors", {"format": "pt"})
            found = stored_weights(folder, read_model_config(folder))
            assert found.keys() == weights.keys()
            assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("at_head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_head_of_its_own_is_not_tied_wherever_it_is_stored(
    at_head: str, wrapper: Callable[[str], Path], tmp_path: Path
) -> None:
    base = wrapper("gemma3")
    assert read_model_config(base).is_tied
    tensors = load_file(base / "model.safetensors")
    embedding = tensors["language_model.model.embed_tokens.weight"]
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    for head, is_tied in ((embedding.clone(), True), (embedding + 1, False)):
        save_file(tensors | {at_head: head}, tmp_path / "model.safetensors", {"format": "pt"})
        model = read_model_config(tmp_path)
        assert model.is_tied == is_tied
        assert ("lm_head.weight" in stored_weights(tmp_path, model)) != is_tied


def test_a_tensor_twice_under_two_names_is_refused(wrapper: Callable[[str], Path], tmp_path: Path) -> None:
    base = wrapper("gemma3")
    tensors = load_file(base / "model.safetensors")
    again = {"model.language_model.norm.weight": tensors["language_model.model.norm.weight"].clone()}
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    save_file(tensors | again, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFilesError, match=r"model\.norm\.weight: in two files of the checkpoint"):
        stored_weights(tmp_path, read_model_config(tmp_path))


def test_adapters_of_every_prefix_and_of_the_text_model_are_one(
    wrapper: Callable[[str], Path], tmp_path: Path, compare: Any
) -> None:
    """PEFT over the wrapper in transformers 5 and 4, and over the text model alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = wrapper("gemma3")
    whole = whole_model(base)
    text = AutoModelForCausalLM.from_config(whole.config.text_config, dtype=torch.float32)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    adapter = train(tmp_path / "text", copy.deepcopy(text))
    engine = compare.engine(base)
    prompt = compare.prompt(20, engine)
    expected = compare.generate(PeftModel.from_pretrained(text.eval(), adapter).eval(), prompt)
    compare.equal_everywhere(engine, prompt, expected, compare.register(engine, adapter))
    of_text = audit(adapter, base)
    assert of_text.verdict == "exact"
    for prefix in ("model.language_model.", "language_model.model."):
        begin = f"base_model.model.{prefix}layers."
        rename(adapter / "adapter_model.safetensors", lambda name, begin=begin: begin + name.split("layers.", 1)[1])
        assert audit(adapter, base).content_sha256 == of_text.content_sha256, prefix


def test_tensors_of_towers_are_passed_over_and_said_once(wrapper: Callable[[str], Path], tmp_path: Path) -> None:
    base = wrapper("gemma3")
    adapter = train(tmp_path / "both", whole_model(base), modules_to_save=["multi_modal_projector"])
    found = audit(adapter, base)
    assert found.verdict == "exact"
    passed = [key for key, use in found.tensor_uses.items() if "text does not reach" in use]
    assert [note for note in found.notes if "vision tower" in note] == [
        f"exact for text; {len(passed)} tensors of the vision tower are not used"
    ]
    assert all("vision_tower" in key or "multi_modal_projector" in key for key in passed)
    assert not any("PEFT ignores" in note for note in found.notes)
    assert "vllm" not in found.other_engines
    for size in (0, 7):  # whatever they hold
        tensors = load_file(adapter / "adapter_model.safetensors")
        changed = {key: torch.full((size or 1,), float("nan")) if key in passed else t for key, t in tensors.items()}
        save_file(changed, adapter / "adapter_model.safetensors", {"format": "pt"})
        again = audit(adapter, base)
        assert (again.verdict, again.content_sha256) == ("exact", found.content_sha256)


# Patterns that trainers write.
PATTERNS: dict[str, dict[str, Any]] = {
    "text by name": {
        "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj|down_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj|down_proj)))"
    },
    "both by name": {"target_modules": ["q_proj", "fc1"]},
    "ranks of towers": {
        "target_modules": ["q_proj", "fc1"],
        "rank_pattern": {"fc1": 2, "layers.0.self_attn.q_proj": 3},
    },
    "some layers": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "no towers": {"target_modules": ["q_proj"], "exclude_modules": r".*vision_tower.*"},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long) for case in PATTERNS])
def test_patterns_match_the_names_of_the_trained_model(
    case: str, wrapper: Callable[[str], Path], tmp_path: Path, compare: Any
) -> None:
    base = wrapper("gemma3")
    adapter = train(tmp_path / "adapter", whole_model(base), **PATTERNS[case])
    engine = compare.engine(base)
    prompt = compare.prompt(20, engine)
    expected = compare.generate(whole_model(base, adapter), prompt)
    compare.equal_everywhere(engine, prompt, expected, compare.register(engine, adapter))


def test_an_adapter_of_the_vision_tower_alone_is_refused(wrapper: Callable[[str], Path], tmp_path: Path) -> None:
    base = wrapper("gemma3")
    adapter = train(tmp_path / "vision", whole_model(base), target_modules=r".*vision_tower.*fc1")
    found = audit(adapter, base)
    assert found.verdict == "refused"
    assert any("all its tensors are of the vision tower" in reason for reason in found.reasons)


def test_towers_of_an_adapter_are_not_passed_over_by_a_base_of_text_alone(
    wrapper: Callable[[str], Path], tmp_path: Path
) -> None:
    base = wrapper("gemma3")
    adapter = train(tmp_path / "both", whole_model(base))
    model = replace(read_model_config(base), wrapper="")
    assert audit_adapter(adapter, model, "both").verdict == "refused"


def config_of(case: str, **at_top: Any) -> dict[str, Any]:
    family, text, vision, given = WRAPPED[case]
    text = {"vocab_size": 96} | TEXT | text
    return {"model_type": family, "text_config": text, "vision_config": vision} | given | at_top


def test_a_file_may_have_the_keys_of_text_at_the_top() -> None:
    raw = config_of("qwen2_vl")
    flat = raw | raw["text_config"] | {"text_config": None}
    assert parse_model_config(flat, {}) == parse_model_config(raw, {})
    with pytest.raises(ModelFilesError, match="text_config: missing, expected the keys"):
        parse_model_config(config_of("gemma3") | {"text_config": None}, {})


def test_the_top_decides_on_stop_tokens_before_the_text_part() -> None:
    assert parse_model_config(config_of("gemma3"), {}).eos_token_ids == (2,)
    assert parse_model_config(config_of("gemma3", eos_token_id=[1, 106]), {}).eos_token_ids == (1, 106)
    assert parse_model_config(config_of("gemma3", eos_token_id=[1, 106]), {"eos_token_id": 7}).eos_token_ids == (7,)


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_silence_in_the_text_part_means_what_transformers_assumes(family: str) -> None:
    whole = CONFIG_MAPPING[family](text_config={}).to_dict()
    left_out = {"architectures", "pad_token_id", "id2label"}
    text = {key: value for key, value in whole["text_config"].items() if key not in left_out}
    inner = next(iter(WRAPPERS[family].families))
    silent = parse_model_config({"model_type": family, "text_config": {"model_type": inner}}, {})
    assert parse_model_config({"model_type": family, "text_config": text}, {}) == silent


REFUSED_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a text model of another family": ("mistral3", {"text_config": {"model_type": "mixtral"}}, "model_type='mixtral'"),
    "a text model of words": ("gemma3", {"text_config": "text"}, "text_config: found 'text', expected an object"),
    "a type of another kind": ("gemma3", {"text_config": {"model_type": ["a"]}}, "text_config.model_type="),
    "quantized at the top": ("gemma3", {"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8'"),
    "quantized inside": (
        "qwen3_vl",
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        "text_config.quantization_config.quant_method='awq'",
    ),
    "experts": ("qwen3_vl", {"text_config": {"num_experts": 8}}, "text_config.num_experts=8"),
    "caps of logits": ("gemma3", {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping=30.0"),
    "a head of another task": (
        "gemma3",
        {"architectures": ["Gemma3ForSequenceClassification"]},
        "ForSequenceClassification.*ForConditionalGeneration",
    ),
    "axes that fill no head": (
        "qwen2_vl",
        {"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}}},
        "mrope_section: found .*three positive integers of sum 64",
    ),
    "axes of words": (
        "qwen3_vl",
        {"text_config": {"rope_scaling": {"rope_type": "default", "mrope_section": "abc"}}},
        "mrope_section: found 'abc'",
    ),
    "norms of heads": ("idefics3", {"text_config": {"qk_layer_norms": True}}, "text_config.qk_layer_norms=True"),
    "sound": ("gemma3", {"audio_config": {"hidden_size": 3}}, "audio_config=.* is not supported"),
}


@pytest.mark.parametrize("case", REFUSED_CASES)
def test_what_is_damaged_or_not_computed_is_refused_by_name(case: str) -> None:
    family, settings, message = REFUSED_CASES[case]
    with pytest.raises(EngineError, match=f"(?s)config.json.*{message}"):
        parse_model_config({"model_type": family, "text_config": {"hidden_size": 8192}} | settings, {})


@pytest.mark.reference("transformers")
@pytest.mark.parametrize("family", WRAPPERS)
def test_every_key_that_transformers_reads_is_classified(family: str, unclassified: Callable[[Any], None]) -> None:
    whole = CONFIG_MAPPING[family]()
    own = {key for text in WRAPPERS[family].families.values() for key in text.own_keys}
    keys = set(whole.to_dict()) | set(whole.attribute_map) | set(whole.text_config.to_dict())
    unclassified(keys - READ.keys() - IRRELEVANT.keys() - REFUSED.keys() - own)


def test_keys_that_nothing_reads_are_named_with_their_place(tmp_path: Path) -> None:
    raw = config_of("gemma3", image_token_index=5, something=1)
    raw["text_config"]["anything"] = True
    raw["vision_config"] = {"nothing_looks_here": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert unknown_config_keys(tmp_path) == ["something", "text_config.anything"]
