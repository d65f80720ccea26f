"""Adapters below the pool: a budget of bytes, and who makes room."""

from __future__ import annotations

import pytest
import torch

from lorabatch.engine.host_tier import HostTier
from lorabatch.engine.packed_adapter import PackedAdapter


def adapter(num_elements: int) -> PackedAdapter:
    return PackedAdapter(torch.zeros(num_elements), ())


def test_the_adapter_needed_furthest_in_the_future_makes_room() -> None:
    uses = {"soon": 1.0, "later": 9.0, "between": 5.0}
    tier = HostTier(budget_bytes=2 * 40)
    for adapter_id in uses:
        tier.put(adapter_id, adapter(10), uses.__getitem__)
        tier.check_integrity()
    assert [a for a in uses if a in tier] == ["soon", "between"]
    assert tier.take("soon").numbers.numel() == 10
    assert "soon" not in tier
    assert tier.num_bytes == 40


def test_an_adapter_needed_later_than_all_others_is_not_kept_at_their_cost() -> None:
    tier = HostTier(budget_bytes=80)
    tier.put("small", adapter(10), lambda a: 1.0)
    tier.put("large", adapter(15), {"small": 1.0, "large": 2.0}.__getitem__)
    assert "small" in tier
    assert "large" not in tier


def test_without_a_budget_nothing_is_kept() -> None:
    tier = HostTier(budget_bytes=0)
    tier.put("a", adapter(1), lambda a: 0.0)
    assert len(tier) == 0
    with pytest.raises(ValueError, match="host_tier_bytes=-1"):
        HostTier(-1)


def test_a_wrong_sum_is_told_with_both_numbers() -> None:
    tier = HostTier(budget_bytes=80)
    tier.put("a", adapter(10), lambda a: 0.0)
    tier.num_bytes = 8
    with pytest.raises(AssertionError, match="hold 40 bytes, counted 8"):
        tier.check_integrity()
