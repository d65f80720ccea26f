"""The members of a group as their leader sees them: start them, send to them, notice when one is lost, end them."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import torch
from torch import Tensor

from ...system.codec import MessageError
from ...system.confinement import python_command
from ..config import EngineConfig
from ..errors import EngineError
from ..memory.residency import ResidentAdapter
from ..models.step_batch import StepEntry
from ..server.frames import Fatal, encode_frame, read_frame
from .collectives import Collectives, buffer_numbers, event_counters, shared_memory, shared_memory_bytes
from .device_sums import DeviceSums
from .messages import (
    FROM_MEMBER,
    TO_MEMBER,
    Connect,
    Connected,
    FromMember,
    MemberReady,
    Merged,
    PlaceAdapter,
    StartMember,
    ToMember,
    UsePool,
)
from .steps import NO_PLACES, encode_step

_MODULE = "lorabatch.engine.parallel.member"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Seconds without a heartbeat, of which there are two a second, after which a member counts as silent.
_SILENCE_S = 5.0
# The limit while members import libraries and read weights: a file system may hold up all of their threads.
_START_SILENCE_S = 300.0
# Seconds that members, once they have loaded, may take to find one another on their devices.
_CONNECT_LIMIT_S = 300.0
_LOOK_S = 1.0
_LEAVING_S = 10.0
ReplyT = TypeVar("ReplyT", MemberReady, Connected, Merged)


#: Starts a member of an engine of this configuration, with these descriptors open in it.
StartProcess = Callable[[EngineConfig, Sequence[int]], subprocess.Popen[bytes]]


class GroupMembers:
    """The processes of all members but the leader, which is this one.

    `configs`: one for each member, the leader's first. `sum_numbers`: numbers that a step adds up at once in memory.
    `pools_bytes`: bytes of the memory behind `pools` (see `StartMember`), where they are known by now. `collectives`:
    the leader's. Every method raises RuntimeError once a member is gone. `close` ends the members; so does the end
    of this process.
    """

    def __init__(
        self,
        model_folder: Path,
        configs: Sequence[EngineConfig],
        start: StartProcess,
        *,
        sum_numbers: int = 0,
        pools_bytes: int = 0,
    ) -> None:
        num_members = len(configs)
        self._began_ns = time.monotonic_ns()
        numbers = buffer_numbers(sum_numbers)
        memory = shared_memory("group", shared_memory_bytes(num_members, numbers))
        self.pools = shared_memory("pools", pools_bytes)
        self._rendezvous = shared_memory("rendezvous", 0)
        counters = event_counters(num_members)
        self.collectives = Collectives(0, num_members, memory, numbers, counters)
        self._shared = _Shared(self.collectives, num_members)
        self._sending = threading.Lock()
        # adapters whose places in the pool the members know, and the orders of those that they were sent
        self._known: weakref.WeakValueDictionary[int, ResidentAdapter] = weakref.WeakValueDictionary()
        self._named: set[int] = set()
        inherited = (memory, self.pools, self._rendezvous, *counters)
        processes = [start(config, inherited) for config in configs[1:]]
        self._close = weakref.finalize(self, _end, processes, self._shared, inherited)
        self._processes = processes
        self._threads = [
            threading.Thread(target=_listen, args=(member, process, self._shared), daemon=True)
            for member, process in enumerate(processes, 1)
        ]
        for thread in self._threads:
            thread.start()
        for member, config in enumerate(configs[1:], 1):
            mapped = memory, numbers, counters, self.pools, self._rendezvous
            self._send(member, StartMember(str(model_folder), config, member, *mapped))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the members, in order."""
        return tuple(process.pid for process in self._processes)

    def wait_until_ready(self, silence_s: float = _START_SILENCE_S) -> tuple[int, ...]:
        """Wait until all parts are loaded. Returns the bytes of the base's weights that each member has read.

        Raises `EngineError` when loading failed and would fail again, and RuntimeError for a member that gives no
        sign of life for `silence_s`: the engine's own heartbeats do not stop before it is loaded.
        """
        replies = self._replies(MemberReady, silence_s)
        return tuple(reply.weight_bytes for reply in replies)

    def connect(self, sums: DeviceSums) -> tuple[int, ...]:
        """Let members find one another on their devices, `sums` being the leader's. Returns the free bytes of each
        other member's device.

        A library that waits for a member for ever holds up a thread and no more.
        """
        self._shared.sums = sums
        self.send(Connect())
        failed: list[Exception] = []

        def meet() -> None:
            try:
                sums.connect(self._rendezvous)
            except Exception as error:
                failed.append(error)

        meeting = threading.Thread(target=meet, name="connect", daemon=True)
        meeting.start()
        replies = self._replies(Connected, limit_s=_CONNECT_LIMIT_S)
        meeting.join()  # all others have met
        if failed:
            raise failed[0]
        return tuple(reply.free_bytes for reply in replies)

    def check(self) -> None:
        """Raise the error by which the loss of a member is reported, if one is lost. Any thread may call."""
        self._shared.check()

    def send(self, message: ToMember) -> None:
        """Send a message to all members, which does not wait for them to read it unless their pipes are full. Any
        thread may call."""
        with self._sending:
            for member in range(1, len(self._processes) + 1):
                self._send(member, message)

    def send_step(self, entries: Sequence[StepEntry], places: Mapping[int, int] = NO_PLACES) -> None:
        """Send a step to all members, and before it the places of its adapters that they do not know. `places`: as in
        `encode_step`.
        """
        for entry in entries:
            for resident in (entry.adapter, entry.minus):
                if resident is not None and resident.order not in self._known:
                    self._place(resident)
        self.send(encode_step(entries, places))

    def _place(self, resident: ResidentAdapter) -> None:
        gone, pages = self._named - set(self._known), tuple(resident.pages.tolist())
        self.send(PlaceAdapter(resident.order, pages, resident.layout, tuple(sorted(gone))))
        self._named = (self._named - gone) | {resident.order}
        self._known[resident.order] = resident

    def merged(self) -> tuple[Merged, ...]:
        """Every member's reply to `MergeAdapter`."""
        return tuple(self._replies(Merged))

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Pools of all members, [num_members, num_elements], all zero; the first is the leader's."""
        num_members = len(self._processes) + 1
        page = mmap.ALLOCATIONGRANULARITY
        row_bytes = -(-num_elements * dtype.itemsize // page) * page
        os.ftruncate(self.pools, num_members * row_bytes)
        for member in range(1, num_members):
            self._send(member, UsePool(num_elements, member * row_bytes))
        mapping = mmap.mmap(self.pools, num_members * row_bytes)
        whole = torch.frombuffer(mapping, dtype=dtype).view(num_members, -1)
        return whole[:, :num_elements]

    def silent_member(self, silence_s: float = _SILENCE_S) -> int | None:
        """A member that lives and has given no sign of life for `silence_s`; None if there is none."""
        now_ns = time.monotonic_ns()
        for member in range(1, len(self._processes) + 1):
            last_ns = max(self.collectives.last_beat_ns(member), self._began_ns)
            if now_ns - last_ns > silence_s * 1e9:
                return member
        return None

    def close(self) -> None:
        """End the members."""
        self._close()

    def _send(self, member: int, message: ToMember) -> None:
        stdin = self._processes[member - 1].stdin
        assert stdin is not None, f"member {member} has no pipe to write to"
        try:
            stdin.write(encode_frame(TO_MEMBER, message))
            stdin.flush()
        except OSError:
            # why it is gone is known in a moment
            self._shared.lost.wait(_LEAVING_S)
        self._shared.check()

    def _replies(
        self, kind: type[ReplyT], silence_s: float = _START_SILENCE_S, limit_s: float = float("inf")
    ) -> list[ReplyT]:
        """One reply of every member, in order."""
        replies: dict[int, ReplyT] = {}
        ends_s = time.monotonic() + limit_s
        while len(replies) < len(self._processes):
            if time.monotonic() > ends_s:
                raise RuntimeError(
                    f"the {len(self._processes) + 1} members of the tensor-parallel group have not found one another "
                    f"within {limit_s:.0f} s (NCCL_DEBUG=INFO shows what they wait for)"
                )
            try:
                member, message = self._shared.inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                self._check_silence(silence_s)
                continue
            self._shared.check()
            assert isinstance(message, kind), f"member {member} sent {message}, expected {kind.__name__}"
            replies[member] = message
        return [replies[member] for member in sorted(replies)]

    def _check_silence(self, silence_s: float) -> None:
        member = self.silent_member(silence_s)
        if member is not None:
            raise RuntimeError(
                f"member {member} of {len(self._processes) + 1} of the tensor-parallel group gave no sign of life for "
                f"{silence_s:.0f} s"
            )


class _Shared:
    """State that the threads that listen to members share with the leader's. `inbox`: replies of members; None after a
    loss.
    """

    def __init__(self, collectives: Collectives, num_members: int) -> None:
        self._collectives = collectives
        self._num_members = num_members
        #: Sums of the leader, where members have devices of their own; else None.
        self.sums: DeviceSums | None = None
        self.inbox: queue.SimpleQueue[tuple[int, FromMember | None]] = queue.SimpleQueue()
        self.lost = threading.Event()
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def lose(self, member: int, failure: Fatal | None, reason: str) -> None:
        """Note that a member is gone; only the first loss counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = self._error_of(member, failure, reason)
        self._collectives.lose(self._error)
        if self.sums is not None:
            self.sums.lose(self._error)
        self.inbox.put((member, None))
        self.lost.set()

    def check(self) -> None:
        """Raise the error by which the loss of a member is reported, if one is lost."""
        if self._error is not None:
            raise self._error

    def _error_of(self, member: int, failure: Fatal | None, reason: str) -> Exception:
        name = f"member {member} of {self._num_members}"
        if failure is None:
            return RuntimeError(f"{name} of the tensor-parallel group ended: {reason}")
        if failure.is_permanent:
            return EngineError(failure.error)
        if failure.is_out_of_memory:
            return MemoryError(f"{name} of the tensor-parallel group: {failure.error}")
        return RuntimeError(f"{name} of the tensor-parallel group failed: {failure.error}")


def start_process(config: EngineConfig, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a member that waits for its `StartMember`. What it prints goes where this process prints."""
    threads = dict.fromkeys(_THREAD_VARIABLES, str(config.member_threads))
    return subprocess.Popen(
        python_command(_MODULE, str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | threads,
        pass_fds=inherited,
    )


def _listen(member: int, process: subprocess.Popen[bytes], shared: _Shared) -> None:
    """Pass on what a member sends until it ends, and how it ended."""
    assert process.stdout is not None, f"member {member} has no pipe to read"
    stdout: IO[bytes] = process.stdout
    failure: Fatal | None = None
    with contextlib.suppress(OSError, ValueError, MessageError):
        while (message := read_frame(stdout, FROM_MEMBER)) is not None:
            if isinstance(message, Fatal):
                failure = message
            else:
                shared.inbox.put((member, message))
    with contextlib.suppress(OSError):
        stdout.close()
    code = process.wait()
    reason = f"it was killed by signal {-code}" if code < 0 else f"exit code {code}"
    shared.lose(member, failure, reason)


def _end(processes: Sequence[subprocess.Popen[bytes]], shared: _Shared, descriptors: Sequence[int]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        with contextlib.suppress(OSError):
            assert process.stdin is not None, f"process {process.pid} has no pipe to write to"
            process.stdin.close()
    # only now no thread writes to the descriptors, whose numbers other files get
    shared.lost.wait(_LEAVING_S)
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
