"""`WeightCache`: a base model's weights as CPU engines use them, packed, in files of this host that engines map.

Packing a model takes longer than all else of an engine's start. A mapped file takes nothing but a look at its numbers,
and the engines of a host share its memory. A file is private to its user, whole or absent, and bears what it was made
of: the weight files' names, sizes and times, the model's configuration, the processor's vectors, versions.

Layout: tensors, each filled up to 64 bytes; an index in JSON; its SHA-256; its length (8 bytes, little-endian).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.native import native_build
from ...kernels.packed_weight import PackedWeight, Products, stored_class
from ...kernels.packed_weight.panels import PANEL_TYPES, PANELS_VERSION, StoredWeight
from ...system.local_cache import default_cache_root, file_lock, make_private
from ...version import __version__
from ..model_config.folder import weight_files
from ..model_config.model import HEAD, ModelConfig
from ..model_config.partition import Partition
from .decoder import joined_name, modules_of_site
from .gguf.blocks import GgufWeight, Weight, looked_up, pack_joined
from .load import stored_weights

logger = logging.getLogger(__name__)
Packed = Mapping[str, PackedWeight]
# Environment variable that names another folder, or `off`.
_VARIABLE = "LORABATCH_WEIGHT_CACHE"
_OFF = "off"
_MAX_BYTES = 16 << 30
# Smaller models are packed in a moment.
_MIN_BYTES = 32 << 20
_SUFFIX = ".panels"
_SCRATCH_PREFIX = ".packing-"
# Seconds after which a temporary file is removed: its process was killed.
_SCRATCH_S = 3600.0
# Bytes of a cache line; blocks begin at multiples of it.
_LINE_BYTES = 64
_TAIL_BYTES = 32 + 8
_MAX_INDEX_BYTES = 64 << 20
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*PANEL_TYPES, torch.uint8)}


@dataclass(frozen=True, slots=True)
class _Block:
    """One tensor of a file, or one packed weight."""

    #: Checkpoint name of a tensor; `joined_name` of a packed weight.
    name: str
    #: Shape of the weight.
    shape: tuple[int, ...]
    #: Whether the numbers are in panels.
    is_packed: bool
    #: Numbers of the block.
    num_items: int
    #: Their type, by its name in torch.
    dtype: str
    #: Sum of the block's 8-byte words, modulo 2 ** 64.
    total: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the block, with those that fill it up."""
        return _filled_up(self.num_items * _DTYPES[self.dtype].itemsize)


class WeightCache:
    """The packed weights below `folder` (None: there are none), at most `max_bytes`, the least recently used leaving
    first. Models of less than `min_bytes` are not kept.
    """

    def __init__(self, folder: Path | None, max_bytes: int = _MAX_BYTES, min_bytes: int = _MIN_BYTES) -> None:
        #: Folder of the files; None: nothing is kept.
        self.folder = folder
        self._max_bytes = max_bytes
        self._min_bytes = min_bytes

    @classmethod
    def of_this_host(cls) -> WeightCache:
        """The cache that the environment names."""
        folder = os.environ.get(_VARIABLE)
        if folder == _OFF:
            return cls(None)
        return cls(Path(folder) if folder else default_cache_root() / "packed")

    def weights(
        self, model_folder: Path, model: ModelConfig, products: Products, partition: Partition | None = None
    ) -> tuple[dict[str, Weight], Packed] | None:
        """The weights of a `Decoder` of the model, or of a member's part of it: plain ones, and those packed for
        `products` by `joined_name`. They are packed and kept now unless they were before.

        None when they cannot be kept. Raises `ModelFilesError` for files that are not the model's.
        """
        if self.folder is None:
            return None
        try:
            _make_private(self.folder)
            key = _key(model_folder, model, products, partition)
            name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
            path = self.folder / f"{name}{_SUFFIX}"
            found = _mapped(path, key, products)
            if found is None:
                # Engines that start together wait for the first.
                with file_lock(self.folder / ".lock"):
                    found = _mapped(path, key, products)
                    if found is None:
                        stored = stored_weights(model_folder, model, partition)
                        num_bytes = _packed_bytes(stored, model, products)
                        if not self._min_bytes <= num_bytes <= self._max_bytes:
                            return None
                        self._make_room(num_bytes)
                        _write(path, key, _tensors(stored, model, products))
                        found = _mapped(path, key, products)
            return found if _key(model_folder, model, products, partition) == key else None
        except OSError as error:
            logger.warning("%s: packed weights are not kept here: %s", self.folder, error)
            return None

    def _make_room(self, num_bytes: int) -> None:
        """Remove what was not used for the longest time. Raises OSError when the disk would be half full of it."""
        assert self.folder is not None, "a cache that is off needs no room"
        for left in self.folder.glob(f"{_SCRATCH_PREFIX}*"):
            if time.time() - left.stat().st_mtime > _SCRATCH_S:
                left.unlink(missing_ok=True)
        kept = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
        total = num_bytes + sum(path.stat().st_size for path in kept)
        for path in kept:
            if total <= self._max_bytes:
                break
            total -= path.stat().st_size
            path.unlink(missing_ok=True)  # engines that have mapped it keep it
        if shutil.disk_usage(self.folder).free < 2 * num_bytes:
            raise OSError(errno.ENOSPC, f"less than {2 * num_bytes} bytes are free")


