"""Converts pickled weights to safetensors: the task of a confined process, since opening a pickle may do anything.

torch unpickles with `weights_only`, which makes tensors and plain containers and calls nothing else. What that leaves
(tensors larger than their file, compressed records, tensors without memory) is checked here before it is written.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ....system.untrusted import shown, shown_name
from ...errors import AdapterRefusedError
from ..tensor_file import MAX_NAME_CHARACTERS, MAX_TENSORS

# Tensors may share memory, as tied layers do; some more than that is a file that was made to grow.
_MAX_GROWTH = 4
_MORE_RECORDS = 16


def run(payload: Mapping[str, str]) -> str | None:
    """Convert the file `source` to the file `target`; returns why that is refused, or None."""
    source = Path(payload["source"])
    try:
        tensors = _read(source)
        save_file({key: tensors[key].detach().clone().contiguous() for key in sorted(tensors)}, payload["target"])
    except AdapterRefusedError as error:
        return f"{source.name}: {error}"
    return None


def _read(source: Path) -> dict[str, Tensor]:
    file_bytes = source.stat().st_size
    _check_records(source, file_bytes)
    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
    except (MemoryError, RecursionError):
        raise AdapterRefusedError("needs more memory than its size allows") from None
    except Exception as error:
        raise AdapterRefusedError(
            f"does not hold tensors alone: torch.load(weights_only=True) refuses it ({type(error).__name__})"
        ) from None
    if not isinstance(state, dict):
        raise AdapterRefusedError(f"holds {type(state).__name__}, expected tensors by name")
    if len(state) > MAX_TENSORS:
        raise AdapterRefusedError(f"holds {len(state)} tensors, expected at most {MAX_TENSORS}")
    for key, value in state.items():
        _check_tensor(key, value, file_bytes)
    total = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.values()}
    if total > _MAX_GROWTH * file_bytes or sum(memory.values()) > file_bytes:
        raise AdapterRefusedError(f"its tensors have {total} bytes, the file {file_bytes}")
    return state


def _check_records(source: Path, file_bytes: int) -> None:
    """Check that an archive, as torch writes since 1.6, has plain records that fit into it. Older files are none."""
    if not zipfile.is_zipfile(source):
        return
    try:
        with zipfile.ZipFile(source) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise AdapterRefusedError(f"a damaged archive ({shown_name(str(error))})") from None
    if len(records) > MAX_TENSORS + _MORE_RECORDS:
        raise AdapterRefusedError(f"holds {len(records)} records, expected at most {MAX_TENSORS + _MORE_RECORDS}")
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise AdapterRefusedError("its records are compressed, which torch never writes")
    total = sum(record.file_size for record in records)
    if total > file_bytes:
        raise AdapterRefusedError(f"its records have {total} bytes, the file {file_bytes}")


def _check_tensor(key: Any, value: Any, file_bytes: int) -> None:
    if not isinstance(key, str) or not key or len(key) > MAX_NAME_CHARACTERS:
        raise AdapterRefusedError(f"{shown(key)} is no name of a tensor")
    if not isinstance(value, Tensor):
        raise AdapterRefusedError(f"{shown_name(key)} is {type(value).__name__}, expected a tensor")
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise AdapterRefusedError(f"{shown_name(key)} is no plain tensor. Save it dense, and not quantised")
    num_bytes = math.prod(value.shape) * value.itemsize
    if num_bytes > file_bytes:
        raise AdapterRefusedError(f"{shown_name(key)} of shape {list(value.shape)} is larger than the file")
