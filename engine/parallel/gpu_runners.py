"""Runs the steps of a group whose members have devices of their own.

    leader    place adapters, send the step | plan it | say which graphs | launch: copy, layers …, sample ┐ share tokens
    members   receive it                    | plan it |                  | launch: copy, layers …         ┘

All plan the same lists from the same numbers, each for its device, and launch the same parts by the same graphs at the
same time: sums of members are in them. The tokens that the leader has chosen are given to all on the devices, where the
next step finds them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..models.gpu_step import GpuStep
from ..models.step_batch import StepEntry
from ..runner.gpu_graphs import GraphKey
from ..runner.gpu_plan import PlannedStep
from ..runner.gpu_runner import GpuRunner
from ..runner.runner import LaunchedStep
from ..runner.sampler import SampledTokens
from .collectives import Collectives
from .members import GroupMembers
from .messages import LaunchStep


class LeadingRunner(GpuRunner):
    """Runs the leader's part of every step while the members run theirs."""

    def __init__(self, *args: Any, members: GroupMembers, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._members = members

    def launch(self, entries: Items[StepEntry]) -> LaunchedStep:
        """Send the step to the members, plan it, send its graphs, and launch the leader's part."""
        self._members.send_step(entries, self._places)
        parts = self._planned(entries)
        graphs = self._graphs_for(parts)
        self._members.send(LaunchStep(tuple(graphs)))
        launched = self._launch_parts(parts, graphs)

        def read() -> SampledTokens:
            tokens = launched.read()
            self._members.check()  # sums that have waited for a lost member are none
            return tokens

        return replace(launched, read=read)

    def _have_moved(self) -> bool:
        return self._members.collectives.any_of(super()._have_moved())


class FollowingRunner(GpuRunner):
    """Runs a member's part of every step. It plans as the leader does, and chooses neither graphs nor tokens."""

    def __init__(self, *args: Any, full_rows: int, collectives: Collectives, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.full_rows = full_rows
        self._collectives = collectives
        self._next: list[PlannedStep] = []

    def plan(self, entries: Items[StepEntry], places: dict[int, int]) -> None:
        """Plan the next step. `places`: places of its rows' pending tokens, by the rows' id()."""
        self._places = places
        self._next = self._planned(entries)

    def launch_planned(self, graphs: Items[GraphKey | None]) -> None:
        """Launch the step planned last, its parts by these graphs or kernel by kernel."""
        first = 0
        for planned, key in zip(self._next, graphs, strict=True):
            self._launch_part(planned, first, key)
            first += len(planned.sampled)

    def _bring(self, states: Tensor, planned: PlannedStep) -> None:
        """Do nothing: the leader has the same states."""

    def _choose_tokens(self, logits: Tensor, step: GpuStep, planned: PlannedStep, count: int) -> None:
        """Do nothing: the leader chooses."""

    def _have_moved(self) -> bool:
        return self._collectives.any_of(super()._have_moved())
