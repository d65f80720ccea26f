"""Builds the settings of a run: cost model, options and limits of engines, their batcher, settings of the scheduler.

A run, its forecast, `plan`, `simulate` and the benchmarks build them only here, so that predictions have the settings
of the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...engine.batching.policy import choose_batcher
from ...engine.config import (
    EngineConfig,
    Mode,
    dtype_on,
    has_blocks,
    pool_format,
    products_format,
    read_model_config,
)
from ...engine.memory.limits import (
    ITEM_BYTES,
    EngineLimits,
    adapter_growth,
    engine_limits,
    has_room_to_merge,
    host_share,
    weight_bytes,
)
from ...engine.memory.prefix_cache import shares_prefixes
from ...engine.model_config import parse_model_config
from ...engine.model_config.model import ModelConfig
from ...engine.teacher import token_bytes
from ...jobs.agreement import Agreement
from ...jobs.errors import JobRequestError
from ...jobs.history import history_path, known_agreement, read_history
from ...jobs.opening.opened_job import OpenedJob
from ...jobs.options.problems import policy_problem
from ...jobs.spec import JobSpec
from ...jobs.storage.local_copy import is_remote
from ...scheduler.assignment.lending import TailSettings
from ...scheduler.assignment.migration import ReplicaMemory
from ...scheduler.batchers.batching import Batcher, ReplicaFacts
from ...scheduler.costs.cost import CostModel
from ...scheduler.costs.machines import MACHINES
from ...scheduler.estimates.lengths import PRIOR_SHARE, AnswerKey, AnswerLengths
from ...scheduler.forecast import WaveMode
from ...scheduler.policies import POLICIES, dealing
from ...scheduler.settings import SchedulerSettings
from ...scheduler.workload import AdapterInfo
from ..cluster.connect import threads_per_engine, usable_cores
from ..cluster.devices import Device
from .step_prices import MACHINE_MODELS, choose_cost

# Seconds from the decision to move rows until they run again: transfer, loading of adapters, fetching of results.
_HOP_S = 0.3
# Least seconds that a move must gain: for less, measured paces are too rough to decide by.
_LEAST_GAIN_S = 0.5
# Batches of rows that a worker has open under policies that deal rows out, whose batchers choose among all of a
# worker's rows.
_DEALT_BATCHES = 64.0
# Workers from which on a placement of shards makes jobs shorter; on four it makes them no shorter (ADR 119).
_PLACED_WORKERS = 8


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings from which a run of a job, and every prediction of it, are built: those of its engines, its scheduler
    and its cost model.
    """

    #: Options with which engines are started, cost model included.
    engine: EngineConfig
    #: Configuration of the base model.
    model: ModelConfig
    #: Device of each engine.
    device: Device
    #: Share of `max_tokens` that answers are expected to take, if no lengths of earlier jobs are known.
    length_share: float = PRIOR_SHARE
    #: Most rows of a shard; None to choose it by the job's size.
    rows_per_shard: int | None = None
    #: Bytes that a worker keeps of each token of an answer, beside the token: `teacher_top_k` of the likeliest ones.
    answer_token_bytes: int = 0
    #: Rows of each adapter that are answered before all others; 0 for no canary.
    canary: int = 0
    #: Whether running rows may move between workers.
    migrates: bool = True
    #: Whether workers fetch adapters from one another.
    shares_adapters: bool = False
    #: Cores of a worker that its engine's steps share with the fetching of adapters from a store; None: it costs steps
    #: nothing.
    fetch_cores: float | None = None
    #: Whether engines compute equal beginnings of prompts once.
    shares_prefixes: bool = False
    #: Ids of adapters that are exact only when merged.
    merged_only: frozenset[str] = frozenset()
    #: Phrase for people that says how the cost model was found.
    cost_origin: str = ""
    #: Name of the policy, in `scheduler.policies.POLICIES`.
    policy: str = "planner"
    #: Name of the placement, in `scheduler.policies.PLACEMENTS`.
    placement: str = "planner"
    #: Costs of steps as earlier jobs have measured them; None to use the cost model. Predictions use them, decisions
    #: do not: engines can then be shared, and do the same whatever ran before.
    prices: CostModel | None = None
    #: Adapter's id (None for the base model) and task -> lengths of its answers in earlier jobs.
    lengths: Mapping[AnswerKey, AnswerLengths] = field(default_factory=dict)
    #: Path of the file that keeps measured costs and lengths for later jobs; None when no history is kept.
    history: Path | None = None
    #: Whether the costs of steps are a guess: none were measured on this machine.
    is_guess: bool = False
    #: Latest comparison of answers in this format on this base model with answers in float32; None without one.
    agreement: Agreement | None = None

    @classmethod
    def of(cls, job: OpenedJob, num_workers: int, device: Device) -> RunSettings:
        """Settings of a job on `num_workers` workers with engines on `device`.

        Raises `JobRequestError` for a cost model that cannot be read, for engines with more processes than their worker
        sees GPUs, and for a policy that the mode does not allow.
        """
        spec, model = job.spec, read_model_config(job.model_folder)
        num_gpus = len(device.uuids)
        if device.kind == "cuda" and not device.assumption and num_gpus < spec.tensor_parallel > 1:
            raise JobRequestError(
                f"tensor_parallel={spec.tensor_parallel}: a worker sees {num_gpus} GPU{'s' * (num_gpus != 1)}, "
                "expected one for each process of its engine. Lower it, or start workers that see as many "
                "(CUDA_VISIBLE_DEVICES)."
            )
        threads = threads_per_engine(spec, num_workers)
        cost, origin, is_guess = choose_cost(spec, job.record.model.sha256, model, device.kind, threads)
        history = _history_path(job, device, threads)
        before = read_history(history)
        engine = EngineConfig(
            max_batch_rows=spec.batch_rows,
            max_step_tokens=spec.step_tokens,
            pool_bytes=spec.pool_bytes,
            host_tier_bytes=spec.host_tier_bytes,
            num_threads=threads,
            tensor_parallel=spec.tensor_parallel,
            dtype=spec.dtype,
            base_quantization=spec.base_quantization,
            device=spec.device,
            mode=_mode(spec, device, model, job.model_folder),
            load_format=spec.load_format,
            cost=cost,
        )
        # whether workers have compiled kernels is seen when their engines start
        is_fixed = device.kind == "cpu" or spec.mode == "exact"
        served = [adapter for adapter in job.record.adapters if not adapter.is_refused]
        has_history = is_guess and before.cost is not None
        known = {None, *(adapter.sha256 for adapter in served)}
        settings = cls(
            engine,
            model,
            device,
            length_share=1.0 if spec.sampling.ignore_eos else PRIOR_SHARE,
            rows_per_shard=spec.rows_per_shard,
            answer_token_bytes=token_bytes(spec.sampling.teacher_top_k),
            canary=spec.canary or 0,
            migrates=spec.migration,
            # Adapters that workers see as files need not be fetched.
            shares_adapters=any(is_remote(adapter.url) for adapter in served),
            fetch_cores=_fetch_cores(spec, num_workers, threads) if device.kind == "cpu" else None,
            shares_prefixes=shares_prefixes(engine, model, is_arithmetic_fixed=is_fixed),
            merged_only=frozenset(adapter.sha256 for adapter in served if adapter.verdict == "exact-by-merge"),
            cost_origin=f"measured by earlier jobs, {history}" if has_history else origin,
            prices=before.cost if has_history else None,
            lengths={}
            if spec.sampling.ignore_eos
            else {key: found for key, found in before.lengths.items() if key[0] in known},
            history=history,
            is_guess=is_guess and not has_history,
        )
        if settings.products != "float32":
            settings = replace(settings, agreement=known_agreement(job.record.model.sha256, settings.products))
        return settings.under(spec.policy, spec.placement)

    @classmethod
    def of_machine(cls, name: str, *, batch_rows: int | None = None) -> RunSettings:
        """Settings for rows without a job, on machine and model of the preset cost model `name` in `MACHINES`."""
        kind, memory_bytes, model = MACHINE_MODELS[name]
        engine = EngineConfig(max_batch_rows=batch_rows, device=kind, cost=MACHINES[name])
        return cls(engine, parse_model_config(dict(model), {}), Device(kind, name, memory_bytes), cost_origin=name)

    def under(self, policy: str, placement: str = "planner") -> RunSettings:
        """These settings under another policy and placement. Raises `JobRequestError` for a policy that the mode of the
        engines does not allow.
        """
        assert self.policy == "planner", f"settings of {self.policy} are no basis for {policy}"
        problem = policy_problem(policy, self.engine.mode)
        if problem is not None:
            raise JobRequestError(problem)
        chosen = POLICIES[policy]
        mode = self.engine.mode
        if policy != "planner" and mode in ("auto", "merged"):
            # Engines that never merge suit a policy that never merges best. A policy that merges may pause rows, which
            # keep their adapters in the pool in mode auto only.
            mode = "auto" if chosen.may_merge else "unmerged"
        engine = replace(self.engine, mode=mode, batcher=chosen.batcher)
        return replace(self, engine=engine, policy=policy, placement=placement)

    @property
    def limits(self) -> EngineLimits:
        """Limits of an engine: as its options say, else by the device's memory."""
        host, kind = self.device.host, self.device.kind
        share = None if host is None else host_share(self.engine, kind, host)
        return engine_limits(self.engine, self.model, kind, self.device.memory_bytes, share)

    @property
    def products(self) -> str:
        """Number format in which linear layers multiply."""
        return products_format(self.device.kind, self.engine.dtype, self.engine.base_quantization)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about engines of several processes, or with another number format than the default."""
        notes = []
        if self.engine.tensor_parallel > 1:
            threads = self.engine.member_threads
            each = f", each with {threads} {'thread' if threads == 1 else 'threads'}" if threads else ""
            gpus = " and take a GPU each" if self.device.kind == "cuda" else ""
            notes.append(f"an engine is {self.engine.tensor_parallel} processes that share the model{gpus}{each}")
        if self.products != dtype_on(self.device.kind, "auto"):
            notes.append(f"linear layers multiply in {self.products} ({self.device.title})")
            notes += filter(None, (self.rounded_weights, self.rounding))
        return tuple(notes)

    @property
    def rounded_weights(self) -> str:
        """A sentence on how a base model in fp8 and its adapters are held; "" for other formats."""
        if self.products != "fp8":
            return ""
        pool = pool_format(self.device.kind, self.engine.dtype, self.engine.base_quantization)
        before, now = (weight_bytes(self.model, ITEM_BYTES[pool], size) for size in (None, 1))
        return (
            f"layers' weights are rounded to fp8 with a scale for each output: a base of {now / 1e9:.3g} GB instead of "
            f"{before / 1e9:.3g}; adapters are added unmerged in {pool}, and layers that must be merged are held in it"
        )

    @property
    def rounding(self) -> str:
        """A clause on how much the number format changes answers; "" for float32, and for 16 bits on a GPU."""
        is_rounded = self.products in ("int8", "fp8") or (self.device.kind == "cpu" and self.products != "float32")
        if not is_rounded:
            return ""
        if self.agreement is None:
            return f"{self.products} was not compared with float32 yet: `lorabatch compare OUTPUT` does after a job"
        return f"compared before, {self.agreement}"

    @property
    def is_dealt(self) -> bool:
        """Whether rows are dealt out to workers before the job, all at once."""
        return dealing(self.policy, self.placement) is not None

    def places(self, num_workers: int) -> bool:
        """Whether shards are placed on workers, which open their own first."""
        if self.is_dealt:
            return False
        return self.placement == "planned" or (self.placement == "planner" and num_workers >= _PLACED_WORKERS)

    @property
    def cost(self) -> CostModel:
        """Costs of steps, merges and loads that engines, scheduler and plans decide by."""
        assert self.engine.cost is not None, "engines of a run have a cost model"
        return self.engine.cost

    @property
    def step_prices(self) -> CostModel:
        """Costs that predictions use: as earlier jobs have measured them, else the cost model."""
        return self.prices or self.cost

    @property
    def wave_mode(self) -> WaveMode:
        """Mode with which the planner marks waves."""
        return "unmerged" if self.engine.mode == "exact" else self.engine.mode

    def scheduler(self, num_workers: int, adapters: Sequence[AdapterInfo] = ()) -> SchedulerSettings:
        """Settings of the job's scheduler, on a cluster and in the simulator. `adapters`: those that answer rows."""
        policy = POLICIES[self.policy]
        settings = SchedulerSettings(
            expected_replicas=num_workers,
            tail=self._tail if self.migrates and policy.moves_rows else None,
            cost=self.cost,
            shares_adapters=self.shares_adapters,
            policy=self.policy,
            is_dealt=self.is_dealt,
        )
        if policy.deal is not None:
            settings = replace(settings, open_batches=_DEALT_BATCHES)
        if policy.migration is not None:
            growth = adapter_growth(self.model, self.engine.tensor_parallel)
            sizes = {adapter.adapter_id: int(adapter.weight_bytes * growth) for adapter in adapters}
            memory = ReplicaMemory(self.limits.pool_bytes, self.limits.token_bytes, sizes)
            settings = replace(settings, memory=memory)
        return settings

    @property
    def _tail(self) -> TailSettings:
        return TailSettings(_HOP_S, least_gain_s=_LEAST_GAIN_S, length_share=self.length_share)

    def batcher(self, facts: ReplicaFacts) -> Batcher:
        """A batcher for one engine, or for one simulated replica."""
        return choose_batcher(self.engine, facts)


