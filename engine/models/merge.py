"""Merges one adapter at a time into the base model's weights, and restores them.

`W_live = round(W_base + sum of scaling * B A)` is computed from the pristine copy every time and never subtracted, so
weights are bit-identical after any number of switches. (Adding and subtracting in bf16 changes 2-10 % of all weights
after one cycle.) On a GPU all plain pairs are jobs of one launch of the merge kernel. An adapter that is nothing but
pairs is merged from its packed matrices, in the pool or on their way there, and whether the result is finite is read
once the next step was launched. What is more than a pair (DoRA, replaced weights, biases) merges parameter by
parameter, as `AdapterWeights.effective` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from ...kernels.launch import empty_pinned, to_device
from ...kernels.merge import LoraPair, MergeJob, merge_weights
from ...kernels.segment_lora import LoraMember, LoraSiteWeights
from ..errors import AdapterRefusedError
from ..memory.adapter_layout import Sites
from ..model_config.model import PackedMember, packed_members
from ..model_config.names import PackedSite
from ..peft.weights import AdapterWeights
from .decoder import Decoder
from .layers import Linear


class LiveWeights:
    """Merges one adapter at a time into a decoder's weights, and restores them.

    `num_switches`: merges and restorations so far. `switching_s`: seconds that merging took.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._pristine_tensors = dict(decoder.tensors)
        self._replaced_linears: list[Linear] = []
        self.merged_adapter_id: str | None = None
        self.num_switches = 0
        self.switching_s = 0.0
        self._unconfirmed: _Overflow | None = None

    @property
    def takes_packed(self) -> bool:
        """Whether `merge_packed` serves: on GPUs, unless the weights are held in another format than activations."""
        return self._decoder.merges_by_kernel and all(linear.has_buffer for _, linear in self._packed_linears())

    def merge(self, adapter_id: str, adapter: AdapterWeights) -> None:
        """Make the weights those of the merged adapter, whatever they were before.

        On any error they are the base's, and merged weights take no memory.
        """
        self._switch(adapter_id, partial(self._merge_all, adapter))

    def merge_packed(self, adapter_id: str, name: str, sites: Sites) -> None:
        """`merge` for an adapter that changes layers by pairs alone, from its packed matrices on the device.

        The weights may be computed with at once; `confirm` finds whether they are finite. `name`: name of the adapter
        in its message.
        """
        self._switch(adapter_id, partial(self._merge_packed, name, sites))

    def confirm(self) -> None:
        """Wait until the latest merge is done. Raises `AdapterRefusedError` if its weights are not finite; they are the
        base's then, and what was computed with them means nothing."""
        overflow, self._unconfirmed = self._unconfirmed, None
        if overflow is None:
            return
        began_s = time.perf_counter()
        is_set = overflow.is_set()
        self.switching_s += time.perf_counter() - began_s
        if is_set:
            self.undo()
            raise _not_finite(overflow.adapter_name, self._decoder.dtype)

    def _switch(self, adapter_id: str, merge: Callable[[], None]) -> None:
        if self.merged_adapter_id == adapter_id:
            return
        began_s = time.perf_counter()
        self.merged_adapter_id = adapter_id
        self.num_switches += 1
        self._unconfirmed = None
        try:
            merge()
        except Exception:
            self.undo()
            raise
        self.switching_s += time.perf_counter() - began_s

    def undo(self) -> None:
        """`restore`, and keep no memory for merged weights. (Merged by half they would be neither the base's nor the
        adapter's.)"""
        self.restore()
        for _, linear in (*self._packed_linears(), *self._whole_linears()):
            linear.free_live()

    def restore(self) -> None:
        """Make the weights those of the base model."""
        if self.merged_adapter_id is None:
            return
        self._unconfirmed = None
        self._restore_all_but([])
        self._decoder.tensors.update(self._pristine_tensors)
        self.merged_adapter_id = None
        self.num_switches += 1

    def _merge_all(self, adapter: AdapterWeights) -> None:
        touched = set(adapter.audit.touched_parameters)
        touched_linears = [
            (members, linear)
            for members, linear in [*self._packed_linears(), *self._whole_linears()]
            if any(f"{m.module}.weight" in touched or f"{m.module}.bias" in touched for m in members)
        ]
        # what the adapter before has changed and this one replaces anyway is not restored in between
        self._restore_all_but([linear for _, linear in touched_linears])
        jobs: list[MergeJob] = []
        for members, linear in touched_linears:
            if linear not in self._replaced_linears:
                self._replaced_linears.append(linear)
            is_in_layer = members[0].module not in self._decoder.linears
            merges_by_kernel = self._decoder.merges_by_kernel and linear.has_buffer and is_in_layer
            if merges_by_kernel and has_plain_pairs(adapter, members):
                jobs += merge_jobs(adapter, members, linear)
            else:
                linear.replace(*_effective(adapter, members, linear))
        run_merge(adapter, jobs)
        self._decoder.tensors.update(self._pristine_tensors)
        for name in touched & self._pristine_tensors.keys():
            pristine = self._pristine_tensors[name].to(self._decoder.dtype)
            self._decoder.tensors[name] = adapter.effective(name, pristine)

    def _merge_packed(self, name: str, sites: Sites) -> None:
        changed = [
            (sites[index][site], members, self._decoder.layers[index].linears[site])
            for index, site, members in self._packed_sites()
            if site in sites[index]
        ]
        self._restore_all_but([linear for _, _, linear in changed])
        self._decoder.tensors.update(self._pristine_tensors)
        self._replaced_linears = [linear for _, _, linear in changed]
        jobs = [job for weights, members, linear in changed for job in packed_jobs(weights, members, linear)]
        if jobs:
            self._unconfirmed = _Overflow.of(name, merge_weights(jobs))

    def _restore_all_but(self, kept: list[Linear]) -> None:
        for linear in self._replaced_linears:
            if linear not in kept:
                linear.restore()
        self._replaced_linears = [linear for linear in self._replaced_linears if linear in kept]

    def _whole_linears(self) -> Iterator[tuple[tuple[PackedMember, ...], Linear]]:
        """The head and projections: linear layers of one member, in no decoder layer."""
        for module, linear in self._decoder.linears.items():
            yield (PackedMember(module, 0, linear.shape[0]),), linear

    def _packed_linears(self) -> Iterator[tuple[tuple[PackedMember, ...], Linear]]:
        for index, site, members in self._packed_sites():
            yield members, self._decoder.layers[index].linears[site]

    def _packed_sites(self) -> Iterator[tuple[int, PackedSite, tuple[PackedMember, ...]]]:
        for index in range(len(self._decoder.layers)):
            for site in self._decoder.layers[index].linears:
                yield index, site, packed_members(self._decoder.model, index, site)


