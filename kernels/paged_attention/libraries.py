"""Attention over prompts by libraries, in place of our kernel: `varlen` of torch, and FlashInfer where it is installed.

Only steps with prompts use it, which are launched kernel by kernel; decode rows always use our kernel. Keys and values
are in pages. FlashInfer reads pages. Torch's kernel needs a sequence's keys side by side, so keys and values are
gathered once per layer: 33 MB for 8,192 tokens of Llama-3-8B, some 20 us beside 250 to 950 us of attention.

`LORABATCH_PROMPT_ATTENTION` names one (`own`, which is also the default, `varlen` or `flashinfer`). `varlen` was
right on an H200 and has not been timed; FlashInfer has not been run.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..launch import to_device
from ..layouts.pages import PageLayout
from .types import AttentionRule

PROMPT_BACKENDS = ("own", "varlen", "flashinfer")
_WIDEST_HEAD = 256
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation advises


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """The sequences of a step, in the order of its rows, on the host."""

    #: New tokens of each sequence, int64 [num_sequences].
    num_queries: NDArray[np.int64]
    #: All tokens of each sequence up to its last new one, int64 [num_sequences].
    num_keys: NDArray[np.int64]
    #: Pages that hold the keys, int64, one sequence after the other.
    pages: NDArray[np.int64]


#: A library's attention for one step, which every layer calls with its queries, the pool, its number and its rule. It
#: gives the attention of the step's tokens, [num_tokens, H * head_dim], as `attend_pages` does.
StepAttention = Callable[[Tensor, Tensor, int, AttentionRule], Tensor]


def choose_prompt_attention(
    device: torch.device, dtype: torch.dtype, layout: PageLayout, rules: frozenset[AttentionRule], *, is_exact: bool
) -> tuple[PromptAttention | None, str | None]:
    """The library that `LORABATCH_PROMPT_ATTENTION` names (None: our kernel), and a sentence when it cannot be used and
    our kernel serves instead.

    `rules`: rules of all layers. `is_exact`: whether a row's sum must not depend on the rows beside it, which no
    library promises.
    """
    asked = os.environ.get("LORABATCH_PROMPT_ATTENTION", "own")
    if asked == "own":
        return None, None
    problem = _problem(asked, device, dtype, layout, rules, is_exact)
    found: PromptAttention | None = None
    if problem is None:
        try:
            found = _installed(asked, device, dtype)
        except ImportError as error:
            problem = f"it is not installed here ({error})"
    if isinstance(found, VarlenAttention) and any(rule.window is not None for rule in rules) and not found.has_windows:
        found, problem = None, f"torch {torch.__version__} has no sliding windows there"
    if problem is not None:
        problem = f"LORABATCH_PROMPT_ATTENTION={asked!r}: {problem}; the own kernel serves. Leave it out, or mend that."
    return found, problem


def _problem(
    asked: str,
    device: torch.device,
    dtype: torch.dtype,
    layout: PageLayout,
    rules: frozenset[AttentionRule],
    is_exact: bool,
) -> str | None:
    if asked not in PROMPT_BACKENDS:
        return f"must be one of {', '.join(PROMPT_BACKENDS)}"
    if device.type != "cuda":
        return "it needs a GPU"
    if is_exact:
        return "mode exact promises that a row's sum does not depend on others"
    if dtype.itemsize != 2:
        return f"it computes in 16 bits, not in {dtype}"
    if layout.head_dim % 8 or layout.head_dim > _WIDEST_HEAD:
        return f"heads of {layout.head_dim} numbers; expected a multiple of 8 up to {_WIDEST_HEAD}"
    if asked == "varlen" and any(rule.softcap is not None for rule in rules):
        return "it has no cap of scores"
    return None


def _installed(asked: str, device: torch.device, dtype: torch.dtype) -> PromptAttention:
    if asked == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        return VarlenAttention(varlen_attn)
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def wrapper() -> Any:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    return FlashInferAttention(wrapper, dtype)


def _starts(counts: NDArray[np.int64]) -> Tensor:
    """The begin of each sequence, and the end of the last one, int32 [num_sequences + 1]."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def _paged(pool: Tensor, layout: PageLayout, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer as views of the pool, [num_pages, K, page_tokens, D]."""
    num_pages = len(pool) // layout.page_elements
    shape = (num_pages, layout.num_layers, 2, layout.num_kv_heads, layout.page_tokens, layout.head_dim)
    pages = pool[: num_pages * layout.page_elements].view(shape)
    return pages[:, layer, 0], pages[:, layer, 1]


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn`, whose arguments differ between versions of torch. `has_windows`: whether
    it supports sliding windows."""

    def __init__(self, varlen_attn: Callable[..., Any]) -> None:
        self._varlen_attn = varlen_attn
        self._parameters = inspect.signature(varlen_attn).parameters.keys()
        self.has_windows = "window_size" in self._parameters

    def of_step(self, spans: PromptSpans, layout: PageLayout, device: torch.device) -> StepAttention:
        """Prepares one step: copies the places of its keys to the device. The host does not wait."""
        num_pages = -(-spans.num_keys // layout.page_tokens)
        sequence = np.repeat(np.arange(len(spans.num_keys)), spans.num_keys)
        position = np.arange(len(sequence)) - (np.cumsum(spans.num_keys) - spans.num_keys)[sequence]
        first_page = (np.cumsum(num_pages) - num_pages)[sequence]
        places = np.stack((spans.pages[first_page + position // layout.page_tokens], position % layout.page_tokens))
        page, offset = to_device(torch.from_numpy(places), device)  # of each key
        starts = [to_device(_starts(counts), device) for counts in (spans.num_queries, spans.num_keys)]
        limits = (*starts, int(spans.num_queries.max()), int(spans.num_keys.max()))

        def attend(q: Tensor, pool: Tensor, layer: int, rule: AttentionRule) -> Tensor:
            keys, values = (paged[page, :, offset] for paged in _paged(pool, layout, layer))
            return self._call(q, keys, values, limits, rule).reshape(len(q), -1)

        return attend

    def _call(self, q: Tensor, keys: Tensor, values: Tensor, limits: tuple[Any, ...], rule: AttentionRule) -> Tensor:
        """Calls the library with the arguments that it knows; returns [num_tokens, H, D].

        `limits`: begins of each sequence's queries and of its keys, int32 [num_sequences + 1], and most queries and
        keys of a sequence. A query's place is counted from the end of its sequence's keys.
        """
        options: dict[str, Any] = {}
        if self.has_windows:
            options["window_size"] = (-1 if rule.window is None else rule.window - 1, 0)
        else:
            options["is_causal"] = True
        if "enable_gqa" in self._parameters:
            options["enable_gqa"] = True
        else:
            group = q.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        if "scale" in self._parameters:
            options["scale"] = rule.scale
        else:
            q = q * (rule.scale * q.shape[2] ** 0.5)
        out: Tensor = self._varlen_attn(q, keys, values, *limits, **options)
        return out


class FlashInferAttention:
    """FlashInfer's prefill over paged keys and values. `make_wrapper`: makes a `BatchPrefillWithPagedKVCacheWrapper`
    with memory of its own; each rule of the layers has one, since a wrapper plans a step for one rule."""

    def __init__(self, make_wrapper: Callable[[], Any], dtype: torch.dtype) -> None:
        self._make_wrapper = make_wrapper
        self._dtype = dtype
        self._wrapper_of: dict[AttentionRule, Any] = {}

    def of_step(self, spans: PromptSpans, layout: PageLayout, device: torch.device) -> StepAttention:
        """Prepares one step, which is planned for a rule when the first layer with the rule calls it."""
        planned: dict[AttentionRule, Any] = {}

        def attend(q: Tensor, pool: Tensor, layer: int, rule: AttentionRule) -> Tensor:
            if rule not in planned:
                planned[rule] = self._planned(rule, spans, layout)
            out: Tensor = planned[rule].run(q.contiguous(), _paged(pool, layout, layer))
            return out.reshape(len(q), -1)

        return attend

    def _planned(self, rule: AttentionRule, spans: PromptSpans, layout: PageLayout) -> Any:
        """A wrapper that has planned the step. It takes lists on the host; device lists it would copy, and wait for."""
        if rule not in self._wrapper_of:
            self._wrapper_of[rule] = self._make_wrapper()
        wrapper = self._wrapper_of[rule]
        num_pages = -(-spans.num_keys // layout.page_tokens)
        last_page = spans.num_keys - (num_pages - 1) * layout.page_tokens
        wrapper.plan(
            _starts(spans.num_queries),
            _starts(num_pages),
            torch.from_numpy(spans.pages.astype(np.int32)),
            torch.from_numpy(last_page.astype(np.int32)),
            layout.num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.page_tokens,
            causal=True,
            sm_scale=rule.scale,
            window_left=-1 if rule.window is None else rule.window - 1,
            logits_soft_cap=rule.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return wrapper


#: A library's attention over prompts, whose `of_step` prepares one step.
PromptAttention = VarlenAttention | FlashInferAttention
