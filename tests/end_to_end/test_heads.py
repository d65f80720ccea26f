"""Jobs of rows that are classified or reranked, on real engines, with the numbers of transformers and PEFT in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from distributed import Client

import lorabatch

LABELS = ("sport", "war", "art")
TEXTS = [f"{word} {number} of the quick brown fox" for number in range(4) for word in ("once", "name", "row", "SELECT")]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def classifiers(tiny_llama: Path, make_classifier: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a classifier with names for its labels."""
    root = tmp_path_factory.mktemp("classifiers")
    for seed in range(1, 4):
        folder = make_classifier(root / f"checkpoint-{seed}", tiny_llama, len(LABELS), seed=seed)
        names = {"id2label": dict(enumerate(LABELS)), "problem_type": "single_label_classification"}
        (folder / "config.json").write_text(json.dumps(names))
    return root


def ids_of(tiny_llama: Path, text: str) -> torch.Tensor:
    from transformers import AutoTokenizer

    return torch.tensor([AutoTokenizer.from_pretrained(tiny_llama)(text).input_ids])


@torch.no_grad()
def logits_of(tiny_llama: Path, adapter: Path, texts: list[str]) -> list[np.ndarray[Any, Any]]:
    """Logits of a classifier by transformers and PEFT, [num_labels] for each text."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tiny_llama, dtype=torch.float32, num_labels=len(LABELS))
    model = PeftModel.from_pretrained(model, adapter).eval()
    return [model(ids_of(tiny_llama, text)).logits[0].numpy() for text in texts]


def options(tiny_llama: Path, tmp_path: Path, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=7)
    given = {"model": tiny_llama, "input": tmp_path / "rows.parquet", "output": tmp_path / "answers"}
    return given | {"max_tokens": 4, "progress": False} | more


@pytest.mark.parametrize("score_by", ["exact", pytest.param("choice", marks=pytest.mark.long)])
def test_classifiers_answer_every_row_and_are_scored_by_label_or_number(
    shared_client: Client, tiny_llama: Path, classifiers: Path, tmp_path: Path, score_by: str
) -> None:
    names = sorted(folder.name for folder in classifiers.iterdir())
    logits = {name: logits_of(tiny_llama, classifiers / name, TEXTS) for name in names}
    best = [int(one.argmax()) for one in logits[names[0]]]
    # the right answers of even rows are those of the first checkpoint; a number stands for a label
    right = [place if number % 2 == 0 else (place + 1) % 3 for number, place in enumerate(best)]
    for written in (right, [LABELS[place] for place in right], [[LABELS[place], None] for place in right]):
        rows = [{"id": i, "prompt": text, "right": written[i]} for i, text in enumerate(TEXTS)]
        given = options(tiny_llama, tmp_path, rows, for_each_adapter="all", adapters=classifiers, shape="wide")
        given |= {"expected": "right", "score_by": score_by}
        result = lorabatch.run(**given, update=written is not right, client=shared_client)
        assert (result.num_rows, result.num_errors) == (48, 0)
        scores = {outcome.adapter: outcome.score for outcome in result.adapters if outcome.score}
        assert scores[names[0]]["mean"] == 0.5
        for name in names:
            met = [int(one.argmax()) == place for one, place in zip(logits[name], right, strict=True)]
            assert scores[name]["mean"] == pytest.approx(np.mean(met))
    for row in lorabatch.Job(tmp_path / "answers").to_arrow().to_pylist():
        for name in names:
            found, expected = row[name], logits[name][row["id"]]
            assert found["label"] == found["completion"] == LABELS[int(expected.argmax())]
            assert [score["label"] for score in found["scores"]] == [*LABELS]
            np.testing.assert_allclose([score["logit"] for score in found["scores"]], expected, atol=TOLERANCE)


@pytest.mark.long
def test_a_base_without_a_head_beside_classifiers_has_error_rows_of_its_own(
    shared_client: Client, tiny_llama: Path, classifiers: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    adapters = {"one": str(classifiers / "checkpoint-1"), "text": str(tiny_adapters["rank8"])}
    rows = [{"id": i, "prompt": text} for i, text in enumerate(TEXTS[:4])]
    given = options(tiny_llama, tmp_path, rows, for_each_adapter="all", include_base=True, adapters=adapters)
    result = lorabatch.run(**given, task="classify", max_errors="100%", client=shared_client)
    assert (result.num_rows, result.num_errors) == (12, 8)
    found = lorabatch.Job(tmp_path / "answers").to_arrow(wide=True).to_pylist()
    assert all(row["one"]["label"] in LABELS for row in found)
    assert all("no head that classifies" in row[name]["error"] for row in found for name in ("text", "base_model"))
    # each adapter does what it was trained for where no task is given
    given["output"] = tmp_path / "mixed"
    result = lorabatch.run(**given, client=shared_client)
    assert (result.num_rows, result.num_errors) == (12, 0)
    mixed = lorabatch.Job(tmp_path / "mixed").to_arrow(wide=True).to_pylist()
    assert [row["one"]["scores"] for row in mixed] == [row["one"]["scores"] for row in found]
    assert all(row["text"]["label"] is None and row["text"]["completion_tokens"] for row in mixed)


@pytest.mark.long
def test_a_classifier_is_a_stage_whose_label_and_probabilities_later_stages_read(
    shared_client: Client, tiny_llama: Path, classifiers: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    adapters = {"topics": str(classifiers / "checkpoint-1"), "text": str(tiny_adapters["rank8"])}
    logits = logits_of(tiny_llama, classifiers / "checkpoint-1", TEXTS)
    shares = [torch.softmax(torch.tensor(one), 0).tolist() for one in logits]
    median = float(np.median([of_row[0] for of_row in shares]))
    stages = {
        "draft": lorabatch.Stage(prompt="{{ body }}", adapter="text", n=2, temperature=1.0, seed=3),
        "topic": lorabatch.Stage(prompt="{{ body }}", adapter="topics", task="classify"),
        "each": lorabatch.Stage(prompt="{{ draft.completion }}", for_each="draft", adapter="topics", task="classify"),
        "best": lorabatch.Stage(pick="draft", by="each.probability.war"),
        "most": lorabatch.Stage(pick="draft", by="each.logit.art"),
        "more": lorabatch.Stage(
            prompt="{{ topic.label }}: {{ body }}", adapter="text", when=f"topic.probability.sport < {median}"
        ),
    }
    rows = [{"id": i, "body": text} for i, text in enumerate(TEXTS)]
    given = options(tiny_llama, tmp_path, rows, adapters=adapters, stages=stages, max_tokens=6)
    result = lorabatch.run(**given, client=shared_client)
    assert (result.num_rows, result.num_errors) == (16, 0)
    found = sorted(lorabatch.Job(tmp_path / "answers").to_arrow().to_pylist(), key=lambda row: row["id"])
    for row, expected in zip(found, shares, strict=True):
        scores = {score["label"]: score["probability"] for score in row["topic"]["scores"]}
        np.testing.assert_allclose([*scores.values()], expected, atol=TOLERANCE)
        assert row["topic"]["label"] == LABELS[expected.index(max(expected))]
        assert (row["more"] is None) == (expected[0] >= median)
        war = [score["probability"] for one in row["each"] for score in one["scores"] if score["label"] == "war"]
        assert row["best"]["index"] == war.index(max(war))
        assert row["best"]["by"] == pytest.approx(max(war), abs=1e-6)
        art = [score["logit"] for one in row["each"] for score in one["scores"] if score["label"] == "art"]
        assert row["most"]["index"] == art.index(max(art))
        assert row["best"]["completion"] == row["draft"][row["best"]["index"]]["completion"]
    drafts = [one["completion"] for row in found for one in row["draft"]]
    of_drafts = logits_of(tiny_llama, classifiers / "checkpoint-1", drafts)
    for one, expected in zip((one for row in found for one in row["each"]), of_drafts, strict=True):
        np.testing.assert_allclose([score["logit"] for score in one["scores"]], expected, atol=TOLERANCE)


@torch.no_grad()
def next_logprobs(tiny_llama: Path, adapter: Path | None, text: str, continuations: list[str]) -> list[float]:
    """Log-probability of each continuation behind a text, by transformers and PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
    start = tokenizer(text).input_ids
    found = []
    for continuation in continuations:
        tokens = tokenizer(continuation, add_special_tokens=False).input_ids
        logprobs = model(torch.tensor([start + tokens])).logits[0].log_softmax(-1)
        found.append(sum(float(logprobs[len(start) - 1 + i, token]) for i, token in enumerate(tokens)))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("choice", "mode"), [((" yes", " no"), "auto"), ((" 7", " fox"), "exact")])
def test_rows_are_reranked_as_transformers_and_peft_do(
    shared_client: Client, tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, choice: Any, mode: str
) -> None:
    names = [None, "rank8", "rank64"]
    rows = [{"id": i, "prompt": text, "adapter": names[i % 3]} for i, text in enumerate(TEXTS)]
    given = options(tiny_llama, tmp_path, rows, adapters={name: str(tiny_adapters[name]) for name in names if name})
    result = lorabatch.run(**given, task="rerank", choice=list(choice), mode=mode, client=shared_client)
    assert (result.num_rows, result.num_errors) == (16, 0)
    found = {row["id"]: row for row in lorabatch.Job(tmp_path / "answers").to_arrow().to_pylist()}
    for row in rows:
        adapter = tiny_adapters[row["adapter"]] if row["adapter"] else None
        first, second = next_logprobs(tiny_llama, adapter, row["prompt"], list(choice))
        answer = found[row["id"]]
        assert answer["relevance"] == pytest.approx(1 / (1 + np.exp(second - first)), abs=TOLERANCE)
        assert [one["logprob"] for one in answer["choice_logprobs"]] == pytest.approx([first, second], abs=TOLERANCE)
