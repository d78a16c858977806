"""Packed weights: 4-bit NormalFloat or 8-bit floating-point numbers, with a scale for every 64 elements.

A tensor is packed in independent cells of CELL (16,384) elements. A cell of `nf4` contains:

    8192 bytes    codes: indices into the 16 `Format.values`, two per byte, the first one in the upper half
    256 bytes     scales, one per 64 elements: indices into the 256 `dynamic_values`
    4 bytes       the factor of this cell's scales, float32
    4 bytes       the mean of the tensor's scales, float32
    8 bytes       padding

An unpacked element is the value of its code times its scale, computed in float32 and rounded once. A scale is its
dynamic value times the factor, plus the mean; the product and the sum are rounded to float32. The unpacked bits equal
those of bitsandbytes with `quant_type="nf4"`, `blocksize=64` and compressed statistics.

A cell of `nf4_float32` has the same codes, followed by 256 scales in float32, as in bitsandbytes without compressed
statistics.

A cell of `fp8` has 16,384 elements in float8_e4m3fn, followed by 256 scales in float32. A scale is the largest
magnitude of its 64 elements, divided by 448. The scales are not compressed, because they take only 0.5 of the 8.5 bits
per element. Each scale belongs to 64 consecutive elements and not to a tile of 128 x 128. So a tensor of any shape can
be divided into cells, and a single kernel unpacks all formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...engine.base.arguments import expect
from ...engine.base.launch import C_NAMES, Variant, kernel

CELL = 16384  # number of elements of a cell
BLOCK = 64  # number of consecutive elements that share a scale
THREADS = 256  # number of threads of a CUDA thread block
_BLOCKS = CELL // BLOCK  # number of scales of a cell
_CHUNK = 256  # number of cells that torch packs or unpacks at a time (16 MiB in float32)
_FP8_MOST = 448.0

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A format in which weights are packed: how many bits their codes and scales take, and what the codes mean.

    An element of a weight is unpacked as the value of its code times a scale, which 64 consecutive elements share.

    Attributes:
        name: the format's name, which is its key in `FORMATS`.
        bits: the bits of an element's code, 4 or 8.
        scale_bits: the bits of a scale: 32, or 8 if the scales are compressed.
        values: for 4 bits, the values of the 16 codes, ascending; one of them is 0, and the largest magnitude is 1.
            Empty for 8 bits, where the codes are float8_e4m3fn numbers.
        by_name: whether `auto_wrap(quantize_frozen=)` accepts the name.
    """

    name: str
    bits: int
    scale_bits: int
    values: tuple[float, ...] = ()
    by_name: bool = True

    @property
    def cell_bytes(self) -> int:
        """The number of bytes of a packed cell (CELL elements and their scales), a multiple of 16."""
        return self._codes + _BLOCKS * self.scale_bits // 8 + (16 if self.scale_bits == 8 else 0)

    @property
    def _codes(self) -> int:
        """The number of bytes of the codes in a packed cell (CELL elements). The scales follow the codes."""
        return CELL * self.bits // 8

    def packed_bytes(self, numel: int) -> int:
        """Return the number of bytes that `numel` elements take when they are packed.

        Elements are packed in cells of CELL (16,384) elements. An incomplete last cell takes as much as a full one.
        """
        return -(-numel // CELL) * self.cell_bytes

    @torch.no_grad()
    def pack(self, values: Tensor) -> Tensor:
        """Pack `values`, a floating-point tensor, into (cells * cell_bytes,) uint8 on the same device.

        Each cell contains the codes and scales of CELL (16,384) elements. The last cell is padded with zeros.

        Raises ValueError if `values` contain inf or NaN, or if an element would overflow the dtype of `values` when it
        is unpacked.
        """
        flat = values.detach().reshape(-1)
        packed = torch.zeros(-(-len(flat) // CELL), self.cell_bytes, dtype=torch.uint8, device=flat.device)
        if not len(flat) or flat.is_meta:
            return packed.view(-1)
        absmax = torch.cat([_blocks(chunk).abs().amax(-1) for chunk in flat.split(_CHUNK * CELL)])
        # The errors below name neither the weight nor the format, because `PackedStorage.fill` adds both names.
        if not absmax.isfinite().all():
            raise ValueError(
                "quantization needs finite values, but the weight contains inf or NaN (check the checkpoint from which "
                "it was loaded)"
            )
        scales = self._put_scales(packed[:, self._codes :], absmax, -(-len(flat) // BLOCK))
        if not (scales if self.values else scales * _FP8_MOST).to(values.dtype).isfinite().all():
            raise ValueError(
                f"the weight has elements so large (up to {absmax.max().item():.6g}) that quantization would round "
                f"them to values that overflow {values.dtype} (cast the model to a wider dtype, if there is one)"
            )
        for number, chunk in enumerate(flat.split(_CHUNK * CELL)):
            own = slice(number * _CHUNK, (number + 1) * _CHUNK)
            divisors = absmax if self.values else scales
            packed[own, : self._codes] = self._encode(_blocks(chunk), divisors[own])
        return packed.view(-1)

    def _put_scales(self, tails: Tensor, absmax: Tensor, count: int) -> Tensor:
        """Compute the scales of each packed cell (CELL elements), and write them into `tails`.

        Args:
            tails: (cells, bytes) uint8, the bytes of each cell after its codes.
            absmax: the largest magnitude in each group of 64 elements, (cells, 256) float32.
            count: the number of these groups that belong to the tensor. The others are padding of the last cell.

        Returns:
            The scales as `unpack` reads them from `tails`, (cells, 256) float32.
        """
        if self.scale_bits == 32:
            # `most` is a tensor, because a GPU computes a division by a Python number as a multiplication by the
            # inverse of the number, which rounds differently.
            most = torch.full_like(absmax, _FP8_MOST)
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
        """Return the scales of packed cells (of CELL elements each), one per 64 elements: (cells, 256) float32.

        tails: (cells, bytes) uint8, the bytes of each cell after its codes. They contain the scales.
        """
        if self.scale_bits == 32:
            return tails.contiguous().view(torch.float32)
        floats = tails[:, _BLOCKS : _BLOCKS + 8].contiguous().view(torch.float32)
        return dynamic_values(tails.device)[tails[:, :_BLOCKS].int()] * floats[:, :1] + floats[:, 1:]

    def _encode(self, blocks: Tensor, divisors: Tensor) -> Tensor:
        """Divide each block of 64 elements by its divisor, and return the codes of the nearest values.

        blocks: (cells, 256, 64) float32. A cell has CELL (16,384) elements.
        divisors: (cells, 256) float32: for 4-bit codes the largest magnitude of each block, for float8 the scales.

        Returns (cells, bytes of a cell's codes) uint8.
        """
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
        """Return the packed form of a tensor that is already quantized, from its 4-bit codes and scales.

        Used for weights that bitsandbytes has quantized. Their codes and scales are copied, so the values stay exactly
        the same. `pack` would have to quantize the unpacked weights a second time, which could change the values.

        Args:
            numel: the number of elements of the tensor.
            codes: 1-D uint8, two elements per byte, the first one in the upper half.
            scales: 1-D, one per 64 elements: float32 or, if compressed, uint8. A compressed scale i represents the
                number `dynamic_values(device)[i] * factor + mean`.
            factors: for compressed scales, one float32 factor for each 256 consecutive scales; otherwise None.
            mean: for compressed scales, the float32 mean of the tensor's scales; otherwise None.

        Returns:
            (cells * cell_bytes,) uint8, in new memory. Each cell contains the codes and scales of CELL (16,384)
            elements.
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
        """Unpack `packed` (cells * cell_bytes,) uint8 into `out` (cells * CELL,) float32, float16 or bfloat16.

        Each cell contains the codes and scales of CELL (16,384) elements. Both tensors must be contiguous and aligned
        to 16 bytes. On a GPU, one kernel is launched on the current stream.
        """
        cells = packed.numel() // self.cell_bytes
        expect("packed", packed, (torch.uint8,), (cells * self.cell_bytes,), out.device)
        expect("out", out, C_NAMES, (cells * CELL,), packed.device)
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
        """Unpack `packed` into `out` with torch's operations. On the CPU, `unpack` calls this instead of a CUDA kernel.

        packed: (cells * cell_bytes,) uint8. Each cell contains the codes and scales of CELL elements.
        out: (cells * CELL,), overwritten.
        """
        rows = packed.view(-1, self.cell_bytes)
        for cells, target in zip(rows.split(_CHUNK), out.view(-1, _BLOCKS, BLOCK).split(_CHUNK)):
            codes = cells[:, : self._codes]
            if not self.values:
                values = codes.contiguous().view(torch.float8_e4m3fn).float()
            else:
                values = self.code_values(out.device)[torch.stack([codes >> 4, codes & 15], -1).int()]
            target.copy_(values.view(-1, _BLOCKS, BLOCK) * self._scales(cells[:, self._codes :])[..., None])

    def code_values(self, device: torch.device) -> Tensor:
        """Return the values of the 16 codes of this 4-bit format, (16,) float32 on `device`."""
        return _tables(self.values, device)[:16]


FORMATS = {
    each.name: each
    for each in (
        Format("nf4", 4, 8, _NF4),
        # Only for weights that bitsandbytes has already quantized, without double quantization. Users cannot select it.
        Format("nf4_float32", 4, 32, _NF4, by_name=False),
        Format("fp8", 8, 32),
    )
}
QUANTIZE_FROZEN = tuple(name for name, form in FORMATS.items() if form.by_name)


def dynamic_values(device: torch.device) -> Tensor:
    """Return the values of the 256 codes of a compressed scale: (256,) float32 on `device`, ascending.

    A packed weight has one scale for every 64 elements. A compressed scale is stored as a code of 8 bits, the index of
    one of these values. The scale is this value times a factor, plus a mean: the factor is stored once for the 256
    scales of a cell, and the mean is that of all scales of the tensor.

    The values are 0, 1, and values in each of the seven decades below 1. Each decade is divided into equal parts, and
    contributes the midpoints of these parts and their negatives. The decade from 0.1 to 1 has 64 parts, the decade from
    0.01 to 0.1 has 32, and so on.
    """
    return _tables(_NF4, device)[16:]


@cache
def _tables(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the two lookup tables of the kernel that unpacks weights, in one tensor: (272,) float32 on `device`.

    The tables are `values` and the 256 values of compressed scales (see `dynamic_values`).

    values: the values of the 16 codes of a 4-bit format.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        middles = 10.0 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor([*values, *sorted(numbers)], dtype=torch.float32, device=device)


def _nearest(values: Tensor, numbers: Tensor) -> Tensor:
    """Return, for each element of `values`, the index of the nearest of `numbers`; in a tie, the lower index.

    values: float32, of any shape. The result has the same shape, and is uint8.
    numbers: (n,) float32, ascending.
    """
    return torch.bucketize(values, (numbers[:-1] + numbers[1:]) / 2, out_int32=True).to(torch.uint8)


def _blocks(flat: Tensor) -> Tensor:
    """Return the elements in blocks of 64, as (cells, 256, 64) float32. The elements of a block share a scale.

    flat: (n,) elements. They are padded with zeros to full cells of 256 blocks.
    """
    return torch.nn.functional.pad(flat.float(), (0, -len(flat) % CELL)).view(-1, _BLOCKS, BLOCK)


@cache
def variant(form: Format, dtype: torch.dtype) -> Variant:
    """Return the CUDA source file and the macros from which the kernel that unpacks weights is compiled.

    The source, kernels/quantize.cu, serves all formats and dtypes. The macros select one format and one dtype.

    form: the format of the packed weights.
    dtype: the dtype of the unpacked weights: float32, float16 or bfloat16.
    """
    tables = "float" if form.values else "none"
    defines = {"BITS": str(form.bits), "SCALE_BITS": str(form.scale_bits), "ELEMENT": C_NAMES[dtype], "TABLES": tables}
    return Variant("quantize", tuple(defines.items()))
