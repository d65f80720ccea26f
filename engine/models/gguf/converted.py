"""`resolve_gguf`: the safetensors folder of a GGUF file. Clients ask for it: only a conversion loads torch."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path

from ....system.local_cache import default_cache_root, file_lock
from .checks import check_convertible
from .file import open_binary, open_gguf

# Part of every cached folder's name: raise it when the same GGUF file would convert to different files.
CONVERSION_VERSION = 2


def converted_folder(name: str, sha256: str, cache_root: Path, *, keep_blocks: bool = True) -> Path:
    """The folder a GGUF file with this content hash (hex) converts into. `keep_blocks`: see `convert_gguf`."""
    kind = "-blocks" if keep_blocks else ""
    return cache_root / "models" / f"{name}-{sha256[:16]}{kind}-v{CONVERSION_VERSION}"


def resolve_gguf(gguf_path: Path, cache_root: Path | None = None) -> Path:
    """The safetensors folder of a GGUF file; converted now unless the cache holds it.

    The cache is keyed by the sha256 of the whole file, never by its name or header alone, which fine-tuned
    siblings share. Raises as `convert_gguf` does.
    """
    root = cache_root or default_cache_root()
    if not any(root.glob(f"models/{glob.escape(gguf_path.stem)}-*")):
        # Refuse a file that cannot be converted before gigabytes are hashed and torch is loaded.
        check_convertible(open_gguf(gguf_path))
    with open_binary(gguf_path) as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    folder = converted_folder(gguf_path.stem, sha256, root)
    if not folder.exists():
        from .convert import convert_gguf

        # Processes that need it at the same moment wait for the first: a conversion takes minutes and gigabytes.
        with file_lock(folder.with_name(f".{folder.name}.lock")):
            if not folder.exists():
                convert_gguf(gguf_path, folder)
    return folder