def _make_private(folder: Path) -> None:
    """Make the folder. Raises PermissionError when others than this user may write there."""
    make_private(folder)
    _check_owner(folder.stat())


def _check_owner(facts: os.stat_result) -> None:
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "it must be this user's, and writable by no one else")


def _linears(model: ModelConfig) -> list[list[str]]:
    """Modules of each linear layer."""
    sites = (modules_of_site(model, layer, site) for layer in range(model.num_layers) for site in model.sites)
    return [modules for modules in sites if modules] + [[name] for name in model.whole_modules]


def _parts(stored: Mapping[str, Weight], model: ModelConfig, modules: Sequence[str]) -> list[Weight]:
    """The weights of a linear layer."""
    names = [model.names.embedding if name == HEAD and model.is_tied else name for name in modules]
    return [stored[f"{name}.weight"] for name in names]


def _others(stored: Mapping[str, Weight], model: ModelConfig) -> Iterator[tuple[str, Weight]]:
    """Names and weights that belong to no linear layer."""
    packed = {f"{name}.weight" for modules in _linears(model) for name in modules}
    return ((name, weight) for name, weight in stored.items() if name not in packed)


def _packed_bytes(stored: Mapping[str, Weight], model: ModelConfig, products: Products) -> int:
    """About what `_tensors` gives: linear layers by the bytes that one row of each part takes when it is packed."""
    of_rows: dict[tuple[Any, ...], float] = {}
    total = 0.0
    for modules in _linears(model):
        parts = _parts(stored, model, modules)
        kind = tuple((part.kind if isinstance(part, GgufWeight) else part.dtype, part.shape[1]) for part in parts)
        if kind not in of_rows:
            packed = pack_joined([part[:1] for part in parts], products)
            assert isinstance(packed, StoredWeight), "only compiled kernels have such weights"
            of_rows[kind] = packed.numbers.nbytes / len(parts)
        total += of_rows[kind] * sum(part.shape[0] for part in parts)
    for _, weight in _others(stored, model):
        itemsize = weight.dtype.itemsize if isinstance(weight, Tensor) else 2
        total += math.prod(weight.shape) * itemsize
    return int(total)


def _key(model_folder: Path, model: ModelConfig, products: Products, partition: Partition | None) -> dict[str, Any]:
    """Facts that packed weights depend on. A file is known by the facts by which `jobs` remembers digests; ctime is one
    of them, since no program can set it.
    """
    files = []
    for path in weight_files(model_folder):
        facts = path.stat()
        times = [facts.st_mtime_ns, facts.st_ctime_ns]
        files.append([str(path.resolve()), facts.st_size, facts.st_ino, *times])
    versions = [__version__, PANELS_VERSION, native_build()]
    part = None if partition is None else [partition.member, partition.num_members]
    return {"files": files, "model": repr(model), "part": part, "products": products, "versions": versions}


