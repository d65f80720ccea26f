"""Defines what is measured of whole engines, how many pages each measurement takes, and which engine holds it.

An engine that merges keeps a copy of the linear layers' weights, as large as the pool's part of some hundred adapters.
Where its pool does not hold everything, an engine without the copy measures what needs more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from lorabatch.benchmarks.gpu.measure import ranks_for
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.memory.limits import engine_limits
from lorabatch.engine.memory.pool import page_layout
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.scheduler.batchers.batching import ReplicaMode

RANK = 16  # of the adapters of `Decoding`
#: Mode of an engine: `auto` keeps memory for merged weights, the others do not.
EngineMode = Literal["auto", "unmerged", "exact"]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of prompts and decode steps: rows that are dealt to adapters."""

    #: Number of rows.
    batch: int
    #: Number of adapters; 0: the base alone.
    adapters: int
    #: LoRA rank of all adapters, or `mixed`; None for the base alone.
    rank: int | str | None
    #: Mode in which the rows are served.
    mode: ReplicaMode
    #: Tokens of each prompt.
    prompt_tokens: int

    @property
    def name(self) -> str:
        """Name in the results."""
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.batch} x {self.prompt_tokens} tokens, {self.adapters} adapters{rank}, {self.mode}"

    @property
    def ranks(self) -> list[int]:
        """LoRA rank of each adapter."""
        return [] if self.rank is None else ranks_for(self.rank, self.adapters)


@dataclass(frozen=True, slots=True)
class Decoding:
    """`batch` rows behind `context` tokens each, dealt to each number of `adapters` of rank 16."""

    batch: int
    context: int
    adapters: tuple[int, ...]

    def name(self, count: int) -> str:
        """Name of the measurement with `count` adapters in the results."""
        return f"decoding {self.batch} rows behind {self.context} tokens, {count} adapters"


