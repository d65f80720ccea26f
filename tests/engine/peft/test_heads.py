"""Heads of classifiers: which are taken, how their labels are named, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorabatch.engine.config import read_model_config
from lorabatch.engine.model_config import parse_model_config
from lorabatch.engine.peft import AdapterAudit, audit_adapter

KEY = "base_model.model.score.weight"
Change = Callable[..., AdapterAudit]


@pytest.fixture(scope="module")
def base(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_model(tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture
def changed(make_classifier: Any, base: Path, tmp_path: Path) -> Change:
    """Audits a classifier of three labels whose tensors, configuration or files were changed."""
    folder = make_classifier(tmp_path / "adapter", base, 3)

    def audit(
        tensors: Any = None, beside: Any = None, base_keys: dict[str, Any] | None = None, **keys: Any
    ) -> AdapterAudit:
        weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
        if tensors is not None:
            save_file(tensors(load_file(weights)), weights)
        if beside is not None:
            (folder / "config.json").write_text(beside if isinstance(beside, str) else json.dumps(beside))
        config.write_text(json.dumps(json.loads(config.read_text()) | keys))
        raw = json.loads((base / "config.json").read_text()) | (base_keys or {})
        return audit_adapter(folder, parse_model_config(raw, {}), "zoo")

    return audit


def named(*names: str) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


def test_a_classifier_is_exact_beside_others_and_knows_its_labels(changed: Change) -> None:
    audit = changed()
    assert (audit.verdict, audit.task, audit.reasons, audit.notes) == ("exact", "classify", (), ())
    assert audit.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert audit.problem_type == "single_label_classification"
    assert audit.tensor_uses[KEY] == "used"
    assert audit.head is not None
    assert audit.head.shape == (3, 64)
    assert "score.weight" not in audit.touched_parameters


def test_names_of_labels_are_of_the_adapter_first_and_part_of_its_identity(changed: Change) -> None:
    plain = changed()
    of_base = changed(base_keys={"id2label": named("x", "y", "z")})
    beside = changed(beside={"id2label": named("a", "b", "c"), "problem_type": "multi_label_classification"})
    own = changed(id2label=named("k", "l", "m"))
    assert (of_base.labels, beside.labels, own.labels) == (("x", "y", "z"), ("a", "b", "c"), ("k", "l", "m"))
    assert beside.problem_type == "multi_label_classification"
    assert len({audit.identity_sha256 for audit in (plain, of_base, beside, own)}) == 4
    assert len({audit.content_sha256 for audit in (plain, of_base, beside, own)}) == 1


def test_default_names_of_another_number_of_labels_are_passed_over(changed: Change) -> None:
    audit = changed(beside={"id2label": named("LABEL_0", "LABEL_1")}, base_keys={"id2label": named("no", "yes")})
    assert audit.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_the_values_of_a_head_are_part_of_the_content(changed: Change) -> None:
    before = changed().content_sha256
    after = changed(tensors=lambda t: t | {KEY: t[KEY] + 1}).content_sha256
    assert before != after


def without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name: value for name, value in tensors.items() if name != key}


def instead(**of_head: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        head = tensors[KEY]
        return tensors | {KEY.replace("weight", name): make(head) for name, make in of_head.items()}

    return change


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"tensors": without(KEY)}, "score.weight: missing, expected because modules_to_save"),
    "missing, and only the task says so": (
        {"tensors": without(KEY), "modules_to_save": None},
        "score.weight: missing, expected because task_type is 'SEQ_CLS'",
    ),
    "of another width": (
        {"tensors": instead(weight=lambda head: np.ascontiguousarray(head[:, :-1]))},
        r"has shape \[3, 63\], expected \[number of labels, 64\]",
    ),
    "without a row": ({"tensors": instead(weight=lambda head: head[:0])}, r"has shape \[0, 64\]"),
    "a vector": ({"tensors": instead(weight=lambda head: head[0])}, r"has shape \[64\]"),
    "with a bias": ({"tensors": instead(bias=lambda head: head[:, 0].copy())}, "score.bias: expected a head 'score'"),
    "in whole numbers": (
        {"tensors": instead(weight=lambda head: head.astype(np.int32))},
        "stored as I32, expected one of F16, BF16, F32",
    ),
    "not finite": ({"tensors": instead(weight=lambda head: head * np.float32(np.nan))}, "holds NaN or infinity"),
    "of a configuration that names none": (
        {"modules_to_save": None, "task_type": None},
        "neither modules_to_save nor task_type='SEQ_CLS' speaks of a head",
    ),
    "with a pair": (
        {"tensors": instead(**{"lora_A.weight": lambda head: head, "lora_B.weight": lambda head: head[:, :3].copy()})},
        "the base has no linear layer 'score'",
    ),
    "with too few names": ({"id2label": named("a", "b")}, "id2label: names 2 labels, the head has 3"),
    "with names that are no object": ({"id2label": ["a", "b", "c"]}, "id2label: expected an object"),
    "with names that lack one": ({"beside": {"id2label": {"0": "a", "2": "c"}}}, "config.json id2label: expected"),
    "beside a broken file": ({"beside": "{"}, "config.json: cannot be read"),
    "of an unknown kind of problem": ({"beside": {"problem_type": "ranking"}}, "problem_type='ranking': expected one"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_head_is_refused_by_name(changed: Change, case: str) -> None:
    changes, expected = WRONG[case]
    audit = changed(**changes)
    assert audit.verdict == "refused"
    assert audit.task == ""
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError("; ".join(audit.reasons))


def test_an_adapter_for_embeddings_embeds_its_rows(make_classifier: Any, base: Path, tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "adapter", base, 0)
    audit = audit_adapter(folder, read_model_config(base), "zoo")
    assert (audit.verdict, audit.task, audit.labels) == ("exact", "embed", ())
    assert any("begin below model" in note for note in audit.notes)


def test_a_base_that_classifies_is_read(base: Path) -> None:
    raw = json.loads((base / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    model = parse_model_config(raw | {"id2label": named("a", "b", "c")}, {})
    assert (model.is_classifier, model.is_tied, model.labels) == (True, True, ("a", "b", "c"))
    assert model.parameter_shapes()["score.weight"] == (3, 64)
    assert parse_model_config(raw, {}).labels == ("LABEL_0", "LABEL_1")
