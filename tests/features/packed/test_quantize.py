"""Packed weights against bitsandbytes on the CPU, where that is installed, and what a cell holds."""

import pytest
import torch

from cases import by_default, full, in_full
from hf_bmtrain.features.packed.arithmetic import BLOCK, CELL, FORMATS, Format, dynamic_values

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")


def unpack(name, packed, numel, dtype):
    form = FORMATS[name]
    out = torch.empty(packed.numel() // form.cell_bytes * CELL, dtype=dtype)
    form.unpack(packed, out)
    return out[:numel]


def draw(number):
    """Tensors of odd sizes and of magnitudes from 1e-4 to 1e2."""
    generator = torch.Generator().manual_seed(number)
    numel = int(torch.randint(1, 3 * CELL, (), generator=generator))
    scale = 10 ** float(torch.empty(()).uniform_(-4, 2, generator=generator))
    return (torch.randn(numel, generator=generator) * scale).to(DTYPES[number % 3])


def cells_of(codes, state):
    """The cells with the codes and scales of a tensor that bitsandbytes has quantized."""
    form, scales = FORMATS["nf4" if state.nested else "nf4_float32"], (state.absmax,)
    if state.nested:
        scales = (state.absmax, state.state2.absmax, state.offset)
    return form.assemble(state.shape.numel(), codes.view(-1), *scales)


@pytest.mark.parametrize("part", [0, *in_full(*range(1, 10))])
def test_the_bits_are_those_of_bitsandbytes(part: int) -> None:
    """1,000 tensors: what it has packed is unpacked alike, and packed here has the same codes.

    The numbers of scales are left out: its CPU code does not always take the nearest one.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(FORMATS["nf4"].code_values(CPU), functional.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(dynamic_values(CPU), functional.create_dynamic_map())
    for number in range(100 * part, 100 * (part + 1)):
        values = draw(number)
        codes, state = functional.quantize_4bit(values, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
        expected = functional.dequantize_4bit(codes, state).flatten()
        assert torch.equal(unpack("nf4", cells_of(codes, state), len(values), values.dtype), expected)
        packed = FORMATS["nf4"].pack(values), cells_of(codes, state)
        mine, theirs = (each.view(-1, FORMATS["nf4"].cell_bytes) for each in packed)
        numel = len(values) // 2
        assert torch.equal(mine[:, : CELL // 2].flatten()[:numel], theirs[:, : CELL // 2].flatten()[:numel])
        assert torch.equal(mine[:, CELL // 2 + 256 :], theirs[:, CELL // 2 + 256 :])
        errors = [(unpack("nf4", each, len(values), values.dtype).float() - values).abs().mean() for each in packed]
        assert errors[0] <= 1.001 * errors[1]
        codes, state = functional.quantize_4bit(values, blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
        cells, single = cells_of(codes, state), "nf4_float32"
        expected = functional.dequantize_4bit(codes, state).flatten()
        whole = unpack(single, cells, len(cells) // FORMATS[single].cell_bytes * CELL, values.dtype)
        assert torch.equal(whole[: len(values)], expected) and not whole[len(values) :].any()
        assert torch.equal(FORMATS[single].pack(values), cells)


@pytest.mark.parametrize("numel", [3 * CELL - 129, *in_full(1, 63, 64, CELL + 1, 2 * CELL)])
def test_assembled(numel: int) -> None:
    """Cells of codes and scales that exist already hold their products, and zeros behind them."""
    codes = torch.randint(256, (-(-numel // 2),), dtype=torch.uint8)
    blocks = -(-numel // BLOCK)
    values = FORMATS["nf4"].code_values(CPU)[torch.stack([codes >> 4, codes & 15], -1).view(-1)[:numel].int()]
    scales, numbers = torch.rand(blocks), torch.randint(256, (blocks,), dtype=torch.uint8)
    factors, mean = torch.rand(-(-blocks // 256)), torch.rand(())
    around = dynamic_values(CPU)[numbers.int()] * factors.repeat_interleave(256)[:blocks] + mean
    for name, given, used in (("nf4_float32", (scales,), scales), ("nf4", (numbers, factors, mean), around)):
        packed = FORMATS[name].assemble(numel, codes, *given)
        assert len(packed) == FORMATS[name].packed_bytes(numel)
        whole = unpack(
            name, packed, FORMATS[name].packed_bytes(numel) // FORMATS[name].cell_bytes * CELL, torch.float32
        )
        assert torch.equal(whole[:numel], values * used.repeat_interleave(BLOCK)[:numel])
        assert not whole[numel:].any()


@pytest.mark.parametrize("name", by_default(FORMATS, "nf4", "fp8"))
@pytest.mark.parametrize("dtype", by_default(DTYPES, torch.bfloat16), ids=str)
def test_cells_do_not_depend_on_each_other(name: str, dtype: torch.dtype) -> None:
    form, values = FORMATS[name], torch.randn(300 * CELL + 77).to(dtype)  # more than are converted at a time
    packed = form.pack(values)
    assert packed.numel() == form.packed_bytes(len(values)) and form.cell_bytes % 16 == 0
    whole = unpack(name, packed, len(values), dtype)
    for cell in (0, 255, 256, 300):
        one = packed[cell * form.cell_bytes : (cell + 1) * form.cell_bytes]
        there = whole[cell * CELL : (cell + 1) * CELL]
        assert torch.equal(unpack(name, one, len(there), dtype), there)
    assert not unpack(name, packed, 301 * CELL, dtype)[len(values) :].any()
    again = form.pack(whole)
    if name == "fp8":
        torch.testing.assert_close(unpack(name, again, len(values), dtype), whole, rtol=2**-4, atol=0)
    assert form.pack(values[:0]).numel() == 0


@full
@pytest.mark.parametrize("value", [torch.inf, *in_full(torch.nan)])
@pytest.mark.parametrize("name", by_default(FORMATS, "fp8"))
def test_not_finite(name: str, value: float) -> None:
    values = torch.ones(3 * CELL)
    values[2 * CELL + 5] = value
    with pytest.raises(ValueError, match="inf or NaN"):
        FORMATS[name].pack(values)


@full
@pytest.mark.parametrize("name", by_default(FORMATS, "fp8"))
def test_tiny_and_zero(name: str) -> None:
    """Blocks of zeros stay zeros in fp8, and nearly in nf4, whose scales are compressed; tiny ones stay finite."""
    for values in (torch.zeros(500), torch.full((500,), 1e-45), torch.full((500,), -1e-38)):
        out = unpack(name, FORMATS[name].pack(values), 500, torch.float32)
        assert (out - values).abs().max() <= values.abs().max()


def test_a_format_with_values_of_its_own():
    """Another 4-bit format is one entry: the codes and their values come from it, and zeros fill the last cell."""
    eighths = tuple(code / 8 - 1 for code in range(15)) + (1.0,)
    form = Format("eighths", 4, 32, eighths)
    values = torch.tensor(eighths).repeat(700)[: BLOCK * 100 + 3] * 3
    packed = form.pack(values)
    out = torch.empty(CELL)
    form.unpack(packed, out)
    assert torch.equal(out[: len(values)], values) and not out[len(values) :].any()
    scales = torch.full((101,), 3.0)
    codes = packed[: CELL // 2][: (len(values) + 1) // 2]
    assert torch.equal(form.assemble(len(values), codes, scales)[: len(codes)], codes)
