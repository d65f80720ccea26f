"""What rows leave behind in their pages, and who must not read it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..kernels.paged_attention.compiled import can_attend_compiled
from .model_config import ModelConfig
from .pool import PageRun
from .step_batch import PageLayout


def eraser_for(memory: Tensor, layout: PageLayout, model: ModelConfig) -> Callable[[PageRun], None] | None:
    """Erases a run of `memory` (flat) before a row gets it; None where attention reads a row's own numbers only.

    Torch's attention reads up to the longest row of a group and masks the rest. That may be the numbers of a row that
    became NaN, which no mask keeps out.
    """
    if layout.is_page_wise or can_attend_compiled(model.head_dim, memory.dtype):
        return None

    def erase(run: PageRun) -> None:
        memory[run.start * layout.page_elements : run.end * layout.page_elements].zero_()

    return erase
