"""`GgufWeight`: a weight as a GGUF file has it, in blocks of few bits; `pack_joined` packs several above one another.

Source of the formats: ggml `ggml-common.h` and `dequantize_row_*` in `ggml-quants.c`. Numbers of a row are in blocks of
32, or in groups of 256 with two factors in fp16 and a scale of few bits for every 16 or 32 of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.packed_weight import PackedWeight, Products, can_widen_blocks, pack
from ....kernels.packed_weight.blocks import Blocks, BlockWeight

#: Metadata key of a safetensors file whose tensors are in blocks. Its value is JSON: name -> kind.
METADATA_KEY = "gguf_kinds"
# Numbers that are widened at a time: codes and factors take several times their memory.
_WIDENED = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class GgufWeight:
    """A weight of `KINDS`, as a file has it. `raw`: uint8, [out_features, bytes of a row]. `kind`: name in `KINDS`."""

    raw: Tensor
    kind: str

    @classmethod
    def of_file(cls, raw: Tensor, kind: object) -> GgufWeight:
        """The weight of a file's bytes. Raises ValueError when these are not bytes of blocks of `kind`."""
        if kind not in KINDS or raw.dtype != torch.uint8 or raw.ndim != 2 or raw.shape[1] % KINDS[str(kind)][1]:
            raise ValueError(f"{raw.dtype} of {tuple(raw.shape)} is not {str(kind)[:20]!r}")
        return cls(raw, str(kind))

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        group, group_bytes, _ = KINDS[self.kind]
        return self.raw.shape[0], self.raw.shape[1] // group_bytes * group

    def __getitem__(self, rows: slice) -> GgufWeight:
        """The weight's rows of a slice."""
        return GgufWeight(self.raw[rows], self.kind)

    def blocks(self) -> Blocks:
        """Codes, scales and shifts of all rows."""
        _, group_bytes, read = KINDS[self.kind]
        return read(self.raw.reshape(self.raw.shape[0], -1, group_bytes))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as numbers, those that llama.cpp's own functions give, rounded to `dtype`."""
        dense = torch.empty(self.shape, dtype=dtype)
        num_rows = max(1, _WIDENED // self.shape[1])
        for first in range(0, self.shape[0], num_rows):
            rows = slice(first, first + num_rows)
            dense[rows] = self[rows].blocks().dense()
        return dense


Weight = Tensor | GgufWeight


def plain(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """The weight as a tensor; without `dtype` in the one it has, or fp32."""
    if isinstance(weight, Tensor):
        return weight if dtype is None else weight.to(dtype)
    return weight.dense(dtype or torch.float32)


def looked_up(embedding: Weight) -> Tensor:
    """A weight whose rows are looked up: one in blocks in fp16."""
    return plain(embedding, None if isinstance(embedding, Tensor) else torch.float16)


def joined(parts: Sequence[Weight]) -> Tensor:
    """Weights above one another as a tensor. One alone is not copied; those in blocks become what the others are."""
    dtypes = {part.dtype for part in parts if isinstance(part, Tensor)}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    tensors = [plain(part, dtype) for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def pack_joined(parts: Sequence[Weight], products: Products) -> PackedWeight:
    """The weights of layers with the same input as one, packed for `products`."""
    quantised = [part for part in parts if isinstance(part, GgufWeight)]
    if len(quantised) == len(parts) and can_widen_blocks(products):
        return BlockWeight(Blocks.joined([part.blocks() for part in quantised]))
    return pack(joined(parts), products)


def _halves(groups: Tensor, first: int, count: int) -> Tensor:
    """Numbers in fp16 from byte `first` of each group on, widened: [rows, groups, count]."""
    return groups[..., first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Codes of 4 bits: the lower halves of all bytes, then the upper ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fifth_bits(groups: Tensor, first: int) -> Tensor:
    """Bit 4 of 32 codes, from the bits of four bytes."""
    packed = groups[..., first : first + 4, None]
    return (packed >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2) << 4


def _read_32(first_code: int, *, has_shift: bool, has_fifth: bool = False) -> Callable[[Tensor], Blocks]:
    """Q4_0, Q4_1, Q5_0 and Q5_1: scale, shift, fifth bits, and codes of 4 bits."""

    def read(groups: Tensor) -> Blocks:
        factors = _halves(groups, 0, 1 + has_shift)
        codes = _nibbles(groups[..., first_code:])
        if has_fifth:
            codes |= _fifth_bits(groups, first_code - 4)
        scales, shifts = factors[..., 0], factors[..., 1] if has_shift else None
        if has_fifth and shifts is None:
            codes += 128 - 16
        return Blocks(codes.flatten(1), scales, shifts, 8 if has_fifth else 4)

    return read


def _read_q8_0(groups: Tensor) -> Blocks:
    """A scale, and signed bytes."""
    return Blocks((groups[..., 2:] ^ 128).flatten(1), _halves(groups, 0, 1)[..., 0], None, 8)


def _scales_of_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight shifts of 6 bits in twelve bytes."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    return scales.float(), torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1).float()


def _read_256(first_code: int, *, has_fifth: bool) -> Callable[[Tensor], Blocks]:
    """Q4_K and Q5_K: two factors, scales and shifts of 6 bits, fifth bits, codes of 4 bits."""

    def read(groups: Tensor) -> Blocks:
        factors = _halves(groups, 0, 2)
        scales, shifts = _scales_of_6_bits(groups[..., 4:16])
        codes = _nibbles(groups[..., first_code:].reshape(*groups.shape[:2], 4, 32))  # of every 64
        if has_fifth:
            bits = groups[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1
            codes |= bits.transpose(2, 3).reshape(codes.shape) << 4
        return Blocks(
            codes.flatten(1),
            (scales * factors[..., :1]).flatten(1),
            (shifts * -factors[..., 1:]).flatten(1),
            8 if has_fifth else 4,
        )

    return read


def _read_q6_k(groups: Tensor) -> Blocks:
    """Codes of 6 bits, in 4 and 2; signed scales of 8 bits for every 16; a factor."""
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    low = groups[..., :128].reshape(*groups.shape[:2], 2, 64)  # of every 128
    high = groups[..., 128:192].reshape(*groups.shape[:2], 2, 1, 32) >> shifts & 3
    codes = _nibbles(low) | high.flatten(3) << 4
    scales = groups[..., 192:208].contiguous().view(torch.int8).float() * _halves(groups, 208, 1)
    return Blocks((codes + (128 - 32)).flatten(1), scales.flatten(1), None, 8)


#: Kinds that stay in blocks: numbers of a group, its bytes, and how it is read. Others are dequantised.
KINDS: Mapping[str, tuple[int, int, Callable[[Tensor], Blocks]]] = {
    "Q4_0": (32, 18, _read_32(2, has_shift=False)),
    "Q4_1": (32, 20, _read_32(4, has_shift=True)),
    "Q5_0": (32, 22, _read_32(6, has_shift=False, has_fifth=True)),
    "Q5_1": (32, 24, _read_32(8, has_shift=True, has_fifth=True)),
    "Q8_0": (32, 34, _read_q8_0),
    "Q4_K": (256, 144, _read_256(16, has_fifth=False)),
    "Q5_K": (256, 176, _read_256(48, has_fifth=True)),
    "Q6_K": (256, 210, _read_q6_k),
}