def _mode(spec: JobSpec, device: Device, model: ModelConfig, model_folder: Path) -> Mode:
    """The mode of engines. `auto` becomes `unmerged` for a base model held in few bits, since merged weights are held
    in 32; on a GPU without room for merged weights; and for engines on several GPUs, each of which would read the
    weights that it merges from files. Policies other than the planner keep `auto`, unless the base is quantized.
    """
    if spec.mode != "auto":
        return spec.mode
    if spec.base_quantization != "none":
        return "unmerged"
    if spec.policy != "planner":
        return "auto"
    if device.kind == "cuda":
        itemsize = ITEM_BYTES[pool_format(device.kind, spec.dtype, spec.base_quantization)]
        has_room = has_room_to_merge(device.memory_bytes, model, itemsize)
        return "auto" if has_room and spec.tensor_parallel == 1 else "unmerged"
    is_widened = products_format(device.kind, spec.dtype, spec.base_quantization) != "float32"
    return "unmerged" if has_blocks(model_folder) and not is_widened else "auto"


def _fetch_cores(spec: JobSpec, num_workers: int, threads: int | None) -> float:
    """Cores of a worker on CPUs. There may be more workers than cores on an embedded cluster."""
    return usable_cores() / num_workers if spec.is_embedded else float(threads or usable_cores())


def _history_path(job: OpenedJob, device: Device, threads: int | None) -> Path | None:
    """Path of the history for this model, device and the other options that decide the costs of steps; None when no
    history is kept.
    """
    name = "cpu" if device.kind == "cpu" else re.sub(r"\W+", "-", device.name)
    threads = threads if device.kind == "cpu" else None
    products = products_format(device.kind, job.spec.dtype, job.spec.base_quantization)
    return history_path(job.record.model.sha256, name, products, threads, job.spec.tensor_parallel)
