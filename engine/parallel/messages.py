"""Messages from the leader of a group to its members and back. `server/frames.py` has their frames, and `Fatal`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ...scheduler.costs.cost import CostModel
from ...system.codec import Codec
from ..config import EngineConfig
from ..memory.adapter_layout import AdapterLayout
from ..runner.gpu_graphs import GraphKey
from ..server.frames import Fatal


@dataclass(frozen=True, slots=True)
class StartMember:
    """To a member, first of all: load your part. The descriptors are open in its process."""

    #: Folder of the base model.
    model: str
    #: Configuration of this member.
    config: EngineConfig
    #: Its number; the leader is 0.
    member: int
    #: Descriptor of the group's shared memory.
    memory: int
    #: Numbers of each buffer in this memory.
    buffer_numbers: int
    #: Descriptors of the event counters.
    counters: tuple[int, ...]
    #: Descriptor of the memory of the page pools; where members have devices of their own, of the slots through which
    #: adapters arrive.
    pools: int
    #: Descriptor of the file by which members with devices of their own meet.
    rendezvous: int


@dataclass(frozen=True, slots=True)
class Connect:
    """To a member with a device of its own, once all have loaded: find the others. `Connected` replies."""


@dataclass(frozen=True, slots=True)
class UsePool:
    """To a member: the pool is `num_elements` numbers, `first_byte` of the pools' memory on."""

    num_elements: int
    first_byte: int


@dataclass(frozen=True, slots=True)
class UseDevicePool:
    """To a member with a device of its own: take a pool of `num_elements` numbers there, for steps within these limits.
    `full_rows`: rows whose attention fills the leader's device, by which it plans."""

    num_elements: int
    batch_rows: int
    step_tokens: int
    full_rows: int


@dataclass(frozen=True, slots=True)
class CopySlot:
    """To a member: copy `num_elements` numbers from a slot to the pool, from number `start` on."""

    slot: int
    start: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class JoinCopies:
    """To a member: steps from now on see what was copied so far."""


@dataclass(frozen=True, slots=True)
class PlaceAdapter:
    """To a member: the place of an adapter in the pool."""

    #: Number by which steps name the adapter.
    order: int
    #: Pages of the pool that hold the adapter, in order.
    pages: tuple[int, ...]
    #: Places of its matrices in these pages.
    layout: AdapterLayout
    #: Orders of adapters that no step will name again.
    gone: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """To a member: compute a step; on a device of its own, plan it. `rows`: int64 [num_entries, `steps.COLUMNS`];
    `token_ids`: int64, of all entries one after the other; `pages`: int64, see `steps.py`."""

    rows: bytes
    token_ids: bytes
    pages: bytes


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """To a member with a device of its own: launch the parts of the step planned last, each by its graph, or kernel by
    kernel."""

    graphs: tuple[GraphKey | None, ...]


@dataclass(frozen=True, slots=True)
class MergeAdapter:
    """To a member: merge an adapter. `Merged` replies."""

    #: Id of the adapter.
    adapter_id: str
    #: Its folder.
    folder: str
    #: Its name, for messages.
    name: str
    #: Rank of one of random weights; 0 for others.
    random_rank: int = 0
    #: Hash that its content must have; "" where that is its id.
    content_sha256: str = ""


@dataclass(frozen=True, slots=True)
class RestoreBase:
    """To a member: make the weights those of the base; after a merge that failed, keep no memory for others."""

    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class MemberReady:
    """From a member: its part is loaded. `weight_bytes`: bytes of the base's tensors that it read."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Connected:
    """From a member: it has found the others. `free_bytes`: memory that is free on its device; 0 where that is the
    host.
    """

    free_bytes: int


@dataclass(frozen=True, slots=True)
class Merged:
    """From a member: whether an adapter is merged; `refusal` says why not, and the weights are the base's then.
    `is_out_of_memory`: its device has no memory for merged weights."""

    refusal: str | None
    is_out_of_memory: bool = False


ToMember = (
    StartMember
    | Connect
    | UsePool
    | UseDevicePool
    | PlaceAdapter
    | CopySlot
    | JoinCopies
    | Step
    | LaunchStep
    | MergeAdapter
    | RestoreBase
)
FromMember = MemberReady | Connected | Merged | Fatal
TO_MEMBER: Codec[ToMember] = Codec(*get_args(ToMember), named=(CostModel,))
FROM_MEMBER: Codec[FromMember] = Codec(*get_args(FromMember))
