"""Weights in blocks of few bits, as GGUF files have them. Products widen them in registers (`../native/panels.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..native import native_number
from .panels import StoredWeight, unpack

_OFFSETS = {4: 8, 8: 128}
# The type's number in vector.h, and the bits of its coding, as in panels.h.
_BLOCKS = 4
_HAS_BYTES, _HAS_WIDE_SCALES, _HAS_SHIFTS, _IS_SHORT = 1 << 8, 1 << 9, 1 << 10, 1 << 11
# Bytes of the type at the end of the numbers.
_TYPE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [out_features, in_features] whose numbers are `scale * (code - offset) + shift`, rounded once to fp32.

    A block has 16 or 32 numbers of a row.
    """

    #: Codes, uint8 [out_features, in_features]; all are below 16 when `bits` is 4.
    codes: Tensor
    #: Scale of each block, fp32 [out_features, blocks of a row].
    scales: Tensor
    #: Shift of each block, fp32 [out_features, blocks of a row]; None for codes with an offset, 8 or 128.
    shifts: Tensor | None
    #: Bits of a code, 4 or 8.
    bits: int

    @property
    def size(self) -> int:
        """Numbers of a block."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def offset(self) -> int:
        """The number subtracted from codes; 0 with shifts."""
        return 0 if self.shifts is not None else _OFFSETS[self.bits]

    def dense(self) -> Tensor:
        """The weight in fp32."""
        blocks = (self.codes.float() - self.offset).view(*self.scales.shape, self.size) * self.scales[..., None]
        if self.shifts is not None:
            blocks += self.shifts[..., None]
        return blocks.view(self.codes.shape)

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """Weights of equal in_features stacked along their outputs, with the shortest blocks and the widest codes."""
        size, bits = min(part.size for part in parts), max(part.bits for part in parts)
        has_shifts = any(part.shifts is not None for part in parts)
        same = [part._coded_as(size, bits, has_shifts=has_shifts) for part in parts]
        shifts = [part.shifts for part in same if part.shifts is not None]
        return cls(
            torch.cat([part.codes for part in same]),
            torch.cat([part.scales for part in same]),
            torch.cat(shifts) if shifts else None,
            bits,
        )

    def _coded_as(self, size: int, bits: int, *, has_shifts: bool) -> Blocks:
        """The blocks with equal numbers in another coding that can hold them."""
        times = self.size // size
        scales = self.scales.repeat_interleave(times, 1)
        if self.shifts is not None:
            return Blocks(self.codes, scales, self.shifts.repeat_interleave(times, 1), bits)
        if has_shifts:  # the offset is a power of two: its product is not rounded
            return Blocks(self.codes, scales, scales * -self.offset, bits)
        return Blocks(self.codes + (_OFFSETS[bits] - self.offset), scales, None, bits)


class BlockWeight(StoredWeight):
    """A packed weight in blocks of few bits, multiplied in fp32. `numbers`: bytes of panels, then their type."""

    def __init__(self, blocks: Blocks) -> None:
        out_features, in_features = blocks.codes.shape
        self.shape = (out_features, in_features)
        factors = [blocks.scales] if blocks.shifts is None else [blocks.scales, blocks.shifts]
        halves = [factor.half() for factor in factors]
        has_wide_scales = not all(torch.equal(h.float(), f) for h, f in zip(halves, factors, strict=True))
        factors = factors if has_wide_scales else halves
        codes = blocks.codes if blocks.bits == 8 else blocks.codes[:, ::2] | blocks.codes[:, 1::2] << 4
        width = native_number("panel_columns")
        num_full = out_features // width * width
        numbers = [
            _panels(codes[rows], [factor[rows] for factor in factors], columns)
            for rows, columns in ((slice(num_full), width), (slice(num_full, None), out_features - num_full))
            if columns and codes[rows].numel()
        ]
        panels_type = (
            _BLOCKS
            | (blocks.bits == 8) * _HAS_BYTES
            | has_wide_scales * _HAS_WIDE_SCALES
            | (blocks.shifts is not None) * _HAS_SHIFTS
            | (blocks.size == 16) * _IS_SHORT
        )
        self.numbers = torch.cat([*numbers, torch.tensor([panels_type]).view(torch.uint8)])
        self._type = panels_type

    @classmethod
    def of_numbers(cls, numbers: Tensor, shape: tuple[int, int]) -> Self:
        """The weight with these `numbers`, which end with the type of the panels."""
        packed = super().of_numbers(numbers, shape)
        packed._type = int.from_bytes(numbers[-_TYPE_BYTES:].numpy().tobytes(), "little")
        return packed

    @property
    def panels_type(self) -> int:
        """Type of the panels, as in vector.h."""
        return self._type

    def dense(self) -> Tensor:
        """W in the plain layout and fp32."""
        return unpack(self.numbers, self._type, self.shape)


def _panels(codes: Tensor, factors: Sequence[Tensor], width: int) -> Tensor:
    """Whole panels of `width` columns, as bytes. `codes`: as stored, [out_features, bytes of a row]."""
    num_blocks = factors[0].shape[1]
    num_panels = len(codes) // width
    parts = [factor.view(num_panels, width, num_blocks).transpose(1, 2) for factor in factors]
    parts.append(codes.view(num_panels, width, num_blocks, -1).permute(0, 2, 3, 1))
    return torch.cat([part.flatten().view(torch.uint8).view(num_panels, num_blocks, -1) for part in parts], 2).flatten()
