"""The identity of a base model: one hash over everything in its folder that decides what it answers."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from ..engine.gguf_model import default_cache_root

_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def model_sha256(folder: Path, *, with_weights: bool = True, cache_root: Path | None = None) -> str:
    """Hash of configuration, tokenizer and (`with_weights`) safetensors files. Names and paths do not count
    beyond the file's own name, so a copied folder is the same model.

    Weights are read once per host: digests are remembered by path, size and time of change.
    """
    digests = (cache_root or default_cache_root()) / "digests"
    whole = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors")) if with_weights else []
    for path in [*(folder / name for name in _FILES), *weights]:
        if path.exists():
            whole.update(f"{path.name} {_file_sha256(path, digests)}\n".encode())
    return whole.hexdigest()


def _file_sha256(path: Path, digests: Path) -> str:
    path = path.resolve()
    facts = path.stat()
    key = f"{path} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}"
    remembered = digests / hashlib.sha256(key.encode()).hexdigest()
    if remembered.exists():
        return remembered.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _remember(remembered, digest)
    return digest


def _remember(path: Path, text: str) -> None:
    """Best effort: a cache that cannot be written costs time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        return
