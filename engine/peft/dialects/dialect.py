"""Turns what an adapter's files say into PEFT's terms, whichever program wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..config import AdapterConfig, judge_keys, read_adapter_config
from ..findings import Ledger
from ..names import BaseLayout
from ..tensor_file import Header, TensorEntry
from .gguf import read_gguf
from .mlx import read_mlx
from .tinker import is_of_tinker, read_tinker

#: Program whose form an adapter's files have.
Dialect = Literal["peft", "mlx", "gguf"]
#: Configuration, and tensors by PEFT's names.
Translated = tuple[AdapterConfig, Mapping[str, TensorEntry]]


def translate(
    dialect: Dialect, raw: Mapping[str, Any], headers: Sequence[Header], layout: BaseLayout, ledger: Ledger
) -> Translated:
    """Configuration and tensors in PEFT's terms; what cannot be said in them is entered as refusals.

    `raw`: the object in `adapter_config.json`. `headers`: those of the files; none where they cannot be read.
    """
    if dialect == "gguf":
        return read_gguf(raw, headers[0], layout, ledger)
    tensors = {key: entry for header in headers for key, entry in header.tensors.items()}
    if dialect == "mlx":
        return read_mlx(raw, tensors, layout, ledger)
    config = read_adapter_config(raw, ledger)
    judge_keys(raw, ledger)
    return read_tinker(config, tensors, layout, ledger) if is_of_tinker(tensors) else (config, tensors)
