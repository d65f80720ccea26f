"""How many of a replica's unfinished rows each helper should take, by the seconds that owner and helpers would need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..costs.cost import CostModel
from ..estimates.lengths import PRIOR_SHARE

# About the number of splits that are tried.
_MAX_SPLITS = 64


class _Alike(NamedTuple):
    """Rows alike in the tokens they have left and in the length of their contexts."""

    num_rows: int
    tokens_left: float
    context_tokens: float


@dataclass(frozen=True, slots=True)
class TailRows:
    """Unfinished rows of one replica: those that decode, and those whose prompts are not computed, in its batch or not.

    All token counts are means of a row.
    """

    #: Rows that decode.
    num_running: int
    #: Rows whose prompts are not computed.
    num_waiting: int
    #: Tokens of prompt and answer so far, of rows that decode.
    context_tokens: float
    #: Prompt tokens of rows that wait.
    prompt_tokens: float
    #: Expected output tokens of rows that wait.
    output_tokens: float
    #: Tokens that rows that decode are expected to generate still.
    tokens_left: float

    @property
    def num_rows(self) -> int:
        """Rows that decode and rows that wait, together."""
        return self.num_running + self.num_waiting

    def kept(self, num_lent: int) -> tuple[_Alike, _Alike]:
        """The rows that stay when `num_lent` rows leave, in the order in which they are worked on."""
        stay = self.num_rows - num_lent
        return self._running(min(stay, self.num_running)), self._waiting(max(0, stay - self.num_running))

    def lent(self, num_lent: int, share: int) -> tuple[_Alike, _Alike]:
        """The rows that one helper gets when `num_lent` rows leave, `share` of them to it.

        Waiting rows leave first, and every helper gets its part of them.
        """
        waiting = round(min(num_lent, self.num_waiting) * share / num_lent)
        return self._waiting(waiting), self._running(share - waiting)

    def _running(self, num_rows: int) -> _Alike:
        return _Alike(num_rows, self.tokens_left, self.context_tokens)

    def _waiting(self, num_rows: int) -> _Alike:
        return _Alike(num_rows, self.output_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Pace:
    """Pace at which a replica works off rows."""

    #: Rows that it works on together.
    batch_rows: int
    #: Seconds of its steps over those of the cost model.
    slowness: float = 1.0
    #: Rows of its own shards, which run beside incoming rows and keep their places.
    own_rows: int = 0
    #: Prompt tokens of its own rows, computed before those of incoming rows.
    own_prefill_tokens: int = 0
    #: Tokens that each of its own rows is expected to generate still.
    own_tokens_left: float = 0.0

    @property
    def free_rows(self) -> int:
        """Free places in the replica's batch."""
        return self.batch_rows - self.own_rows


@dataclass(frozen=True, slots=True)
class TailSettings:
    """Cost of a move of running rows, and the least gain for which they move."""

    #: Seconds from the decision until a moved row runs again, beside the step that its owner is in and its second
    #: prefill.
    hop_s: float = 0.1
    #: Least gain for which rows move, as a share of the time that the owner would take.
    least_gain: float = 0.05
    #: Least gain in seconds, which must be reached as well.
    least_gain_s: float = 0.0
    #: Share of `max_tokens` that the plan expects of a row where it knows no better.
    length_share: float = PRIOR_SHARE


