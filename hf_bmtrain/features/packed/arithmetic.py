"""Packed weights: 4-bit NormalFloat or 8-bit floating-point numbers, with a scale for every 64 elements.

A tensor is packed in cells of CELL elements that do not depend on each other. A cell of `nf4` is, in bytes:

    8192 codes       two elements a byte, the first in its upper half: numbers of the 16 in `Format.values`
    256 scales       of 64 elements each: numbers of the 256 in `dynamic_values`
    4 + 4 + 8        float32: the factor of this cell's scales, and the tensor's mean scale; padding

An element is value x scale, in float32, rounded once; its scale is number x factor, rounded, plus mean, rounded. The
bits are those that bitsandbytes makes of a tensor with `quant_type="nf4"`, `blocksize=64` and compressed statistics.
A cell of `nf4_float32` is the same codes, then 256 scales in float32: what bitsandbytes makes without compressing them.
A cell of `fp8` is 16,384 elements in float8_e4m3fn, then 256 scales in float32 (the largest magnitude / 448): rounding
costs 2^-4 of an element at most whatever the scale is, so there is nothing to win by compressing 0.5 bits in 8.5. A
scale for 64 elements, not for 128 x 128, lets any shape be cut in cells, and serves both formats with one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...engine.base.arguments import expect
from ...engine.base.launch import C_NAMES, Variant, kernel

CELL = 16384
BLOCK = 64
THREADS = 256
_BLOCKS = CELL // BLOCK
_CHUNK = 256  # cells that are converted at a time, 16 MiB in float32
_FP8_MOST = 448.0

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A packed format.

    Attributes:
        name: by which FORMATS has it.
        bits: of a code, 4 or 8.
        scale_bits: of a scale: 32, or 8 if scales are compressed.
        values: the values of the 16 codes of 4 bits, ascending; 0 is one of them, and 1 is the largest magnitude. Empty
            for 8 bits, whose codes are numbers of float8_e4m3fn.
        by_name: whether `auto_wrap(quantize_frozen=)` takes the name.
    """

    name: str
    bits: int
    scale_bits: int
    values: tuple[float, ...] = ()
    by_name: bool = True

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell, a multiple of 16."""
        return self._codes + _BLOCKS * self.scale_bits // 8 + (16 if self.scale_bits == 8 else 0)

    @property
    def _codes(self) -> int:
        return CELL * self.bits // 8

    def packed_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` packed elements, with those that fill the last cell."""
        return -(-numel // CELL) * self.cell_bytes

    @torch.no_grad()
    def pack(self, values: Tensor) -> Tensor:
        """Return a packed tensor: (cells * cell_bytes,) uint8 on the device of `values`, a floating tensor.

        Elements that fill the last cell count as zero. Raises ValueError for inf or NaN, and if what is unpacked to the
        dtype of `values` would overflow.
        """
        flat = values.detach().reshape(-1)
        packed = torch.zeros(-(-len(flat) // CELL), self.cell_bytes, dtype=torch.uint8, device=flat.device)
        if not len(flat) or flat.is_meta:
            return packed.view(-1)
        absmax = torch.cat([_blocks(chunk).abs().amax(-1) for chunk in flat.split(_CHUNK * CELL)])
        if not absmax.isfinite().all():
            raise ValueError("it holds inf or NaN")
        scales = self._put_scales(packed[:, self._codes :], absmax, -(-len(flat) // BLOCK))
        if not (scales if self.values else scales * _FP8_MOST).to(values.dtype).isfinite().all():
            raise ValueError(
                f"its magnitude, up to {absmax.max().item():.6g}, would overflow {values.dtype} when it is unpacked"
            )
        for number, chunk in enumerate(flat.split(_CHUNK * CELL)):
            own = slice(number * _CHUNK, (number + 1) * _CHUNK)
            divisors = absmax if self.values else scales
            packed[own, : self._codes] = self._encode(_blocks(chunk), divisors[own])
        return packed.view(-1)

    def _put_scales(self, tails: Tensor, absmax: Tensor, count: int) -> Tensor:
        """Store the scales, of which the first `count` belong to elements, and return them as they are read."""
        if self.scale_bits == 32:
            most = torch.full_like(absmax, _FP8_MOST)  # a GPU would multiply by the rounded inverse of a number
            tails.view(torch.float32).copy_(absmax if self.values else absmax / most)
            return self._scales(tails)
        mean = absmax.view(-1)[:count].mean()
        around = absmax - mean
        around.view(-1)[count:] = 0
        factor = around.abs().amax(-1, keepdim=True)
        numbers = dynamic_values(tails.device)
        tails[:, :_BLOCKS] = _nearest(around * (1.0 / factor.clamp(min=1e-38)), numbers)
        floats = torch.cat([factor, mean.expand_as(factor)], 1)
        tails[:, _BLOCKS : _BLOCKS + 8] = floats.view(torch.uint8)
        return self._scales(tails)

    def _scales(self, tails: Tensor) -> Tensor:
        """Return the scales (cells, 256) in the bytes of cells behind their codes."""
        if self.scale_bits == 32:
            return tails.contiguous().view(torch.float32)
        floats = tails[:, _BLOCKS : _BLOCKS + 8].contiguous().view(torch.float32)
        return dynamic_values(tails.device)[tails[:, :_BLOCKS].int()] * floats[:, :1] + floats[:, 1:]

    def _encode(self, blocks: Tensor, divisors: Tensor) -> Tensor:
        """Return the codes (cells, bytes) of elements (cells, 256, 64)."""
        if not self.values:
            scaled = torch.where(divisors[..., None] > 0, blocks / divisors[..., None], 0.0)
            return scaled.clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
        scaled = blocks * (1.0 / divisors.clamp(min=1e-38))[..., None]
        codes = _nearest(scaled, self.code_values(blocks.device)).flatten(1)
        return codes[:, ::2] << 4 | codes[:, 1::2]

    @torch.no_grad()
    def assemble(
        self, numel: int, codes: Tensor, scales: Tensor, factors: Tensor | None = None, mean: Tensor | None = None
    ) -> Tensor:
        """Return packed, as `pack` does, the `numel` elements that have these 4-bit codes and scales already.

        codes: two elements a byte, uint8. scales: of 64 elements each, float32, or 8-bit numbers, of which 256 at a
        time have one of the float32 `factors`, and all the `mean`.
        """
        assert self.values
        cells = -(-numel // CELL)
        packed = torch.zeros(cells, self.cell_bytes, dtype=torch.uint8, device=codes.device)
        zero = self.values.index(0.0)
        filled = codes.new_full((cells * self._codes,), zero << 4 | zero)
        filled[: numel // 2] = codes[: numel // 2]
        if numel % 2:
            filled[numel // 2] = codes[numel // 2] & 0xF0 | zero
        packed[:, : self._codes] = filled.view(cells, -1)
        tails = packed[:, self._codes :]
        rows = torch.nn.functional.pad(scales, (0, cells * _BLOCKS - len(scales))).view(cells, _BLOCKS)
        if self.scale_bits == 32:
            tails.view(torch.float32).copy_(rows)
            return packed.view(-1)
        assert factors is not None and mean is not None
        tails[:, :_BLOCKS] = rows
        floats = torch.stack([factors.float(), mean.float().expand(cells)], 1)
        tails[:, _BLOCKS : _BLOCKS + 8] = floats.view(torch.uint8)
        return packed.view(-1)

    @torch.no_grad()
    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Fill `out` (cells * CELL,) float32, float16 or bfloat16 from `packed` (cells * cell_bytes,) uint8.

        Both are contiguous and begin on 16 bytes. On a GPU the current stream does it, in one launch.
        """
        cells = packed.numel() // self.cell_bytes
        expect("packed", packed, (torch.uint8,), (cells * self.cell_bytes,), out.device)
        expect("out", out, tuple(C_NAMES), (cells * CELL,), packed.device)
        if cells == 0 or out.is_meta:
            return
        if not out.is_cuda:
            self._reference(packed, out)
            return
        tables = _tables(self.values, out.device) if self.values else None
        kernel(variant(self, out.dtype), "unpack_cells", out.device)(
            cells, THREADS, packed.view(torch.int32), tables, out
        )

    def _reference(self, packed: Tensor, out: Tensor) -> None:
        rows = packed.view(-1, self.cell_bytes)
        for cells, target in zip(rows.split(_CHUNK), out.view(-1, _BLOCKS, BLOCK).split(_CHUNK)):
            codes = cells[:, : self._codes]
            if not self.values:
                values = codes.contiguous().view(torch.float8_e4m3fn).float()
            else:
                values = self.code_values(out.device)[torch.stack([codes >> 4, codes & 15], -1).int()]
            target.copy_(values.view(-1, _BLOCKS, BLOCK) * self._scales(cells[:, self._codes :])[..., None])

    def code_values(self, device: torch.device) -> Tensor:
        """Return the values of the 16 codes of 4 bits, (16,) float32."""
        return _tables(self.values, device)[:16]


FORMATS = {
    each.name: each
    for each in (
        Format("nf4", 4, 8, _NF4),
        Format("nf4_float32", 4, 32, _NF4, by_name=False),  # as bitsandbytes makes it without compressing scales
        Format("fp8", 8, 32),
    )
}
QUANTIZE_FROZEN = tuple(name for name, form in FORMATS.items() if form.by_name)


def dynamic_values(device: torch.device) -> Tensor:
    """Return the 256 numbers of scales, float32, ascending: 0, 1, and the middles of 2^k equal parts of each decade.

    The decade down from 1 has 64 parts, the next 32, and so on to the seventh, on both sides of 0.
    """
    return _tables(_NF4, device)[16:]


@cache
def _tables(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the values of 16 codes and the 256 numbers of `dynamic_values`, (272,) float32: what the kernel reads."""
    numbers = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        middles = 10.0 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor([*values, *sorted(numbers)], dtype=torch.float32, device=device)


def _nearest(values: Tensor, numbers: Tensor) -> Tensor:
    """Return the index, uint8, of the nearest of the ascending `numbers` for each value; of two, the first."""
    return torch.bucketize(values, (numbers[:-1] + numbers[1:]) / 2, out_int32=True).to(torch.uint8)


def _blocks(flat: Tensor) -> Tensor:
    """Return elements as float32 (cells, 256, 64), with zeros at the end."""
    return torch.nn.functional.pad(flat.float(), (0, -len(flat) % CELL)).view(-1, _BLOCKS, BLOCK)


@cache
def variant(form: Format, dtype: torch.dtype) -> Variant:
    tables = "float" if form.values else "none"
    defines = {"BITS": str(form.bits), "SCALE_BITS": str(form.scale_bits), "ELEMENT": C_NAMES[dtype], "TABLES": tables}
    return Variant("quantize", tuple(defines.items()))


def variants(arch: int) -> list[Variant]:
    """Return all variants that this module can compile."""
    return [variant(form, dtype) for form in FORMATS.values() for dtype in C_NAMES]
