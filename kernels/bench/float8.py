"""Measure the kernels that round matrices to float8, and the same operations in eager torch."""

import torch
from measuring import Line, measure

from hf_bmtrain.features.float8 import arithmetic as float8

SHAPES = ((8192, 4096), (4096, 5120), (8192, 14336))


def eager_rows(x: torch.Tensor) -> torch.Tensor:
    absmax = x.abs().amax(1, keepdim=True).float()
    return (x.float() * (float8.MOST / absmax)).clamp(-float8.MOST, float8.MOST).to(torch.float8_e4m3fn)


def bench_shape(shape: tuple[int, int]) -> list[Line]:
    x = torch.randn(shape, device="cuda").bfloat16()
    size, codes = x.numel(), x.to(torch.float8_e4m3fn)
    half = size // 256 * 128
    pieces = float8.Pieces([(0, half), (half, size)], x.dtype, x.device)
    rounded = torch.empty(size, dtype=torch.uint8, device="cuda")

    def by_pieces(flat: torch.Tensor) -> None:
        bits = torch.zeros(len(pieces), dtype=torch.int32, device="cuda")
        float8.measure_pieces(flat, pieces, bits)
        float8.round_pieces(flat, pieces, bits, rounded)

    return [
        Line(f"float8 {shape[0]}x{shape[1]} bf16, by rows", measure(lambda: float8.quantize_rows(x)), 3 * size),
        Line("  by rows and columns", measure(lambda: float8.quantize_both(x)), 6 * size),
        Line("  one scale", measure(lambda: float8.quantize_full(x)), 5 * size),
        Line("  one scale, transposed", measure(lambda: float8.quantize_transposed(x)), 5 * size),
        Line("  two ranges of a shard", measure(lambda: by_pieces(x.view(-1))), 5 * size),
        Line("  codes transposed", measure(lambda: float8.transpose(codes)), 2 * size),
        Line("  eager torch, codes transposed", measure(lambda: codes.t().contiguous()), 2 * size),
        Line("  eager torch, by rows", measure(lambda: eager_rows(x)), 3 * size),
    ]


def bench_float8() -> list[Line]:
    return [line for shape in SHAPES for line in bench_shape(shape)]
