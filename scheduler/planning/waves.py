"""Orders all rows and cuts them into shards, the pieces that become part files.

Rows are ordered adapter-major, then by shared prefix, then longest predicted first. A *wave* is the group of shards of
one adapter (or of all small adapters). Its shards have one mode, chosen from the numbers of all rows before the job
starts (`with_merged_waves`). A *shard* is cut where a prefix group ends if that is near. It holds about the same work
as its neighbours: neither so much that losing it hurts nor so little that its overhead dominates. Shards are numbered
in dispatch order, longest first.

Shapes: rows `[num_rows]` unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..costs.cost import CostModel, StepLoad
from ..workload import BASE_MODEL, Workload

ShardMode = Literal["none", "base", "unmerged", "merged", "mixture"]
#: Least shards per replica when rows allow, so that late corrections have something to move and one lost shard costs
#: little.
SHARDS_PER_REPLICA = 16
#: Rows below which a shard's fixed cost (a task, a file) shows.
MIN_ROWS = 16
#: Most rows of a shard, in full batches, unless the whole job would then exceed `_MAX_SHARDS`.
MAX_BATCHES = 4
_MAX_SHARDS = 8192
# Work of one prompt token, one output token being 1.
_PROMPT_TOKEN_WEIGHT = 0.1
# Rows of a shard of the smallest jobs, so that a part holds more than one row.
_FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class Shard:
    """A group of rows that becomes one part file."""

    #: Number of the shard in the plan, in dispatch order.
    shard_id: int
    #: Number of its wave.
    wave_id: int
    #: Mode in which its rows are planned to run; `none`: no row needs an engine.
    mode: ShardMode
    #: Ids of its adapters, without the base model.
    adapters: tuple[str, ...]
    #: Rows of the shard.
    num_rows: int
    #: Tokens of their prompts.
    prompt_tokens: int
    #: Tokens that they are predicted to generate.
    predicted_output_tokens: int
    #: Number of the replica that the plan gives it to (None: to none).
    replica: int | None = None
    #: Rows of each of `adapters`, then those of the base model, when rows were dealt out before the job (empty: not
    #: counted).
    adapter_rows: tuple[int, ...] = ()
    #: Predicted output tokens of the row that is predicted to generate most.
    longest_output_tokens: int = 0
    #: Weight bytes of all its adapters together.
    adapter_bytes: int = 0
    #: Whether its rows are the job's canary, or a part of it: they are answered before all others.
    is_canary: bool = False

    @property
    def has_engine_work(self) -> bool:
        """Whether any row needs an engine; a shard of error rows only may run anywhere."""
        return self.mode != "none"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with every field."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shard:
        """The shard that `to_json` wrote."""
        lists = {"adapters": tuple(value["adapters"]), "adapter_rows": tuple(value.get("adapter_rows", ()))}
        return cls(**{**value, **lists})


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlan:
    """All rows in order, and where the shards are cut."""

    #: Row numbers of the input in the order of the plan, int64 `[num_rows]`, a permutation.
    row_order: NDArray[np.int64]
    #: Offsets into `row_order`, int64 `[num_shards + 1]`: shard `i` holds
    #: `row_order[shard_offsets[i]:shard_offsets[i + 1]]`.
    shard_offsets: NDArray[np.int64]
    #: The shards, in dispatch order.
    shards: tuple[Shard, ...]

    def rows_of(self, shard_id: int) -> NDArray[np.int64]:
        """Input row numbers of one shard, in the plan's order."""
        return self.row_order[self.shard_offsets[shard_id] : self.shard_offsets[shard_id + 1]]

    def check_integrity(self) -> None:
        """Raise AssertionError, with the failing sum, unless every row is in exactly one shard."""
        num_rows = len(self.row_order)
        seen = np.bincount(self.row_order, minlength=num_rows) if num_rows else np.zeros(0, np.int64)
        is_permutation = len(seen) == num_rows and bool((seen == 1).all())
        assert is_permutation, "row_order is not a permutation of the rows"
        assert len(self.shard_offsets) == len(self.shards) + 1, (
            f"{len(self.shard_offsets)} offsets for {len(self.shards)} shards"
        )
        ends = (int(self.shard_offsets[0]), int(self.shard_offsets[-1]))
        assert ends == (0, num_rows), f"offsets run from {ends[0]} to {ends[1]}, expected 0 to {num_rows}"
        sizes = np.diff(self.shard_offsets)
        for shard, size in zip(self.shards, sizes, strict=True):
            assert shard.num_rows == size > 0, f"shard {shard.shard_id}: {shard.num_rows} rows, offsets say {size}"
            assert shard.mode in get_args(ShardMode), f"shard {shard.shard_id}: mode {shard.mode!r}"
        assert [s.shard_id for s in self.shards] == list(range(len(self.shards))), "shard ids are not 0, 1, 2, …"


