"""Merging on a GPU: from the packed matrices of an adapter, read ahead, and found not to be finite after a launch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.scheduler.batchers.batching import BatchView, StepPlan
from lorabatch.tests.engine.runner.test_gpu_runner import PROMPT, MergesFirst, by_id, device_engine, make_engine
from lorabatch.tests.oracle.peft_oracle import register_all, weights_sha256

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def rows_of(adapter_ids: list[str | None], count: int = 2) -> list[Request]:
    return [
        Request(f"{i}-{number}", (*PROMPT, i + 3), adapter_id, GREEDY)
        for i in range(count)
        for number, adapter_id in enumerate(adapter_ids)
    ]


def tokens_of(results: list[Result]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(result.token_ids) for key, result in by_id(results).items()}


class OnceMerged:
    """Serves all rows unmerged, or merged one adapter after the other, as `adapter` says."""

    adapter: int | None = None

    def __call__(self, view: BatchView) -> StepPlan:
        everyone = np.ones(len(view.running_adapter), bool)
        waiting = np.arange(len(view.waiting_adapter))
        return StepPlan("unmerged" if self.adapter is None else "merged", self.adapter, everyone, waiting)


@pytest.mark.long
def test_weights_merged_from_the_pool_the_host_and_the_files_have_the_same_bits(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = device_engine(tiny_llama, mode="auto", page_tokens=16)  # chunks of 16 rank rows, as files are merged by
    names = ["rank8", "rank20"]
    ids = register_all(engine, {name: tiny_adapters[name] for name in names})
    from_files, pristine = {}, weights_sha256(engine)
    for adapter_id in ids.values():
        engine._merge_from_files(adapter_id)
        from_files[adapter_id] = weights_sha256(engine)
    assert len({*from_files.values(), pristine}) == 3
    monkeypatch.setattr(engine._registry, "load", None)  # no file is read for merging
    for adapter_id in [*ids.values(), *ids.values()]:  # read for it, then from host memory
        engine.switch_weights(adapter_id)
        assert weights_sha256(engine) == from_files[adapter_id]
    assert engine.telemetry().adapters.disk_reads == 2
    engine.switch_weights(None)
    assert weights_sha256(engine) == pristine
    list(engine.run(rows_of(list(ids.values()), 1)))  # unmerged, from the pool
    assert set(engine.telemetry().resident_adapter_ids) == set(ids.values())
    for adapter_id in ids.values():
        engine.switch_weights(adapter_id)
        assert weights_sha256(engine) == from_files[adapter_id]
    assert engine.telemetry().adapters.disk_reads == 2
    engine.check_integrity()


@pytest.mark.long
def test_the_adapter_that_is_merged_next_is_read_ahead(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    engine = device_engine(tiny_llama, mode="merged", host_tier_bytes=1 << 20)
    ids = register_all(engine, {name: tiny_adapters[name] for name in ("rank8", "rank20")})
    requests = rows_of(list(ids.values()))
    loader = engine._batch.residency.loader
    found, begun = [], []
    engine.add(requests)
    while engine.num_unfinished:
        found += engine.step()
        begun.append([loader.has_begun(adapter_id) for adapter_id in ids.values()])
    assert [True, True] in begun, "the second adapter is read while rows of the first run"
    assert engine.telemetry().adapters.disk_reads == 2, "each was read once"
    plain = make_engine(tiny_llama)
    register_all(plain, {name: tiny_adapters[name] for name in ("rank8", "rank20")})
    assert tokens_of(found) == tokens_of(list(plain.run(requests)))
    assert {result.mode for result in found} == {"merged"}


@pytest.fixture
def huge(tiny_adapters: dict[str, Path], tmp_path: Path) -> Path:
    """An adapter whose product with the base's weights is infinite."""
    folder = shutil.copytree(tiny_adapters["rank8"], tmp_path / "huge")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor * 1e25 for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return Path(folder)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.long
@pytest.mark.parametrize("batcher", [OnceMerged(), MergesFirst()])
def test_merged_weights_that_are_not_finite_cost_their_own_rows_alone(
    tiny_llama: Path, tiny_adapters: dict[str, Path], huge: Path, batcher: OnceMerged | MergesFirst
) -> None:
    """They are found after a step was launched with them: its tokens mean nothing, and rows go on as if it had not
    been. Where all modes may be mixed, a step of other rows is on its way meanwhile."""
    unmerged = OnceMerged()
    engine, plain = device_engine(tiny_llama, unmerged, mode="auto"), make_engine(tiny_llama)
    folders = {"huge": huge, "rank20": tiny_adapters["rank20"]}
    ids = register_all(engine, folders)
    register_all(plain, folders)
    others = rows_of([None, ids["rank20"]])
    expected = tokens_of(list(plain.run(others)))
    engine.add(others)
    found = [*engine.step(), *engine.step()]
    if isinstance(batcher, OnceMerged):  # no other rows beside those of the adapter
        found += list(engine.run([]))
        batcher.adapter = 0
    engine.batcher = batcher
    engine.add(Request(f"bad-{i}", (*PROMPT, i), ids["huge"], GREEDY) for i in range(2))
    while not any(result.error for result in found):
        found += engine.step()
    assert engine.telemetry().mode != "merged", "the weights are the base's again"
    engine.batcher = unmerged
    found += list(engine.run([]))
    errors = [result.error for result in found if result.error]
    assert len(errors) == 2
    assert all("'huge'" in error and "are not finite" in error for error in errors)
    assert tokens_of([result for result in found if not result.error]) == expected
    engine.check_integrity()
