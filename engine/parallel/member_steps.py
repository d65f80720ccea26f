"""The two ways in which a member computes its leader's steps: in memory that both have mapped, or on a device of its
own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.layouts.pages import PageLayout
from ..memory.copies import AdapterCopies, Arrival
from ..memory.residency import ResidentAdapter
from ..models.decoder import Decoder
from ..models.merge import LiveWeights
from ..models.step_batch import build_step
from ..runner.backend import Backend, GpuBackend
from .collectives import Collectives, mapped
from .device_copies import pin, slots_in
from .device_sums import DeviceSums
from .gpu_runners import FollowingRunner
from .messages import (
    CopySlot,
    JoinCopies,
    LaunchStep,
    PlaceAdapter,
    StartMember,
    Step,
    ToMember,
    UseDevicePool,
    UsePool,
)
from .steps import decode_step, place_adapter


class StepsInMemory:
    """Steps on a CPU, computed when their messages arrive."""

    #: Whether something is in flight that `settle` counts.
    is_busy = False

    def __init__(self, decoder: Decoder, memory: Tensor, layout: PageLayout) -> None:
        self._decoder = decoder
        self._memory = memory
        self._layout = layout
        self._residents: dict[int, ResidentAdapter] = {}

    def settle(self) -> None:
        """Do nothing: nothing is in flight between messages."""

    def handle(self, message: ToMember) -> bool:
        """Place an adapter or compute a step; False for other messages."""
        match message:
            case PlaceAdapter():
                place_adapter(message, self._memory, self._residents)
            case Step():
                entries, _ = decode_step(message, self._residents)
                batch = build_step(entries, self._decoder.model, self._layout, self._memory.dtype)
                for _ in self._decoder.forward_in_blocks(batch, self._memory):
                    pass  # the leader reads the logits
            case _:
                return False
        return True


class StepsOnDevice:
    """Steps on a device, planned when their messages arrive and launched when the leader has chosen their graphs.

    Adapters arrive in `slots` [slots, numbers], the member's part of the shared ones, and are copied to the pool,
    `memory`. `note_copied`: notes how many copies are done, so that their slots may be used again.
    """

    def __init__(
        self,
        runner: FollowingRunner,
        memory: Tensor,
        slots: Tensor,
        copies: AdapterCopies,
        note_copied: Callable[[int], None],
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._slots = slots
        self._copies = copies
        self._note_copied = note_copied
        self._arriving: deque[Arrival] = deque()
        self._num_copied = 0
        self._residents: dict[int, ResidentAdapter] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a copy of an adapter is in flight, as far as `settle` has seen."""
        return bool(self._arriving)

    def settle(self) -> None:
        """Count the copies of adapters that are done."""
        while self._arriving and self._arriving[0].is_done():
            self._arriving.popleft()
            self._num_copied += 1
            self._note_copied(self._num_copied)

    def handle(self, message: ToMember) -> bool:
        """Place or copy an adapter, plan or launch a step; False for other messages."""
        match message:
            case PlaceAdapter():
                place_adapter(message, self._memory, self._residents)
            case CopySlot():
                numbers, part = self._slots[message.slot, : message.num_elements], (message.start, message.num_elements)
                self._arriving.append(self._copies.to_pool(numbers, self._memory, (part,)))
            case JoinCopies():
                for arrival in self._arriving:
                    arrival.join()
            case Step():
                self._runner.plan(*decode_step(message, self._residents))
            case LaunchStep():
                self._runner.launch_planned(message.graphs)
            case _:
                return False
        return True


def steps_over(
    message: UsePool | UseDevicePool, start: StartMember, backend: Backend, live: LiveWeights, collectives: Collectives
) -> StepsInMemory | StepsOnDevice:
    """The object that computes steps over the pool that `message` names."""
    layout = backend.page_layout()
    if isinstance(message, UsePool):
        mapping = mapped(start.pools, message.num_elements * backend.pool_dtype.itemsize, message.first_byte)
        memory = torch.frombuffer(mapping, dtype=backend.pool_dtype, count=message.num_elements)
        return StepsInMemory(backend.decoder, memory, layout)
    assert isinstance(backend, GpuBackend), f"{backend!r} has no memory on a device"
    assert isinstance(backend.sums, DeviceSums), f"{backend.sums!r} do not add up on devices"
    memory = backend.allocate(message.num_elements)[0]
    slots = slots_in(start.pools, start.config.tensor_parallel, memory.dtype)
    if memory.is_cuda:
        pin(slots)
    config = replace(start.config, max_batch_rows=message.batch_rows, max_step_tokens=message.step_tokens)
    runner = FollowingRunner(
        *(backend.decoder, live, memory, layout, config, None, backend.executor()),
        prompts=backend.prompt_attention(layout, config),
        share=backend.sums.share,
        full_rows=message.full_rows,
        collectives=collectives,
    )
    own_slots = slots[:, start.member - 1]
    return StepsOnDevice(runner, memory, own_slots, backend.copies(), collectives.note_copied)