def plan_shards(
    workload: Workload,
    *,
    batch_rows: int,
    num_replicas: int,
    predicted_output_tokens: NDArray[np.float64] | None = None,
    rows_per_shard: int | None = None,
) -> ShardPlan:
    """Order all rows and cut them into shards.

    `batch_rows`: sequences one replica decodes together. `predicted_output_tokens`: float64 `[num_rows]`, by default
    `max_tokens`. `rows_per_shard`: number of average rows that a shard holds (None: by the size of the job). Zero
    rows give a plan of zero shards. The same input gives the same plan.
    """
    assert min(batch_rows, num_replicas) >= 1, f"batch_rows={batch_rows}, num_replicas={num_replicas}"
    if workload.num_rows == 0:
        return ShardPlan(np.zeros(0, np.int64), np.zeros(1, np.int64), ())
    output = workload.max_tokens.astype(np.float64) if predicted_output_tokens is None else predicted_output_tokens
    work = np.where(workload.max_tokens > 0, output + _PROMPT_TOKEN_WEIGHT * workload.prompt_tokens, 0.0)
    target_rows = rows_per_shard or shard_rows(workload.num_rows, batch_rows, num_replicas)
    pool = _pool_of_adapter(workload, target_rows)
    order = _row_order(workload, output, work, pool)
    wave = _wave_keys(workload, pool)[order]
    cuts = _cut_shards(wave, workload.prefix_hash[order], work[order], target_rows)
    return _in_dispatch_order(workload, order, cuts, wave, output, work)


