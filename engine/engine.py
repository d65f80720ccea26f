"""Runs one base model with many adapters on one device, one step at a time.

`add` queues rows; `step` launches a forward pass over the rows that the batcher chose, and returns what finished.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.layouts.pages import PageLayout
from ..scheduler.batchers.batching import Batcher, BatchView, ReplicaFacts, StepPlan, all_unmerged
from ..scheduler.costs.fitting import StepSample
from ..scheduler.estimates.lengths import LengthEstimator
from ..scheduler.estimates.pace import StepBudget
from .adapter_use import AdapterUse
from .batching.admission import Room
from .batching.batch import RunningBatch
from .batching.policy import choose_batcher
from .batching.prefix_sharing import CopiedPrefixes, NamedPrefixes, PrefixSharing
from .config import EngineConfig, read_model_config
from .errors import AdapterRefusedError, AdapterUnusableError, ModelFilesError, TokenizerError
from .heads import Heads
from .memory.allocation import eraser_for, pages_of_pool
from .memory.limits import keeps_merged_copy
from .memory.loader import AdapterLoader
from .memory.pool import PagePool
from .memory.prefix_cache import shares_prefixes
from .memory.registry import AdapterRegistry
from .memory.residency import AdapterResidency
from .model_config.model import SCORE, ModelConfig
from .models.rope import restart_lengths
from .models.step_batch import StepEntry
from .request import ExportedRow, Request, Result, ServedMode
from .runner.backend import Backend, MakeBackend, choose_backend
from .runner.runner import LaunchedStep, ReadToken, StepsInFlight
from .runner.step_counts import StepCounts
from .sequence import Sequence
from .telemetry import EngineTelemetry
from .text.answers.choices import ChoiceScores
from .text.answers.completion import Completion
from .text.answers.token_rules import TokenRules
from .text.tokenizers.confined_tokenizer import adapter_tokenizer
from .text.tokenizers.tokenizer import Tokenizer, Tokenizers


class Engine:
    """Serves rows of many adapters over one base model. `clock`: gives seconds, by which steps are measured.

    Raises `EngineError` when the model folder cannot be served exactly, or not in this mode on this device.
    """

    def __init__(
        self,
        model_folder: Path,
        config: EngineConfig,
        batcher: Batcher | None = None,
        make_backend: MakeBackend | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model: ModelConfig = read_model_config(model_folder)
        if config.member_threads is not None:
            torch.set_num_threads(config.member_threads)
        with torch.inference_mode():
            self.backend = backend = (make_backend or _backend_maker(config))(model_folder, config, self.model)
            limits, layout = backend.limits(), backend.page_layout()
            self.config = config = replace(config, max_batch_rows=limits.batch_rows, max_step_tokens=limits.step_tokens)
            num_pages = pages_of_pool(limits)
            pools = backend.allocate(num_pages * layout.page_elements)
        self._registry = AdapterRegistry(
            *(self.model, backend.pool_dtype, backend.device, layout.page_elements, backend.partitions),
            in_panels=backend.has_lora_panels,
        )
        cost = config.cost or backend.default_cost
        self._live = backend.live_weights()
        self._batch = _running_batch(
            *(backend, PagePool(num_pages), layout, pools, self._registry, config, limits.host_tier_bytes or 0),
            shows_memory=cost.mixed_step_s > 0,
            merges_packed=self._live.takes_packed,
        )
        self._restart_lengths = restart_lengths(self.model.layer_ropes)
        self._lengths = LengthEstimator()
        #: Chooses the rows and the mode of each step.
        self.batcher = batcher or choose_batcher(
            config,
            ReplicaFacts(
                cost=cost,
                ranks=self._registry.ranks,
                must_merge=self._registry.must_merge,
                max_batch_rows=config.batch_rows,
                lengths=self._lengths,
                rows_to_come=self._num_expected,
            ),
        )
        own_tokenizer = partial(_own_tokenizer, self._registry, model_folder)
        tokenizers = Tokenizers(model_folder, own_tokenizer, self.model.eos_token_ids)
        self._tokenizers = tokenizers
        #: Decides which tokens each row may generate next, and with which logits.
        self.rules = TokenRules(tokenizers)
        self._completion = Completion(tokenizers, self.rules)
        self._choices = ChoiceScores(tokenizers, has_states=self.model.has_recurrent_layers)
        self._heads = Heads(self._registry, lambda: backend.decoder.tensors.get(f"{SCORE}.weight"))
        self._runner = backend.runner(self._live, pools[0], layout, config, self.rules)
        self._in_flight = StepsInFlight()
        self._expected: Counter[str] = Counter()
        self._rejected: list[Result] = []
        #: Called with every step that was read, and the entries that it was launched with: for measurements.
        self.observe_step: Callable[[StepSample, Items[StepEntry]], None] | None = None
        self._counts = StepCounts()
        self._filled_steps = 0.0
        self._use_in_steps = AdapterUse()
        self._generated_tokens = 0
        self._budget = StepBudget(self.config.step_tokens)
        self._clock = clock
        # seconds on the clock when the latest step was read
        self._read_s = 0.0

    def register_adapter(self, adapter_id: str, folder: Path, name: str = "", content_sha256: str = "") -> None:
        """Register an adapter; its tensors are read, and their hash checked, on first use. `content_sha256`: the hash
        that they must have; "" where it is `adapter_id`.

        Raises `AdapterRefusedError` when it cannot be applied exactly.
        """
        self._registry.register(adapter_id, folder, name or folder.name, content_sha256)

    def register_dummy_adapter(self, name: str, rank: int) -> str:
        """Register an adapter of random weights, for benchmarks; returns its id.

        Raises ValueError unless the base's weights are random too (`load_format="dummy"`).
        """
        if self.config.load_format != "dummy":
            raise ValueError(
                f"load_format={self.config.load_format!r}: random adapters belong to random weights; use 'dummy'."
            )
        return self._registry.register_dummy(name, rank)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue rows in the order in which they should be served. A bad row becomes an error result.

        Raises ValueError when a row of the same `request_id` is unfinished.
        """
        self.import_rows(map(ExportedRow, requests))

    def import_rows(self, rows: Iterable[ExportedRow]) -> None:
        """Queue rows exported by another engine: `add` for rows that may have tokens already."""
        if not self.num_unfinished:
            # a step of rows that have ended, or were taken out: its time is not the next one's
            for _ in self._in_flight.read(keep=0):
                pass
        for row in rows:
            try:
                problem = self._queued(row)
            except (ModelFilesError, TokenizerError) as error:
                # its adapter's own tokenizer has changed since it was audited, or fails on the row's texts
                problem = str(error)
            if problem is not None:
                self._rejected.append(Result.refused(row.request, problem))

    def _queued(self, row: ExportedRow) -> str | None:
        """Queue a row, or say why it cannot be served. Raises `ModelFilesError` and `TokenizerError`."""
        request = row.request
        if request.adapter_id is not None and request.adapter_id in self._registry:
            self._tokenizers.of(request.adapter_id)
        problem = self._batch.problem_with(row, self.model.max_context_tokens, self._choices.spare_tokens)
        if problem is not None:
            return problem
        self._batch.append(sequence := Sequence.of(row, self._choices.spare_tokens(request)))
        try:
            self._choices.ask(sequence)
        except TokenizerError:
            self._take_out([request.request_id])
            raise
        self._lengths.asked(request.sampling.max_tokens, prompt_tokens=sequence.prompt_tokens)
        return None

    def expect_rows(self, adapter_id: str, num_rows: int) -> None:
        """Announce rows of an adapter that will be added later: merging it may pay though few are queued now."""
        self._expected[adapter_id] = num_rows

    def export_rows(self, request_ids: Collection[str]) -> list[ExportedRow]:
        """Remove unfinished rows, waiting or running, so that another engine can import them.

        Unknown ids are ignored: they may have just finished. No result follows for what is returned.
        """
        return [sequence.exported() for sequence in self._take_out(request_ids)]

    def abort(self, request_ids: Collection[str]) -> None:
        """Drop rows, waiting or running. Unknown ids are ignored: they may have just finished."""
        self._take_out(request_ids)

    @property
    def num_unfinished(self) -> int:
        """Rows without a result."""
        return self._batch.num_waiting + self._batch.num_running + len(self._rejected)

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Serve rows to the end; yield each result as soon as it is known."""
        self.add(requests)
        while self.num_unfinished:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Launch one forward pass and read the oldest that is due.

        Returns the results of rows that finished, rejected ones too.
        """
        began_s = self._clock()
        finished, self._rejected = self._rejected, []
        entries: list[StepEntry] = []
        if self._batch.num_waiting + self._batch.num_running:
            try:
                entries = self._plan_step()
            except AdapterUnusableError as error:
                return finished + self._give_up_adapter(error)
        unusable = self._launch(entries, began_s) if entries else None
        # with nothing launched, what is on its way is all that can be waited for
        keep = self._runner.steps_ahead if entries and unusable is None else 0
        for step, tokens in self._in_flight.read(keep):
            finished += [result for token in tokens if (result := self._append_token(token)) is not None]
            finished += self._finish_prompts(step.pooled)
            self._count(step)
        if unusable is not None:
            finished += self._give_up_adapter(unusable)
        return finished

    def telemetry(self) -> EngineTelemetry:
        """A snapshot between two steps."""
        pool = self._batch.pool
        return EngineTelemetry(
            num_running=self._batch.num_running,
            num_prefilling=self._batch.num_prefilling,
            prefill_tokens_left=self._batch.prefill_tokens_left,
            resident_adapter_ids=self._batch.residency.resident_ids,
            mode=self._mode(),
            pages_used=pool.num_pages - pool.num_free,
            pages_total=pool.num_pages,
            prompt_tokens=self._counts.prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_steps=self._counts.totals.num_steps,
            filled_steps=self._filled_steps,
            running_tokens=self._batch.running_tokens,
            adapters=self._adapter_use(),
            adapter_pages=self._batch.residency.num_pages,
            prefix_pages=self._batch.prefix_pages,
            host_tier_bytes=self._batch.residency.loader.host_bytes,
            host_tier_used_bytes=self._batch.residency.loader.kept_bytes,
            reused_prompt_tokens=0 if self._batch.prefixes is None else self._batch.prefixes.num_reused_tokens,
            steps=self._counts.totals,
        )

    def _adapter_use(self) -> AdapterUse:
        totals = self._counts.totals
        weights = AdapterUse(
            switches=self._live.num_switches,
            switching_s=self._live.switching_s,
            lora_steps=totals.num_lora_steps,
            step_adapters=totals.num_adapters,
        )
        return self._use_in_steps + self._batch.adapter_use + weights

    @property
    def num_preempted(self) -> int:
        """Times that a row lost its memory to others and waited again, with its tokens."""
        return self._batch.num_preempted

    @property
    def switching_s(self) -> float:
        """Seconds spent on merging adapters so far."""
        return self._live.switching_s

    @property
    def num_switches(self) -> int:
        """Merges and restorations so far."""
        return self._live.num_switches

    @torch.inference_mode()
    def switch_weights(self, adapter_id: str | None) -> None:
        """Merge an adapter into the live weights instead of the one that is merged; None restores the base's.

        Raises `AdapterUnusableError`; the weights are then the base's. On a GPU the step after a merge may find that
        the weights are not finite. Memory for merged weights is kept in the modes that choose to merge. In others an
        adapter that must be merged finds some or is unusable.
        """
        if adapter_id is None:
            self._live.restore()
        elif self._live.merged_adapter_id == adapter_id:
            return
        elif self._live.takes_packed and not self._registry.must_merge_id(adapter_id):
            sites = self._batch.packed(adapter_id).sites
            self._live.merge_packed(adapter_id, self._registry.name_of(adapter_id), sites)
        else:
            self._merge_from_files(adapter_id)

    def _merge_from_files(self, adapter_id: str) -> None:
        weights = self._registry.load(adapter_id)
        try:
            self._live.merge(adapter_id, weights)
        except AdapterRefusedError as error:
            raise AdapterUnusableError(adapter_id, str(error)) from error
        except torch.OutOfMemoryError as error:
            if keeps_merged_copy(self.config):
                raise
            raise AdapterUnusableError(
                adapter_id,
                f"adapter {weights.audit.name!r} is exact only when merged, and the device has no memory for "
                "merged weights; lower pool_bytes, or answer its rows in a job of --mode merged",
            ) from error

    @property
    def hung_process(self) -> str | None:
        """Name of a process of the engine that gives no sign of life; None: all do. Any thread may ask."""
        return self.backend.hung_process

    def close(self) -> None:
        """End the engine's other processes, if it has any."""
        self.backend.close()

    def check_integrity(self) -> None:
        """Assert that pool, pins and running rows agree with each other."""
        self._batch.check_integrity()

    def _num_expected(self, code: int) -> int:
        return self._expected[self._registry.id_of(code)]

    def _take_out(self, request_ids: Collection[str]) -> list[Sequence]:
        sequences = self._batch.remove(request_ids)
        for sequence in sequences:
            self._forget(sequence)
        return sequences

    def _mode(self) -> ServedMode:
        if self._live.merged_adapter_id is not None:
            return "mixture" if self._batch.is_mixture else "merged"
        return "unmerged" if self._batch.residency.resident_ids else "base"

    def _plan_step(self) -> list[StepEntry]:
        """Entries of the next step, as the batcher chooses them."""
        for sequence in self._batch.grow():
            if sequence.request.sampling.scores_choices:
                self._forget(sequence)  # it begins its answer again
                self._choices.ask(sequence)
        view = self._batch.view(self.config.batch_rows, self._live.merged_adapter_id)
        plan = self.batcher(view)
        entries = self._enact(view, plan)
        if not entries and not self._in_flight:
            # Memory does not allow the plan: paused rows hold it. Unmerged all of them can go on.
            entries = self._enact(view, all_unmerged(view, plan.admit))
        return entries

    def _enact(self, view: BatchView, plan: StepPlan) -> list[StepEntry]:
        """Admit the plan's rows as far as memory allows and, if there are any, switch weights as it says."""
        plan, served = self._batch.admit(view, plan)
        if not served:
            return []
        self.switch_weights(None if plan.merged_adapter is None else self._registry.id_of(plan.merged_adapter))
        return self._batch.entries(served, plan, self._budget.tokens)

    def _give_up_adapter(self, error: AdapterUnusableError) -> list[Result]:
        """Error results for the rows of an adapter that cannot be loaded; all others go on."""
        rows = self._take_out(self._batch.ids_of_adapter(error.adapter_id))
        return [Result.refused(sequence.request, str(error)) for sequence in rows]

    def _give_up_row(self, sequence: Sequence, problem: str) -> Result:
        """An error result for a row; all others go on."""
        self._end(sequence)
        return Result.refused(sequence.request, problem)

    def _why_no_token(self, sequence: Sequence) -> str:
        after, dtype = len(sequence.token_ids), str(self.backend.dtype).removeprefix("torch.")
        if (problem := self.rules.problem_of(sequence)) is not None:
            return problem
        if sequence.request.sampling.is_constrained:
            return (
                f"after {after} generated tokens the row's grammar allows none of the model's tokens, has become too "
                "complex, or the logits are not finite: simplify the grammar"
            )
        return (
            f"the model's logits are NaN or infinite after {after} generated tokens in {dtype}: use a wider --dtype, "
            "or an earlier checkpoint of the adapter"
        )

    def _end(self, sequence: Sequence) -> None:
        self._batch.release(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._completion.forget(sequence)
        self._choices.forget(sequence)

    def _launch(self, entries: Items[StepEntry], began_s: float) -> AdapterUnusableError | None:
        """Launch a step. If the weights that were merged for it turn out not to be finite, it counts for nothing and
        the error is returned: its rows are as they were before.
        """
        launched, merged_id = self._runner.launch(entries), self._live.merged_adapter_id
        try:
            self._live.confirm()
        except AdapterRefusedError as error:
            assert merged_id is not None, "weights were confirmed that no adapter was merged into"
            self._in_flight.add(launched)
            return AdapterUnusableError(merged_id, str(error))
        counts = StepCounts.of(entries, self._registry.elements_per_rank)
        step = replace(launched, entries=entries, counts=counts, max_tokens=self._budget.tokens, began_s=began_s)
        self._in_flight.add(step)
        self._batch.after_step(entries)
        return None

    def _count(self, step: LaunchedStep) -> None:
        """Count a step that was read. It took the time since the host began to plan it, or since the step before it was
        read where that was later.
        """
        now_s = self._clock()
        seconds, self._read_s = now_s - max(step.began_s, self._read_s), now_s
        self._counts += step.counts
        self._filled_steps += step.share_filled(self.config.batch_rows)
        self._use_in_steps += self._batch.use_in(len(step.entries), seconds)
        self._budget.took(step.counts.num_tokens, step.max_tokens, seconds)
        if self.observe_step is not None:
            self.observe_step(StepSample(step.counts.load, seconds), step.entries)

    def _append_token(self, read: ReadToken) -> Result | None:
        sequence, token, logprob, top, asked, teacher = read
        if not self._batch.is_running(sequence):
            return None  # it ended or was taken out after this step was launched
        if token is None or sequence.has_unsound_scores:
            return self._give_up_row(sequence, self._why_no_token(sequence))
        self._generated_tokens += 1
        if sequence.asked_tokens:
            self._choices.note(sequence, asked)
        if sequence.is_scoring:
            return self._finish(sequence)
        sequence.token_ids.append(token)
        if sequence.request.sampling.wants_logprobs:
            sequence.token_logprobs.append(logprob)
        if sequence.request.sampling.top_logprobs:
            sequence.top_logprobs.append(top)
        sequence.teacher += teacher
        try:
            self._choices.ask(sequence)
            result = self._completion.finish(sequence)
        except TokenizerError as error:
            return self._give_up_row(sequence, str(error))
        if result is not None:
            self._lengths.finished(len(sequence.token_ids), reused_tokens=sequence.num_reused)
            self._batch.finished(sequence)
            return self._finish(sequence, result)
        if sequence.total_tokens in self._restart_lengths:
            sequence.num_stored = 0
        return None

    def _finish_prompts(self, pooled: Items[Sequence]) -> list[Result]:
        """The results of rows that are classified or embedded, whose prompts are computed."""
        rows = [sequence for sequence in pooled if self._batch.is_running(sequence)]
        results = self._heads.results(rows)
        for sequence in rows:
            self._lengths.finished(1, reused_tokens=sequence.num_reused)  # as long as rows of one token
            self._end(sequence)
        return results

    def _finish(self, sequence: Sequence, answer: Result | None = None) -> Result | None:
        """The result of a row with a complete answer, once the texts of its choice are scored."""
        result = self._choices.finish(sequence, answer)
        if result is not None:
            self._batch.finish(sequence)
            self._forget(sequence)
        elif self.model.has_length_dependent_rope:
            sequence.num_stored = 0
        return result


def _own_tokenizer(registry: AdapterRegistry, base: Path, adapter_id: str) -> Tokenizer | None:
    """An adapter's own tokenizer, if it ships one (a chat template alone is none). No engine renders chat templates."""
    audit = registry.audit_of(adapter_id)
    if not audit.has_own_vocabulary:
        return None
    return adapter_tokenizer(audit.folder, base, audit.tokenizer_sha256, chat_template="")


def _backend_maker(config: EngineConfig) -> MakeBackend:
    if config.tensor_parallel == 1:
        return choose_backend
    # the messages between members of a group need more libraries than an engine of one process
    from .parallel.cpu_backend import choose_group_backend

    return choose_group_backend


def _running_batch(
    backend: Backend,
    pool: PagePool,
    layout: PageLayout,
    pools: Tensor,
    registry: AdapterRegistry,
    config: EngineConfig,
    host_tier_bytes: int,
    *,
    shows_memory: bool,
    merges_packed: bool,
) -> RunningBatch:
    """An empty batch over `pools` [num_members, numbers of a pool], as the backend's kernels read them."""
    model = backend.model
    loader = AdapterLoader(registry.load_packed, host_tier_bytes, backend.loader_threads)
    residency = AdapterResidency(pool, pools[0], layout.page_elements, loader, backend.copies())
    prefixes: PrefixSharing | None = None
    if shares_prefixes(config, model, is_arithmetic_fixed=backend.is_arithmetic_fixed):
        named = backend.has_block_tables
        prefixes = NamedPrefixes(pool, layout, model) if named else CopiedPrefixes(pool, layout, model, pools)
    clean = eraser_for(pools, layout) if backend.reads_other_rows else None
    room = Room(pool, layout, residency, registry, prefixes, backend.run_pages)
    return RunningBatch(
        room,
        clean,
        may_switch=config.mode == "auto",
        merges_all=config.mode == "merged",
        shows_memory=shows_memory,
        rows_grow=backend.has_block_tables,
        merges_packed=merges_packed,
    )
