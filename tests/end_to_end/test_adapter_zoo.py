"""Some sixty adapters, built by PEFT and by damaging them, through the whole job: applied exactly, or refused by name.

For each base one real job (index, plan, two workers with real engines, parts) answers interleaved rows of every
adapter and of the base; each answer is compared with PEFT in fp32, token by token and by log-probability.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from other_forms import as_gguf_of, as_mlx, as_pickle, as_tinker
from safetensors.numpy import load_file, save_file

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
EXACT: dict[str, dict[str, Any]] = {
    "all linear layers": {"target_modules": "all-linear"},
    "rank 1": {"r": 1, "target_modules": ["q_proj"]},
    "rank 64": {"r": 64, "target_modules": ["v_proj", "up_proj"]},
    "rsLoRA": {"use_rslora": True, "target_modules": ["k_proj", "gate_proj"]},
    "rank and alpha patterns": {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 3},
        "alpha_pattern": {"layers.1.*q_proj": 5},
    },
    "several ranks": {"target_modules": ["k_proj", "up_proj"], "rank_pattern": {"up_proj": 3}},
    "patterns with rsLoRA": {
        "target_modules": ["o_proj", "up_proj"],
        "use_rslora": True,
        "rank_pattern": {"o_proj": 12},
        "alpha_pattern": {"up_proj": 3},
    },
    "regular expression": {"target_modules": r".*\.1\..*(q_proj|down_proj)"},
    "one layer": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded modules": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
}
BY_MERGE: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True, "target_modules": ["q_proj", "up_proj"]},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "o_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "saved norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 41]},
}


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Damage that renames tensors."""
    return rewrite(lambda tensors: {change(key): value for key, value in tensors.items()})


