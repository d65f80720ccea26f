"""Adds up and joins tensors of the members of a group on their devices: by NCCL on GPUs, by gloo where the Triton
kernels run in their interpreter.

Sums run on the stream of the step, inside of what a CUDA graph captures. Nothing here looks at a number on the host,
and every shape is known to all members: from the step, and from how wide the head is.

Members find one another by a file in memory that the leader shares with them, without a name, so that no other process
can join; gloo and NCCL then open ports on the loopback interface alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.nn.functional import pad

from ..model_config.partition import Partition, partitions_of
from ..models.decoder import GroupSums

# Members are on one host. Buffers of captured sums are not registered: NCCL takes each for one allocation, which
# buffers of torch's expandable segments are not.
_NCCL_SETTINGS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_GRAPH_REGISTER": "0"}
# Limit of one sum, where a timer runs: a supervisor ends an engine whose step takes as long.
_LONGEST = timedelta(minutes=10)
# Seconds within which the leader learns why a sum has failed.
_KNOWN_S = 10.0


class DeviceSums(GroupSums):
    """Adds up and joins tensors on the members' devices. Nothing may be added up before `connect`. `num_sums`,
    `num_joins`: calls so far; a graph that is replayed makes none.
    """

    def __init__(self, partition: Partition, device: torch.device) -> None:
        super().__init__(partition)
        self._partitions = partitions_of(partition.whole, partition.num_members)
        self._device = device
        self._group: Any = None
        self._error: Exception | None = None
        self._is_lost = threading.Event()
        self.num_sums = 0
        self.num_joins = 0

    def connect(self, rendezvous: int) -> None:
        """Wait for the other members. `rendezvous`: a descriptor of memory that all of them have."""
        member, num_members = self.partition.member, self.partition.num_members
        # never closed: the store opens this path once more when it is destroyed, which may be late
        descriptor = os.dup(rendezvous)
        store = dist.FileStore(f"/proc/self/fd/{descriptor}", num_members)
        store.set_timeout(_LONGEST)
        if self._device.type == "cuda":
            for name, value in _NCCL_SETTINGS.items():
                os.environ.setdefault(name, value)
            torch.cuda.set_device(self._device)  # of this thread
            self._group = dist.ProcessGroupNCCL(store, member, num_members, dist.ProcessGroupNCCL.Options())
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = _LONGEST
            self._group = dist.ProcessGroupGloo(store, member, num_members, options)
        # NCCL connects with the first sum, and takes its memory
        self._sum_(torch.ones(1, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def lose(self, error: Exception) -> None:
        """Make sums that wait for others fail, for good. Any thread may call."""
        self._error = error
        self._is_lost.set()
        if self._group is not None and self._device.type == "cuda":
            with suppress(RuntimeError):
                self._group.abort()  # the kernels of sums in flight end, and what the host waits for with them

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all members' `x`, in `x` itself where that is contiguous."""
        self.num_sums += 1
        x = x.contiguous()
        self._sum_(x)
        return x

    def join_logits(self, x: Tensor) -> Tensor:
        """The logits of all members side by side on the leader; on other members their own. On their way all parts are
        as wide as the widest.
        """
        self.num_joins += 1
        ends = [part.tokens(self.head_outputs) for part in self._partitions]
        widths = [end - start for start, end in ends]
        widest, rows = max(widths), len(x)
        if not rows:
            return x.new_empty(0, sum(widths))
        given = pad(x, (0, widest - x.shape[1])).contiguous()
        joined = torch.empty(len(widths) * rows, widest, dtype=x.dtype, device=x.device)
        options = AllgatherOptions()
        options.asyncOp = False
        self._wait(lambda: self._group._allgather_base(joined, given, options))
        if self.partition.member:
            return x
        parts = joined.view(len(widths), rows, widest)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def share(self, numbers: Tensor) -> None:
        """Overwrite `numbers` with the leader's."""
        if numbers.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.asyncOp = 0, False
            self._wait(lambda: self._group.broadcast([numbers], options))

    def _sum_(self, x: Tensor) -> None:
        options = dist.AllreduceOptions()
        options.asyncOp = False
        self._wait(lambda: self._group.allreduce([x], options))

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Begin an operation and wait until it is done, on a GPU until it is launched."""
        try:
            work = begin()
            if work is not None:
                work.wait()
        except RuntimeError:
            # why it has failed is known in a moment, on the leader
            if not self.partition.member and self._is_lost.wait(_KNOWN_S) and self._error is not None:
                raise self._error from None
            raise
