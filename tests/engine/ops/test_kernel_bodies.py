"""The operations against float64 on the CPU: the torch references, and the kernels' own sources on a shim."""

import shutil
from collections.abc import Iterator

import pytest
import torch

import kernel_checks as checks
import kernel_shim
from cases import full, in_full, pairwise
from hf_bmtrain.engine.ops import adam, eight_bits, grad_norm, peer_sum
from hf_bmtrain.features.experts import arithmetic as experts
from hf_bmtrain.features.float8 import arithmetic as float8
from hf_bmtrain.features.lora import arithmetic as lora
from hf_bmtrain.features.loss import cross_entropy
from hf_bmtrain.features.loss.cross_entropy import CrossEntropy, Plan
from hf_bmtrain.features.packed import arithmetic as quantize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLACES = ("reference", "shim")
NAMES = str


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> kernel_shim.Shim:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels for the CPU")
    return kernel_shim.Shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(params=[PLACES[1], *in_full(PLACES[0])])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[checks.Place]:
    """Runs a test twice: with plain CPU tensors, and with tensors that take the CUDA path into the shim."""
    if request.param == "reference":
        yield lambda tensor: tensor
        return
    shim = request.getfixturevalue("shim")
    before = len(shim.launches)
    for module in (adam, cross_entropy, eight_bits, experts, float8, grad_norm, lora, peer_sum, quantize):
        monkeypatch.setattr(module, "kernel", shim.kernel)
    monkeypatch.setattr(adam, "THREADS", 64)
    monkeypatch.setattr(eight_bits, "THREADS", 64)
    monkeypatch.setattr(grad_norm, "THREADS", 64)
    monkeypatch.setattr(peer_sum, "THREADS", 64)
    monkeypatch.setattr(CrossEntropy, "plan", lambda self, logits: Plan(2, 64, 40))
    yield kernel_shim.place
    assert len(shim.launches) > before, "the test did not reach a kernel"


