"""The kernels that round to float8 on a GPU, against the bits of the reference, and products against the CPU's."""

import pytest
import torch

import kernel_checks as checks
from float8_training import same_bits
from hf_bmtrain.features.float8 import arithmetic as float8
from lagging import lagging
from ranks import with_tensors_on_gpu

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAMES = {
    "rows": {"quantize_rows"},
    "both": {"absmax_both", "round_both"},
    "whole": {"absmax_whole", "round_whole"},
    "transposed": {"absmax_whole", "round_transposed"},
    "pieces": {"absmax_pieces", "round_pieces"},
}


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(checks.FLOAT8))
@pytest.mark.parametrize(
    ("shape", "offset"),
    [((1, 1), 0), ((1003, 1008), 0), ((257, 1001), 1), ((2048, 5120), 3), ((2049, 20480), 0)],
    ids=str,
)
def test_float8(name: str, dtype: torch.dtype, shape: tuple[int, int], offset: int, launched) -> None:
    checks.check_float8(on_gpu, name, dtype, shape, offset)
    assert set(launched) == NAMES[name]


# of several blocks, with gaps, aligned and not
PIECES = [[(0, 4096), (4224, 4224), (4224, 1 << 22), ((1 << 22) + 128, (1 << 22) + 144)], [(3, 9000), (9001, 100_003)]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranges", PIECES, ids=["aligned", "not"])
def test_float8_pieces(dtype: torch.dtype, ranges: list[tuple[int, int]], launched) -> None:
    checks.check_float8_pieces(on_gpu, dtype, ranges)
    assert set(launched) == NAMES["pieces"]


@pytest.mark.parametrize("shape", [(16, 16), (1008, 5120), (14336, 4096)], ids=str)
def test_transpose(shape: tuple[int, int], launched) -> None:
    checks.check_transpose(on_gpu, shape)
    assert launched == ["transpose_codes"]


@pytest.mark.parametrize("shape", [(1003, 1008), (16, 1001)], ids=str)
def test_compilers_know_what_rounding_both_ways_returns(shape: tuple[int, int], launched) -> None:
    torch.library.opcheck(torch.ops.hf_bmtrain.quantize_both.default, (torch.randn(shape, device="cuda"),))
    assert set(launched) == NAMES["both"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_codes(dtype: torch.dtype, launched) -> None:
    checks.check_float8_codes(on_gpu, dtype)
    assert set(launched) == set.union(*NAMES.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_product(fast: bool, dtype: torch.dtype, launched) -> None:
    """y, dx and dW of a linear layer: a scale a row with one scale, and with a scale a row."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products of float8 factors need compute capability 8.9")
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(shape).bfloat16() for shape in ((300, 512), (256, 512), (300, 256)))

    def products(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        (x_rows, x_columns), (dy_rows, dy_columns) = float8.quantize_both(x), float8.quantize_both(dy)
        return [
            float8.product(x_rows, float8.quantize_full(weight), dtype, fast),
            float8.product(dy_rows, float8.quantize_transposed(weight), dtype, fast),
            float8.product(dy_columns, x_columns, dtype, fast),
        ]

    for found, expected in zip(products(x.cuda(), weight.cuda(), dy.cuda()), products(x, weight, dy), strict=True):
        assert found.is_cuda and found.dtype == expected.dtype == dtype
        # a GPU rounds to bfloat16, and adds in 14 bits or more
        torch.testing.assert_close(found.cpu(), expected, rtol=2**-7, atol=float(expected.abs().max()) * 2**-9)


def lagging_updates(seed: int) -> None:
    with lagging(seed):
        same_bits("llama", {"offload": True, "accumulate": 2})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_shards_are_rounded_behind_their_updates(gpus, seed: int) -> None:
    gpus(with_tensors_on_gpu, lagging_updates, seed)
