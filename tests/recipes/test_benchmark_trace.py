"""The accounting of a trace, on made-up events."""

from bench import trace
from cases import full


def event(name: str, begin: float, duration: float, category: str = "kernel", stream: int = 7) -> dict:
    return {"name": name, "cat": category, "ts": 1e3 * begin, "dur": 1e3 * duration, "args": {"stream": stream}}


def test_account_of_a_trace():
    """GEMM 0-4 and 6-8 ms, a gather 3-7, a reduction 7-9, a copy 10-11."""
    events = [
        event("nvjet_gemm", 0, 4), event("nvjet_gemm", 6, 2), event("ncclDevKernel_AllGather", 3, 4, stream=20),
        event("ncclDevKernel_ReduceScatter", 7, 2, stream=24), event("Memcpy DtoD", 10, 1, "gpu_memcpy"),
        event("aten::mm", 0, 100, "cpu_op"),  # not on the device
    ]  # fmt: skip
    account = trace.account(events)
    found = account["milliseconds"]
    assert (found["GEMM"], found["gather"], found["reduce"], found["packing"]) == (6, 4, 2, 1)
    assert found["exposed gather"] == 2  # from 4 to 6
    assert found["exposed reduce"] == 1  # from 8 to 9
    assert found["idle"] == 1  # from 9 to 10
    assert account["streams"] == {
        "compute": {"busy": 7, "exposed": 0}, "gather": {"busy": 4, "exposed": 2}, "reduce": {"busy": 2, "exposed": 1},
    }  # fmt: skip
    assert trace.account([event("aten::mm", 0, 1, "cpu_op")]) == {"milliseconds": {}}


@full
def test_copies_count_by_their_stream():
    """Pulled weights on two streams; gradients pulled on a third and summed on a fourth; a packing copy; an offload."""
    pull = "Memcpy PtoP (Device -> Device)"
    local = "Memcpy DtoD (Device -> Device)"
    events = [
        event("nvjet_gemm", 0, 10), event(local, 10, 1, "gpu_memcpy"),
        event(pull, 0, 2, "gpu_memcpy", 20), event(local, 1, 2, "gpu_memcpy", 21),
        event(pull, 5, 3, "gpu_memcpy", 24), event("peer_mean", 8, 1, stream=25),
        event("add_functor", 9, 0.5, stream=25),
        event("Memcpy HtoD (Pinned -> Device)", 9, 4, "gpu_memcpy", 28),
    ]  # fmt: skip
    account = trace.account(events)
    found = account["milliseconds"]
    assert (found["gather"], found["reduce"], found["offload"], found["packing"]) == (4, 4.5, 4, 1)
    assert (found["exposed gather"], found["exposed reduce"], found["exposed offload"]) == (0, 0, 2)
    assert account["streams"]["gather"] == {"busy": 3, "exposed": 0}  # two streams of one role
    assert account["streams"]["offload"] == {"busy": 4, "exposed": 2}


@full
def test_kinds_of_kernels():
    kinds = {
        "adam_update": "optimizer", "squared_norm_partials": "optimizer", "flash_fwd_kernel": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention", "fmha_cutlassF_bf16_aligned": "attention",
        "void cutlass::Kernel2": "GEMM", "multi_tensor_apply_kernel<CopyFunctor>": "packing",
        "multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer", "vectorized_elementwise_kernel": "element-wise",
        "triton_per_fused__scaled_dot_product_flash_attention_backward_sum_3": "element-wise",
        "triton_poi_fused_copy_gemm_gelu_0": "element-wise", "triton_tem_fused_mm_2": "GEMM",
        "Memset (Device)": "packing", "cross_entropy_losses": "element-wise",
        "round_both": "rounding", "quantize_rows": "rounding",
    }  # fmt: skip
    assert {name: trace.kind_of(name) for name in kinds} == kinds


@full
def test_kernels_that_no_pattern_knows_are_listed():
    events = [event(f"new_kernel_{number}", number, 0.1 * number) for number in range(1, 8)]
    events += [event("new_kernel_1", 20, 5), event("nvjet_gemm", 30, 9)]
    found = trace.account(events)["longest element-wise"]
    assert list(found) == ["new_kernel_1", "new_kernel_7", "new_kernel_6", "new_kernel_5", "new_kernel_4"]
    assert found["new_kernel_1"] == 5.1
