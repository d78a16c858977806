"""The benchmark from the command line to its table and chart, on CPU; its accounting of a trace on made-up events."""

import json

import benchmark_trace
import pytest
from benchmark_table import read_reports, table
from small_job import ROOT, TWO_RANKS, run

BENCHMARK = ROOT / "recipes" / "benchmark.py"
TINY = ("--model", "tiny", "--batch", 2, "--length", 16, "--warmup", 1, "--steps", 3)


@pytest.mark.parametrize(
    "engines", [("ours", "fsdp2"), pytest.param(("ddp", "fsdp2", "ours"), marks=pytest.mark.slow)], ids=len
)
def test_engines_learn_alike(tmp_path, engines):
    """Losses side by side agree within bf16, so a wrong engine would show."""
    for engine in engines:
        done = run(
            TWO_RANKS, BENCHMARK, *TINY, "--engine", engine, "--output", tmp_path, "--plot", tmp_path / "bars.png"
        )
        assert done.returncode == 0, done.stderr
    reports = read_reports(tmp_path, "tiny 2x16 kept 2 ranks")
    assert sorted(report["engine"] for report in reports) == sorted(engines)
    for report in reports:
        assert len(report["losses"]) == 4
        assert report["losses"] == pytest.approx(reports[0]["losses"], abs=2e-3)
        assert report["spread_ms"][0] <= report["ms"] <= report["spread_ms"][1]
        assert report["tokens_a_second_a_rank"] == pytest.approx(2 * 16 / report["ms"] * 1e3)
    assert done.stdout.count("\n") == 2 + len(engines)  # job, heading, a line each
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_not_measured_here_is_marked(tmp_path):
    job = "gpt-13b 8x512 recomputed 4 ranks"
    report = {"engine": "ours", "job": job, "ms": 864.0, "spread_ms": [860.0, 870.0], "TFLOPs": 368.0, "losses": [1.0]}
    (tmp_path / "one.json").write_text(json.dumps(report))
    (tmp_path / "other_job.json").write_text(json.dumps(report | {"job": "tiny"}))
    lines = table(read_reports(tmp_path, job)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["ours", "deepspeed", "bmtrain"]  # the fastest first
    assert ["other run" in line for line in lines[1:]] == [False, True, True]


def event(name: str, begin: float, duration: float, category: str = "kernel") -> dict:
    return {"name": name, "cat": category, "ts": 1e3 * begin, "dur": 1e3 * duration}


def test_account_of_a_trace():
    """GEMM 0-4 and 6-8 ms, a gather 3-7, a reduction 7-9, a copy 10-11, one beside GEMM 1-2, a peer's 10-10.5."""
    events = [
        event("nvjet_gemm", 0, 4), event("nvjet_gemm", 6, 2), event("ncclDevKernel_AllGather", 3, 4),
        event("ncclDevKernel_ReduceScatter", 7, 2), event("Memcpy DtoD", 10, 1, "gpu_memcpy"),
        event("multi_tensor_apply_kernel<CopyFunctor>", 1, 1), event("Memcpy PtoP", 10, 0.5, "gpu_memcpy"),
        event("aten::mm", 0, 100, "cpu_op"),  # not on the device
    ]  # fmt: skip
    found = benchmark_trace.account(events)
    assert (found["GEMM"], found["gather"], found["reduce"], found["packing"]) == (6, 4, 2, 2)
    assert found["exposed gather"] == 2  # from 4 to 6
    assert found["exposed reduce"] == 1  # from 8 to 9
    assert (found["exposed peer copies"], found["exposed packing"]) == (0.5, 0.5)  # from 10 to 10.5, to 11
    assert found["idle"] == 1  # from 9 to 10
    assert benchmark_trace.account([event("aten::mm", 0, 1, "cpu_op")]) == {}


def test_kinds_of_kernels():
    kinds = {
        "adam_step_bf16": "optimizer", "squared_norm": "optimizer", "flash_fwd_kernel": "attention",
        "void cutlass::Kernel2": "GEMM", "multi_tensor_apply_kernel<CopyFunctor>": "packing",
        "vectorized_elementwise_kernel": "element-wise", "Memcpy PtoP (Device -> Device)": "peer copies",
        "peer_mean": "summing", "Memcpy DtoD (Device -> Device)": "packing",
    }  # fmt: skip
    assert {name: benchmark_trace.kind_of(name) for name in kinds} == kinds
