"""Holds everything that GPU kernels read of one step in one int32 buffer, so that it is one copy.

Lists have the lengths of `StepSizes`: exactly those of the step, or, where a captured graph reads them, those of a
bucket of steps. A bucket's rest is padding: rows that no tile, no attention item and no slot names. Their numbers
are computed and never read.

Legend: T rows (tokens), S sampled rows. Block tables are ragged: one flat list of pages, each sequence's own from a
place that its attention items name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layouts.segments import SegmentLimits, Segments
from ...kernels.paged_attention.libraries import StepAttention
from ...kernels.paged_attention.work import AttentionWork, WorkLimits
from ...kernels.sampling import SamplingRows
from ..model_config.model import ModelConfig

_ALIGNED_INTS = 4  # every list starts at a multiple of 16 bytes, so that kernels are compiled once
_ROW_LISTS = ("token_ids", "sources", "positions", "slots", "prompt_tokens", "total_tokens")
_SAMPLED_LISTS: dict[str, torch.dtype] = {
    "sampled_rows": torch.int32,
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float64,
    "seeds": torch.int64,
    "streams": torch.int64,
    "draws": torch.int64,
}


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Lengths of a step's lists."""

    #: Rows of the step (T).
    rows: int
    #: Rows whose logits are asked (S).
    sampled: int
    #: Tokens that one sampled row may have withheld.
    withheld: int
    #: Pages of all block tables.
    pages: int
    #: Limits of the LoRA of all rows.
    segments: SegmentLimits
    #: Limits of the attention.
    attention: WorkLimits
    #: Limits of the LoRA of the sampled rows, where the last layer goes on with them alone; else None.
    sampled_segments: SegmentLimits | None = None


@dataclass(frozen=True, slots=True)
class GpuStep:
    """One step on the device: views of its buffer, and facts that decide which kernels run."""

    #: Tokens, int32 [T]; not read where a source is not negative.
    token_ids: Tensor
    #: Places among the tokens sampled by the step before, int32 [T]: the row's token is there; negative: in
    #: `token_ids`.
    sources: Tensor
    #: Positions in their sequences, int32 [T].
    positions: Tensor
    #: Slots of the pool that take the keys and values, int32 [T].
    slots: Tensor
    #: Rows whose logits are asked, then those whose hidden states are, int32 [S].
    sampled_rows: Tensor
    #: Overlapping rows over the flat list of pages: row i starts at place i, which attention items name.
    block_tables: Tensor
    #: LoRA of all rows.
    segments: Segments
    #: Attention of all rows.
    attention: AttentionWork
    #: Options by which the sampled rows' tokens are chosen.
    sampling: SamplingRows
    #: Tokens that a row must not choose, int32 [S, n], filled up with -1.
    withheld: Tensor
    #: Whether a row has an adapter.
    has_lora: bool
    #: Whether log-probabilities are asked.
    wants_logprobs: bool
    #: Whether some row is not greedy.
    draws: bool
    #: First place at which its tokens are left for the next step.
    first_place: int
    #: Lengths of the rows' sequences, as `Rope.tables` reads them; None unless rotary angles depend on them.
    row_lengths: tuple[Tensor, Tensor] | None
    #: Attention by a library; None: by our kernel.
    library: StepAttention | None = None
    #: LoRA of the sampled rows, with which alone the last layer goes on behind its attention; None: it goes on with all
    #: rows.
    sampled_segments: Segments | None = None
    #: Rows at the end of `sampled_rows` whose hidden states are asked instead of logits.
    num_pooled: int = 0

    def with_first_sampled(self, num_rows: int) -> GpuStep:
        """The step as the sampling of its first `num_rows` sampled rows reads it."""
        columns = {f.name: getattr(self.sampling, f.name)[:num_rows] for f in fields(SamplingRows)}
        return replace(
            self,
            sampled_rows=self.sampled_rows[:num_rows],
            sampling=SamplingRows(**columns),
            withheld=self.withheld[:num_rows],
        )


class StepBuffer:
    """The step's lists in one int32 tensor, on the host or on the device, at places that `sizes` alone decide.

    Pages stand last, since only those in use are copied, in twice the room, which `block_tables` may touch.
    """

    def __init__(self, sizes: StepSizes, buffer: Tensor) -> None:
        self.sizes = sizes
        self.buffer = buffer
        self._places, _ = _layout(sizes)

    @staticmethod
    def length(sizes: StepSizes) -> int:
        """int32 elements of a buffer."""
        return _layout(sizes)[1]

    def view(self, name: str) -> Tensor:
        """One list in its own type."""
        start, length, dtype = self._places[name]
        return self.buffer[start : start + length].view(dtype)

    def array(self, name: str) -> NDArray[np.generic]:
        """One list of a buffer on the host, as NumPy."""
        array: NDArray[np.generic] = self.view(name).numpy()
        return array

    def copy_to(self, target: StepBuffer, num_pages: int) -> None:
        """Fill the device's buffer from this one, with `num_pages` pages, without waiting."""
        used = self._places["pages"][0] + num_pages
        target.buffer[:used].copy_(self.buffer[:used], non_blocking=True)

    def step(
        self, model: ModelConfig, *, has_lora: bool, wants_logprobs: bool, draws: bool, first_place: int
    ) -> GpuStep:
        """Views of the lists for the decoder and the sampling."""
        lengths = None
        if model.has_length_dependent_rope:
            lengths = self.view("prompt_tokens"), self.view("total_tokens")
        sampled = self.sizes.sampled_segments
        return GpuStep(
            token_ids=self.view("token_ids"),
            sources=self.view("sources"),
            positions=self.view("positions"),
            slots=self.view("slots"),
            sampled_rows=self.view("sampled_rows"),
            block_tables=self.view("pages").as_strided((self.sizes.pages, self.sizes.pages), (1, 1)),
            segments=Segments(self.sizes.segments, self.view("segments")),
            attention=AttentionWork(self.sizes.attention, self.view("attention")),
            sampling=SamplingRows(
                *(self.view(name) for name in ("temperature", "top_k", "top_p", "seeds", "streams", "draws"))
            ),
            withheld=self.view("withheld").view(self.sizes.sampled, self.sizes.withheld),
            has_lora=has_lora,
            wants_logprobs=wants_logprobs,
            draws=draws,
            first_place=first_place,
            row_lengths=lengths,
            sampled_segments=None if sampled is None else Segments(sampled, self.view("sampled_segments")),
        )


def _layout(sizes: StepSizes) -> tuple[dict[str, tuple[int, int, torch.dtype]], int]:
    """Start, int32 elements and type of each list, and the elements of all."""
    places: dict[str, tuple[int, int, torch.dtype]] = {}
    end = 0

    def place(name: str, length: int, dtype: torch.dtype = torch.int32) -> None:
        nonlocal end
        num_ints = length * dtype.itemsize // torch.int32.itemsize
        places[name] = (end, num_ints, dtype)
        end += -(-num_ints // _ALIGNED_INTS) * _ALIGNED_INTS

    for name in _ROW_LISTS:
        place(name, sizes.rows)
    for name, dtype in _SAMPLED_LISTS.items():
        place(name, sizes.sampled, dtype)
    place("withheld", sizes.sampled * sizes.withheld)
    place("segments", sizes.segments.length)
    if sizes.sampled_segments is not None:
        place("sampled_segments", sizes.sampled_segments.length)
    place("attention", sizes.attention.length)
    place("pages", 2 * sizes.pages)
    return places, end
