"""Messages from the leader of a group to its members and back. `engine/server/frames.py` has the frames."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import EngineConfig
from ..memory.packed import AdapterLayout
from ..server.codec import Codec


@dataclass(frozen=True, slots=True)
class StartMember:
    """To a member, first of all: load your part. The descriptors are open in its process: the group's memory with
    buffers of `buffer_numbers`, the counters, and the memory of the page pools."""

    model: str
    config: EngineConfig
    member: int
    memory: int
    buffer_numbers: int
    counters: tuple[int, ...]
    pools: int


@dataclass(frozen=True, slots=True)
class UsePool:
    """To a member: the pool is `num_elements` numbers, `first_byte` of the pools' memory on."""

    num_elements: int
    first_byte: int


@dataclass(frozen=True, slots=True)
class PlaceAdapter:
    """To a member: an adapter lies in the pool from number `start` on, `num_elements` long. `order`: as steps name it.
    `gone`: orders of adapters that no step will name again."""

    order: int
    start: int
    num_elements: int
    layout: AdapterLayout
    gone: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """To a member: compute a step. `rows`: int64 [num_entries, 10], see `steps.py`; `token_ids`: int64, of all entries
    one after the other."""

    rows: bytes
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class MergeAdapter:
    """To a member: merge the adapter of this content hash; one of random weights has no folder and a `random_rank`.
    `Merged` replies."""

    adapter_id: str
    folder: str
    name: str
    random_rank: int = 0


@dataclass(frozen=True, slots=True)
class RestoreBase:
    """To a member: make the weights those of the base."""


@dataclass(frozen=True, slots=True)
class MemberReady:
    """From a member: its part is loaded. `weight_bytes`: of the tensors that it read."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Merged:
    """From a member: whether an adapter is merged; `refusal` says why not, and the weights are the base's then."""

    refusal: str | None


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """From a member, last of all: why it ends. `is_permanent`: another process would fail likewise."""

    error: str
    is_permanent: bool
    is_out_of_memory: bool


ToMember = StartMember | UsePool | PlaceAdapter | Step | MergeAdapter | RestoreBase
FromMember = MemberReady | Merged | MemberFailed
TO_MEMBER: Codec[ToMember] = Codec(StartMember, UsePool, PlaceAdapter, Step, MergeAdapter, RestoreBase)
FROM_MEMBER: Codec[FromMember] = Codec(MemberReady, Merged, MemberFailed)
