"""Finds the largest numbers of many rows at once, in falling order, equal ones in order of their places.

A row is seen as columns that lie side by side. The k largest numbers are in the columns with the k largest maxima, so
that two small searches take the place of one over the whole row: k of all maxima, then k of all numbers in the columns
that were found.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Rows whose numbers are all put in order at a time: whole numbers of 64 bits take up to four times as much memory.
_ORDERED_ROWS = 64
# Columns for each number that is wanted, below which a row is searched as a whole.
_LEAST_COLUMNS = 4
_LAST_PLACE = 2**31 - 1


def largest_of_rows(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest numbers of each of `rows` [num_rows, width] and their places, both [num_rows, count], in
    float32 and int64. `count` is at most `width`. NaN counts as largest or smallest.
    """
    height = max(int(math.sqrt(rows.shape[1] / max(count, 1))), 1)
    # a device is not asked how many columns have equal maxima: the host would wait for it
    if rows.device.type != "cpu" or rows.shape[1] // height < _LEAST_COLUMNS * count or height == 1:
        places = torch.cat([_largest(in_order(part), count) for part in torch.split(rows, _ORDERED_ROWS)])
    else:
        places = _largest_of_columns(rows, count, height)
    return rows.gather(1, places).float(), places


def _largest_of_columns(rows: Tensor, count: int, height: int) -> Tensor:
    """Places of the `count` largest numbers of rows that are seen as columns of `height` numbers."""
    num_rows, width = rows.shape
    num_columns = width // height
    maxima = rows[:, : height * num_columns].view(num_rows, height, num_columns).amax(1)
    least = maxima.topk(count).values[:, -1:]
    # equal maxima: any of these columns may have one of the numbers
    num_found = max(int((maxima >= least).sum(1).max()), count) if num_rows else count
    columns = maxima.topk(num_found).indices[:, None, :]
    inside = (columns + torch.arange(height)[None, :, None] * num_columns).flatten(1)
    behind = torch.arange(height * num_columns, width).expand(num_rows, -1)
    places = torch.cat([inside, behind], 1)
    return _largest(in_order(rows.gather(1, places), places), count)


def in_order(rows: Tensor, places: Tensor | None = None) -> Tensor:
    """Whole numbers in the order of `rows` [num_rows, width], no two of a row alike: of equal numbers the one whose
    place comes first is larger. `places`: of the numbers (None: their columns). The last 32 bits are `_LAST_PLACE` less
    the place.
    """
    if places is None:
        places = torch.arange(rows.shape[1], device=rows.device)
    bits = rows.float().add(0.0).view(torch.int32)  # -0.0 becomes 0.0
    # negative numbers grow with their bits, other than whole ones
    ordered = torch.where(bits < 0, bits ^ _LAST_PLACE, bits).to(torch.int64)
    return (ordered << 32) | (_LAST_PLACE - places)


def _largest(ordered: Tensor, count: int) -> Tensor:
    """Places of the `count` largest of the whole numbers that `in_order` gives."""
    return _LAST_PLACE - (ordered.topk(count).values & _LAST_PLACE)
