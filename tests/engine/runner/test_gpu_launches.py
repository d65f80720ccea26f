"""What launching a step costs the host: it waits for nothing, and makes few launches, views and allocations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import register_all
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from lorabatch.engine.models.gpu_decoder import GpuDecoder
from lorabatch.engine.models.gpu_step import GpuStep
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner import gpu_runner
from lorabatch.engine.runner.backend import MakeBackend
from lorabatch.engine.runner.gpu_runner import GpuRunner
from lorabatch.engine.runner.runner import LaunchedStep
from lorabatch.engine.runner.sampler import SampledTokens
from lorabatch.kernels.launch import is_interpreted
from lorabatch.tests.engine.runner.test_gpu_runner import PROMPT, as_part, device_engine, make_engine, rows, with_runner


class _HostOnly(TorchFunctionMode):
    """Raises where Python asks a tensor for its numbers: on a GPU the host would wait."""

    _WAITING = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in self._WAITING, f"{name} waits for the device"
        found = func(*args, **(kwargs or {}))
        # the kernels run nothing here: what memory held before must not end a row as "not finite"
        return found.zero_() if name in ("empty", "empty_like", "new_empty") else found


class _DeviceOnly(TorchDispatchMode):
    """Raises for operators whose result's shape or value must be known on the host."""

    _WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self._WAITING, f"{name} waits for the device"
        if name in ("index", "index_put_", "_index_put_impl_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a mask's count must be known on the host"
        return func(*args, **(kwargs or {}))


class _Counted(TorchDispatchMode):
    """Counts tensor operators, views and allocations among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not is_interpreted(), reason="compiled kernels are not launched by the interpreter's function")
def test_a_layer_costs_the_host_few_launches_views_and_allocations(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that is launched kernel by kernel: its host time is these. What all layers read is made once a step."""
    forward, num_launched, checked = GpuDecoder.forward_step, [0], []

    def launched(kernel: Any, *args: Any, **options: Any) -> None:
        num_launched[0] += 1

    def cost(decoder: GpuDecoder, num_layers: int, *place: Any) -> Counter[str]:
        with monkeypatch.context() as cut, _Counted() as counted:
            cut.setattr(decoder, "layers", decoder.layers[:num_layers])
            num_launched[0] = 0
            forward(decoder, *place)
        return counted.operators + Counter(launches=num_launched[0])

    def forward_step(decoder: GpuDecoder, step: GpuStep, *place: Any) -> torch.Tensor:
        logits = forward(decoder, step, *place)
        more = cost(decoder, 2, step, *place) - cost(decoder, 1, step, *place)
        assert more.pop("launches") == (11 if step.has_lora else 7)
        assert more.pop("linear") == 4
        assert more.total() <= 7, more
        checked.append(step.has_lora)
        return logits.zero_()

    engine = device_engine(tiny_llama)
    (adapter_id,) = register_all(engine, {"rank20": tiny_adapters["rank20"]}).values()
    monkeypatch.setattr(InterpretedFunction, "run", launched)
    monkeypatch.setattr(GpuDecoder, "forward_step", forward_step)
    for which in (None, adapter_id):
        results = list(engine.run([replace(row, adapter_id=which) for row in rows(1, max_tokens=2, ignore_eos=True)]))
        assert [result.error for result in results] == [None]
    assert checked == [False, False, True, True]


@pytest.mark.skipif(not is_interpreted(), reason="a GPU's graphs and copies are watched by the benchmark's own check")
@pytest.mark.parametrize("make", [with_runner, as_part])
def test_launching_waits_for_nothing(
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[type[GpuRunner]], MakeBackend],
) -> None:
    """Prefill, decode, an adapter new to the device: no number comes back to the host before it is read."""
    launched: list[int] = []

    class Watched(GpuRunner):
        def launch(self, entries: Any) -> LaunchedStep:
            with _HostOnly(), _DeviceOnly():
                launched.append(len(entries))
                return super().launch(entries)

    engine = device_engine(tiny_llama, make_backend=make(Watched))
    ids = [None, *register_all(engine, {name: tiny_adapters[name] for name in ("rank1", "rank20")}).values()]
    sampling = SamplingParams(max_tokens=200, min_tokens=200, logprobs=True, temperature=0.5, top_k=3)
    engine.add([Request(str(i), PROMPT, adapter_id, sampling) for i, adapter_id in enumerate(ids)])
    # the interpreter reads what a GPU would: launches themselves are not what is watched
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **options: None)
    monkeypatch.setattr(gpu_runner, "sample_tokens", lambda logits, rows: logits.argmax(-1))
    # adapters are read in a thread: their rows join when they have come, which may be late on a busy machine
    while engine.num_unfinished and launched[-2:] != [3, 3]:
        engine.step()
        time.sleep(0.05)
    assert launched[-2:] == [3, 3]


@pytest.mark.skipif(not is_interpreted(), reason="a GPU refuses by itself")
def test_what_steps_are_computed_from_is_on_the_device(weightless_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without numbers: operators refuse to mix its tensors with the host's, and no number can be asked of it.
    Prefill, decode, adapters of two ranks, drawn tokens with log-probabilities."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **options: None)
    copied: list[int] = []

    class Unread(GpuRunner):
        def _launched(self, sampled: Any, wants_logprobs: bool, num_top: int) -> LaunchedStep:
            assert self._read_tokens.device.type == self._logprobs.device.type == "meta"
            copied.append(len(sampled))
            return LaunchedStep(
                sampled,
                lambda: SampledTokens(
                    [1] * len(sampled), [0.0] * len(sampled), [()] * len(sampled), [()] * len(sampled)
                ),
            )

    config = {"device": "meta", "load_format": "dummy", "kernels": "triton", "page_tokens": 16}
    engine = make_engine(weightless_model, make_backend=with_runner(Unread), **config)
    ids = [None, engine.register_dummy_adapter("a", 3), engine.register_dummy_adapter("b", 20)]
    sampling = SamplingParams(max_tokens=4, min_tokens=4, logprobs=True, temperature=0.5, top_k=3)
    rows = [Request(f"{i}", PROMPT, adapter_id, sampling) for i, adapter_id in enumerate(ids)]
    # adapters are read in a thread; those that are there already have their rows in one step
    results = [*engine.run(rows), *engine.run(rows)]
    assert [result.error for result in results] == [None] * 6
    assert max(copied) == 3
