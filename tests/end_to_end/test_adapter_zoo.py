"""Over a hundred adapters, built by PEFT and by damaging them, through the whole job: applied exactly, or refused by
name.

For each base one real job (index, plan, two workers with real engines, parts) answers interleaved rows of every
adapter and of the base; each answer is compared with PEFT in fp32, token by token and by log-probability.
`tests/engine/model_config/test_zoo.py` has the same adapters over every family, in the engine alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from adapter_zoo import HARMLESS, Parts, Specimen, build_zoo, damages, exact_kinds, merged_kinds, spellings
from trained_adapters import Base, open_base

import lorabatch
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore

MAX_TOKENS = 5
PROMPTS = ((5, 6, 7, 9, 11), (40, 41, 42))
BASES: dict[str, dict[str, Any]] = {
    "llama, tied": {"family": "llama", "tie_word_embeddings": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 16},
}


def write_input(path: Path, names: list[str]) -> None:
    """Rows of all adapters, the base between any two of them, all asking the same prompts."""
    rows = [
        {"adapter": asked, "prompt_token_ids": list(prompt)}
        for prompt in PROMPTS
        for name in names
        for asked in (name, None)
    ]
    ids = pa.array([str(number) for number in range(len(rows))])
    pq.write_table(pa.Table.from_pylist(rows).add_column(0, "id", ids), path)


class Oracle:
    """PEFT in fp32, one adapter at a time."""

    def __init__(self, base: Base, root: Path) -> None:
        self._base, self._root = base, root

    @torch.no_grad()
    def check(self, specimen: Specimen | None, rows: list[dict[str, Any]]) -> None:
        """Every answer is the greedy one, with its log-probability, at every position."""
        from peft import PeftModel

        model = self._base.fresh()
        if specimen is not None:
            if specimen.vocab_size is not None:
                model.resize_token_embeddings(specimen.vocab_size)
            model = PeftModel.from_pretrained(model, self._root / specimen.source)
        model.eval()
        for row in rows:
            prompt, tokens = row["prompt_token_ids"], row["token_ids"]
            assert len(tokens) == MAX_TOKENS, row["error"]
            expected = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            for step, (token, logprob) in enumerate(zip(tokens, row["token_logprobs"], strict=True)):
                best = float(expected[step].max())
                assert abs(float(expected[step, token]) - best) < 1e-3, (specimen, row["id"], step)
                assert abs(logprob - best) < 1e-3, (specimen, row["id"], step)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "processes"),
    [*((name, 1) for name in BASES), ("llama, tied", 2)],
)
@pytest.mark.filterwarnings("ignore")
def test_every_adapter_is_applied_exactly_or_refused_by_name(
    name: str,
    processes: int,
    make_model: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = open_base(make_model(tmp_path / "base", **BASES[name]))
    zoo = build_zoo(tmp_path / "adapters", base)
    write_input(tmp_path / "in.parquet", list(zoo))
    spec = JobSpec(
        model=str(base.folder),
        adapters=str(tmp_path / "adapters"),
        input=str(tmp_path / "in.parquet"),
        output=str(tmp_path / "out"),
        workers=2,
        tensor_parallel=processes,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=True,
        max_errors="50%",
        pool_bytes=4 << 20,
    )
    lorabatch.run(spec)
    record = JobStore(spec.output).read_record()
    found = {adapter.name: adapter.verdict for adapter in record.adapters}
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{kind}: {verdict}" for kind, verdict in found.items()))
    assert found == {kind: specimen.verdict for kind, specimen in zoo.items()}
    rows = ds.dataset(spec.output, format="parquet").to_table().to_pylist()
    assert sorted(int(row["id"]) for row in rows) == list(range(2 * len(PROMPTS) * len(zoo)))
    oracle = Oracle(base, tmp_path / "adapters")
    oracle.check(None, [row for row in rows if row["adapter"] is None])
    for kind, specimen in zoo.items():
        own = [row for row in rows if row["adapter"] == kind]
        if specimen.verdict == "refused":
            check_refusal(kind, specimen.word, own)
            continue
        assert {row["mode"] for row in own} == {"unmerged" if specimen.verdict == "exact" else "merged"}
        assert len({row["adapter_sha256"] for row in own}) == 1
        oracle.check(specimen, own)


def check_refusal(kind: str, word: str, rows: list[dict[str, Any]]) -> None:
    """Error rows that name the adapter and what is wrong with it."""
    for row in rows:
        assert row["finish_reason"] == "error"
        assert row["completion"] is None
        assert kind in row["error"]
        assert word in row["error"], row["error"]


def test_the_verdicts_are_those_of_the_document() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=2))
    parts = Parts.of(model)
    exact, merged = exact_kinds(parts), merged_kinds(parts, 320)
    forms = {kind: source in exact for kind, (source, _) in spellings(parts, "llama", False).items()}
    kinds = {
        "exact": [*exact, *HARMLESS, *(kind for kind, is_exact in forms.items() if is_exact)],
        "exact-by-merge": [*merged, *(kind for kind, is_exact in forms.items() if not is_exact)],
        "refused": damages(parts, False),
    }
    text = (Path(__file__).parents[2] / "docs" / "reference" / "adapters.md").read_text(encoding="utf-8")
    for verdict, names in kinds.items():
        assert f"| {verdict} | {'; '.join(sorted(names, key=str.lower))} |" in text
