"""Adapters that an engine may be asked for: headers when they are registered, their bytes once when they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lorabatch.engine.config import read_model_config
from lorabatch.engine.errors import AdapterUnusableError
from lorabatch.engine.memory.registry import AdapterRegistry
from lorabatch.engine.peft import audit_adapter

# Headers, configuration and tokenizer checks beside the weights.
_OTHER_BYTES = 50_000
_IO = Path("/proc/self/io")


def bytes_read(work: Callable[[], object]) -> int:
    """What this process reads from files while it works, from the disk or from the page cache."""

    def total() -> int:
        return int(_IO.read_text().split()[1])

    before = total()
    work()
    return total() - before


@pytest.fixture
def large_adapter(tiny_adapters: dict[str, Path]) -> Path:
    return max(tiny_adapters.values(), key=lambda folder: (folder / "adapter_model.safetensors").stat().st_size)


def test_a_byte_of_an_adapter_is_read_once_in_the_audit_and_once_on_its_way_to_memory(
    tiny_llama: Path, large_adapter: Path
) -> None:
    model = read_model_config(tiny_llama)
    registry = AdapterRegistry(model, torch.float32, torch.device("cpu"), 2048)
    audit = audit_adapter(large_adapter, model, "large")
    adapter_id, num_bytes = audit.identity_sha256 or "", audit.weight_bytes
    in_audit = bytes_read(lambda: audit_adapter(large_adapter, model, "large"))
    in_registration = bytes_read(lambda: registry.register(adapter_id, large_adapter, "large"))
    in_loading = bytes_read(lambda: registry.load_packed(adapter_id))
    assert num_bytes <= in_audit < num_bytes + _OTHER_BYTES
    assert in_registration < _OTHER_BYTES
    assert num_bytes <= in_loading < num_bytes + _OTHER_BYTES


def test_content_that_is_not_what_was_audited_does_not_load(tiny_llama: Path, large_adapter: Path) -> None:
    registry = AdapterRegistry(read_model_config(tiny_llama), torch.float32, torch.device("cpu"), 2048)
    registry.register("0" * 64, large_adapter, "large")
    with pytest.raises(AdapterUnusableError, match="have changed since they were audited"):
        registry.load("0" * 64)
