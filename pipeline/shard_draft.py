"""A plan as it comes, block by block: its shards in memory, the places of their rows in a file of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..scheduler.waves import Shard, ShardPlan, dispatch_order
from . import prepared_rows as prepared
from .job_index import IndexedRows
from .scratch_file import ScratchFile

_COLUMNS = tuple(prepared.REFERENCE_SCHEMA.names)
_PLACE = np.dtype([(name, np.int32) for name in _COLUMNS])


class ShardDraft:
    """`shards`, and per shard `shard_s`, its engine seconds, and `adapter_names`: every name its rows ask for, refused
    and unknown ones included.
    """

    def __init__(self) -> None:
        self.shards: tuple[Shard, ...] = ()
        self.shard_s: NDArray[np.float64] = np.zeros(0)
        self.adapter_names: tuple[tuple[str, ...], ...] = ()
        self._file = ScratchFile()
        self._starts: tuple[int, ...] = ()
        self._num_waves = 0

    def __enter__(self) -> ShardDraft:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, rows: IndexedRows, names: Sequence[str], plan: ShardPlan, shard_s: NDArray[np.float64]) -> None:
        """The shards of one more block. `names`: of adapters, by code."""
        plan.check_integrity()
        places = np.empty(len(rows), _PLACE)
        for name in _COLUMNS:
            places[name] = rows[name][plan.row_order]
        start = self._file.write(places.tobytes())
        self._starts += tuple((start + plan.shard_offsets[:-1] * _PLACE.itemsize).tolist())
        codes = (np.unique(rows["adapter"][plan.rows_of(shard.shard_id)]) for shard in plan.shards)
        self.adapter_names += tuple(tuple(names[code] for code in found if code >= 0) for found in codes)
        self.shards += tuple(replace(s, wave_id=s.wave_id + self._num_waves) for s in plan.shards)
        self.shard_s = np.append(self.shard_s, shard_s)
        self._num_waves = max((shard.wave_id + 1 for shard in self.shards), default=0)

    def sort(self) -> None:
        """Number the shards of all blocks in the order in which they should run; their ids are their places."""
        order = dispatch_order(self.shards)
        self.shards = tuple(replace(self.shards[old], shard_id=new) for new, old in enumerate(order))
        self.shard_s = self.shard_s[order]
        self.adapter_names = tuple(self.adapter_names[old] for old in order)
        self._starts = tuple(self._starts[old] for old in order)

    @contextmanager
    def references(self, metadata: Mapping[bytes, str]) -> Iterator[memoryview]:
        """`plan.arrow`: record batch i tells where the rows of shard i lie; `metadata` stands in its schema."""
        schema = prepared.REFERENCE_SCHEMA.with_metadata(metadata)
        with tempfile.TemporaryDirectory(prefix="lorabatch-plan-") as folder:
            path = Path(folder, "plan.arrow")
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for shard, start in zip(self.shards, self._starts, strict=True):
                    places = np.frombuffer(self._file.read(start, shard.num_rows * _PLACE.itemsize), _PLACE)
                    columns = [pa.array(np.ascontiguousarray(places[name])) for name in _COLUMNS]
                    writer.write_batch(pa.record_batch(columns, schema=schema))
            with pa.memory_map(str(path)) as mapped:
                yield memoryview(mapped.read_buffer())