def rewrite(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    """Damage to the tensors of a folder."""

    def damage(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return damage


def configure(**keys: Any) -> Callable[[Path], None]:
    """Damage to the configuration."""

    def damage(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return damage


# Adapters of the above in the forms of other programs: name -> the one whose numbers it has, and what writes it, given
# the base, that adapter's folder, and the one to write.
OTHER_FORMS: dict[str, tuple[str, Callable[[Path, Path, Path], Any]]] = {
    "weights pickled": ("patterns with rsLoRA", lambda _, *folders: as_pickle(*folders)),
    "mlx-lm": ("all linear layers", lambda _, *folders: as_mlx(*folders)),
    "mlx-lm, one layer": ("one layer", lambda _, *folders: as_mlx(*folders, num_layers=1)),
    "mlx-lm, DoRA": ("DoRA", lambda _, *folders: as_mlx(*folders)),
    "Tinker": ("all linear layers", lambda _, *folders: as_tinker(*folders)),
    "GGUF": ("all linear layers", as_gguf_of),
    "GGUF, several ranks": ("several ranks", as_gguf_of),
}


class Touching:
    """Creates a file when unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


def _code_in_a_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"x": Touching()}, folder / "adapter_model.bin")


# What is done to a good adapter, and a word that the refusal must hold.
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no matching module": (rename(lambda key: key.replace("q_proj", "query")), "query"),
    "B all zero": (rewrite(lambda t: {k: v * np.float32("lora_A" in k) for k, v in t.items()}), "zero"),
    "NaN": (rewrite(lambda t: {k: v * np.float32("nan") for k, v in t.items()}), "NaN"),
    "missing partner": (rewrite(lambda t: dict(list(t.items())[:-1])), "lora_"),
    "another base": (rewrite(lambda t: {k: np.repeat(v, 2, axis=1) for k, v in t.items()}), "shape"),
    "another rank": (configure(r=4), "4"),
    "an unknown key": (configure(scale_by_magic=True), "scale_by_magic"),
    "unconverted PiSSA": (configure(init_lora_weights="pissa"), "pissa"),
    "activated LoRA": (configure(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
    "another method": (configure(peft_type="IA3"), "IA3"),
    "code in a pickle": (_code_in_a_pickle, "adapter_model.bin"),
    "damaged file": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"no tensors"), "safetensors"),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
}


def build_zoo(root: Path, base: Path, make_adapter: Callable[..., Path]) -> dict[str, str]:
    """Write every adapter below `root`; the verdict each must get, by name."""
    verdicts = {}
    for seed, (name, settings) in enumerate((EXACT | BY_MERGE).items()):
        make_adapter(root / name, base, seed=seed, **settings)
        verdicts[name] = "exact" if name in EXACT else "exact-by-merge"
    for name, (source, write) in OTHER_FORMS.items():
        write(base, root / source, root / name)
        verdicts[name] = verdicts[source]
    for name, (damage, _) in DAMAGED.items():
        shutil.copytree(root / "rank 1", root / name)
        damage(root / name)
        verdicts[name] = "refused"
    return verdicts


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

    def __init__(self, base: Path) -> None:
        self._base = base

    @torch.no_grad()
    def check(self, adapter: Path | None, rows: list[dict[str, Any]]) -> None:
        """Every answer is the greedy one, with its log-probability, at every position."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
        model.eval()
        for row in rows:
            prompt, tokens = row["prompt_token_ids"], row["token_ids"]
            assert len(tokens) == MAX_TOKENS, row["error"]
            expected = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            for step, (token, logprob) in enumerate(zip(tokens, row["token_logprobs"], strict=True)):
                best = float(expected[step].max())
                assert abs(float(expected[step, token]) - best) < 1e-3, (adapter, row["id"], step)
                assert abs(logprob - best) < 1e-3, (adapter, row["id"], step)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "processes"),
    [pytest.param(name, 1, marks=[] if name == "qwen2" else pytest.mark.long) for name in BASES]
    + [pytest.param("llama, tied", 2, marks=pytest.mark.long)],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_adapter_is_applied_exactly_or_refused_by_name(
    name: str,
    processes: int,
    make_model: Callable[..., Path],
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = make_model(tmp_path / "base", **BASES[name])
    zoo = tmp_path / "adapters"
    verdicts = build_zoo(zoo, base, make_adapter)
    write_input(tmp_path / "in.parquet", list(verdicts))
    spec = JobSpec(
        model=str(base),
        adapters=str(zoo),
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
    assert found == verdicts
    rows = ds.dataset(spec.output, format="parquet").to_table().to_pylist()
    assert sorted(int(row["id"]) for row in rows) == list(range(2 * len(PROMPTS) * len(verdicts)))
    oracle = Oracle(base)
    oracle.check(None, [row for row in rows if row["adapter"] is None])
    for kind, verdict in verdicts.items():
        own = [row for row in rows if row["adapter"] == kind]
        if verdict == "refused":
            check_refusal(kind, own)
            continue
        assert {row["mode"] for row in own} == {"unmerged" if verdict == "exact" else "merged"}
        assert len({row["adapter_sha256"] for row in own}) == 1
        oracle.check(zoo / (OTHER_FORMS[kind][0] if kind in OTHER_FORMS else kind), own)


def check_refusal(kind: str, rows: list[dict[str, Any]]) -> None:
    """Error rows that name the adapter and what is wrong with it."""
    _, word = DAMAGED[kind]
    for row in rows:
        assert row["finish_reason"] == "error"
        assert row["completion"] is None
        assert kind in row["error"]
        assert word in row["error"], row["error"]


def test_the_verdicts_are_those_of_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "adapters.md").read_text(encoding="utf-8")
    for kinds, verdict in ((EXACT, "exact"), (BY_MERGE, "exact-by-merge"), (DAMAGED, "refused")):
        for kind in kinds:
            assert f"| {kind} | {verdict} |" in text, f"docs/reference/adapters.md lacks the verdict of {kind!r}"
    for kind, (source, _) in OTHER_FORMS.items():
        verdict = "exact" if source in EXACT else "exact-by-merge"
        assert f"| {kind} | {verdict} |" in text, f"docs/reference/adapters.md lacks the verdict of {kind!r}"
