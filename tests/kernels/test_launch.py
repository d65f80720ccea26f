"""What launches share."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from lorabatch.benchmarks.gpu.kernel_cases import kernel_cases
from lorabatch.benchmarks.gpu.layer import StepLayer
from lorabatch.benchmarks.gpu.shapes import TINY
from lorabatch.kernels import launch
from lorabatch.kernels.launch import Tuning, empty_pinned


@pytest.mark.parametrize("number", [torch.uint8, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_host_memory_has_the_length_asked_for_even_none(length: int, number: torch.dtype) -> None:
    memory = empty_pinned(length, number, torch.device("cpu"))
    assert (memory.shape, memory.dtype) == ((length,), number)


@pytest.mark.long
@pytest.mark.parametrize("pdl", ["0", "1"])
def test_compiled_kernels_get_what_triton_s_own_call_gives_them(pdl: str) -> None:
    """On a machine without a GPU: both calls end at the launcher, which notes its arguments here."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "launch_kernels.py"],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0", "LORABATCH_PDL": pdl},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert results["launches"] == 12
    assert results["differing"] == []
    assert results["by_triton"] == 0, "kernels that were compiled went through Triton's own call again"
    assert results["operators"] == ["empty_like", "empty_like"], "the norms' results; views are made once a step"


@triton.jit
def _copy_of(x, y, n, chosen, PDL: tl.constexpr):  # noqa: N803 (constants of kernels are in capitals)
    at = tl.arange(0, 16)
    is_inside = (at < n) & (chosen >= 0)
    is_doubled = is_inside & (chosen > 3)
    number = tl.load(x + at, mask=is_inside, other=0)
    tl.store(y + at, number + tl.load(x + at, mask=is_doubled, other=0), mask=is_inside & (n > 0))


@pytest.mark.skipif(not launch.is_interpreted(), reason="on a GPU the compiler knows the types of masks")
@pytest.mark.parametrize(("chosen", "factor"), [(-1, 0), (3, 1), (4, 2)])
def test_masks_made_of_numbers_are_boolean(chosen: int, factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter has masks of integers for them, which from 3.9 on it refuses."""
    native, masks = interpreter._interpreter, list[str]()

    def noting(call: Any, place: int) -> Any:
        def noted(*args: Any) -> Any:
            masks.append(args[place].dtype.name)
            return call(*args)

        return noted

    for name, place in (("load", 1), ("store", 2)):
        monkeypatch.setattr(native, name, noting(getattr(native, name), place))
    x, y = torch.arange(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    launch.launch(_copy_of, 1, x, y, 10, chosen)
    assert y.tolist() == [factor * number if number < 10 else 0 for number in range(16)]
    assert masks == ["bool"] * 3


@dataclass
class Stream:
    """Notes in `seen` for whom it waits, as streams of `torch.cuda` are told to."""

    name: str
    seen: list[str]

    def wait_stream(self, other: Stream) -> None:
        self.seen.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize(("is_capturing", "is_off"), [(True, False), (False, False), (True, True)])
def test_what_is_launched_beside_is_waited_for_where_it_is_needed(
    is_capturing: bool, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(launch, "has_side_stream", lambda: not is_off)
    is_capturing_beside = is_capturing and not is_off
    main, side = Stream("main", seen), Stream("side", seen)
    current = [main]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(launch, "_side_stream", lambda device: side)
    with launch.beside(torch.device("cuda")) as join:
        seen.append(f"shrink on {current[-1].name}")
    seen.append(f"product on {current[-1].name}")
    join()
    seen.append(f"expand on {current[-1].name}")
    expected = ["shrink on side", "product on main", "expand on main"]
    assert [entry for entry in seen if "waits" not in entry] == (
        expected if is_capturing_beside else ["shrink on main", *expected[1:]]
    )
    if is_capturing_beside:
        assert seen.index("side waits for main") < seen.index("shrink on side")
        assert seen.index("product on main") < seen.index("main waits for side")
        assert seen.index("main waits for side") < seen.index("expand on main")


@pytest.mark.parametrize(("asked", "capability", "expected"), [("0", 90, False), ("1", 90, True), ("1", 80, False)])
def test_kernels_are_launched_early_if_asked_where_the_gpu_can_and_then_none_runs_beside_others(
    asked: str, capability: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORABATCH_PDL", asked)
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(launch, "compile_capability", lambda: capability)
    monkeypatch.setattr(launch, "uses_pdl", launch.uses_pdl.__wrapped__)
    assert launch.uses_pdl() == expected
    assert launch.has_side_stream.__wrapped__() != expected


def test_tiles_warps_and_stages_of_all_kernels_can_be_changed() -> None:
    """A program keeps its registers: half the warps have twice as many each."""
    tuning = Tuning.parse("block=0.5,warps=0.5,stages=-1")
    own = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 16, "num_stages": 4, "num_warps": 4, "maxnreg": 72}
    assert tuning.of(own) == {
        "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "num_stages": 3, "num_warps": 2, "maxnreg": 144
    }  # fmt: skip
    assert tuning.of({"num_stages": 1, "num_warps": 1, "maxnreg": None}) == {
        "num_stages": 1, "num_warps": 1, "maxnreg": None
    }  # fmt: skip
    assert Tuning(warps=4).of({"num_warps": 8, "maxnreg": 128})["num_warps"] == 16
    assert [Tuning(rows=rows).of({"FEW_ROWS": 4})["FEW_ROWS"] for rows in (None, 0, 2)] == [4, 0, 2]
    assert Tuning(rows=2).of({"FEW_ROWS": 0}) == {"FEW_ROWS": 0}, "where rows must not round otherwise"


@pytest.mark.parametrize(
    "asked", ["block", "block=3", "tiles=2", "warps=0", "stages=1.5", "block=2;warps=2", "warps=inf", "rows=1.5"]
)
def test_a_tuning_of_another_form_is_refused(asked: str) -> None:
    with pytest.raises(
        ValueError, match=f"LORABATCH_TUNING={re.escape(asked)}: expected powers of 2 and whole numbers"
    ):
        Tuning.parse(asked)


@pytest.fixture
def tuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of this process are tuned as the test's parameter says."""
    with monkeypatch.context() as environment:
        environment.setenv("LORABATCH_TUNING", request.param)
        launch.tuning.cache_clear()
        assert launch.tuning() == Tuning.parse(request.param)
        yield
    launch.tuning.cache_clear()
    assert launch.tuning() is None


@pytest.mark.skipif(not launch.is_interpreted(), reason="tiles of twice the size need not fit every GPU")
@pytest.mark.parametrize("tuned", ["block=2", pytest.param("block=0.5", marks=pytest.mark.long)], indirect=True)
@pytest.mark.usefixtures("tuned")
def test_kernels_with_other_tiles_compute_the_same() -> None:
    ranks = [8, 20]
    for new_tokens in (1, 13):
        layer = StepLayer(TINY, 2, 20, ranks, torch.float32, torch.device("cpu"), num_programs=2, new_tokens=new_tokens)
        for case in kernel_cases(layer, ranks):
            expected = case.twin()
            torch.testing.assert_close(case.run().double(), expected.double(), rtol=1e-4, atol=1e-4)
