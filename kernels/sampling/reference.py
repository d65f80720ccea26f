"""The plain twin of `sample_tokens`: one row at a time, by sorting."""

from __future__ import annotations

from torch import Tensor

from .types import SamplingRows, share_of, weights_of

_MASK = (1 << 64) - 1


def uniform(seed: int, stream: int, position: int) -> float:
    """The number in [0, 1) of (seed, stream, position)."""
    state = 0
    for key in (seed, stream, position):
        state = ((state ^ key & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return float(state >> 11) * 2.0**-53


def sample(tokens: Tensor, logits: Tensor, rows: SamplingRows) -> None:
    """Write a token for each row of `logits` to `tokens` [num_rows]."""
    for row, values in enumerate(logits.float()):
        temperature, top_k, top_p = float(rows.temperature[row]), int(rows.top_k[row]), float(rows.top_p[row])
        if temperature == 0:
            tokens[row] = values.argmax()
            continue
        weights = weights_of(values, float(values.max()), temperature)
        kept = values.argsort(descending=True, stable=True)[: top_k or len(values)]
        if top_p < 1:
            reached = weights[kept].cumsum(0)
            goal = share_of(int(reached[-1]), top_p)
            kept = kept[: max(1, int((reached - weights[kept] < goal).sum()))]
        kept = kept.sort().values
        reached = weights[kept].cumsum(0)
        u = uniform(int(rows.seeds[row]), int(rows.streams[row]), int(rows.positions[row]))
        target = min(share_of(int(reached[-1]), u), int(reached[-1]) - 1)
        tokens[row] = kept[int((reached <= target).sum())]


def largest_of_rows(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest numbers of each of `rows` and their places, by sorting."""
    places = rows.float().argsort(dim=-1, descending=True, stable=True)[:, :count]
    return rows.gather(1, places).float(), places
