"""The compile gate: every variant the code can ask for compiles for every architecture, without a GPU.

It shows syntax, architecture guards and register spills; it says nothing about results.
"""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kernel_shim
from cases import full, in_full, rows_in_full
from hf_bmtrain.engine.base import launch
from hf_bmtrain.engine.ops import adam, eight_bits, grad_norm, peer_sum
from hf_bmtrain.features.experts import arithmetic as experts
from hf_bmtrain.features.float8 import arithmetic as float8
from hf_bmtrain.features.lora import arithmetic as lora
from hf_bmtrain.features.loss import cross_entropy
from hf_bmtrain.features.loss.cross_entropy import CrossEntropy, Plan
from hf_bmtrain.features.packed import arithmetic as quantize
from kernel_variants import MODULES, variants

nvrtc = pytest.importorskip("cupy", reason="no CuPy: install the extra 'ci'", exc_type=ImportError).cuda.nvrtc
ARCHS = (75, 90, 100)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@full
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.split(".")[-1])
@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS if arch != 90)])
def test_every_variant_compiles(module, arch: int) -> None:
    if arch not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc.getVersion()} does not know sm_{arch}")
    with ThreadPoolExecutor(2) as pool:
        logs = list(
            pool.map(lambda v: launch.compile_cubin(v, arch, ("--ptxas-options=-v",))[1], variants(module, arch))
        )
    assert logs
    for log in logs:
        properties = [line for line in log.splitlines() if "stack frame" in line]
        assert properties
        assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in properties), log


def ask_for_everything() -> None:
    """Calls every public function with every combination of dtypes; those without a kernel raise."""
    n, place = 64, kernel_shim.place
    for dtype in DTYPES:
        flat, out = place(torch.ones(n, dtype=dtype)), place(torch.zeros(2, dtype=torch.float64))
        attempt(grad_norm.accumulate_squared_norm, flat, out)
        attempt(grad_norm.segmented_squared_norm, flat, grad_norm.Segments([0, 3, n], "cpu"))
        for total in (torch.ones(n), None):
            rows = place(torch.ones(2, n, dtype=dtype))
            attempt(peer_sum.peer_mean, rows, flat, 1, flat, None if total is None else place(total))
        attempt(cross_entropy.rescale_, place(torch.ones(3, 5, dtype=dtype)), torch.ones(1), torch.ones(3))
        for form in quantize.FORMATS.values():
            packed = place(form.pack(torch.ones(n)))
            attempt(form.unpack, packed, place(torch.zeros(quantize.CELL, dtype=dtype)))
        for shape in ((16, 32), (3, 5)):
            for function in (
                float8.quantize_rows, float8.quantize_both, float8.quantize_full, float8.quantize_transposed,
            ):  # fmt: skip
                attempt(function, place(torch.ones(shape, dtype=dtype)))
        rows, order = place(torch.ones(4, n, dtype=dtype)), place(torch.arange(4))
        if dtype != torch.float64:
            experts.sum_rows(rows, order.view(2, 2))
            for summed in (dtype, torch.float32):
                experts.sum_rows(rows, order.view(2, 2), place(torch.ones(2, 2)), summed)
        for ranges in ([(0, 32), (48, n)], [(0, 3), (5, n)]):
            pieces = float8.Pieces(ranges, dtype, torch.device("cpu"))
            bits, codes = (place(torch.zeros(k, dtype=kind)) for k, kind in ((2, torch.int32), (n, torch.uint8)))
            attempt(float8.measure_pieces, flat, pieces, bits)
            attempt(float8.round_pieces, flat, pieces, bits, codes)
    attempt(float8.transpose, place(torch.zeros(16, 32, dtype=torch.float8_e4m3fn)))
    lora.split_factors(place(torch.ones(2, 5)), place(torch.ones(3, 2)))
    lora.split_sums(place(torch.ones(5, 4)), 2.0)
    kinds = itertools.product(DTYPES, (torch.float32, torch.int16), DTYPES, (*DTYPES, None), (False, True))
    for grad, master, exp_avg, weight, coupled in kinds:
        tensors = [place(torch.ones(n, dtype=d)) for d in (grad, master, exp_avg, torch.float32)]
        attempt(
            adam.adam_update,
            *tensors,
            None if weight is None else place(torch.ones(n, dtype=weight)),
            torch.zeros(len(adam.RECORD)),
            coupled=coupled,
        )
        attempt(
            eight_bits.adam8_update,
            *tensors[:2],
            eight_bits.Moments(*map(place, eight_bits.Moments.zeros(n, torch.device("cpu")))),
            None if weight is None else place(torch.ones(n, dtype=weight)),
            torch.zeros(len(adam.RECORD)),
            coupled=coupled,
        )
    adam.adam_prepare(
        *(
            place(t)
            for t in (
                torch.ones(1),
                torch.zeros(1),
                torch.ones(1, len(adam.HYPER), dtype=torch.float64),
                torch.zeros(1),
                torch.zeros(1, len(adam.RECORD)),
            )
        )
    )
    settings = (0, 0.1), (0, 0.1), (0, 5.0), (None, torch.ones(5))
    losses = [CrossEntropy(-100, *values) for values in itertools.product(*settings)]
    for loss, dtype in itertools.product(losses, DTYPES):
        logits, targets = place(torch.ones(3, 5, dtype=dtype)), torch.zeros(3, dtype=torch.int64)
        attempt(loss.losses, logits, targets)
        attempt(loss.losses_and_gradient_, logits, targets, torch.ones(1))
        attempt(loss.gradient_, logits, targets, torch.ones(3), torch.ones(3))


def attempt(function, *arguments, **options) -> None:
    with contextlib.suppress(ValueError):
        function(*arguments, **options)


@pytest.mark.parametrize("arch", [90, *in_full(80)])
def test_the_list_is_what_the_code_asks_for(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a dry launch: the arguments of every call are packed by the source's signature."""
    asked: set[launch.Variant] = set()

    def dry(variant: launch.Variant, name: str, device: torch.device):
        asked.add(variant)
        return lambda grid, block, *values, shared_memory=0: launch.pack(
            name, variant.signature(name), values, torch.device("cpu")
        )

    for module in MODULES:
        monkeypatch.setattr(module, "kernel", dry)
    for cluster in (1, 2, 4, 8) if arch >= 90 else (1,):
        monkeypatch.setattr(CrossEntropy, "plan", lambda self, logits, cluster=cluster: Plan(cluster, 64, 1))
        ask_for_everything()
    assert asked == {variant for module in MODULES for variant in variants(module, arch)}


@pytest.mark.parametrize(
    ("clusters", "limit"), [(True, 227 << 10), *rows_in_full([(False, 163 << 10), (False, 64 << 10)])]
)
@pytest.mark.parametrize("row_bytes", [2 * 50257, *in_full(4, 512000, 4 << 20)])
def test_plan_fits(row_bytes: int, clusters: bool, limit: int) -> None:
    plan = cross_entropy.plan(row_bytes, clusters, limit)
    assert plan.cluster in ((1, 2, 4, 8) if clusters else (1,))
    assert plan.threads % 32 == 0 and 64 <= plan.threads <= 1024
    assert cross_entropy.SCRATCH + 16 * plan.stage <= limit
    if clusters and row_bytes <= 8 * cross_entropy.SHARE:
        assert 16 * plan.stage * plan.cluster >= row_bytes
