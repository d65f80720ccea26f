"""Records what an audit found for every key and tensor, and the reasons against the verdict `exact`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ...system.untrusted import printable, shown, shown_name

Verdict = Literal["exact", "exact-by-merge", "refused"]
USED = "used"
#: Why shapes do not fit, and what to do.
OTHER_BASE = "The adapter belongs to another base; use the one it was trained on"
# Reasons that the adapter's own base would not give.
_IS_OF_BASE = re.compile(r"another base|the base this adapter was trained on|the base it was trained on")


class Ledger:
    """Collects findings. A refusal of many tensors for one cause becomes one reason with a count."""

    def __init__(self) -> None:
        self.key_uses: dict[str, str] = {}
        self.tensor_uses: dict[str, str] = {}
        self.notes: list[str] = []
        self._refusals: dict[str, list[str]] = {}
        self._merges: dict[str, list[str]] = {}

    def __or__(self, later: Ledger) -> Ledger:
        """The findings of both, which stay as they are; where one has none, this is the other."""
        if not later._is_anything:
            return self
        if not self._is_anything:
            return later
        both = Ledger()
        both.key_uses = self.key_uses | later.key_uses
        both.tensor_uses = self.tensor_uses | later.tensor_uses
        both.notes = self.notes + later.notes
        both._refusals = _joined_lists(self._refusals, later._refusals)
        both._merges = _joined_lists(self._merges, later._merges)
        return both

    @property
    def _is_anything(self) -> bool:
        return bool(self.key_uses or self.tensor_uses or self.notes or self._refusals or self._merges)

    @property
    def is_refused(self) -> bool:
        """Whether anything so far makes the adapter unusable."""
        return bool(self._refusals)

    @property
    def verdict(self) -> Verdict:
        """The verdict that follows from the findings so far."""
        if self._refusals:
            return "refused"
        return "exact-by-merge" if self._merges else "exact"

    def refuse(self, what: str, cause: str | None = None) -> None:
        """Refuse the adapter: it cannot be applied exactly. `what` names field or tensor, value, expectation and next
        step.
        """
        self._refusals.setdefault(cause or what, []).append(what)

    def refuse_key(self, key: str, value: Any, why: str) -> None:
        """Refuse the adapter for a key of its configuration."""
        self.key_uses[key] = f"refused: {why}"
        self.refuse(f"{shown_name(key)}={shown(value)}: {why}")

    def refuse_tensors(self, keys: Iterable[str], cause: str, why: str) -> None:
        """Refuse the adapter for tensors; those of one `cause` are listed together."""
        for key in keys:
            self.tensor_uses[key] = f"refused: {why}"
            self.refuse(f"{key}: {why}", cause)

    def merge_only(self, what: str, cause: str) -> None:
        """Note that the adapter is exact only when merged into the base; findings of one cause are listed together."""
        listed = self._merges.setdefault(cause, [])
        if what not in listed:
            listed.append(what)

    def use_key(self, key: str) -> None:
        """Note a key that takes part in the computation."""
        self.key_uses.setdefault(key, USED)

    def ignore_key(self, key: str, why: str) -> None:
        """Note a key that does not matter at inference."""
        self.key_uses[key] = f"irrelevant: {why}"

    def use_tensor(self, key: str) -> None:
        """Note a tensor that takes part in the computation."""
        self.tensor_uses.setdefault(key, USED)

    def ignore_tensor(self, key: str, why: str) -> None:
        """Note a tensor that does not matter at inference."""
        self.tensor_uses[key] = f"irrelevant: {why}"

    def reasons(self, adapter: str, other_base: str = "") -> tuple[str, ...]:
        """Why the verdict is not `exact`: all refusals, or what asks for merging. Each names the adapter.

        `other_base`: a clause for the first reason that the adapter may be of another base; "" for none.
        """
        groups = self._refusals or self._merges
        found = [_joined(messages) for messages in groups.values()]
        position = next((i for i, what in enumerate(found) if _IS_OF_BASE.search(what)), None)
        if other_base and position is not None:
            found[position] = f"{found[position]}; {other_base}"
        return tuple(reason(adapter, what) for what in found)


def reason(adapter: str, what: str) -> str:
    """A sentence about what is wrong with an adapter, which begins with its name."""
    return f"adapter {adapter!r}: {printable(what)}"


def _joined(messages: list[str]) -> str:
    others = len(messages) - 1
    return messages[0] if not others else f"{messages[0]} (and {others} more like it)"


def _joined_lists(first: Mapping[str, list[str]], later: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {cause: first.get(cause, []) + later.get(cause, []) for cause in (*first, *later)}
