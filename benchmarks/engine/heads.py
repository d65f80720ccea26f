"""Classifiers and generators in one batch, beside PEFT: seconds, and how far the numbers are apart.

`python -m lorabatch.benchmarks.engine.heads MODEL [--rows N] [--tokens N] [--output FILE.json]` writes random adapters
of rank 16 for a base model: eight classifiers of 2 to 77 labels and four that generate text. N rows ask each of them.
Texts have the long-tailed lengths of `lorabatch bench engine`, which no system knows, or all have as many tokens as
`--tokens` says. It prints one JSON object.

PEFT is given its best. All adapters are loaded into one model, and heads are applied to hidden states by hand: PEFT
loads no two heads of different sizes into one model. `mixed` takes rows as they come, in batches of 32 with a name
of an adapter for each (`adapter_names`); `switched` sorts them by adapter and switches between groups. The numbers
are compared with PEFT's own `AutoModelForSequenceClassification` models, one for each classifier.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorabatch.benchmarks.engine.systems import PEFT_BATCH, serve, start_clock
from lorabatch.benchmarks.engine.workload import LIMIT_TOKENS, drawn_length
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams

LABELS = (2, 3, 5, 8, 13, 20, 41, 77)
GENERATORS = 4
RANK = 16
SHORTEST, LONGEST = 16, 64
CLASSIFY = SamplingParams().of_task("classify")


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A row of the measurement: an adapter's name, a prompt, and the length of its text; 0 where it is classified."""

    adapter: str
    tokens: tuple[int, ...]
    num_tokens: int

    @property
    def is_classified(self) -> bool:
        return not self.num_tokens