def _effective(
    adapter: AdapterWeights, members: tuple[PackedMember, ...], linear: Linear
) -> tuple[Tensor, Tensor | None]:
    """Merged weight and bias of one packed layer."""
    weight = torch.cat([adapter.effective(f"{m.module}.weight", linear.pristine[m.start : m.end]) for m in members])
    # an adapter may add a bias to a layer that has none: zeros then stand for the base's
    bias_names = [f"{m.module}.bias" for m in members]
    bias = linear.pristine_bias
    if bias is None and not set(bias_names) & set(adapter.audit.touched_parameters):
        return weight, None
    pristine = bias if bias is not None else weight.new_zeros(weight.shape[0])
    return weight, torch.cat(
        [adapter.effective(name, pristine[m.start : m.end]) for name, m in zip(bias_names, members, strict=True)]
    )


def has_plain_pairs(adapter: AdapterWeights, members: Sequence[PackedMember]) -> bool:
    """Whether merging changes these layers by pairs alone."""
    for member in members:
        if f"{member.module}.bias" in adapter.changes:
            return False
        change = adapter.changes.get(f"{member.module}.weight")
        if change is None:
            continue
        if change.site is None or change.replaced_by or change.rows_key or change.site.magnitude_key:
            return False
    return True


def merge_jobs(adapter: AdapterWeights, members: Sequence[PackedMember], linear: Linear) -> list[MergeJob]:
    """Jobs of a linear layer, one for each member; a member that the adapter leaves alone is copied."""
    live = linear.live_buffer()
    jobs = []
    for member in members:
        rows = slice(member.start, member.end)
        pairs: tuple[LoraPair, ...] = ()
        change = adapter.changes.get(f"{member.module}.weight")
        if change is not None and change.site is not None:
            site = change.site
            a, b = (to_device(adapter.stored[key], live.device).contiguous() for key in (site.a_key, site.b_key))
            pairs = (LoraPair(a, b, site.scaling),)
        jobs.append(MergeJob(live[rows], linear.pristine[rows], pairs))
    return jobs


def run_merge(adapter: AdapterWeights, jobs: Sequence[MergeJob]) -> None:
    """Merge; one launch for each type that the pairs are stored in. Raises `AdapterRefusedError` on overflow."""

    def type_of(job: MergeJob) -> str:
        return str(job.pairs[0].a.dtype) if job.pairs else ""

    flags = [merge_weights(list(group)) for _, group in groupby(sorted(jobs, key=type_of), key=type_of)]
    if any(int(flag) for flag in flags):
        raise _not_finite(adapter.audit.name, jobs[0].live.dtype)


def packed_jobs(weights: LoraSiteWeights, members: Sequence[PackedMember], linear: Linear) -> list[MergeJob]:
    """`merge_jobs` from the matrices of one packed site; B is stored transposed there, and both may be in pieces."""
    live = linear.live_buffer()
    pairs_of = {member.column_start: _pairs_of(weights, member) for member in weights.members}
    jobs = []
    for member in members:
        rows = slice(member.start, member.end)
        jobs.append(MergeJob(live[rows], linear.pristine[rows], pairs_of.get(member.start, ())))
    return jobs


def _pairs_of(weights: LoraSiteWeights, member: LoraMember) -> tuple[LoraPair, ...]:
    """The pieces of a member's pair: rank rows that are side by side in A and in B."""
    found: list[tuple[Tensor, Tensor]] = []
    first = 0
    for a in weights.a:
        begin = member.rank_start
        for b in member.b:
            row, end = max(first, begin), min(first + len(a), begin + len(b))
            if row < end:
                found.append((a[row - first : end - first], b[row - begin : end - begin]))
            begin += len(b)
        first += len(a)
    last = len(found) - 1
    return tuple(LoraPair(a, b.t(), member.scaling, goes_on=i < last) for i, (a, b) in enumerate(found))


@dataclass(frozen=True, slots=True)
class _Overflow:
    """Whether merged weights are not finite, on its way to the host."""

    adapter_name: str
    flag: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, adapter_name: str, flag: Tensor) -> _Overflow:
        if flag.device.type != "cuda":
            return cls(adapter_name, flag, None)
        on_host = empty_pinned(1, flag.dtype, flag.device)
        on_host.copy_(flag, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(adapter_name, on_host, copied)

    def is_set(self) -> bool:
        if self.copied is not None:
            self.copied.synchronize()
        return bool(int(self.flag))


def _not_finite(adapter_name: str, dtype: torch.dtype) -> AdapterRefusedError:
    return AdapterRefusedError(
        f"adapter {adapter_name!r}: its weights merged in {dtype} are not finite. Use a wider --dtype, or an earlier "
        "checkpoint."
    )
