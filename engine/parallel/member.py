"""A member of a group as a process: `python -m lorabatch.engine.parallel.member`, driven by the leader over its
standard streams.

It has a part of the weights and a pool of its own, and computes what the leader does at the same time. It ends with the
leader, whatever ends that one.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import torch

from ...system.codec import MessageError
from ...system.confinement import end_with
from ..config import read_model_config
from ..errors import AdapterRefusedError, EngineError
from ..memory.registry import AdapterRegistry
from ..model_config.partition import partitions_of
from ..runner.backend import choose_backend
from ..server.frames import write_frame
from ..server.process import HEARTBEAT_INTERVAL_S, claim_stdout, failure, receive_messages
from .collectives import Collectives
from .device_sums import DeviceSums
from .member_steps import StepsInMemory, StepsOnDevice, steps_over
from .messages import (
    FROM_MEMBER,
    TO_MEMBER,
    Connect,
    Connected,
    FromMember,
    MemberReady,
    MergeAdapter,
    Merged,
    RestoreBase,
    StartMember,
    ToMember,
    UseDevicePool,
    UsePool,
)
from .shard import sums_of

# Between looks at copies in flight.
_LOOK_S = 0.001
Inbox = queue.SimpleQueue[ToMember | MessageError]


class Member:
    """Loads a member's part and computes its steps."""

    def __init__(self, start: StartMember) -> None:
        config, folder = start.config, Path(start.model)
        assert config.member_threads is not None, "members share the threads of the engine out"
        torch.set_num_threads(config.member_threads)
        self._start = start
        self._collectives = Collectives(
            start.member, config.tensor_parallel, start.memory, start.buffer_numbers, start.counters
        )
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        whole = read_model_config(folder)
        parts = partitions_of(whole, config.tensor_parallel)
        partition = parts[start.member]
        self._sums = sums_of(config, self._collectives, partition)
        self._backend = choose_backend(folder, config, partition.shard, self._sums)
        self._live = self._backend.live_weights()
        page_elements = self._backend.page_layout().page_elements
        self._registry = AdapterRegistry(
            whole,
            self._backend.pool_dtype,
            self._backend.device,
            page_elements,
            parts,
            in_panels=self._backend.has_lora_panels,
        )
        self._steps: StepsInMemory | StepsOnDevice | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the base's tensors that this process has read."""
        return self._backend.weight_bytes

    @property
    def is_busy(self) -> bool:
        """Whether `settle` should be called before long."""
        return self._steps is not None and self._steps.is_busy

    def settle(self) -> None:
        """Count what is done and was not waited for."""
        if self._steps is not None:
            self._steps.settle()

    def handle(self, message: ToMember) -> FromMember | None:
        """Do what a message asks; the reply, if there is one."""
        match message:
            case Connect():
                assert isinstance(self._sums, DeviceSums), "members that share memory know one another"
                self._sums.connect(self._start.rendezvous)
                return Connected(self._backend.free_bytes())
            case UsePool() | UseDevicePool():
                self._steps = steps_over(message, self._start, self._backend, self._live, self._collectives)
            case MergeAdapter():
                return self._merge(message)
            case RestoreBase():
                if message.has_failed:
                    self._live.undo()
                else:
                    self._live.restore()
            case _:
                if self._steps is None or not self._steps.handle(message):
                    raise MessageError(f"{message!r}: not expected now")
        return None

    def _merge(self, message: MergeAdapter) -> Merged:
        # the leader has read it just now: what goes wrong here is no fault of the adapter
        if message.random_rank:
            self._registry.register_dummy(message.name, message.random_rank)
        else:
            self._registry.register(message.adapter_id, Path(message.folder), message.name, message.content_sha256)
        try:
            self._live.merge(message.adapter_id, self._registry.load(message.adapter_id))
        except (AdapterRefusedError, torch.OutOfMemoryError) as error:
            return Merged(str(error), isinstance(error, torch.OutOfMemoryError))
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
                try:
                    message = inbox.get(timeout=_LOOK_S if member.is_busy else None)
                except queue.Empty:
                    member.settle()
                    continue
                if isinstance(message, MessageError):
                    raise message
                reply = member.handle(message)
                member.settle()
                if reply is not None:
                    send(reply)
    except Exception as error:
        send(failure(error, is_permanent=isinstance(error, EngineError)))
        return 1


def main() -> int:
    """Entry point of the process. Its argument: the leader's process id."""
    end_with(int(sys.argv[1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the leader does
    outlet = claim_stdout()
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=receive_messages, args=(sys.stdin.buffer, inbox, TO_MEMBER), daemon=True).start()
    try:
        return serve(inbox, outlet)
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
