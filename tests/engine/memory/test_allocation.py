"""Memory that an engine asks of the system."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorabatch.engine.config import DeviceKind, EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.memory.allocation import zeroed_memory
from lorabatch.engine.memory.limits import Host, engine_limits, host_share, this_host, total_host_bytes
from lorabatch.engine.model_config.model import ModelConfig

_STATUS = Path("/proc/self/status")
_MIB = 1 << 20


def test_memory_is_zero_aligned_and_writable() -> None:
    memory = zeroed_memory(1000, torch.bfloat16)
    assert memory.shape == (1000,)
    assert memory.dtype == torch.bfloat16
    assert not memory.any()
    assert memory.data_ptr() % 64 == 0
    memory += 1
    assert memory.sum() == 1000


@pytest.mark.skipif(not _STATUS.exists(), reason="no /proc")
def test_writes_far_apart_take_only_the_pages_they_fall_on() -> None:
    memory = zeroed_memory(256 * _MIB, torch.uint8)
    before = _held_bytes()
    memory[::_MIB] = 1
    assert _held_bytes() - before < 32 * _MIB


def _held_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


_GIB = 1 << 30
#: 256 GiB, 64 cores, 8 GPUs.
_HOST = (256 * _GIB, 64, 8)


def _tier(model: ModelConfig, kind: DeviceKind, host: Host = _HOST, **config: Any) -> int:
    settings = EngineConfig(**config)
    limits = engine_limits(settings, model, kind, 80 * _GIB, host_share(settings, kind, host))
    assert limits.host_tier_bytes is not None
    return limits.host_tier_bytes


def test_engines_of_a_host_share_what_it_leaves(tiny_llama: Path) -> None:
    model = read_model_config(tiny_llama)
    alone, quarter = (_tier(model, "cpu", num_threads=threads, pool_bytes=_GIB) for threads in (64, 16))
    assert 124 * _GIB < alone < 127.5 * _GIB, "half of what pool, worker and process leave"
    assert 30 * _GIB < quarter < 31.5 * _GIB
    assert 4 * (2 * quarter + 2 * _GIB) <= _HOST[0], "with their pools and workers, all have room"
    assert _tier(model, "cpu", num_threads=64, pool_bytes=41 * _GIB) == pytest.approx(alone - 20 * _GIB, abs=10)
    one, group = (_tier(model, "cuda", tensor_parallel=gpus) for gpus in (1, 2))
    assert one == (32 - 1 - 4) * _GIB // 2
    assert group == (64 - 1 - 8) * _GIB // 2


def test_a_host_that_leaves_nothing_keeps_no_adapter(tiny_llama: Path) -> None:
    assert _tier(read_model_config(tiny_llama), "cpu", (1 * _GIB, 2, 0)) == 0


@pytest.mark.parametrize("asked", [0, 5 * _GIB])
def test_what_is_asked_for_is_the_host_tier(tiny_llama: Path, asked: int) -> None:
    assert _tier(read_model_config(tiny_llama), "cpu", host_tier_bytes=asked) == asked


def test_a_container_limits_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = total_host_bytes()
    files = [tmp_path / name for name in ("none", "memory.max", "limit")]
    files[1].write_text("max\n")
    files[2].write_text(f"{_GIB}\n")
    monkeypatch.setattr("lorabatch.engine.memory.limits._CGROUP_LIMITS", tuple(files))
    assert total_host_bytes() == _GIB < whole


def test_an_engine_has_the_host_tier_of_its_plan(tiny_llama: Path) -> None:
    config = EngineConfig(num_threads=1, pool_bytes=1 << 20, device="cpu")
    engine = Engine(tiny_llama, config)
    share = host_share(config, "cpu", this_host())
    planned = engine_limits(config, engine.model, "cpu", total_host_bytes(), share)
    assert engine.backend.limits() == planned
    assert engine._batch.residency.loader.host_bytes == planned.host_tier_bytes
