"""An adapter's plain pairs as jobs of the merge kernel: one launch for all layers.

Whatever is more than `W + scaling * B A` (DoRA, replaced weights, biases) merges parameter by parameter, as
`AdapterWeights.effective` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ..kernels.launch import to_device
from ..kernels.merge import MergeJob, MergePair, merge_weights
from .adapter.weights import AdapterWeights
from .errors import AdapterRefusedError
from .linear import Linear
from .packed_sites import PackedMember


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
    """One job per member; a member that the adapter leaves alone is copied."""
    live = linear.live_buffer()
    jobs = []
    for member in members:
        rows = slice(member.start, member.end)
        pairs: tuple[MergePair, ...] = ()
        change = adapter.changes.get(f"{member.module}.weight")
        if change is not None and change.site is not None:
            site = change.site
            a, b = (to_device(adapter.stored[key], live.device).contiguous() for key in (site.a_key, site.b_key))
            pairs = (MergePair(a, b, site.scaling),)
        jobs.append(MergeJob(live[rows], linear.pristine[rows], pairs))
    return jobs


def run_merge(adapter: AdapterWeights, jobs: Sequence[MergeJob]) -> None:
    """Merge; one launch for each type that the pairs are stored in. Raises `AdapterRefusedError` on overflow."""

    def type_of(job: MergeJob) -> str:
        return str(job.pairs[0].a.dtype) if job.pairs else ""

    flags = [merge_weights(list(group)) for _, group in groupby(sorted(jobs, key=type_of), key=type_of)]
    if any(int(flag) for flag in flags):
        raise AdapterRefusedError(
            f"adapter {adapter.audit.name!r}: its weights merged in {jobs[0].live.dtype} are not finite. Use a wider "
            "--dtype, or an earlier checkpoint."
        )
