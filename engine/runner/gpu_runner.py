"""Runs steps on a GPU (or in Triton's interpreter): lists in one copy, decode rows as graphs, tokens read later.

    host    plan, write lists | copy | launch |  plan the next step ... | read the tokens of the step before
    device                      copy   forward, sample, copy tokens back

The host needs no number of a step to launch the next: positions, places and the sampling of a row depend on how many
tokens it has, and the token itself is fed from the step before on the device.

A step with prompts is two launches: its decode rows by their graph in tiles of 16 rows, then its prompts kernel by
kernel in tiles of 64. Together, each decode row of an adapter of its own would fill a tile of 64 rows. The weights are
read twice, which costs less from a few adapters on.

Rows with rules (grammars, penalties) need their last token on the host, and take part in every second step. The graph
of such a step ends with logits, which stay where they are for what the host changes and chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...kernels.launch import empty_pinned, num_persistent_programs, to_device
from ...kernels.layouts.lora_table import CHUNK_RANK
from ...kernels.layouts.pages import PageLayout
from ...kernels.log_sum_exp import log_sum_exp
from ...kernels.paged_attention.libraries import PromptAttention
from ...kernels.paged_attention.types import allocate_partials
from ...kernels.sampling import NO_TOKEN, largest_of_rows, sample_tokens
from ..config import EngineConfig
from ..model_config.model import ModelConfig
from ..models.gpu_decoder import GpuDecoder, GpuMemory
from ..models.gpu_step import GpuStep, StepBuffer, StepSizes
from ..models.merge import LiveWeights
from ..models.step_batch import StepEntry, rows_of_head
from ..request import MOST_TOP_LOGPROBS
from ..sequence import Sequence
from .gpu_adapters import GpuAdapters
from .gpu_graphs import GraphKey, StepExecutor, bucket_of
from .gpu_plan import DECODE_TILE_ROWS, SPLIT_KEYS, PlannedStep, StepGeometry, rounded
from .runner import LaunchedStep, finished_prompts
from .sampler import PromptLogprobs, SampledTokens, most_likeliest, packed_rows, read_prompts, split_states

if TYPE_CHECKING:
    from ..text.answers.token_rules import TokenRules

# per multiprocessor, as in kernels.lora_shrink.triton and kernels.paged_attention.triton
_SHRINK_PROGRAMS, _ATTENTION_PROGRAMS = 4, 4
# Room of a bucket per row: 12 chunks, which rank 64 on the three members of qkv takes, and 8 withheld stop tokens.
# Steps that need more (a batch full of distinct adapters of higher ranks) run without a graph.
_BUCKET_CHUNKS, _BUCKET_WITHHELD = 12, 8


# Chunks per linear layer that the table has room for at first, for each row's adapter: rank 64 on every linear layer.
_CHUNKS_PER_MEMBER = 4
# Rows of scratch at first, per row of the largest step: twelve chunks, as in a bucket.
_SCRATCH_PER_TOKEN = 12


def first_sizes(config: EngineConfig, model: ModelConfig, pool_elements: int) -> tuple[int, int, int]:
    """Sizes of a runner's first allocations: residents and chunks of the table, and rows of scratch. They grow with
    what steps need, which drops every graph.

    There is room for a batch of distinct adapters, and as many that left it, as far as the pool can hold them. For 512
    rows on 32 layers of 7 linear ones up to 45 MB of table and, with 16,384 tokens, 13 MB of scratch.
    """
    shapes = model.linear_shapes().values()
    smallest_chunk = CHUNK_RANK * min(map(sum, shapes))
    num_residents = 2 * bucket_of(config.batch_rows)
    most_chunks = num_residents * len(shapes) * _CHUNKS_PER_MEMBER
    num_chunks = rounded(max(1, min(most_chunks, pool_elements // smallest_chunk)))
    return num_residents, num_chunks, rounded(config.step_tokens * _SCRATCH_PER_TOKEN)


def full_rows_of(device: torch.device, num_kv_heads: int) -> int:
    """Decode rows whose attention fills the device, see `split_keys_of`."""
    return -(-2 * num_persistent_programs(device, _ATTENTION_PROGRAMS) // num_kv_heads)


class GpuRunner:
    """Runs `decoder` over `memory` (the flat pool). `rules`: rules of the rows (None: none has rules or `min_tokens`).
    `first`: what `first_sizes` gives, or others. `prompts`: a library that computes attention in steps with prompts
    (None: our kernel). `share`: gives the leader's tokens to the members of its group.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        live: LiveWeights,
        memory: Tensor,
        layout: PageLayout,
        config: EngineConfig,
        rules: TokenRules | None,
        executor: StepExecutor,
        first: tuple[int, int, int] | None = None,
        prompts: PromptAttention | None = None,
        share: Callable[[Tensor], None] | None = None,
    ) -> None:
        model, device = decoder.model, memory.device
        self.steps_ahead = steps_ahead(model, config)
        self._decoder = decoder
        self._live = live
        self._seen_switches = live.num_switches
        self._weight_addresses = decoder.weight_addresses()
        self._executor = executor
        self._prompt_attention = prompts
        self._share = share
        num_residents, num_chunks, scratch_rows = first or first_sizes(config, model, len(memory))
        self._adapters = GpuAdapters(memory, model, num_residents, num_chunks)
        self._num_pages = len(memory) // layout.page_elements
        self._context_pages = layout.pages_for_tokens(model.max_context_tokens)
        self._page_tokens = layout.page_tokens
        programs = num_persistent_programs(device, _SHRINK_PROGRAMS)
        self._is_exact = config.mode == "exact"
        self._num_programs = 1 if self._is_exact else programs
        self.full_rows = None if self._is_exact else full_rows_of(device, model.num_kv_heads)
        rows = bucket_of(config.batch_rows)
        self._memory = GpuMemory.allocate(layout, self._adapters.table, scratch_rows, self._attention_items(rows))
        self._buffers: dict[tuple[int, bool], StepBuffer] = {}
        # the step before: its tokens as the next step reads them and as the host does, their log-probabilities, and
        # whose they are
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._read_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        # logits of graphs that end with them, [rows, vocab_size]
        self._logits: Tensor | None = None
        self._logprobs = torch.zeros(rows, dtype=torch.float32, device=device)
        self._top_ids = torch.zeros((rows, MOST_TOP_LOGPROBS), dtype=torch.int64, device=device)
        self._top_logprobs = torch.zeros((rows, MOST_TOP_LOGPROBS), dtype=torch.float32, device=device)
        # log-probabilities of the tokens that rows ask for, of each part of the step
        self._asked: list[Tensor] = []
        # log-probabilities of the part's prompts, with the likeliest tokens of each place, some places at a time
        self._columns: list[tuple[Tensor, Tensor, Tensor]] = []
        # read log-probabilities of prompts of each part of the step, which are on their way to the host
        self._scored: list[Callable[[], Iterator[PromptLogprobs]]] = []
        # hidden states of prompts of each part, on their way, with their sequences and numbers of places
        self._states: list[tuple[Tensor, list[tuple[Sequence, int]]]] = []
        self._places: dict[int, int] = {}
        self._rules = rules

    def launch(self, entries: Items[StepEntry]) -> LaunchedStep:
        """Plan a step and launch its parts, by graphs where there are any."""
        parts = self._planned(entries)
        return self._launch_parts(parts, self._graphs_for(parts))

    def _planned(self, entries: Items[StepEntry]) -> list[PlannedStep]:
        """The step's parts, once there is room for them."""
        # all of the step at once: what one part needs must not make the other's adapters leave the table
        rows = self._table_rows(entries)
        parts = [self._plan(part, rows) for part in _parts(entries)]
        for planned in parts:
            self._make_room(planned)
        if self._live.num_switches != self._seen_switches:
            self._seen_switches = self._live.num_switches
            if self._have_moved():
                self._executor.forget()
        return parts

    def _graphs_for(self, parts: Items[PlannedStep]) -> list[GraphKey | None]:
        """The graph by which each part is run; None: kernel by kernel. Only the first part may have one, since graphs
        put their tokens at the beginning.
        """
        planned = parts[0]
        bucket = self._bucket(planned)
        others = [None] * (len(parts) - 1)
        if bucket is None:
            return [None, *others]
        key = GraphKey(bucket, planned.has_lora, planned.split_keys > 0)
        if not planned.needs_host:
            key = replace(key, chooses=True, wants_logprobs=planned.wants_logprobs, draws=planned.draws)
        return [self._executor.choose(key), *others]

    def _launch_parts(self, parts: Items[PlannedStep], graphs: Items[GraphKey | None]) -> LaunchedStep:
        """Launch parts by these graphs, or kernel by kernel."""
        sampled: tuple[Sequence, ...] = ()
        self._asked.clear()
        self._scored, self._states = [], []
        num_top = max(planned.num_top for planned in parts)
        if num_top > self._top_ids.shape[1]:
            # no graph writes here
            shape = (len(self._top_ids), rounded(num_top))
            self._top_ids = self._top_ids.new_zeros(shape)
            self._top_logprobs = self._top_logprobs.new_zeros(shape)
        for planned, key in zip(parts, graphs, strict=True):
            self._launch_part(planned, len(sampled), key)
            sampled += planned.sampled
        self._places = {id(sequence): place for place, sequence in enumerate(sampled)}
        launched = self._launched(sampled, any(planned.wants_logprobs for planned in parts), num_top)
        finished = [each for planned in parts for each in finished_prompts(planned.entries)]
        return replace(launched, pooled=tuple(finished))

    def _launch_part(self, planned: PlannedStep, first: int, key: GraphKey | None) -> None:
        """Launch one part; its tokens stand from place `first` on."""
        if key is not None:
            sizes = self._bucket_sizes(key.bucket, planned.split_keys)
        else:
            sizes = planned.exact_sizes(len(self._memory.scratch))
        target = self._buffer(key, sizes)
        host = StepBuffer(sizes, empty_pinned(len(target.buffer), torch.int32, target.buffer.device))
        planned.write(host, self._places)
        host.copy_to(target, planned.num_pages)

        def step() -> GpuStep:
            made = target.step(
                self._decoder.model,
                has_lora=planned.has_lora,
                wants_logprobs=planned.wants_logprobs,
                draws=planned.draws,
                first_place=first,
            )
            made = replace(made, num_pooled=planned.num_pooled)
            if self._prompt_attention is None or planned.is_decode:
                return made
            library = self._prompt_attention(*planned.spans(), self._memory.layout, target.buffer.device)
            return replace(made, library=library)

        if key is None:
            self.compute(step(), planned)
        elif key.chooses:
            self._executor.run(key, lambda: self.compute(step(), planned))
        else:
            self._executor.run(key, lambda: self._keep(self.forward(step())))
            assert self._logits is not None, "the work of a graph was never run"
            self._choose(self._logits[: key.bucket], step(), planned)

    def compute(self, step: GpuStep, planned: PlannedStep) -> None:
        """Launch the device's part of a step. The logits of many scored places are computed some at a time."""
        rows = rows_of_head(len(step.sampled_rows) - planned.num_pooled - planned.num_scored, planned.num_scored)
        others: list[Tensor] = []
        if len(rows) == 1:
            logits = self.forward(step)
        else:
            first, *others = torch.split(self._decoder.forward_to_head(self._with_fed_tokens(step), self._memory), rows)
            logits = self._decoder.logits(first)
        if planned.pooled:
            self._bring(self._decoder.states, planned)
        self._choose(logits, step, planned)
        for block in others:
            self._score(self._decoder.logits(block), planned)
        if self._columns:
            self._copy_scores(planned)

    def _bring(self, states: Tensor, planned: PlannedStep) -> None:
        """Copy hidden states of prompts to the host."""
        wide = states.float()
        host = empty_pinned(wide.numel(), wide.dtype, wide.device).view(wide.shape)
        host.copy_(wide, non_blocking=True)
        self._states.append((host, [(planned.entries[i].sequence, count) for i, count in planned.pooled]))

    def forward(self, step: GpuStep) -> Tensor:
        """Launch the forward pass; logits of the sampled rows."""
        return self._decoder.forward_step(self._with_fed_tokens(step), self._memory)

    def _with_fed_tokens(self, step: GpuStep) -> GpuStep:
        """The step with the tokens that the step before has chosen."""
        fed = self._tokens.index_select(0, step.sources.clamp(min=0)).to(torch.int32)
        return replace(step, token_ids=torch.where(step.sources >= 0, fed, step.token_ids))

    def _keep(self, logits: Tensor) -> None:
        """Copy a graph's logits to where they stay after it."""
        if self._logits is None:  # not in a capture: the first run of a key is none
            self._logits = logits.new_empty(len(self._tokens), logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    def _choose(self, logits: Tensor, step: GpuStep, planned: PlannedStep) -> None:
        """Launch the sampling; the tokens stay on the device for the next step, on every member of a group."""
        # places of prompts stand behind the rows that get tokens, as rows of padding do
        count = len(logits) - rows_of_head(0, planned.num_scored)[0]
        if not len(logits):
            return
        if len(logits) < len(step.sampled_rows):
            step = step.with_first_sampled(len(logits))
        self._choose_tokens(logits, step, planned, count)
        if self._share is not None:
            self._share(self._tokens[step.first_place : step.first_place + count])

    def _choose_tokens(self, logits: Tensor, step: GpuStep, planned: PlannedStep, count: int) -> None:
        """Choose the tokens of `count` rows, and find what is asked beside them."""
        whole = self._sums(logits) if step.wants_logprobs else None
        raw = logits.clone() if step.wants_logprobs else logits
        _withhold_(logits, step.withheld)
        if planned.ruled:
            assert self._rules is not None, "rows with rules, and nothing that knows them"
            ruled = to_device(torch.tensor(planned.ruled), logits.device)
            changed = logits[ruled]
            self._rules.apply_(changed, [planned.sampled[i] for i in planned.ruled])
            logits = logits.index_copy(0, ruled, changed)
        is_finite = logits.amax(-1).isfinite()  # NaN counts as largest
        # argmax takes the first of equals, as the kernel does
        tokens = sample_tokens(logits, step.sampling) if step.draws else logits.argmax(-1)
        places = slice(step.first_place, step.first_place + count)
        if whole is not None and planned.scored:
            self._score(raw[count:], planned)
            raw, whole, tokens, is_finite = raw[:count], whole[:count], tokens[:count], is_finite[:count]
        self._tokens[places].copy_(tokens)
        self._read_tokens[places].copy_(torch.where(is_finite, tokens, NO_TOKEN))
        if whole is not None:
            self._logprobs[places].copy_(raw.gather(1, tokens[:, None])[:, 0].float() - whole)
            if planned.num_top:
                top, ids = self._largest(raw, planned.num_top)
                self._top_ids[places, : top.shape[1]] = ids
                self._top_logprobs[places, : top.shape[1]] = top - whole[:, None]
            if planned.asked:
                rows, tokens = to_device(torch.tensor(planned.asked).T.contiguous(), logits.device)
                is_known = tokens < raw.shape[1]
                values = raw[rows, tokens.where(is_known, 0)].float() - whole[rows]
                self._asked.append(values.where(is_known, -torch.inf))

    def _sums(self, logits: Tensor) -> Tensor:
        """Logarithms of the sums of the rows' exponentials, which log-probabilities are relative to."""
        return log_sum_exp(logits) if self._is_exact else logits.float().logsumexp(-1)

    def _largest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Each row's largest logits and their tokens. If logits are equal, torch takes any; in mode `exact` the first
        are taken.
        """
        count = min(count, logits.shape[1])
        if not self._is_exact:
            largest = logits.float().topk(count)
            return largest.values, largest.indices
        return largest_of_rows(logits, count)

    def _score(self, logits: Tensor, planned: PlannedStep) -> None:
        """Find what is asked of the next places of prompts. `logits` [num_places, vocab_size]: theirs."""
        first = sum(len(values) for values, *_ in self._columns)
        tokens = to_device(torch.tensor(planned.scored_tokens[first : first + len(logits)]), logits.device)
        whole = self._sums(logits)
        is_known = tokens < logits.shape[1]  # an adapter may have more than the model
        values = logits.gather(1, tokens.where(is_known, 0)[:, None])[:, 0].float() - whole
        top, ids = self._largest(logits, most_likeliest([places for _, places in planned.scored]))
        self._columns.append((values.where(is_known, -torch.inf), top - whole[:, None], ids))

    def _copy_scores(self, planned: PlannedStep) -> None:
        """Copy what was found at all places of a part's prompts back."""
        columns = list(map(torch.cat, zip(*self._columns, strict=True)))
        self._columns = []
        pinned = [empty_pinned(column.numel(), column.dtype, column.device).view(column.shape) for column in columns]
        for host, column in zip(pinned, columns, strict=True):
            host.copy_(column, non_blocking=True)
        self._scored.append(partial(read_prompts, [places for _, places in planned.scored], *pinned))

    def _table_rows(self, entries: Items[StepEntry]) -> dict[int, int]:
        """Table rows of all adapters of a step by their `order`."""
        plus = (e.adapter for e in entries)
        minus = (e.minus for e in entries)
        rows = self._adapters.rows_of(adapter for adapter in (*plus, *minus) if adapter is not None)
        if self._adapters.table is not self._memory.table:
            self._memory = replace(self._memory, table=self._adapters.table)
            self._forget_addresses()
        return rows

    def _plan(self, entries: Items[StepEntry], rows: dict[int, int]) -> PlannedStep:
        plus = [e.adapter for e in entries]
        minus = [e.minus for e in entries]
        plus_rows, minus_rows = (
            np.fromiter((rows[adapter.order] if adapter else -1 for adapter in adapters), np.int32, len(entries))
            for adapters in (plus, minus)
        )
        return PlannedStep(entries, plus_rows, minus_rows, self._geometry(), self._rules)

    def _geometry(self) -> StepGeometry:
        layout, dtype = self._memory.layout, self._memory.table.pool.dtype
        return StepGeometry(self._adapters.chunk_counts, layout, dtype, self._num_programs, self.full_rows)

    def _make_room(self, planned: PlannedStep) -> None:
        """Grow scratch to what the step needs (ranks have no limit)."""
        memory, device = self._memory, self._memory.scratch.device
        if planned.scratch_rows > len(memory.scratch):
            shape = (rounded(2 * planned.scratch_rows), memory.scratch.shape[1])
            scratch = torch.empty(shape, dtype=torch.float32, device=device)
            self._memory = memory = replace(memory, scratch=scratch)
            self._forget_addresses()
        if planned.num_partials > len(memory.partials[0]):
            model = self._decoder.model
            partials = allocate_partials(2 * planned.num_partials, model.num_heads, model.head_dim, device)
            self._memory = replace(memory, partials=partials)
            self._forget_addresses()

    def _have_moved(self) -> bool:
        """Whether weights are where they were not when this was asked last, on any member of a group: all drop graphs
        that read them, and capture new ones at the same time."""
        before, self._weight_addresses = self._weight_addresses, self._decoder.weight_addresses()
        return before != self._weight_addresses

    def _forget_addresses(self) -> None:
        self._buffers.clear()
        self._executor.forget()

    def _bucket(self, planned: PlannedStep) -> int | None:
        """The bucket that serves a step; None for prompts, and for what no bucket has room for."""
        if not planned.is_decode or planned.scored or planned.pooled:
            return None
        bucket = bucket_of(planned.num_rows)
        sizes = self._bucket_sizes(bucket, planned.split_keys)
        fits = (
            len(planned.sampled) <= sizes.sampled
            and planned.num_withheld <= sizes.withheld
            and planned.num_pages <= sizes.pages
            and planned.num_lora_items <= sizes.segments.max_items
            and planned.num_attention_items <= sizes.attention.max_items
        )
        return bucket if fits else None

    def _bucket_sizes(self, bucket: int, split_keys: int) -> StepSizes:
        return StepSizes(
            rows=bucket,
            sampled=bucket,
            withheld=_BUCKET_WITHHELD,
            pages=self._bucket_pages(bucket),
            segments=self._geometry().segment_limits(
                rounded(bucket), bucket * _BUCKET_CHUNKS, len(self._memory.scratch), DECODE_TILE_ROWS
            ),
            attention=self._geometry().attention_limits(
                rounded(self._attention_items(bucket)), bucket, split_keys, is_decode=True
            ),
        )

    def _bucket_pages(self, bucket: int) -> int:
        """Pages that `bucket` rows can have. Shared prefixes count once for each row that has them."""
        return min(bucket * self._context_pages, 2 * self._num_pages)

    def _attention_items(self, bucket: int) -> int:
        return bucket + self._bucket_pages(bucket) * self._page_tokens // SPLIT_KEYS

    def _buffer(self, key: GraphKey | None, sizes: StepSizes) -> StepBuffer:
        """The buffer of a step's lists on the device; steps of one graph share one, since its address must stay."""
        place = None if key is None else (key.bucket, key.splits)
        if place in self._buffers:
            return self._buffers[place]
        device = self._memory.scratch.device
        buffer = StepBuffer(sizes, torch.empty(StepBuffer.length(sizes), dtype=torch.int32, device=device))
        if place is not None:
            self._buffers[place] = buffer
        return buffer

    def _launched(self, sampled: tuple[Sequence, ...], wants_logprobs: bool, num_top: int) -> LaunchedStep:
        """The launched step, whose tokens are copied back behind it."""
        count, device = len(sampled), self._tokens.device
        tokens = empty_pinned(count, torch.int64, device)
        tokens.copy_(self._read_tokens[:count], non_blocking=True)
        logprobs = empty_pinned(count, torch.float32, device)
        if wants_logprobs:
            logprobs.copy_(self._logprobs[:count], non_blocking=True)
        else:
            logprobs.zero_()
        top_ids = empty_pinned(count * num_top, torch.int64, device).view(count, num_top)
        top_logprobs = empty_pinned(count * num_top, torch.float32, device).view(count, num_top)
        if num_top:
            top_ids.copy_(self._top_ids[:count, :num_top], non_blocking=True)
            top_logprobs.copy_(self._top_logprobs[:count, :num_top], non_blocking=True)
        num_asked = [len(sequence.asked_tokens) for sequence in sampled]
        prompts, pooled = self._scored, self._states
        asked = empty_pinned(sum(num_asked), torch.float32, device)
        if self._asked:
            asked.copy_(torch.cat(self._asked), non_blocking=True)
        arrived = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if arrived is not None:
            arrived.record()

        def read() -> SampledTokens:
            if arrived is not None:
                arrived.synchronize()
            counts = [sequence.request.sampling.top_logprobs for sequence in sampled]
            most = max(counts, default=0)
            likeliest = zip(counts, top_ids[:, :most].tolist(), top_logprobs[:, :most].tolist(), strict=True)
            tops = [tuple(zip(ids[:count], values[:count], strict=True)) for count, ids, values in likeliest]
            values = iter(asked.tolist())
            of_each = [tuple(islice(values, count)) for count in num_asked]
            scored = [prompt for of_part in prompts for prompt in of_part()]
            states = [found for of_part in pooled for found in split_states(*of_part)]
            teacher = packed_rows([sequence.request.sampling for sequence in sampled], top_ids, top_logprobs)
            return SampledTokens(tokens.tolist(), logprobs.tolist(), tops, of_each, scored, states, teacher)

        return LaunchedStep(sampled, read)


def _parts(entries: Items[StepEntry]) -> list[Items[StepEntry]]:
    """The step's decode rows and its prompts, each launched by itself; all entries where that cannot be.

    Decode rows need nothing that a prompt of the same step computes. A row that computes several tokens, the last of
    which is on its way, must be launched before the step's own tokens take its place.
    """
    decoding = [entry for entry in entries if entry.is_decode]
    others = [entry for entry in entries if not entry.is_decode]
    if not decoding or not others or any(entry.sequence.num_pending for entry in others):
        return [entries]
    return [decoding, others]


def _withhold_(logits: Tensor, token_ids: Tensor) -> None:
    """Make each row's `token_ids` [rows, n] impossible; what is no token of this vocabulary stands for none."""
    if token_ids.shape[1]:
        is_token = (token_ids >= 0) & (token_ids < logits.shape[1])
        penalty = torch.zeros_like(token_ids, dtype=logits.dtype).masked_fill_(is_token, -torch.inf)
        logits.scatter_add_(1, token_ids.where(is_token, 0).to(torch.int64), penalty)


def steps_ahead(model: ModelConfig, config: EngineConfig) -> int:
    """Steps that may be launched before the one before them is read.

    One, unless configured otherwise or a row's token count may restart it (LongRoPE: all its angles change, it is
    computed anew).
    """
    restarts = any(rope is not None and rope.kind == "longrope" for rope in model.layer_ropes)
    return 1 if config.launches_ahead and not restarts else 0
