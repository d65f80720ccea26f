"""A member of a group as a process: `python -m lorabatch.engine.parallel.member`, driven by the leader over its
standard streams.

It has a part of the weights and a pool of its own, and computes what the leader does at the same time. It ends with the
leader, whatever ends that one.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import BinaryIO

import torch

from ..config import read_model_config
from ..errors import AdapterRefusedError, EngineError
from ..memory.registry import AdapterRegistry
from ..model_config.partition import Partition
from ..models.step_batch import build_step
from ..server.codec import MessageError
from ..server.frames import write_frame
from ..server.process import HEARTBEAT_INTERVAL_S, claim_stdout, is_out_of_memory, read_messages
from .collectives import Collectives, Counters, mapped
from .messages import (
    FROM_MEMBER,
    TO_MEMBER,
    FromMember,
    MemberFailed,
    MemberReady,
    MergeAdapter,
    Merged,
    PlaceAdapter,
    RestoreBase,
    StartMember,
    Step,
    ToMember,
    UsePool,
)
from .shard import ShardBackend
from .steps import StepDecoder

# Of prctl(2).
_PR_SET_PDEATHSIG = 1
Inbox = queue.SimpleQueue[ToMember | MessageError]


class Member:
    """Loads a member's part and computes its steps."""

    def __init__(self, start: StartMember) -> None:
        config, folder = start.config, Path(start.model)
        counters = Counters(start.counters)
        self._collectives = Collectives(
            start.member, config.tensor_parallel, start.memory, start.buffer_numbers, counters
        )
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        whole = read_model_config(folder)
        partition = Partition(whole, config.tensor_parallel, start.member)
        self._backend = ShardBackend(folder, config, partition, self._collectives)
        self._live = self._backend.live_weights()
        self._layout = self._backend.page_layout()
        self._registry = AdapterRegistry(whole, self._backend.pool_dtype, self._backend.device)
        self._pools = start.pools
        self._memory = torch.empty(0)
        self._steps = StepDecoder(self._memory)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the base's tensors that this process has read."""
        return self._backend.weight_bytes

    def handle(self, message: ToMember) -> FromMember | None:
        """Do what a message asks; the reply, if there is one."""
        match message:
            case UsePool():
                self._use_pool(message)
            case PlaceAdapter():
                self._steps.place(message)
            case Step():
                decoder = self._backend.decoder
                entries = self._steps.entries(message)
                batch = build_step(entries, decoder.model, self._layout, self._memory.dtype)
                decoder.forward(batch, self._memory)
            case MergeAdapter():
                return self._merge(message)
            case RestoreBase():
                self._live.restore()
            case _:
                raise MessageError(f"{message!r}: not expected after the start")
        return None

    def _use_pool(self, message: UsePool) -> None:
        dtype = self._backend.pool_dtype
        mapping = mapped(self._pools, message.num_elements * dtype.itemsize, message.first_byte)
        self._memory = torch.frombuffer(mapping, dtype=dtype, count=message.num_elements)
        self._steps = StepDecoder(self._memory)

    def _merge(self, message: MergeAdapter) -> Merged:
        # the leader has read it just now: what goes wrong here is no fault of the adapter
        if message.random_rank:
            self._registry.register_dummy(message.name, message.random_rank)
        else:
            self._registry.register(message.adapter_id, Path(message.folder), message.name)
        try:
            self._live.merge(message.adapter_id, self._registry.load(message.adapter_id))
        except AdapterRefusedError as error:
            return Merged(str(error))
        return Merged(None)

    def _beat(self) -> None:
        while True:
            self._collectives.beat(time.monotonic_ns())
            time.sleep(HEARTBEAT_INTERVAL_S / 2)


def serve(inbox: Inbox, outlet: BinaryIO) -> int:
    """Do what the leader asks until it ends; the exit code."""

    def send(message: FromMember) -> None:
        write_frame(outlet, FROM_MEMBER, message)

    try:
        with torch.inference_mode():
            start = inbox.get()
            if not isinstance(start, StartMember):
                raise MessageError(f"{start!r}: expected StartMember as the first message")
            member = Member(start)
            send(MemberReady(member.weight_bytes))
            while True:
                message = inbox.get()
                if isinstance(message, MessageError):
                    raise message
                reply = member.handle(message)
                if reply is not None:
                    send(reply)
    except Exception as error:
        traceback.print_exc()
        sentence = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        send(MemberFailed(sentence, isinstance(error, EngineError), is_out_of_memory(error)))
        return 1


def end_with(leader: int) -> None:
    """Have this process killed when the leader ends, stopped or not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:
        os._exit(0)


def main() -> int:
    """Entry point of the process. Its argument: the leader's process id."""
    end_with(int(sys.argv[1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the leader does
    outlet = claim_stdout()
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=read_messages, args=(sys.stdin.buffer, inbox, TO_MEMBER), daemon=True).start()
    try:
        return serve(inbox, outlet)
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
