"""Adapters of a hub's cache and of run folders, in several forms, through a whole job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from other_forms import as_gguf_of, as_pickle

import lorabatch
from lorabatch.jobs.spec import JobSpec

PROMPT = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'again' if add_generation_prompt }}"


def answers(
    base: Path, adapters: str | dict[str, str], names: list[str], folder: Path
) -> dict[str, tuple[str, list[int]]]:
    """Hash of the adapter and tokens of the answer by adapter."""
    rows = [{"id": name, "adapter": name, "messages": PROMPT} for name in names]
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "in.parquet")
    spec = JobSpec(
        model=str(base),
        adapters=adapters,
        input=str(folder / "in.parquet"),
        output=str(folder / "out"),
        workers=1,
        max_tokens=4,
        ignore_eos=True,
        logprobs=True,
        pool_bytes=4 << 20,
    )
    lorabatch.run(spec)
    found = ds.dataset(spec.output, format="parquet").to_table().to_pylist()
    return {row["id"]: (row["adapter_sha256"], row["token_ids"]) for row in found if row["error"] is None}


@pytest.mark.long
def test_adapters_answer_alike_wherever_they_are(
    make_model: Callable[..., Path],
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = make_model(tmp_path / "base")
    plain = make_adapter(tmp_path / "plain" / "one", base, target_modules="all-linear")
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    expected = answers(base, {"one": str(plain)}, ["one"], tmp_path / "first")["one"]
    pickled = as_pickle(plain, tmp_path / "pickled")
    (pickled / "chat_template.jinja").write_text(TEMPLATE)
    hub = tmp_path / "hub"
    shutil.copytree(pickled, hub / "models--org--one" / "snapshots" / "0")
    assert answers(base, str(hub), ["one"], tmp_path / "second") == {"one": expected}
    for number in (9, 10):
        shutil.copytree(plain if number == 10 else tmp_path / "pickled", tmp_path / f"runs/a/checkpoint-{number}")
    shutil.rmtree(tmp_path / "runs/a/checkpoint-9")
    make_adapter(tmp_path / "runs/a/checkpoint-9", base, seed=5)
    assert answers(base, str(tmp_path / "runs/*/latest"), ["a"], tmp_path / "third") == {"a": expected}
    file = as_gguf_of(base, plain, tmp_path / "gguf") / "adapter.gguf"
    found = answers(base, {"file": str(file)}, ["file"], tmp_path / "fourth")
    (plain / "chat_template.jinja").unlink()
    assert found == {"file": answers(base, {"one": str(plain)}, ["one"], tmp_path / "fifth")["one"]}