@full
@pytest.mark.parametrize(
    ("place", "dtype", "sizes"),
    pairwise([], PLACES, DTYPES, [(20011, 5), (1, 0), (1000, 3)]),
    indirect=["place"],
    ids=str,
)
def test_squared_norm(place: checks.Place, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    checks.check_squared_norm(place, dtype, *sizes)


@full
@pytest.mark.parametrize(
    ("place", "dtype", "offsets"),
    pairwise([], PLACES, DTYPES, [[3, 3, 4, 4, 900, 903, 903, 9001], [0, 10], [1, 70000, 70001, 140003]]),
    indirect=["place"],
    ids=str,
)
def test_segments(place: checks.Place, dtype: torch.dtype, offsets: list[int]) -> None:
    checks.check_segments(place, dtype, offsets)


@pytest.mark.parametrize(
    ("place", "dtype", "sizes"),
    pairwise(
        [("shim", torch.bfloat16, (4096, 5, 3))], PLACES, DTYPES, [(4096, 5, 3), (1, 2, 0), (7, 3, 1), (1000, 4, 0)]
    ),
    indirect=["place"],
    ids=str,
)
def test_peer_mean(place: checks.Place, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    checks.check_peer_mean(place, dtype, *sizes)


@pytest.mark.parametrize(
    ("place", "dtype", "name"),
    pairwise([("shim", torch.bfloat16, "nf4")], PLACES, DTYPES, list(quantize.FORMATS)),
    indirect=["place"],
    ids=str,
)
def test_unpack(place: checks.Place, dtype: torch.dtype, name: str) -> None:
    checks.check_unpack(place, dtype, name, numel=20011)


# sizes of one and of several tiles, with rows that are aligned, that are not, and that are longer than what is kept
FLOAT8 = [((1, 1), 0), ((21, 48), 0), ((64, 160), 3), ((80, 272), 0), ((67, 131), 1), ((2, 8400), 0), ((2, 8201), 0)]


@pytest.mark.parametrize(
    ("case", "dtype", "name"),
    pairwise([(FLOAT8[4], torch.bfloat16, [*checks.FLOAT8][-1])], FLOAT8, DTYPES, list(checks.FLOAT8)),
    ids=NAMES,
)
@pytest.mark.parametrize("place", ["shim"], indirect=True)
def test_float8(place: checks.Place, name: str, dtype: torch.dtype, case: tuple[tuple[int, int], int]) -> None:
    shape, offset = case
    checks.check_float8(place, name, dtype, shape, offset)


@full
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_float8_codes(place: checks.Place, dtype: torch.dtype) -> None:
    checks.check_float8_codes(place, dtype)


# gaps before, between and after pieces that are empty, of one element, and of several blocks; aligned, and not
PIECES = [[(16, 48), (64, 64), (64, 16448), (16512, 16528)], [(3, 3), (3, 4), (9, 9000), (9001, 9001)], [(0, 9000)]]


@full
@pytest.mark.parametrize(
    ("place", "dtype", "ranges"), pairwise([], PLACES, DTYPES, PIECES), indirect=["place"], ids=str
)
def test_float8_pieces(place: checks.Place, dtype: torch.dtype, ranges: list[tuple[int, int]]) -> None:
    checks.check_float8_pieces(place, dtype, ranges)


# (tokens, k, width): fewer vectors than the lanes of a warp, as many, more; more than the threads of a block
EXPERTS = [(5, 2, 64), (3, 1, 256), (7, 4, 328), (2, 3, 2104)]


@pytest.mark.parametrize(
    ("place", "dtype", "weights", "shape"),
    pairwise([("shim", torch.bfloat16, torch.float32, EXPERTS[2])], PLACES, DTYPES, (*DTYPES, None), EXPERTS),
    indirect=["place"],
    ids=str,
)
def test_sums_of_rows(place: checks.Place, dtype, weights, shape: tuple[int, int, int]) -> None:
    checks.check_sums_of_rows(place, dtype, weights, *shape)


@pytest.mark.parametrize(
    ("place", "dtype", "shape"),
    pairwise([("shim", torch.bfloat16, (6, 328))], PLACES, DTYPES, [(6, 328), (1, 8), (2, 2104)]),
    indirect=["place"],
    ids=str,
)
def test_silu_gate(place: checks.Place, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    checks.check_silu_gate(place, dtype, *shape)


@pytest.mark.parametrize("sizes", [(8, 40, 24), *in_full((1, 1, 1), (16, 300, 129))], ids=str)
def test_split(place: checks.Place, sizes: tuple[int, int, int]) -> None:
    checks.check_split(place, *sizes)


@full
@pytest.mark.parametrize("shape", [(80, 272), (16, 16), (144, 528)], ids=str)
def test_transpose(place: checks.Place, shape: tuple[int, int]) -> None:
    checks.check_transpose(place, shape)


@full
@pytest.mark.parametrize("flag", [1.0, 0.0])
def test_adam_prepare(place: checks.Place, flag: float) -> None:
    checks.check_prepare(place, flag)


COMBINATIONS = [
    (g, m, w)
    for g in DTYPES
    for m in (torch.float32, torch.bfloat16)
    for w in (None, torch.float16, torch.bfloat16)
    if w is None or g in (w, torch.float32)
]


@pytest.mark.parametrize(
    ("place", "dtypes", "sizes"),
    pairwise(
        [("shim", (torch.bfloat16,) * 3, (517, (0, 1, 2, 3, 1)))],
        PLACES,
        COMBINATIONS,
        [(517, (0, 1, 2, 3, 1)), (1030, (3, 3, 3, 3, 3))],
    ),
    indirect=["place"],
    ids=str,
)
def test_adam_update(place: checks.Place, dtypes, sizes) -> None:
    checks.check_adam(place, dtypes, *sizes)


@pytest.mark.parametrize(
    ("place", "grad", "exp_avg", "sizes"),
    pairwise(
        [("shim", torch.bfloat16, torch.bfloat16, (517, (0, 1, 2, 3, 1)))],
        PLACES,
        [torch.float32, torch.bfloat16],
        [torch.float32, torch.bfloat16],
        checks.LYING,
    ),
    indirect=["place"],
    ids=str,
)
def test_update_of_residuals(place: checks.Place, grad: torch.dtype, exp_avg: torch.dtype, sizes) -> None:
    checks.check_residual(place, grad, exp_avg, *sizes)


@full
def test_residuals_of_all_kinds(place: checks.Place) -> None:
    checks.check_residual_patterns(place, 1 << 14)


@full
def test_adam_skips(place: checks.Place) -> None:
    checks.check_adam_skips(place)


def test_stochastic_rounding(place: checks.Place) -> None:
    checks.check_stochastic_rounding(place, 20000)


EIGHT_BITS = [
    (torch.bfloat16, torch.bfloat16, torch.int16), (torch.float32, torch.bfloat16, torch.int16),
    (torch.float32, None, torch.float32), (torch.bfloat16, None, torch.float32),
    (torch.float16, torch.float16, torch.float32), (torch.float32, torch.bfloat16, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "dtypes", "sizes"),
    pairwise(
        [("shim", EIGHT_BITS[0], (10013, 0)), ("reference", EIGHT_BITS[2], (4096, 0))],
        PLACES,
        EIGHT_BITS,
        [(10013, 0), (4096, 0), (2001, 3)],
    ),
    indirect=["place"],
    ids=str,
)
def test_eight_bits(place: checks.Place, dtypes, sizes: tuple[int, int]) -> None:
    checks.check_eight_bits(place, dtypes, *sizes)


def test_eight_bits_of_parts(place: checks.Place) -> None:
    checks.check_eight_bits_of_parts(place, 10013)


@pytest.mark.parametrize("place", ["shim"], indirect=True)
def test_eight_bits_of_rare_values(place: checks.Place) -> None:
    checks.check_eight_bits_of_rare_values(place)


@pytest.mark.parametrize("place", ["reference", *in_full("shim")], indirect=True)
def test_eight_bits_over_time(place: checks.Place) -> None:
    checks.check_eight_bits_over_time(place)


LOSSES = {
    "plain": (CrossEntropy(), False),
    "smoothing": (CrossEntropy(label_smoothing=0.1), False),
    "weights": (CrossEntropy(label_smoothing=0.2, ignore_index=3), True),
    "z_loss": (CrossEntropy(z_loss=0.01), False),
    "softcap": (CrossEntropy(softcap=5.0), False),
    "all": (CrossEntropy(label_smoothing=0.1, z_loss=0.01, softcap=4.0), True),
}


@pytest.mark.parametrize(
    ("place", "dtype", "name"),
    pairwise([("shim", torch.bfloat16, "all")], PLACES, DTYPES, list(LOSSES)),
    indirect=["place"],
    ids=str,
)
def test_cross_entropy(place: checks.Place, name: str, dtype: torch.dtype) -> None:
    loss, weighted = LOSSES[name]
    checks.check_cross_entropy(place, loss, dtype, (3, 1003), weighted, pad=5, offset=3)
    checks.check_cross_entropy(place, loss, dtype, (3, 1001), weighted)  # the gradient beside logits as they are


@full
@pytest.mark.parametrize(
    "chosen",
    [Plan(8, 64, 7), Plan(1, 64, 0), Plan(1, 96, 3000), Plan(1, 64, 100), Plan(4, 64, 1000)],
    ids=str,
)
@pytest.mark.parametrize("classes", [4099, 9])
@pytest.mark.parametrize("place", ["shim"], indirect=True)
def test_every_way_to_share_a_row(place: checks.Place, monkeypatch, chosen: Plan, classes: int) -> None:
    monkeypatch.setattr(CrossEntropy, "plan", lambda self, logits: chosen)
    checks.check_cross_entropy(place, CrossEntropy(), torch.bfloat16, (2, classes), pad=1, offset=1)


@full
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_odd_rows(place: checks.Place, dtype: torch.dtype) -> None:
    checks.check_odd_rows(place, dtype, 300)


@full
def test_confident_target(place: checks.Place) -> None:
    checks.check_confident_target(place)


@full
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_rescale(place: checks.Place, dtype: torch.dtype) -> None:
    checks.check_rescale(place, dtype)
