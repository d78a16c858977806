"""What the operations refuse, and what they state for inputs that hold nothing."""

import pytest
import torch

from cases import by_default, full, in_full, rows_in_full
from hf_bmtrain.engine.ops import adam, grad_norm
from hf_bmtrain.features.float8 import arithmetic as float8
from hf_bmtrain.features.loss.cross_entropy import CrossEntropy, rescale_

OUT = torch.zeros(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("flat", "out", "message"),
    [
        (torch.ones(4, 4), OUT, r"flat must be contiguous .* of shape \(16,\) on cpu, got .* shape \(4, 4\)"),
        *rows_in_full(
            [
                (torch.ones(8)[::2], OUT, r"flat must be contiguous .* strides \(2,\)"),
                (torch.ones(4).double(), OUT, "flat must be contiguous float32 or float16 or bfloat16"),
                (torch.ones(4), torch.zeros(2), "out must be contiguous float64"),
                (torch.ones(4), torch.zeros(1, dtype=torch.float64), r"out must be .* of shape \(2,\)"),
                (torch.ones(4), torch.zeros(2, dtype=torch.float64, device="meta"), "out must be .* on meta"),
            ]
        ),
    ],
)
def test_squared_norm_refuses(flat: torch.Tensor, out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grad_norm.accumulate_squared_norm(flat, out)


@pytest.mark.parametrize("offsets", [[3, 2], *in_full([], [-1, 4])])
def test_segments_refuse(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="must be one or more ascending integers >= 0"):
        grad_norm.Segments(offsets, "cpu")


@full
def test_segments_beyond_the_tensor_raise() -> None:
    with pytest.raises(ValueError, match="segments end at 5, but the tensor has 4"):
        grad_norm.segmented_squared_norm(torch.ones(4), grad_norm.Segments([0, 5], "cpu"))


def test_empty_inputs_change_nothing() -> None:
    out = torch.tensor([5.0, 1.0], dtype=torch.float64)
    grad_norm.accumulate_squared_norm(torch.ones(0), out)
    assert out.tolist() == [5.0, 1.0]
    assert grad_norm.segmented_squared_norm(torch.ones(3), grad_norm.Segments([2], "cpu")).shape == (0,)
    empty = torch.ones(0)
    adam.adam_update(empty, empty, empty, empty, None, torch.zeros(12))
    losses, lses = CrossEntropy().losses(torch.ones(0, 5), torch.ones(0, dtype=torch.int64))
    assert losses.shape == lses.shape == (0,)


def tensors(n: int = 8) -> dict[str, torch.Tensor]:
    names = ("grad", "master", "exp_avg", "exp_avg_sq")
    return {**{name: torch.ones(n) for name in names}, "record": torch.zeros(12)}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("grad", torch.ones(9), r"grad must be .* of shape \(8,\) on cpu, got .* shape \(9,\)"),
        ("grad", torch.ones(8).double(), "grad must be"),
        *rows_in_full(
            [
                ("grad", torch.ones(8).half(), "gradients of a torch.bfloat16 weight must be"),
                ("master", torch.ones(8).half(), "master must be contiguous float32"),
                ("master", torch.ones(8).int(), "master must be contiguous float32 or int16"),
                ("exp_avg", torch.ones(8).half(), "exp_avg must be contiguous float32 or bfloat16"),
                ("exp_avg_sq", torch.ones(16)[::2], "exp_avg_sq must be contiguous"),
                ("weight", torch.ones(8), "weight must be contiguous float16 or bfloat16"),
                ("record", torch.zeros(1, 12), r"record must be .* of shape \(12,\)"),
            ]
        ),
    ],
)
def test_adam_update_refuses(name: str, value: torch.Tensor, message: str) -> None:
    arguments = {**tensors(), "weight": torch.ones(8).bfloat16(), name: value}
    with pytest.raises(ValueError, match=message):
        adam.adam_update(**arguments)


@pytest.mark.parametrize("weight", [torch.ones(8).half(), *in_full(None)], ids=["fp16", "none"])
def test_a_residual_needs_a_bfloat16_weight(weight: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"only for bfloat16 weights, but .* (None|torch.float16)"):
        adam.adam_update(**{**tensors(), "weight": weight, "master": torch.ones(8).short()})


@full
def test_adam_prepare_refuses_a_single_row() -> None:
    with pytest.raises(ValueError, match=r"hyper must be contiguous float64 of shape \(5, 7\)"):
        adam.adam_prepare(
            torch.ones(1), torch.zeros(1), torch.ones(5, dtype=torch.float64), torch.ones(5), torch.ones(5, 12)
        )


FLOAT8 = {
    float8.quantize_rows: "x",
    float8.quantize_both: "x",
    float8.quantize_full: "weight",
    float8.quantize_transposed: "weight",
}


