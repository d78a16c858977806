"""Signatures, argument packing, the cache of cubins; all without a GPU."""

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from cases import full, rows_in_full
from hf_bmtrain.engine.base import launch
from hf_bmtrain.engine.base.launch import Argument, Variant
from hf_bmtrain.engine.ops import grad_norm
from hf_bmtrain.engine.ops.adam import variant as adam_variant
from hf_bmtrain.features.float8 import arithmetic as float8
from processes import environment

CPU = torch.device("cpu")
NORM = grad_norm.variant(torch.bfloat16)


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="no CuPy: install the extra 'ci'", exc_type=ImportError)


def test_signature_is_read_from_the_source() -> None:
    assert NORM.signature("squared_norm_partials") == (
        Argument("x", "bf16", True, False),
        Argument("n", "long long", False, False),
        Argument("partials", "double", True, True),
    )
    update = adam_variant(torch.float16, torch.float32, None).signature("adam_update")
    assert [a.c_type for a in update[:5]] == ["fp16", "float", "float", "float", "none"]
    assert [a.written for a in update[:5]] == [False, True, True, True, True]
    rows = float8.variant(torch.bfloat16, aligned=True).signature("quantize_rows")
    assert rows[2:] == (Argument("values", "e4m3", True, True), Argument("scales", "float", True, True))


def test_unknown_kernel_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no kernel named squared"):
        NORM.signature("squared")


def test_pack_is_bit_exact() -> None:
    signature = (
        Argument("x", "float", True, False),
        Argument("n", "long long", False, False),
        Argument("count", "int", False, False),
        Argument("eps", "float", False, False),
        Argument("weight", "none", True, False),
    )
    x = torch.zeros(3)
    packed = launch.pack("k", signature, (x, 1 << 40, 7, 0.5, None), CPU)
    assert packed == (x.data_ptr(), 1 << 40, 7, 0.5, 0)
    assert [type(p) for p in packed] == [int, int, numpy.int32, numpy.float32, int]
    packed = launch.pack("k", signature, (x, numpy.int64(1 << 40), numpy.int8(7), numpy.float32(0.5), None), CPU)
    assert packed == (x.data_ptr(), 1 << 40, 7, 0.5, 0)
    assert [type(p) for p in packed] == [int, int, numpy.int32, numpy.float32, int]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ((torch.zeros(2), 2), TypeError, "takes 3 arguments"),
        ((torch.zeros(2).double(), 2, 1), ValueError, "x must be torch.float32, got torch.float64"),
        *rows_in_full(
            [
                ((torch.zeros(2), 2.0, 1), TypeError, "n must be of type long long, got float"),
                ((torch.zeros(2), True, 1), TypeError, "n must be of type long long, got bool"),
                ((torch.zeros(2), 2, 1 << 31), OverflowError, "out of bounds"),
                ((None, 2, 1), TypeError, "x must be a tensor of float, got NoneType"),
                ((5, 2, 1), TypeError, "x must be a tensor of float, got int"),
                ((torch.zeros(2, device="meta"), 2, 1), ValueError, "x must be on cpu, got meta"),
            ]
        ),
    ],
)
def test_wrong_arguments_raise(values, error, message) -> None:
    signature = (
        Argument("x", "float", True, False),
        Argument("n", "long long", False, False),
        Argument("count", "int", False, False),
    )
    with pytest.raises(error, match=message):
        launch.pack("k", signature, values, CPU)


def test_an_absent_array_must_be_none() -> None:
    with pytest.raises(TypeError, match="must be None"):
        launch.pack("k", (Argument("weight", "none", True, False),), (torch.zeros(1),), CPU)


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 9), 86), *rows_in_full([((9, 0), 90), ((8, 0), 80), ((12, 1), 120)])]
)
def test_architecture_of_a_device(capability: tuple[int, int], arch: int) -> None:
    assert launch.supported_arch(capability, (75, 80, 86, 90, 120)) == arch


def test_unsupported_device_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="compiles for sm_75, sm_90, but the GPU is sm_70"):
        launch.supported_arch((7, 0), (90, 75))


def test_cubin_is_compiled_once_and_recompiled_for_other_content(cupy, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_BMTRAIN_KERNEL_CACHE", str(tmp_path / "kernels"))
    entry = launch.cached_cubin(NORM, 90)
    assert entry.read_bytes()[:4] == b"\x7fELF"
    monkeypatch.setattr(launch, "compile_cubin", lambda *_: pytest.fail("compiled twice"))
    assert launch.cached_cubin(NORM, 90) == entry
    assert sorted(path.suffix for path in entry.parent.iterdir()) == [".cubin", ".lock"]
    others = {
        NORM.digest(90, (13, 0)),
        NORM.digest(80, (13, 0)),
        NORM.digest(90, (12, 9)),
        grad_norm.variant(torch.float16).digest(90, (13, 0)),
    }
    assert len(others) == 4


def test_headers_are_part_of_the_content() -> None:
    changed = Variant(NORM.file, NORM.macros)
    changed.headers["device.cuh"] += "\n"
    assert changed.digest(90, (13, 0)) != NORM.digest(90, (13, 0))


@full
def test_processes_of_a_host_compile_once(cupy, tmp_path: Path) -> None:
    code = (
        "import logging, torch; logging.basicConfig(level='INFO'); "
        "from hf_bmtrain.engine.base import launch; from hf_bmtrain.engine.ops import grad_norm; "
        "launch.cached_cubin(grad_norm.variant(torch.float32), 80)"
    )
    command, variables = [sys.executable, "-c", code], environment(HF_BMTRAIN_KERNEL_CACHE=str(tmp_path))
    ranks = [subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    logs = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], logs
    assert sum(log.count("compiled grad_norm.cu") for log in logs) == 1
    assert len(list(tmp_path.glob("*.cubin"))) == 1


def test_a_failed_compilation_leaves_nothing_and_says_why(cupy, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_BMTRAIN_KERNEL_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match=r'does not compile for sm_90[\s\S]*"nonsense" is undefined'):
        launch.cached_cubin(Variant("grad_norm", (("ELEMENT", "nonsense"),)), 90)
    assert not list(tmp_path.glob("*.cubin"))


def test_cache_that_cannot_be_written_names_the_way_out(cupy, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_BMTRAIN_KERNEL_CACHE", str(tmp_path / "file" / "kernels"))
    with pytest.raises(RuntimeError, match="Set HF_BMTRAIN_KERNEL_CACHE"):
        launch.cached_cubin(NORM, 90)


def test_missing_cupy_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(RuntimeError, match=r"pip install 'hf_bmtrain\[cuda12\]'"):
        launch.import_cupy()