def shard_rows(num_rows: int, batch_rows: int, num_replicas: int) -> int:
    """Number of average rows that a shard should hold."""
    wanted = -(-num_rows // (num_replicas * SHARDS_PER_REPLICA))
    largest = max(MAX_BATCHES * batch_rows, -(-num_rows // _MAX_SHARDS))
    # A handful of rows is still spread: every replica gets four shards before `MIN_ROWS` counts, or two of a few rows.
    few = max(num_rows // (4 * num_replicas), min(_FEW_ROWS, num_rows // (2 * num_replicas)))
    smallest = max(1, min(MIN_ROWS, few))
    return min(max(wanted, smallest), largest)


def dispatch_order(shards: Sequence[Shard]) -> list[int]:
    """Order in which shards that were planned apart should run.

    The canary comes first, then most work, in steps of a quarter of the largest; shards that need no engine come last.
    """
    work = np.array(
        [s.predicted_output_tokens + _PROMPT_TOKEN_WEIGHT * s.prompt_tokens if s.has_engine_work else 0 for s in shards]
    )
    is_canary = np.array([shard.is_canary for shard in shards], bool)
    order: list[int] = np.lexsort((-_coarse(work), ~is_canary)).tolist()
    return order


def _coarse(work: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pieces of about the same work are equal: they keep their order, heavy adapters and long rows first."""
    return np.asarray(np.ceil(4 * work / max(work.max(initial=0.0), 1.0)))


def _pool_of_adapter(workload: Workload, target_rows: int) -> NDArray[np.int64]:
    """`[num_adapters + 1]`: wave of each adapter. Large adapters have their own; all small ones share one."""
    num_adapters = len(workload.adapters)
    has_work = workload.max_tokens > 0
    slots = (workload.adapter_index % (num_adapters + 1))[has_work]
    rows = np.bincount(slots, minlength=num_adapters + 1)
    pool = np.arange(num_adapters + 1, dtype=np.int64)
    is_small = rows < target_rows
    is_small[num_adapters] = False
    if is_small.any():
        pool[is_small] = np.argmax(is_small)
    return pool


def _wave_keys(workload: Workload, pool: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows that share a key share a wave; rows without engine work have the key after all others."""
    slots = workload.adapter_index % (len(workload.adapters) + 1)
    return np.where(workload.max_tokens > 0, pool[slots], len(workload.adapters) + 1)


def _row_order(
    workload: Workload, output: NDArray[np.float64], work: NDArray[np.float64], pool: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Heaviest wave first; inside: adapter-major, heaviest prefix group first, longest predicted first."""
    wave = _wave_keys(workload, pool)
    wave_work = np.bincount(wave, weights=work, minlength=len(workload.adapters) + 2)
    group, group_size = _prefix_groups(workload)
    longest = np.zeros(len(group_size))
    np.maximum.at(longest, group, output)
    keys = (-output, group, -longest[group], workload.adapter_index, wave, -wave_work[wave])
    return np.lexsort(keys).astype(np.int64)


def _prefix_groups(workload: Workload) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group number of each row, and rows of each group; rows that share no prefix are group 0."""
    key = np.empty(workload.num_rows, dtype=[("adapter", np.int32), ("prefix", np.uint64)])
    key["adapter"], key["prefix"] = workload.adapter_index, workload.prefix_hash
    by_key = np.lexsort((key["prefix"], key["adapter"]))
    is_first = np.ones(workload.num_rows, dtype=bool)
    is_first[1:] = key[by_key][1:] != key[by_key][:-1]
    number = np.cumsum(is_first)
    size = np.bincount(number, minlength=number[-1] + 1)
    is_shared = (size[number] > 1) & (key["prefix"][by_key] != 0)
    group = np.empty(workload.num_rows, dtype=np.int64)
    group[by_key] = np.where(is_shared, number, 0)
    return group, np.bincount(group, minlength=number[-1] + 1)


def _cut_shards(
    wave: NDArray[np.int64],
    prefix: NDArray[np.uint64],
    work: NDArray[np.float64],
    target_rows: int,
) -> NDArray[np.int64]:
    """Offsets `[num_shards + 1]` into the ordered rows: equal work within a wave, at most `2 * target_rows` rows."""
    num_rows = len(wave)
    starts = np.flatnonzero(np.concatenate([[True], wave[1:] != wave[:-1]]))
    target_work = work.sum() * target_rows / max(num_rows, 1)
    cuts = [0]
    for start, end in zip(starts, np.append(starts[1:], num_rows), strict=True):
        done = np.cumsum(work[start:end])
        pieces = max(1, round(done[-1] / target_work)) if target_work > 0 else 1
        pieces = min(pieces, max(1, (end - start) // min(MIN_ROWS, target_rows)))
        wanted = done[-1] * np.arange(1, pieces) / pieces
        inner = start + np.searchsorted(done, wanted, side="left") + 1
        for cut in np.append(inner, end):
            cuts += _limited(cuts[-1], _at_prefix_end(int(cut), cuts[-1], int(end), prefix), 2 * target_rows)
    return np.asarray(cuts, dtype=np.int64)


def _at_prefix_end(cut: int, previous: int, end: int, prefix: NDArray[np.uint64]) -> int:
    """Move a cut forward to the end of its prefix group if that is within an eighth of the shard."""
    if cut >= end or prefix[cut] == 0:
        return min(cut, end)
    for moved in range(cut, min(end, cut + (cut - previous) // 8 + 1)):
        if prefix[moved] != prefix[moved - 1]:
            return moved
    return cut


def _limited(previous: int, cut: int, max_rows: int) -> list[int]:
    """Cuts after `previous` up to `cut`, none more than `max_rows` apart; empty when there is nothing between."""
    pieces = -(-(cut - previous) // max_rows)
    return [previous + (cut - previous) * (piece + 1) // pieces for piece in range(pieces)]


def _in_dispatch_order(
    workload: Workload,
    order: NDArray[np.int64],
    cuts: NDArray[np.int64],
    wave: NDArray[np.int64],
    output: NDArray[np.float64],
    work: NDArray[np.float64],
) -> ShardPlan:
    """Number the pieces: most work first, error rows last, ties in row order."""
    starts = cuts[:-1]
    piece_work = np.add.reduceat(work[order], starts)
    dispatch = np.lexsort((starts, -_coarse(piece_work)))
    sizes = np.diff(cuts)[dispatch]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    # Row positions of each piece, pieces in dispatch order.
    positions = np.repeat(starts[dispatch] - offsets[:-1], sizes) + np.arange(len(order))
    row_order = order[positions]
    _, wave_id = np.unique(wave[starts], return_inverse=True)
    shards = tuple(
        _describe(workload, row_order[offsets[i] : offsets[i + 1]], i, int(wave_id[piece]), output)
        for i, piece in enumerate(dispatch)
    )
    return ShardPlan(row_order, offsets, shards)


def _describe(
    workload: Workload, rows: NDArray[np.int64], shard_id: int, wave_id: int, output: NDArray[np.float64]
) -> Shard:
    has_work = workload.max_tokens[rows] > 0
    present = np.unique(workload.adapter_index[rows][has_work])
    mode: ShardMode = "none" if not has_work.any() else "base" if (present == BASE_MODEL).all() else "unmerged"
    return Shard(
        shard_id=shard_id,
        wave_id=wave_id,
        mode=mode,
        adapters=tuple(workload.adapters[index].adapter_id for index in present if index != BASE_MODEL),
        num_rows=len(rows),
        prompt_tokens=int(workload.prompt_tokens[rows].sum()),
        predicted_output_tokens=round(float(output[rows][has_work].sum())),
        longest_output_tokens=round(float(output[rows][has_work].max(initial=0.0))),
        adapter_bytes=sum(workload.adapters[index].weight_bytes for index in present.tolist() if index != BASE_MODEL),
    )


def dealt_shards(
    workload: Workload,
    replica_of: NDArray[np.int64],
    num_replicas: int,
    *,
    rows_per_shard: int,
    predicted_output_tokens: NDArray[np.float64],
    mode: ShardMode,
) -> ShardPlan:
    """Cut rows that were dealt out to replicas into shards of `rows_per_shard` rows, each replica's in input order.

    Rows without engine work are for any replica. `replica_of` int64 `[num_rows]`: replica of each row. `mode`: of
    shards with adapters.
    """
    in_order = workload.input_order
    owner = np.where(workload.max_tokens > 0, replica_of, num_replicas)[in_order]
    by_owner = np.argsort(owner, kind="stable")
    order, owner = in_order[by_owner], owner[by_owner]
    firsts = np.searchsorted(owner, np.arange(num_replicas + 1))
    place = np.arange(len(order)) - firsts[owner]
    starts = np.flatnonzero(place % rows_per_shard == 0)
    # The first shard of each replica, then the second of each, …; those without engine work last.
    turn = np.lexsort((owner[starts], place[starts], owner[starts] == num_replicas))
    sizes = np.diff(np.append(starts, len(order)))[turn]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    row_order = order[np.repeat(starts[turn] - offsets[:-1], sizes) + np.arange(len(order))]
    shards = []
    for number, start in enumerate(starts[turn].tolist()):
        rows, replica = row_order[offsets[number] : offsets[number + 1]], int(owner[start])
        shard = _describe(workload, rows, number, replica, predicted_output_tokens)
        if shard.has_engine_work:
            of_each = _adapter_rows(workload, rows)
            chosen = mode if shard.mode == "unmerged" else shard.mode
            shard = replace(shard, mode=chosen, replica=replica, adapter_rows=of_each)
        shards.append(shard)
    return ShardPlan(row_order, offsets, tuple(shards))


def with_whole_groups(plan: ShardPlan, workload: Workload, output: NDArray[np.float64]) -> ShardPlan:
    """Put each group of rows into the shard of its first row, side by side and in their order.

    `output`: tokens that rows are predicted to generate, `[num_rows]`.
    """
    if workload.groups is None or workload.num_rows == 0:
        return plan
    is_first = np.concatenate([[True], workload.groups[1:] != workload.groups[:-1]])
    first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    place = np.empty(workload.num_rows, np.int64)
    place[plan.row_order] = np.arange(workload.num_rows)
    order = np.argsort(place[first], kind="stable")
    shard_of = np.searchsorted(plan.shard_offsets, place[first][order], side="right") - 1
    sizes = np.bincount(shard_of, minlength=len(plan.shards))
    offsets = np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64)
    shards = []
    for shard_id, old_id in enumerate(np.flatnonzero(sizes).tolist()):
        old, rows = plan.shards[old_id], order[offsets[shard_id] : offsets[shard_id + 1]]
        now = _describe(workload, rows, shard_id, old.wave_id, output)
        shards.append(
            replace(
                now,
                mode=old.mode if now.mode == "unmerged" else now.mode,
                replica=old.replica,
                adapter_rows=old.adapter_rows and _adapter_rows(workload, rows),
            )
        )
    return ShardPlan(order, offsets, tuple(shards))


def _adapter_rows(workload: Workload, rows: NDArray[np.int64]) -> tuple[int, ...]:
    """`Shard.adapter_rows` of a shard."""
    counts = np.bincount(workload.adapter_index[rows] + 1)
    return (*counts[1:][counts[1:] > 0].tolist(), int(counts[0]))


def with_merged_waves(
    plan: ShardPlan, workload: Workload, cost: CostModel, *, batch_rows: int, num_replicas: int
) -> ShardPlan:
    """Mark the waves of one adapter that run sooner merged as `merged`. Rows and order are untouched."""
    ranks = {adapter.adapter_id: adapter.rank for adapter in workload.adapters}
    merged = merged_waves(plan.shards, ranks, cost, batch_rows=batch_rows, num_replicas=num_replicas)
    shards = tuple(replace(s, mode="merged") if s.wave_id in merged else s for s in plan.shards)
    return replace(plan, shards=shards)


def merged_waves(
    shards: Sequence[Shard], ranks: Mapping[str, int], cost: CostModel, *, batch_rows: int, num_replicas: int
) -> set[int]:
    """Numbers of the waves of one adapter that run sooner merged. `ranks`: adapter id -> LoRA rank."""
    waves: dict[int, list[Shard]] = {}
    for shard in shards:
        waves.setdefault(shard.wave_id, []).append(shard)
    return {
        wave_id
        for wave_id, shards in waves.items()
        if shards[0].mode in ("unmerged", "merged")
        and len({adapter_id for shard in shards for adapter_id in shard.adapters}) == 1
        and pays_to_merge(shards, ranks[shards[0].adapters[0]], cost, batch_rows=batch_rows, num_replicas=num_replicas)
    }


def pays_to_merge(shards: Sequence[Shard], rank: int, cost: CostModel, *, batch_rows: int, num_replicas: int) -> bool:
    """Whether a wave of one adapter gains more than its switches cost (to merged and back, on each replica it uses).

    It must fill a batch twice over: a homogeneous batch that is too small loses more than an adapter costs (dLoRA
    section 4.1).
    """
    if sum(shard.num_rows for shard in shards) < 2 * batch_rows:
        return False
    passes = sum(shard.predicted_output_tokens for shard in shards) / batch_rows
    tokens = sum(shard.predicted_output_tokens + shard.prompt_tokens for shard in shards)
    once_s = float(cost.step_seconds(StepLoad(num_adapters=1, rank_sum=rank))) - cost.step_s
    saved_s = passes * once_s + tokens * (rank * cost.rank_token_s + cost.lora_token_s)
    return saved_s > (2 * cost.merge_s + cost.first_merge_s) * min(num_replicas, len(shards))