@dataclass(frozen=True, slots=True)
class EngineMatrix:
    """Measurements of whole engines, and their sizes."""

    #: Points in the order in which they are measured, the most important first.
    points: tuple[Point, ...]
    #: Decode measurements, which come before all points.
    decoding: tuple[Decoding, ...] = ()
    #: Times that each of `decoding` is measured.
    repeats: int = 3
    #: Decode steps that are timed in each measurement.
    decode_steps: int = 48
    #: Decode steps before them, which capture graphs and are not timed.
    warm_steps: int = 6
    #: Most tokens of a step.
    max_step_tokens: int = 8192

    @property
    def decoding_tokens(self) -> int:
        """`max_tokens` of rows of `Decoding`: none of them ends while steps are timed."""
        return self.warm_steps + self.decode_steps + 8

    def answer_tokens(self, point: Point) -> int:
        """`max_tokens` of a point's rows. Rows whose prompts are computed first decode beside the other prompts, and no
        row may end before the last step."""
        prefill_steps = -(-point.batch * point.prompt_tokens // self.max_step_tokens)
        return 2 * prefill_steps + self.warm_steps + self.decode_steps + 4


def full_matrix() -> EngineMatrix:
    """Batches 64 to 512, adapters 0 to 256, ranks 8, 16, 64 and mixed, unmerged, merged and mixture; prompts of 128
    tokens where decoding counts, of 1024 where prefill does, and four of 2048 or one of 8000 where attention does."""
    short, long = 128, 1024
    points = []
    for batch in (256, 64, 512, 128):
        points.append(Point(batch, 0, None, "unmerged", short))
        points += [Point(batch, count, 16, "unmerged", short) for count in (1, 16, 64, 256) if count <= batch]
        if batch in (256, 64):
            points.append(Point(batch, 1, 16, "merged", short))
            points.append(Point(batch, 16, 16, "mixture", short))
            points += [
                Point(batch, count, rank, "unmerged", short)
                for rank in (64, 8, "mixed")
                for count in (16, 256)
                if count <= batch
            ]
        if batch == 256:
            points.append(Point(64, 0, None, "unmerged", long))
            points += [Point(64, count, 16, "unmerged", long) for count in (1, 16, 64)]
            points += [Point(4, 0, None, "unmerged", 2048), Point(4, 4, 16, "unmerged", 2048)]
            points.append(Point(1, 0, None, "unmerged", 8000))
    counts = (1, 16, 64, 256)
    return EngineMatrix(tuple(points), (Decoding(256, 1024, counts), Decoding(64, 1024, counts[:3])))


def exact_matrix() -> EngineMatrix:
    """Measurements of engines in mode `exact`: some decoding and prompts of `full_matrix`."""
    points = (Point(4, 0, None, "unmerged", 2048), Point(4, 4, 16, "unmerged", 2048))
    return EngineMatrix(points, (Decoding(256, 1024, (1, 64)), Decoding(64, 1024, (16,))), repeats=2)


def tiny_matrix() -> EngineMatrix:
    """A small `full_matrix` for a machine without a GPU, to see that all of it runs."""
    points = (
        Point(3, 0, None, "unmerged", 4),
        Point(3, 2, 8, "unmerged", 4),
        Point(3, 1, 8, "merged", 4),
        Point(3, 2, 8, "mixture", 4),
        Point(1, 1, "mixed", "unmerged", 20),
    )
    decoding = (Decoding(3, 20, (1, 2)),)
    return EngineMatrix(points, decoding, repeats=2, decode_steps=2, warm_steps=1, max_step_tokens=16)


def tiny_exact_matrix() -> EngineMatrix:
    """A small `exact_matrix` for a machine without a GPU, to see that all of it runs."""
    decoding = (Decoding(2, 20, (1,)),)
    return replace(tiny_matrix(), points=(Point(1, 1, 8, "unmerged", 20),), decoding=decoding, repeats=1)


class PagesNeeded:
    """Pages of an engine's pool that rows of the matrix and their adapters take, at most."""

    def __init__(self, matrix: EngineMatrix, model: ModelConfig, page_tokens: int) -> None:
        self._matrix = matrix
        self._layout = page_layout(model, page_tokens, 2)
        self._elements_per_rank = model.num_layers * sum(map(sum, model.layer_shapes(0).values()))

    def of_point(self, point: Point) -> int:
        """Pages of the point's rows with all of their answers, and of its adapters."""
        rows = point.batch * self._layout.pages_for_tokens(point.prompt_tokens + self._matrix.answer_tokens(point))
        return rows + self._of_adapters(point.ranks)

    def of_decoding(self, decoding: Decoding, count: int) -> int:
        """Pages of the decoding's rows with all of their answers, and of `count` adapters."""
        tokens = decoding.context + 1 + self._matrix.decoding_tokens
        return decoding.batch * self._layout.pages_for_tokens(tokens) + self._of_adapters(ranks_for(RANK, count))

    def largest_decoding(self, decoding: Decoding, count: int, num_pages: int) -> Decoding | None:
        """The decoding with the longest context, in quarters of its own, that `num_pages` pages hold; None if they hold
        none."""
        contexts = (decoding.context * quarters // 4 for quarters in (4, 3, 2, 1))
        smaller = (replace(decoding, context=context) for context in contexts)
        return next((found for found in smaller if self.of_decoding(found, count) <= num_pages), None)

    def _of_adapters(self, ranks: Iterable[int]) -> int:
        return sum(max(1, self._layout.pages_for_elements(rank * self._elements_per_rank)) for rank in ranks)


@dataclass(frozen=True, slots=True)
class EnginePart:
    """Measurements of one engine."""

    mode: EngineMode
    decoding: tuple[Decoding, ...]
    points: tuple[Point, ...]


def engine_parts(matrix: EngineMatrix, config: EngineConfig, model: ModelConfig, memory_bytes: int) -> list[EnginePart]:
    """The engines that measure the matrix on a device with `memory_bytes` of free memory before weights are loaded.

    One engine is enough where a pool beside merged weights holds everything, as an H200's does for an 8B model, or
    where nothing merges. Else there are two: the first, without a copy of the weights, measures `decoding` and what the
    second one's pool does not hold.
    """
    if all(point.mode == "unmerged" for point in matrix.points):
        return [EnginePart("unmerged", matrix.decoding, matrix.points)]
    num_pages = planned_pages(replace(config, mode="auto"), model, memory_bytes)
    needed = PagesNeeded(matrix, model, config.page_tokens)
    too_large = {p for p in matrix.points if p.mode == "unmerged" and needed.of_point(p) > num_pages}
    decoding_pages = [
        needed.of_decoding(decoding, count) for decoding in matrix.decoding for count in decoding.adapters
    ]
    if not too_large and max(decoding_pages, default=0) <= num_pages:
        return [EnginePart("auto", matrix.decoding, matrix.points)]
    first = tuple(point for point in matrix.points if point in too_large)
    others = tuple(point for point in matrix.points if point not in too_large)
    return [EnginePart("unmerged", matrix.decoding, first), EnginePart("auto", (), others)]


def planned_pages(config: EngineConfig, model: ModelConfig, memory_bytes: int) -> int:
    """Pages that an engine plans for its pool on a device with `memory_bytes` of free memory."""
    return engine_limits(config, model, "cuda" if config.device == "cuda" else "cpu", memory_bytes).num_pages