def rows_to_lend(
    rows: TailRows, owner: Pace, helpers: Sequence[Pace], cost: CostModel, settings: TailSettings
) -> list[int]:
    """Rows each helper should take, in proportion to its pace; zeros when it does not pay.

    The split with the soonest end wins, fewer rows on ties.
    """
    stay_s = _kept_s(rows, 0, owner, cost)
    best_s = min(stay_s * (1 - settings.least_gain), stay_s - settings.least_gain_s)
    none = best = [0] * len(helpers)
    hop_s = settings.hop_s + _step_s(min(rows.num_rows, owner.batch_rows), rows.context_tokens, cost) * owner.slowness
    able = [i for i, helper in enumerate(helpers) if max(hop_s, _own_s(helper, 0, rows, cost)) < best_s]
    if not able:
        return none
    helpers = [helpers[i] for i in able]
    # The last row goes too: a slow owner is better rid of it. Rows that only wait may be what should move.
    splits = {*range(rows.num_rows, 0, -max(1, rows.num_rows // _MAX_SPLITS)), rows.num_waiting}
    splits |= {min(rows.num_rows, sum(helper.free_rows for helper in helpers))}
    for num_lent in sorted(splits - {0}, reverse=True):
        end_s = _kept_s(rows, num_lent, owner, cost)
        if end_s > best_s:
            break  # with fewer rows lent the owner ends later still
        shares = shares_of(num_lent, helpers)
        if sum(shares) < num_lent:
            continue
        # Helpers that are alike are looked at once.
        for share, helper in set(zip(shares, helpers, strict=True)):
            moved = rows.lent(num_lent, share)
            prefill_s = _prefill_s(*moved, pace=helper, cost=cost)
            moved_s = hop_s + _own_prefill_s(helper, cost) + prefill_s + _work_s(moved, helper, cost)
            end_s = max(end_s, moved_s, prefill_s + _own_s(helper, share, rows, cost))
        if end_s <= best_s and end_s < stay_s:
            best_s, best = end_s, [*none]
            for i, share in zip(able, shares, strict=True):
                best[i] = share
    return best


def _own_s(helper: Pace, num_moved: int, rows: TailRows, cost: CostModel) -> float:
    """Seconds until a helper has ended its own rows, with `num_moved` moved rows beside them.

    Contexts are taken to be as long as those of the owner's rows.
    """
    step_s = _step_s(helper.own_rows + num_moved, rows.context_tokens, cost) * helper.slowness
    return _own_prefill_s(helper, cost) + helper.own_tokens_left * step_s


def _own_prefill_s(helper: Pace, cost: CostModel) -> float:
    return cost.prefill_token_s * helper.own_prefill_tokens * helper.slowness


def shares_of(num_rows: int, helpers: Sequence[Pace]) -> list[int]:
    """Rows for each helper, in proportion to its pace.

    A helper with rows of its own gets at most its free places, so that the sum may be below `num_rows`.
    """
    speed = sum(1 / helper.slowness for helper in helpers)
    most = [helper.free_rows if helper.own_rows else num_rows for helper in helpers]
    shares = [min(int(num_rows / helper.slowness / speed), m) for helper, m in zip(helpers, most, strict=True)]
    for i, limit in enumerate(most):
        shares[i] += min(num_rows - sum(shares), limit - shares[i])
    return shares


def _work_s(groups: Sequence[_Alike], pace: Pace, cost: CostModel) -> float:
    """Seconds to decode what is left of these rows: batch after batch, each as long as its longest row."""

    def batch_s(num_rows: int, tokens_left: float, context_tokens: float) -> float:
        return tokens_left * _step_s(num_rows + pace.own_rows, context_tokens + tokens_left / 2, cost)

    places = pace.free_rows
    seconds, begun, tokens_left = 0.0, 0, 0.0
    for group in groups:
        num_rows = group.num_rows
        if begun and num_rows:
            joining = min(num_rows, places - begun)
            begun, num_rows, tokens_left = begun + joining, num_rows - joining, max(tokens_left, group.tokens_left)
            if begun == places:
                seconds += batch_s(begun, tokens_left, group.context_tokens)
                begun = 0
        full, rest = divmod(num_rows, places)
        seconds += full * batch_s(places, group.tokens_left, group.context_tokens)
        if rest:
            begun, tokens_left = rest, group.tokens_left
    if begun:
        seconds += batch_s(begun, tokens_left, groups[-1].context_tokens)
    return seconds * pace.slowness


def _kept_s(rows: TailRows, num_lent: int, owner: Pace, cost: CostModel) -> float:
    """Seconds until an owner has ended the rows that stay when `num_lent` rows leave."""
    running, waiting = rows.kept(num_lent)
    return _prefill_s(waiting, pace=owner, cost=cost) + _work_s((running, waiting), owner, cost)


def _prefill_s(*groups: _Alike, pace: Pace, cost: CostModel) -> float:
    """Seconds to compute the tokens that these rows have so far."""
    seconds = 0.0
    for num_rows, _, tokens in groups:
        seconds += num_rows * tokens * (cost.prefill_token_s + cost.prefill_pair_s * tokens / 2)
    return (cost.step_s + seconds) * pace.slowness if seconds else 0.0


def _step_s(num_rows: int, context_tokens: float, cost: CostModel) -> float:
    # Faster than `CostModel.step_seconds`, which takes arrays too: a decision asks some thousand times.
    return cost.step_s + cost.decode_row_s * num_rows + cost.context_token_s * num_rows * context_tokens
