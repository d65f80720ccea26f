"""`adapter_folder`: the local folder of an adapter, fetched, and converted from a pickle, once per host.

Pickled weights (`adapter_model.bin`) are converted in a confined process into the cache, keyed by the content of the
adapter's files. The program reads the converted folder alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...engine.errors import AdapterRefusedError
from ...engine.peft.folder import CONFIG_NAME, PICKLE_NAMES, WEIGHTS_NAME, check_links, holds_weights
from ...engine.peft.heads import MODEL_CONFIG
from ...engine.tokenizer_files import NAMES as TOKENIZER_NAMES
from ...system.confinement import MEMORY_BYTES, ConfinedError, confined
from ...system.local_cache import default_cache_root, file_lock, make_private, temporary_folder
from .local_copy import file_sha256, local_path, sha256_of_files

# Part of every converted folder's name: raise it when the same files would convert to others.
_VERSION = 1
_TASK = "engine.peft.dialects.pickled"
_CPU_S = 60
_BYTES_PER_CPU_S = 50_000_000
_MAX_PICKLE_BYTES = 16 << 30
# The file, its tensors, and a copy of each while they are written.
_MEMORY_PER_BYTE = 3


def adapter_folder(url: str, storage_options: Mapping[str, Any], cache_root: Path | None = None) -> Path:
    """A local folder with the adapter behind `url`, without pickled weights.

    Raises `StorageError` when there is no such folder or it cannot be fetched, `AdapterRefusedError` for pickled
    weights that hold more than tensors, and `NoProcessError` when the machine cannot start the process that reads them.
    """
    root = cache_root or default_cache_root()
    folder = local_path(url, storage_options, cache_root, pickles=PICKLE_NAMES)
    if folder.is_file():
        return _folder_of_file(folder, root)
    pickle = next((folder / name for name in PICKLE_NAMES if (folder / name).is_file()), None)
    if pickle is None or holds_weights(folder):
        return folder
    try:
        check_links(folder)
    except AdapterRefusedError:
        return folder  # the audit refuses it, with this reason
    return _converted(folder, pickle, root)


def _converted(folder: Path, pickle: Path, root: Path) -> Path:
    """The folder with safetensors in place of its pickle."""
    kept = [name for name in (CONFIG_NAME, MODEL_CONFIG, *TOKENIZER_NAMES) if (folder / name).is_file()]
    kept += sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    digests = [(name, file_sha256(folder / name, cache_root=root)) for name in (*kept, pickle.name)]
    target = root / "adapters" / f"{folder.name}-{sha256_of_files(digests)[:16]}-v{_VERSION}"

    def write(scratch: Path) -> None:
        for name in kept:
            (scratch / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, scratch / name)
        _convert(pickle, scratch / WEIGHTS_NAME)

    return _written_once(target, write)


def _folder_of_file(path: Path, root: Path) -> Path:
    """A folder with a copy of one file in GGUF and nothing else."""
    sha256 = file_sha256(path, cache_root=root)
    target = root / "adapters" / f"{path.stem}-{sha256[:16]}-v{_VERSION}"
    return _written_once(target, lambda scratch: shutil.copyfile(path, scratch / path.name))


def _written_once(target: Path, write: Callable[[Path], object]) -> Path:
    """The folder `target`, which `write` fills unless it is there; it is whole or absent."""
    if target.exists():
        return target
    with file_lock(target.with_name(f".{target.name}.lock")):
        if target.exists():
            return target
        make_private(target.parent)
        with temporary_folder(target.parent, ".convert-") as scratch:
            write(scratch)
            try:
                os.replace(scratch, target)
            except OSError:
                # Without locks another process may have been faster; its folder has the same content.
                if not target.exists():
                    raise
    return target


def _convert(pickle: Path, target: Path) -> None:
    num_bytes = pickle.stat().st_size
    what_to_do = "Convert it where you trust the file: load it with PEFT, then save_pretrained"
    if num_bytes > _MAX_PICKLE_BYTES:
        raise AdapterRefusedError(
            f"{pickle.name}: {num_bytes} bytes, expected at most {_MAX_PICKLE_BYTES}. {what_to_do}."
        )
    payload = {"source": str(pickle.resolve()), "target": str(target)}
    cpu_s = _CPU_S + num_bytes // _BYTES_PER_CPU_S
    try:
        problem = confined().run(_TASK, payload, cpu_s, MEMORY_BYTES + _MEMORY_PER_BYTE * num_bytes)
    except ConfinedError as error:
        problem = f"{pickle.name}: {error}"
    if problem is not None:
        raise AdapterRefusedError(f"{problem}. {what_to_do}.")
