"""Packed weights against bitsandbytes on the CPU, where that is installed, and what a cell holds."""

import pytest
import torch

from hf_bmtrain.ops.quantize import BLOCK, CELL, FORMATS, dynamic_values, nf4_values

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
    """The bytes of cells with the codes and scales of a tensor that bitsandbytes has quantized."""
    count = -(-state.absmax.numel() // 256)
    cells = torch.zeros(count, FORMATS["nf4"].cell_bytes, dtype=torch.uint8)
    for start, stop, values in ((0, CELL // 2, codes), (CELL // 2, CELL // 2 + 256, state.absmax)):
        padded = torch.zeros(count * (stop - start), dtype=torch.uint8)
        padded[: values.numel()] = values.view(-1)
        cells[:, start:stop] = padded.view(count, -1)
    floats = torch.stack([state.state2.absmax, state.offset.expand(count)], 1)
    cells[:, CELL // 2 + 256 : CELL // 2 + 264] = floats.view(torch.uint8)
    return cells.view(-1)


@pytest.mark.parametrize("part", range(10))
def test_the_bits_are_those_of_bitsandbytes(part: int) -> None:
    """1,000 tensors: what it has packed is unpacked alike, and packed here has the same codes.

    The numbers of scales are left out: its CPU code does not always take the nearest one.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(nf4_values(CPU), functional.get_4bit_type("nf4", device="cpu"))
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


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", list(FORMATS))
def test_not_finite(name: str, value: float) -> None:
    values = torch.ones(3 * CELL)
    values[2 * CELL + 5] = value
    with pytest.raises(ValueError, match="inf or NaN"):
        FORMATS[name].pack(values)


@pytest.mark.parametrize("name", list(FORMATS))
def test_tiny_and_zero(name: str) -> None:
    """Blocks of zeros stay zeros in fp8, and nearly in nf4, whose scales are compressed; tiny ones stay finite."""
    for values in (torch.zeros(500), torch.full((500,), 1e-45), torch.full((500,), -1e-38)):
        out = unpack(name, FORMATS[name].pack(values), 500, torch.float32)
        assert (out - values).abs().max() <= values.abs().max()
