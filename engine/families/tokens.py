"""Token ids and number format named in `config.json` and `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .raw_config import RawConfig


def stop_token_ids(raw: RawConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a completion; `generation_config.json` wins. One id, a list, or none."""
    listed = generation.get("eos_token_id")
    return _token_ids(raw, "eos_token_id", raw.get("eos_token_id") if listed is None else listed)


def first_token_id(raw: RawConfig) -> int | None:
    """The token that begins a text, where there is one."""
    return next(iter(_token_ids(raw, "bos_token_id", raw.get("bos_token_id"))), None)


def checkpoint_dtype(raw: RawConfig) -> str:
    """Number format of the stored weights, by either spelling."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32")


def _token_ids(raw: RawConfig, key: str, value: Any) -> tuple[int, ...]:
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        return tuple(listed)
    raw.damage(key, f"expected a token id or a list of them, not {value!r}")
    return ()
