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
from collections.abc import Callable, Collection
from functools import cache, partial
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


_Counts = NDArray[np.int64]
#: A library's attention for one step, which every layer calls with its queries, the pool, its number and its rule. It
#: gives the attention of the step's tokens, [num_tokens, H * head_dim], as `attend_pages` does.
StepAttention = Callable[[Tensor, Tensor, int, AttentionRule], Tensor]
#: A library's attention over prompts, which prepares one step. It is given, on the host and in the order of the step's
#: rows, the new tokens of each sequence and all of its tokens up to the last new one, int64 [num_sequences], and the
#: pages that hold the keys, int64, one sequence after the other; then the layout of the pages, and the device.
PromptAttention = Callable[[_Counts, _Counts, _Counts, PageLayout, torch.device], StepAttention]


def choose_prompt_attention(
    device: torch.device,
    dtype: torch.dtype,
    layout: PageLayout,
    rules: frozenset[AttentionRule],
    *,
    is_exact: bool,
    has_sinks: bool,
) -> tuple[PromptAttention | None, str | None]:
    """The library that `LORABATCH_PROMPT_ATTENTION` names (None: our kernel), and a sentence when it cannot be used and
    our kernel serves instead.

    `rules`: rules of all layers. `is_exact`: whether a row's sum must not depend on the rows beside it, which no
    library promises. `has_sinks`: whether heads have attention sinks, which no library has here.
    """
    asked = os.environ.get("LORABATCH_PROMPT_ATTENTION", "own")
    if asked == "own":
        return None, None
    problem = _problem(asked, device, dtype, layout, rules, is_exact, has_sinks)
    found: PromptAttention | None = None
    if problem is None:
        try:
            found = _installed(asked, device, dtype)
        except ImportError as error:
            problem = f"it is not installed here ({error})"
    if found is not None and asked == "varlen" and any(rule.window is not None for rule in rules):
        from torch.nn.attention.varlen import varlen_attn

        if not has_windows(varlen_attn):
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
    has_sinks: bool,
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
    if has_sinks:
        return "it has no attention sinks"
    return None


def _installed(asked: str, device: torch.device, dtype: torch.dtype) -> PromptAttention:
    if asked == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        return partial(attend_by_varlen, varlen_attn)
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    @cache
    def wrapper_of(_rule: AttentionRule) -> Any:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    return partial(attend_by_flashinfer, wrapper_of, dtype)


def _starts(counts: _Counts) -> Tensor:
    """The begin of each sequence, and the end of the last one, int32 [num_sequences + 1]."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def _paged(pool: Tensor, layout: PageLayout, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer as views of the pool, [num_pages, K, page_tokens, D]."""
    num_pages = len(pool) // layout.page_elements
    shape = (num_pages, layout.num_layers, 2, layout.num_kv_heads, layout.page_tokens, layout.head_dim)
    pages = pool[: num_pages * layout.page_elements].view(shape)
    return pages[:, layer, 0], pages[:, layer, 1]


@cache
def _parameters(function: Callable[..., Any]) -> Collection[str]:
    return inspect.signature(function).parameters.keys()


def has_windows(varlen_attn: Callable[..., Any]) -> bool:
    """Whether `torch.nn.attention.varlen.varlen_attn` of this version supports sliding windows."""
    return "window_size" in _parameters(varlen_attn)


def attend_by_varlen(
    varlen_attn: Callable[..., Any],
    num_queries: _Counts,
    num_keys: _Counts,
    pages: _Counts,
    layout: PageLayout,
    device: torch.device,
) -> StepAttention:
    """`PromptAttention` by `torch.nn.attention.varlen.varlen_attn`: copies the places of the step's keys to the device.
    The host does not wait.
    """
    num_pages = -(-num_keys // layout.page_tokens)
    sequence = np.repeat(np.arange(len(num_keys)), num_keys)
    position = np.arange(len(sequence)) - (np.cumsum(num_keys) - num_keys)[sequence]
    first_page = (np.cumsum(num_pages) - num_pages)[sequence]
    places = np.stack((pages[first_page + position // layout.page_tokens], position % layout.page_tokens))
    page, offset = to_device(torch.from_numpy(places), device)  # of each key
    starts = [to_device(_starts(counts), device) for counts in (num_queries, num_keys)]
    limits = (*starts, int(num_queries.max()), int(num_keys.max()))

    def attend(q: Tensor, pool: Tensor, layer: int, rule: AttentionRule) -> Tensor:
        keys, values = (paged[page, :, offset] for paged in _paged(pool, layout, layer))
        return _called(varlen_attn, q, keys, values, limits, rule).reshape(len(q), -1)

    return attend


def _called(
    varlen_attn: Callable[..., Any],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    limits: tuple[Any, ...],
    rule: AttentionRule,
) -> Tensor:
    """Calls the library with the arguments that its version knows; returns [num_tokens, H, D].

    `limits`: begins of each sequence's queries and of its keys, int32 [num_sequences + 1], and most queries and keys of
    a sequence. A query's place is counted from the end of its sequence's keys.
    """
    options: dict[str, Any] = {}
    if has_windows(varlen_attn):
        options["window_size"] = (-1 if rule.window is None else rule.window - 1, 0)
    else:
        options["is_causal"] = True
    if "enable_gqa" in _parameters(varlen_attn):
        options["enable_gqa"] = True
    else:
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    if "scale" in _parameters(varlen_attn):
        options["scale"] = rule.scale
    else:
        q = q * (rule.scale * q.shape[2] ** 0.5)
    out: Tensor = varlen_attn(q, keys, values, *limits, **options)
    return out


def attend_by_flashinfer(
    wrapper_of: Callable[[AttentionRule], Any],
    dtype: torch.dtype,
    num_queries: _Counts,
    num_keys: _Counts,
    pages: _Counts,
    layout: PageLayout,
    device: torch.device,
) -> StepAttention:
    """`PromptAttention` by FlashInfer's prefill over paged keys and values. The step is planned for a rule when the
    first layer with the rule asks for it.

    `wrapper_of`: the `BatchPrefillWithPagedKVCacheWrapper` of a rule, with memory of its own, always the same one: a
    wrapper plans a step for one rule. It takes lists on the host; device lists it would copy, and wait for.
    """
    planned: dict[AttentionRule, Any] = {}

    def plan(rule: AttentionRule) -> Any:
        num_pages = -(-num_keys // layout.page_tokens)
        last_page = num_keys - (num_pages - 1) * layout.page_tokens
        wrapper = wrapper_of(rule)
        wrapper.plan(
            _starts(num_queries),
            _starts(num_pages),
            torch.from_numpy(pages.astype(np.int32)),
            torch.from_numpy(last_page.astype(np.int32)),
            layout.num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.page_tokens,
            causal=True,
            sm_scale=rule.scale,
            window_left=-1 if rule.window is None else rule.window - 1,
            logits_soft_cap=rule.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper

    def attend(q: Tensor, pool: Tensor, layer: int, rule: AttentionRule) -> Tensor:
        if rule not in planned:
            planned[rule] = plan(rule)
        out: Tensor = planned[rule].run(q.contiguous(), _paged(pool, layout, layer))
        return out.reshape(len(q), -1)

    return attend
