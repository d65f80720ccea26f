"""Rows that are classified and embedded beside rows that generate, with the numbers of transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft_oracle import Oracle, make_engine, prompts, serve
from safetensors.torch import load_file, save_file

from lorabatch.engine.engine import Engine
from lorabatch.engine.heads import products
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams

NUM_LABELS = {"two": 2, "seventy-seven": 77, "one": 1}
CLASSIFY = SamplingParams().of_task("classify")
GENERATE = SamplingParams(max_tokens=4, ignore_eos=True)
TOLERANCE = 1e-4

Vectors = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@pytest.fixture(scope="module")
def base(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_model(tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture(scope="module")
def zoo(
    base: Path, make_adapter: Any, make_classifier: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("zoo")
    found = {name: make_classifier(root / name, base, n, seed=n) for name, n in NUM_LABELS.items()}
    found["dora"] = make_classifier(root / "dora", base, 4, seed=9, use_dora=True)
    found["embedder"] = make_classifier(root / "embedder", base, 0, seed=5)
    return found | {"text": make_adapter(root / "text", base)}


def register(engine: Engine, folders: dict[str, Path]) -> dict[str, str]:
    ids = {}
    for name, folder in folders.items():
        found = audit_adapter(folder, engine.model, name).identity_sha256
        assert found is not None, name
        engine.register_adapter(found, folder, name)
        ids[name] = found
    return ids


def numbers(result: Result) -> Vectors:
    assert result.error is None, result.error
    assert result.pooled is not None
    return np.frombuffer(result.pooled, "<f4")


@torch.no_grad()
def logits_of(base: Path, adapter: Path, num_labels: int, rows: Iterable[tuple[int, ...]]) -> list[Vectors]:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=num_labels)
    model = PeftModel.from_pretrained(model, adapter).eval()
    return [model(torch.tensor([row])).logits[0].numpy() for row in rows]


@torch.no_grad()
def states_of(base: Path, adapter: Path | None, rows: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
    """Hidden states of all tokens, as sentence-transformers pools them."""
    from peft import PeftModel
    from transformers import AutoModel

    model = AutoModel.from_pretrained(base, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
    return [model(torch.tensor([row])).last_hidden_state[0] for row in rows]


@pytest.mark.parametrize("mode", ["unmerged", "merged", pytest.param("auto", marks=pytest.mark.long), "exact"])
def test_classifiers_of_any_number_of_labels_share_batches_with_text(
    mode: Any, base: Path, zoo: dict[str, Path]
) -> None:
    rows = prompts(4, 300)
    engine = make_engine(base, mode)
    ids = register(engine, zoo)
    names = [*NUM_LABELS, *(["dora"] if mode in ("merged", "auto") else [])]
    asked = [Request(f"{name} {i}", row, ids[name], CLASSIFY) for i, row in enumerate(rows) for name in names]
    texts = [Request(f"text {i}", row, ids["text"], GENERATE) for i, row in enumerate(rows)]
    results = serve(engine, [*asked[:6], *texts, *asked[6:]])
    for name in names:
        expected = logits_of(base, zoo[name], NUM_LABELS.get(name, 4), rows)
        for i, logits in enumerate(expected):
            result = results[f"{name} {i}"]
            np.testing.assert_allclose(numbers(result), logits, atol=TOLERANCE)
            assert (result.token_ids, result.finish_reason) == ((), "stop")
            if name != "one":
                assert result.text == f"LABEL_{logits.argmax()}"
            else:
                assert float(result.text) == pytest.approx(float(logits[0]), abs=TOLERANCE)
    oracle = Oracle(base, {"text": zoo["text"]})
    for i, row in enumerate(rows):
        assert results[f"text {i}"].token_ids == oracle.greedy(row, "text", 4, -1)


@pytest.mark.parametrize("adapter", [None, "embedder", "text"])
def test_embeddings_are_pooled_as_sentence_transformers_does(
    adapter: str | None, base: Path, zoo: dict[str, Path]
) -> None:
    rows = prompts(3, 300, seed=2)
    engine = make_engine(base)
    adapter_id = register(engine, zoo)[adapter] if adapter else None
    ways = [(pooling, normalized) for pooling in ("last", "mean") for normalized in (True, False)]
    asked = [
        Request(
            f"{pooling} {normalized} {i}",
            row,
            adapter_id,
            SamplingParams(pooling=pooling, normalize_embeddings=normalized).of_task("embed"),
        )
        for pooling, normalized in ways
        for i, row in enumerate(rows)
    ]
    results = serve(engine, asked)
    if adapter == "text":
        return  # PEFT wraps a model with a head for it; that rows get an answer is enough
    for i, states in enumerate(states_of(base, zoo[adapter] if adapter else None, rows)):
        for pooling, normalized in ways:
            expected = states[-1] if pooling == "last" else states.mean(0)
            expected = torch.nn.functional.normalize(expected, dim=0) if normalized else expected
            found = numbers(results[f"{pooling} {normalized} {i}"])
            np.testing.assert_allclose(found, expected.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("task", ["classify", "embed"])
def test_exact_numbers_depend_on_their_row_alone(task: str, base: Path, zoo: dict[str, Path]) -> None:
    shared = tuple(range(3, 40))
    rows = [shared + row for row in prompts(4, 300, seed=3)]
    sampling = SamplingParams(pooling="mean").of_task(task)

    def answers(step_tokens: int, batch_rows: int, uses_prefix_cache: bool) -> dict[str, bytes | None]:
        engine = make_engine(
            base, "exact", max_step_tokens=step_tokens, max_batch_rows=batch_rows, uses_prefix_cache=uses_prefix_cache
        )
        ids = register(engine, zoo)
        asked = [Request(f"{i}", row, ids["seventy-seven"], sampling) for i, row in enumerate(rows)]
        others = [Request(f"other {i}", row, ids["text"], GENERATE) for i, row in enumerate(rows)]
        results = serve(engine, [*asked, *others] if batch_rows > 1 else asked)
        return {name: result.pooled for name, result in results.items() if not name.startswith("other")}

    assert answers(24, 8, True) == answers(7, 1, False)


@pytest.mark.parametrize("launches_ahead", [True, pytest.param(False, marks=pytest.mark.long)])
def test_gpu_kernels_give_the_same_numbers(launches_ahead: bool, base: Path, zoo: dict[str, Path]) -> None:
    rows = prompts(3, 300, seed=8)
    ways = {"seventy-seven": CLASSIFY, "embedder": SamplingParams(pooling="mean").of_task("embed"), "text": GENERATE}

    def answers(**config: object) -> dict[str, Result]:
        engine = make_engine(base, dtype="float32", **config)
        ids = register(engine, zoo)
        return serve(
            engine,
            [Request(f"{name} {i}", row, ids[name], way) for i, row in enumerate(rows) for name, way in ways.items()],
        )

    expected, found = answers(), answers(kernels="triton", launches_ahead=launches_ahead)
    for name, result in expected.items():
        if name.startswith("text"):
            assert found[name].token_ids == result.token_ids
        else:
            np.testing.assert_allclose(numbers(found[name]), numbers(result), atol=TOLERANCE)
            assert found[name].text == result.text


def test_a_row_that_moves_begins_again_and_keeps_its_numbers(base: Path, zoo: dict[str, Path]) -> None:
    row = Request("row", prompts(1, 300, seed=4)[0] * 3, None, SamplingParams(pooling="mean").of_task("embed"))
    whole = serve(make_engine(base), [row])["row"]
    first, second = make_engine(base, max_step_tokens=5), make_engine(base)
    first.add([row])
    assert first.step() == []
    moved = first.export_rows(["row"])
    second.import_rows(moved)
    (result,) = second.run([])
    np.testing.assert_allclose(numbers(result), numbers(whole), atol=1e-6)


def test_what_cannot_be_served_is_refused_by_name_and_costs_its_row_alone(base: Path, zoo: dict[str, Path]) -> None:
    engine = make_engine(base)
    ids = register(engine, zoo)
    asked = [
        Request("no head", (5, 6), ids["text"], CLASSIFY),
        Request("base", (5, 6), None, CLASSIFY),
        Request("good", (5, 6), ids["two"], CLASSIFY),
    ]
    results = serve(engine, asked)
    assert results["no head"].error == "task='classify': adapter 'text' has no head that classifies"
    assert results["base"].error == "task='classify': the base model has no head that classifies"
    assert results["good"].error is None


def test_a_head_that_has_changed_since_the_audit_is_refused(base: Path, make_classifier: Any, tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "adapter", base, 3)
    engine = make_engine(base)
    ids = register(engine, {"adapter": folder})
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"] += 1.0
    save_file(tensors, folder / "adapter_model.safetensors")
    result = serve(engine, [Request("row", (5, 6), ids["adapter"], CLASSIFY)])["row"]
    assert "have changed since they were audited" in (result.error or "")


def test_numbers_that_are_not_finite_are_an_error(base: Path, make_classifier: Any, tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "adapter", base, 3)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"].fill_(3e38)
    save_file(tensors, folder / "adapter_model.safetensors")
    engine = make_engine(base)
    ids = register(engine, {"adapter": folder})
    result = serve(engine, [Request("row", (5, 6), ids["adapter"], CLASSIFY)])["row"]
    assert "NaN or infinite" in (result.error or "")


@pytest.mark.parametrize("family", ["llama", pytest.param("opt", marks=pytest.mark.long), "gemma2"])
def test_a_base_that_classifies_serves_its_own_head_and_those_of_adapters(
    family: str, make_model: Callable[..., Path], make_classifier: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    extra = {"ffn_dim": 96, "word_embed_proj_dim": 32} if family == "opt" else {}
    base = make_model(tmp_path / "base", family, **extra)
    folder = tmp_path / "classifier"
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=5, dtype=torch.float32)
    model.config.id2label = {i: f"kind {i}" for i in range(5)}
    model.save_pretrained(folder)
    for file in base.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    adapter = make_classifier(tmp_path / "adapter", base, 3, seed=4)
    engine = make_engine(folder)
    ids = register(engine, {"adapter": adapter})
    rows = [row for row in prompts(3, 300, seed=6) if row[-1]]
    results = serve(
        engine,
        [
            *(Request(f"base {i}", row, None, CLASSIFY) for i, row in enumerate(rows)),
            *(Request(f"adapter {i}", row, ids["adapter"], CLASSIFY) for i, row in enumerate(rows)),
            Request("text", rows[0], None, GENERATE),
        ],
    )
    model.eval()
    for i, row in enumerate(rows):
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0].numpy()
        np.testing.assert_allclose(numbers(results[f"base {i}"]), logits, atol=TOLERANCE)
        assert results[f"base {i}"].text == f"kind {logits.argmax()}"
    for i, logits in enumerate(logits_of(base, adapter, 3, rows)):
        np.testing.assert_allclose(numbers(results[f"adapter {i}"]), logits, atol=TOLERANCE)
    assert results["text"].error == "the base model classifies text and has no head that generates it"


def test_a_head_without_pairs_serves_the_base_s_states(base: Path, make_classifier: Any, tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "adapter", base, 3)
    config = folder / "adapter_config.json"
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({k: v for k, v in tensors.items() if "score" in k}, folder / "adapter_model.safetensors")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": []}))
    engine = make_engine(base)
    ids = register(engine, {"adapter": folder})
    plain = SamplingParams(normalize_embeddings=False).of_task("embed")
    results = serve(engine, [Request("head", (5, 6), ids["adapter"], CLASSIFY), Request("base", (5, 6), None, plain)])
    head = tensors["base_model.model.score.weight"].numpy()
    np.testing.assert_allclose(numbers(results["head"]), head @ numbers(results["base"]), atol=TOLERANCE)


def test_products_of_a_head_do_not_depend_on_rows_beside_them() -> None:
    rng = np.random.default_rng(0)
    states = rng.standard_normal((7, 33)).astype(np.float32)
    head = rng.standard_normal((5, 33)).astype(np.float32)
    together = products(states, head)
    np.testing.assert_allclose(together, states @ head.T, rtol=1e-4, atol=1e-5)
    for i in range(len(states)):
        assert (products(states[i : i + 1], head) == together[i]).all()


def test_a_row_s_task_leaves_it_the_options_that_it_has() -> None:
    job = SamplingParams(max_tokens=99, temperature=1.0, choice=("a", "b", "c"), pooling="mean", logprobs=True)
    assert job.of_task("classify") == CLASSIFY
    assert job.of_task("embed") == SamplingParams(max_tokens=1, task="embed", pooling="mean")
    assert job.of_task("generate") == replace(job, pooling="last")
    assert SamplingParams().of_task("rerank").choice == ("yes", "no")
    assert replace(job, task="rerank").problems() == [
        "task=rerank, choice=['a', 'b', 'c']: expected two texts, the first for relevance"
    ]