def _tensors(
    stored: Mapping[str, Weight], model: ModelConfig, products: Products
) -> Iterator[tuple[str, tuple[int, ...], bool, Tensor]]:
    """Name, shape, whether it is packed, and numbers (flat) of all that a decoder needs."""
    for modules in _linears(model):
        packed = pack_joined(_parts(stored, model, modules), products)
        assert isinstance(packed, StoredWeight), "only compiled kernels have such weights"
        yield joined_name(modules), packed.shape, True, packed.numbers
    for name, weight in _others(stored, model):
        tensor = looked_up(weight)
        yield name, tuple(tensor.shape), False, tensor.flatten()


def _write(path: Path, key: Mapping[str, Any], tensors: Iterator[tuple[str, tuple[int, ...], bool, Tensor]]) -> None:
    """Write a file under another name, and rename it when it is whole."""
    descriptor, scratch = tempfile.mkstemp(prefix=_SCRATCH_PREFIX, dir=path.parent)  # readable by this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            blocks = []
            for name, shape, is_packed, numbers in tensors:
                data = numbers.view(torch.uint8)
                filled = pad(data, (0, _filled_up(len(data)) - len(data)))
                file.write(filled.numpy().data)
                dtype = str(numbers.dtype).removeprefix("torch.")
                blocks.append(asdict(_Block(name, shape, is_packed, len(numbers), dtype, _total(filled))))
            index = json.dumps({"key": key, "blocks": blocks}).encode()
            file.write(index + hashlib.sha256(index).digest() + len(index).to_bytes(8, "little"))
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise


def _mapped(path: Path, key: Mapping[str, Any], products: Products) -> tuple[dict[str, Weight], Packed] | None:
    """The weights in a file; None where there is none, or one that is damaged, another user's or of other weights."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            _check_owner(os.fstat(descriptor))
            found = _tensors_of(file, key, products)
        except (ValueError, KeyError, TypeError, PermissionError) as error:
            logger.warning("%s: weights are packed again: %s", path, error)
            return None
    with suppress(OSError):
        os.utime(path)  # for `_make_room`
    return found


def _tensors_of(file: BinaryIO, key: Mapping[str, Any], products: Products) -> tuple[dict[str, Weight], Packed]:
    """Map an open file. Raises ValueError when its numbers are not those that were written."""
    blocks = _read_index(file, key)
    # Private: should anything be written to the tensors, neither the file nor other engines see it.
    mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    tensors: dict[str, Weight] = {}
    packed: dict[str, PackedWeight] = {}
    first = 0
    for block in blocks:
        data = torch.frombuffer(mapping, dtype=torch.uint8, count=block.num_bytes, offset=first)
        if _total(data) != block.total:
            raise ValueError(f"the numbers of {block.name} have changed")
        first += block.num_bytes
        numbers = data.view(_DTYPES[block.dtype])[: block.num_items]
        if block.is_packed:
            out_features, in_features = block.shape
            kind = stored_class(products, numbers.dtype)
            packed[block.name] = kind.of_numbers(numbers, (out_features, in_features))
        else:
            tensors[block.name] = numbers.view(block.shape)
    return tensors, packed


def _read_index(file: BinaryIO, key: Mapping[str, Any]) -> list[_Block]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    num_bytes = int.from_bytes(tail[32:], "little")
    start = size - _TAIL_BYTES - num_bytes
    if num_bytes > _MAX_INDEX_BYTES or start < 0:
        raise ValueError("it is cut off")
    file.seek(start)
    text = file.read(num_bytes)
    if hashlib.sha256(text).digest() != tail[:32]:
        raise ValueError("its index has changed")
    index = json.loads(text)
    if index["key"] != key:
        raise ValueError("it is of other weights")
    blocks = [_Block(**raw | {"shape": tuple(raw["shape"])}) for raw in index["blocks"]]
    if sum(block.num_bytes for block in blocks) != start:
        raise ValueError("its size is another")
    return blocks


def _filled_up(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _LINE_BYTES


def _total(data: Tensor) -> int:
    return int(data.view(torch.int64).sum())