@pytest.mark.parametrize("function", by_default(FLOAT8, float8.quantize_both))
def test_float8_refuses(function) -> None:
    name = FLOAT8[function]
    for x, message in (
        (torch.ones(4, 8).double(), f"{name} must be contiguous float32 or float16 or bfloat16"),
        (torch.ones(8, 4).t(), rf"{name} must be .* strides \(1, 4\)"),
        (torch.ones(2, 4, 8), rf"{name} must be .* of shape \(2, 8\) on cpu, got .* shape \(2, 4, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            function(x)


@pytest.mark.parametrize("function", by_default(FLOAT8, float8.quantize_both))
def test_float8_of_meta_tensors(function) -> None:
    def factors(x: torch.Tensor) -> list[float8.Float8]:
        result = function(x)
        return [result] if isinstance(result, float8.Float8) else list(result)

    for there, here in zip(factors(torch.ones(5, 32, device="meta")), factors(torch.ones(5, 32)), strict=True):
        for a, b in zip(there, here, strict=True):
            assert a.is_meta and (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@full
def test_float8_pieces_refuse() -> None:
    pieces = float8.Pieces([(0, 3), (4, 8)], torch.float32, torch.device("cpu"))
    x, bits, out = torch.ones(8), torch.zeros(2, dtype=torch.int32), torch.zeros(8, dtype=torch.uint8)
    for values, message in (
        ((x.double(), pieces, bits), "x must be contiguous float32 or float16 or bfloat16"),
        ((x, pieces, bits[:1]), r"bits must be contiguous int32 of shape \(2,\)"),
        ((x, pieces, bits.float()), "bits must be contiguous int32"),
    ):
        with pytest.raises(ValueError, match=message):
            float8.measure_pieces(*values)
        with pytest.raises(ValueError, match=message):
            float8.round_pieces(*values, out)
    with pytest.raises(ValueError, match=r"out must be contiguous uint8 of shape \(8,\)"):
        float8.round_pieces(x, pieces, bits, out[:4])
    with pytest.raises(ValueError, match="values must be contiguous float8_e4m3fn"):
        float8.transpose(torch.ones(4, 4))


TARGETS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "targets", "weight", "message"),
    [
        (torch.ones(3, 5).double(), TARGETS, None, "logits must be float32, float16 or bfloat16"),
        (torch.ones(3, 5, 2), TARGETS, None, r"shape \(3, 5, 2\)"),
        *rows_in_full(
            [
                (torch.ones(5, 3).T, TARGETS, None, "rows of logits must be contiguous"),
                (torch.ones(5).expand(3, 5), TARGETS, None, "not overlap"),
                (torch.ones(3, 0), TARGETS, None, "rows of logits"),
                (torch.ones(3, 5), TARGETS.int(), None, "targets must be contiguous int64"),
                (torch.ones(3, 5), TARGETS[:2], None, r"targets must be .* of shape \(3,\)"),
                (torch.ones(3, 5), TARGETS, torch.ones(4), r"class_weight must be .* of shape \(5,\)"),
                (torch.ones(3, 5), TARGETS, torch.ones(5).half(), "class_weight must be contiguous float32"),
            ]
        ),
    ],
)
def test_cross_entropy_refuses(logits, targets, weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CrossEntropy(class_weight=weight).losses(logits, targets)


@full
def test_scales_of_a_wrong_shape_raise() -> None:
    with pytest.raises(ValueError, match=r"scale must be contiguous float32 of shape \(3,\)"):
        CrossEntropy().losses_and_gradient_(torch.ones(3, 5), TARGETS, torch.ones(2))
    with pytest.raises(ValueError, match="wanted must be"):
        rescale_(torch.ones(3, 5), torch.tensor(1.0), torch.ones(1))


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 1.5}, *in_full({"label_smoothing": -0.1}, {"z_loss": -1.0}, {"softcap": -1.0})]
)
def test_impossible_losses_raise(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must (be between 0 and 1|.*not be negative)"):
        CrossEntropy(**options)


def test_all_rows_ignored_is_no_loss_and_no_gradient() -> None:
    loss, targets = CrossEntropy(label_smoothing=0.1, z_loss=0.1), torch.full((3,), -100)
    logits = torch.randn(3, 5)
    losses, _ = loss.losses_and_gradient_(logits, targets, torch.ones(1))
    assert not bool(losses.any()) and not bool(logits.any())
    assert float(loss.count(targets)) == 0


def test_count_is_what_torchs_mean_divides_by() -> None:
    targets, weight = torch.tensor([1, -100, 4, 0]), torch.rand(5)
    assert float(CrossEntropy().count(targets)) == 3
    torch.testing.assert_close(CrossEntropy(class_weight=weight).count(targets)[0], weight[[1, 4, 0]].sum())