def write_adapters(model: Path, root: Path) -> dict[str, int]:
    """Write the adapters in PEFT's form. Returns number of labels by name, 0 for adapters that generate text."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    names = {f"classifier-{count}": count for count in LABELS} | {f"writer-{i}": 0 for i in range(GENERATORS)}
    for seed, (name, count) in enumerate(names.items()):
        config = AutoConfig.from_pretrained(model, **({"num_labels": count} if count else {}))
        kind: Any = AutoModelForSequenceClassification if count else AutoModelForCausalLM
        task = "SEQ_CLS" if count else "CAUSAL_LM"
        with torch.device("meta"):  # names and shapes alone
            lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type=task)
            tuned = get_peft_model(kind.from_config(config), lora)
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            key.replace(".modules_to_save", "").replace(".default", ""): 0.02
            * torch.randn(parameter.shape, generator=generator)
            for key, parameter in tuned.named_parameters()
            if "lora_" in key or "score.modules_to_save" in key
        }
        tuned.peft_config["default"].save_pretrained(str(root / name))
        save_file(tensors, root / name / "adapter_model.safetensors", {"format": "pt"})
    return names


def make_rows(names: dict[str, int], vocab_size: int, num_rows: int, num_tokens: int | None) -> list[HeadRow]:
    """Rows of all adapters in random order."""
    rng = random.Random(0)
    rows = [
        HeadRow(
            name,
            tuple(rng.randrange(100, vocab_size) for _ in range(rng.randrange(SHORTEST, LONGEST))),
            0 if count else num_tokens or drawn_length(rng),
        )
        for name, count in names.items()
        for _ in range(num_rows)
    ]
    rng.shuffle(rows)
    return rows


class Ours:
    """Our engine with all adapters."""

    def __init__(self, model: Path, root: Path, names: Iterable[str]) -> None:
        self._engine = Engine(model, EngineConfig(mode="auto"))
        self._ids = {}
        for name in names:
            found = audit_adapter(root / name, self._engine.model, name).identity_sha256
            assert found is not None, f"{name}: refused"
            self._engine.register_adapter(found, root / name, name)
            self._ids[name] = found
        self._text = SamplingParams(max_tokens=LIMIT_TOKENS, ignore_eos=True)

    def run(self, rows: Sequence[HeadRow]) -> list[Any]:
        """Logits of classified rows, tokens of others."""
        asked = [
            Request(str(i), row.tokens, self._ids[row.adapter], CLASSIFY if row.is_classified else self._text)
            for i, row in enumerate(rows)
        ]
        found = serve(
            self._engine, asked, {str(i): row.num_tokens for i, row in enumerate(rows) if not row.is_classified}
        )
        return [self._answer(found[str(i)]) for i in range(len(rows))]

    @staticmethod
    def _answer(found: Result | ExportedRow) -> Any:
        if isinstance(found, ExportedRow):
            return list(found.token_ids)
        assert found.pooled is not None, found.error
        return np.frombuffer(found.pooled, "<f4")


class Peft:
    """One model of PEFT with the pairs of all adapters, and their heads beside it."""

    def __init__(self, model: Path, root: Path, names: dict[str, int]) -> None:
        from peft import PeftModel
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._heads: dict[str, torch.Tensor] = {}
        with tempfile.TemporaryDirectory() as scratch:
            for name, count in names.items():
                folder = root / name
                if count:
                    tensors = load_file(folder / "adapter_model.safetensors")
                    self._heads[name] = tensors["base_model.model.score.weight"]
                    folder = _without_head(folder, Path(scratch) / name)
                if base.__class__.__name__.startswith("Peft"):
                    base.load_adapter(folder, adapter_name=name)
                else:
                    base = PeftModel.from_pretrained(base, folder, adapter_name=name)
        self._model = base.eval()

    def mixed(self, rows: Sequence[HeadRow]) -> list[Any]:
        """Batches of rows as they come, each with an adapter of its own; both tasks by themselves."""
        found: dict[int, Any] = {}
        for task in (True, False):
            found |= self._in_batches(rows, [i for i, row in enumerate(rows) if row.is_classified == task])
        return [found[i] for i in range(len(rows))]

    def switched(self, rows: Sequence[HeadRow]) -> list[Any]:
        """Batches of one adapter each."""
        found: dict[int, Any] = {}
        for name in sorted({row.adapter for row in rows}):
            self._model.set_adapter(name)
            found |= self._in_batches(rows, [i for i, row in enumerate(rows) if row.adapter == name], is_mixed=False)
        return [found[i] for i in range(len(rows))]

    @torch.inference_mode()
    def _in_batches(self, rows: Sequence[HeadRow], places: list[int], *, is_mixed: bool = True) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for batch in _batches(places):
            ids, mask = _padded([rows[i].tokens for i in batch])
            names = {"adapter_names": [rows[i].adapter for i in batch]} if is_mixed else {}
            if rows[batch[0]].is_classified:
                states = self._states(ids, mask, names)
                found |= {
                    i: (self._heads[rows[i].adapter] @ state).numpy() for i, state in zip(batch, states, strict=True)
                }
                continue
            longest = max(rows[i].num_tokens for i in batch)
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
                **names,
            )
            texts = out[:, ids.shape[1] :].tolist()
            found |= {i: text[: rows[i].num_tokens] for i, text in zip(batch, texts, strict=True)}
        return found

    def _states(self, ids: torch.Tensor, mask: torch.Tensor, names: dict[str, Any]) -> torch.Tensor:
        """Last hidden states of the last tokens, [num_rows, hidden_size]."""
        kept: list[torch.Tensor] = []
        head = self._model.get_base_model().lm_head
        hook = head.register_forward_pre_hook(lambda module, given: kept.append(given[0]))
        try:
            # logits of one place only: transformers computes those of all otherwise
            self._model(input_ids=ids, attention_mask=mask, logits_to_keep=1, **names)
        finally:
            hook.remove()
        return kept[0][:, -1]


def _without_head(folder: Path, target: Path) -> Path:
    """A classifier as an adapter that PEFT loads into a model that generates text: its pairs alone."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"task_type": "CAUSAL_LM", "modules_to_save": None}
    (target / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({k: v for k, v in tensors.items() if "score" not in k}, target / "adapter_model.safetensors")
    return target


def _batches(places: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(places), PEFT_BATCH):
        yield places[start : start + PEFT_BATCH]


def _padded(rows: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@torch.inference_mode()
def peft_logits(model: Path, root: Path, names: dict[str, int], rows: Sequence[HeadRow]) -> dict[int, Any]:
    """Logits of classified rows by PEFT's own models, one row at a time."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32, num_labels=2)
    found = {}
    for name, count in names.items():
        if not count:
            continue
        base.score = torch.nn.Linear(base.config.hidden_size, count, bias=False)
        tuned = PeftModel.from_pretrained(base, root / name).eval()
        for i, row in enumerate(rows):
            if row.adapter == name:
                found[i] = tuned(torch.tensor([row.tokens])).logits[0].numpy()
        base = tuned.unload()
    return found


@torch.inference_mode()
def likeliest_tokens(
    model: Path, root: Path, names: dict[str, int], rows: Sequence[HeadRow], answers: Sequence[Any]
) -> int:
    """Number of tokens of texts that PEFT, given each text alone and whole, finds the likeliest at their places."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    count = 0
    for name in (name for name, labels in names.items() if not labels):
        tuned = PeftModel.from_pretrained(base, root / name).eval()
        for row, text in zip(rows, answers, strict=True):
            if row.adapter == name:
                logits = tuned(torch.tensor([[*row.tokens, *text]])).logits[0, len(row.tokens) - 1 : -1]
                count += int((logits.argmax(1) == torch.tensor(text)).sum())
        base = tuned.unload()
    return count


@torch.inference_mode()
def embedding_error(model: Path, rows: Sequence[HeadRow]) -> float:
    """Largest difference of embeddings from sentence-transformers' pooling, by its formulas: the last token, or
    the sum over the mask by its size, then divided by the length.
    """
    from transformers import AutoModel

    base = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    engine = Engine(model, EngineConfig(mode="unmerged"))
    asked = [
        Request(f"{pooling} {i}", row.tokens, None, SamplingParams(pooling=pooling).of_task("embed"))
        for pooling in ("last", "mean")
        for i, row in enumerate(rows)
    ]
    found = {r.request_id: np.frombuffer(r.pooled or b"", "<f4") for r in engine.run(asked)}
    worst = 0.0
    for i, row in enumerate(rows):
        states = base(torch.tensor([row.tokens])).last_hidden_state[0]
        for pooling, pooled in (("last", states[-1]), ("mean", states.sum(0) / len(states))):
            expected = torch.nn.functional.normalize(pooled, dim=0).numpy()
            worst = max(worst, float(np.abs(found[f"{pooling} {i}"] - expected).max()))
    return worst


def timed(run: Callable[[], list[Any]]) -> tuple[float, float, list[Any]]:
    """Seconds of a call, processor seconds of this process during it, and what it returns."""
    began_s, began_cpu_s = start_clock(), time.process_time()
    found = run()
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s, found


def measure(model: Path, num_rows: int, num_tokens: int | None, turns: int, threads: int) -> dict[str, Any]:
    """Everything that is measured, as a JSON-ready object. With one thread, processor seconds compare the systems on a
    machine that others use, too: nobody waits in a loop.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        names = write_adapters(model, root)
        ours = Ours(model, root, names)
        rows = make_rows(names, 40_000, num_rows, num_tokens)
        peft = Peft(model, root, names)
        seconds: dict[str, list[float]] = {"ours": [], "peft mixed": [], "peft switched": []}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in seconds}
        warm = rows[:PEFT_BATCH]
        ours.run(warm)
        peft.mixed(warm[:4])
        answers: dict[str, list[Any]] = {}
        for _ in range(turns):
            for name, run in (("ours", ours.run), ("peft mixed", peft.mixed), ("peft switched", peft.switched)):
                taken_s, cpu_s, answers[name] = timed(lambda run=run: run(rows))  # type: ignore[misc]
                seconds[name].append(taken_s)
                cpu_seconds[name].append(cpu_s)
                print(f"{name}: {taken_s:.1f} s, {cpu_s:.1f} s of a processor", flush=True)
        expected = peft_logits(model, root, names, rows)
        errors = [float(np.abs(answers["ours"][i] - logits).max()) for i, logits in expected.items()]
        texts = [i for i, row in enumerate(rows) if not row.is_classified]
        return {
            "model": model.name,
            "cores": len(os.sched_getaffinity(0)),
            "rows": len(rows),
            "classified": len(expected),
            "labels": LABELS,
            "lengths": "long-tailed" if num_tokens is None else num_tokens,
            "tokens_of_text": sum(row.num_tokens for row in rows),
            "threads": threads,
            "seconds": seconds,
            "processor_seconds": cpu_seconds,
            "times_as_fast_as_mixed": _ratio(seconds, "peft mixed"),
            "times_as_fast_as_switched": _ratio(seconds, "peft switched"),
            "times_as_fast_as_mixed_by_processor": _ratio(cpu_seconds, "peft mixed"),
            "times_as_fast_as_switched_by_processor": _ratio(cpu_seconds, "peft switched"),
            "largest_difference_of_a_logit": max(errors),
            "equal_labels": sum(int(answers["ours"][i].argmax() == e.argmax()) for i, e in expected.items()),
            "likeliest_tokens": likeliest_tokens(model, root, names, rows, answers["ours"]),
            "texts": len(texts),
            "texts_equal_to_peft_in_batches": sum(answers["ours"][i] == answers["peft switched"][i] for i in texts),
            "largest_difference_of_an_embedding": embedding_error(model, rows[:8]),
        }


def _ratio(seconds: dict[str, list[float]], other: str) -> float:
    return min(seconds[other]) / min(seconds["ours"])


def main() -> None:
    """Measure, and print or write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=16, help="rows of each adapter")
    parser.add_argument("--tokens", type=int, help="tokens of each text; without: long-tailed lengths")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    result = json.dumps(measure(given.model, given.rows, given.tokens, given.turns, given.threads), indent=1)
    if given.output:
        given.output.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main()
