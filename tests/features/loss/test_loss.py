"""FusedCrossEntropy against float64 sums written out by hand, and against torch where torch is right."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import loss_checks as checks
from cases import by_default, full, in_full, pairwise, rows_in_full
from hf_bmtrain.loss import FusedCrossEntropy, cross_entropy

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def by_hand(logits, targets, weight, ignore_index, smoothing):
    """(losses, normalisers) of (N, C) logits in float64, one row at a time."""
    losses, counts = [], []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        if target == ignore_index:
            losses.append(0.0)
            counts.append(0.0)
            continue
        log_total = math.log(sum(math.exp(x - max(row)) for x in row)) + max(row)
        each = [w * (log_total - x) for w, x in zip(weight, row, strict=True)]
        losses.append((1 - smoothing) * each[target] + smoothing * sum(each) / len(row))
        counts.append(weight[target])
    return losses, counts


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from([-100, -1, 2]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_equals_the_sum_written_out(rows, classes, ignore_index, smoothing, weighted, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator) * 4
    targets = torch.randint(classes, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = ignore_index
    weight = torch.rand(classes, generator=generator) + 0.1 if weighted else None
    losses, counts = by_hand(
        logits.double(), targets, weight.tolist() if weighted else [1.0] * classes, ignore_index, smoothing
    )
    wanted = {"none": losses, "sum": sum(losses), "mean": sum(losses) / sum(counts) if any(counts) else 0.0}
    for reduction, value in wanted.items():
        loss = FusedCrossEntropy(weight, ignore_index, reduction, smoothing)(logits, targets)
        torch.testing.assert_close(loss, torch.tensor(value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "reduction", "smoothing", "weighted"),
    pairwise(
        [(torch.bfloat16, "mean", 0.1, True), (torch.float16, "none", 0.0, False), (torch.float16, "sum", 0.1, False)],
        list(TOLERANCE),
        ("mean", "sum", "none"),
        (0.0, 0.1),
        (False, True),
    ),
)
def test_half_precision_is_computed_in_float32(dtype, reduction, smoothing, weighted):
    torch.manual_seed(0)
    logits = (torch.randn(7, 33) * 3).to(dtype).requires_grad_()
    targets = torch.randint(33, (7,))
    targets[3] = -100
    weight = torch.rand(33) if weighted else None
    exact = logits.detach().double().requires_grad_()
    options = {"reduction": reduction, "label_smoothing": smoothing}
    truth = F.cross_entropy(exact, targets, None if weight is None else weight.double(), **options)
    loss = FusedCrossEntropy(weight, **options)(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-6)  # no half-precision rounding in it
    truth.sum().backward()
    loss.sum().backward()
    assert logits.grad.dtype == dtype
    error = (logits.grad.double() - exact.grad).abs().max()
    assert error <= TOLERANCE[dtype] * exact.grad.abs().max()


@full
@pytest.mark.parametrize("dtype", by_default(TOLERANCE, torch.float16))
@pytest.mark.parametrize("weight", [torch.ones(5), *in_full(None)])
def test_only_padding_gives_zero_loss_and_zero_gradient(dtype, weight):
    logits = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    loss = FusedCrossEntropy(weight, label_smoothing=0.1)(logits, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.count_nonzero() == 0
    assert logits.grad.isfinite().all()


@full
def test_no_rows_give_zero():
    logits = torch.randn(0, 5, requires_grad=True)
    loss = FusedCrossEntropy()(logits, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == (0, 5)


@full
@pytest.mark.parametrize("reduction", ["mean", *in_full("sum", "none")])
def test_further_dimensions_follow_torch(reduction):
    torch.manual_seed(1)
    logits, targets = torch.randn(2, 6, 3, 4), torch.randint(6, (2, 3, 4))
    loss = FusedCrossEntropy(reduction=reduction, label_smoothing=0.1)(logits, targets)
    truth = F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(loss, truth)


@full
@pytest.mark.parametrize("dtype", [torch.int16, *in_full(torch.int32, torch.int8, torch.uint8)])
def test_any_integer_targets(dtype):
    logits, targets = torch.randn(4, 200), torch.tensor([0, 5, 100, 127])
    assert FusedCrossEntropy()(logits, targets.to(dtype)) == FusedCrossEntropy()(logits, targets)


@full
def test_uint8_targets_are_not_mistaken_for_the_ignored_value():
    logits, targets = torch.randn(1, 200), torch.tensor([156], dtype=torch.uint8)  # -100 modulo 256
    assert FusedCrossEntropy()(logits, targets) > 0


def test_large_logits_stay_finite():
    logits = torch.tensor([[6e4, -6e4], [-6e4, 6e4]], dtype=torch.float16)
    torch.testing.assert_close(FusedCrossEntropy()(logits, torch.tensor([0, 0])), torch.tensor(6e4))


@full
def test_the_weight_moves_with_the_module():
    loss = FusedCrossEntropy(torch.ones(3))
    assert list(loss.state_dict()) == ["weight"]
    assert loss.double().weight.dtype == torch.float64
    assert loss(torch.randn(2, 3), torch.tensor([0, 1])).dtype == torch.float32


@pytest.mark.parametrize("wrong", [5, *in_full(-1, 10**6)])
def test_a_target_out_of_range_is_named(wrong):
    targets = torch.tensor([0, 4, wrong, wrong])
    with pytest.raises(ValueError, match=rf"target {wrong} at \[2\] .* \[0, 5\) .* 2 of 4"):
        FusedCrossEntropy()(torch.randn(4, 5), targets)


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (torch.randn(4, 5), torch.zeros(3, dtype=torch.long), r"\(4, 5\) and targets \(3,\)"),
        (torch.randn(4, 5), torch.zeros(4), "integer dtype, got torch.float32"),
        *rows_in_full(
            [
                (torch.randn(4, 5), torch.zeros(4, 5, dtype=torch.long), r"\(4, 5\) and targets \(4, 5\)"),
                (torch.randn(5), torch.tensor(1), r"logits \(5,\)"),
                (torch.randn(4, 5), torch.zeros(4, dtype=torch.bool), "integer dtype, got torch.bool"),
                (torch.randn(4, 5).double(), torch.zeros(4, dtype=torch.long), "got torch.float64"),
            ]
        ),
    ],
)
def test_wrong_inputs_are_explained(logits, targets, message):
    with pytest.raises(ValueError, match=message):
        FusedCrossEntropy()(logits, targets)


@full
def test_wrong_settings_are_explained():
    with pytest.raises(ValueError, match="mean, sum, none, got 'average'"):
        FusedCrossEntropy(reduction="average")
    with pytest.raises(ValueError, match="between 0 and 1, got 1.5"):
        FusedCrossEntropy(label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        FusedCrossEntropy(weight=torch.ones(2, 3))
    with pytest.raises(ValueError, match="4 class weights were given for 5 classes"):
        FusedCrossEntropy(weight=torch.ones(4))(torch.randn(2, 5), torch.tensor([0, 1]))


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "options", "inplace"),
    pairwise(
        [(torch.bfloat16, {"softcap": 3.0, "num_items_in_batch": 29}, True)],
        list(TOLERANCE),
        checks.OPTIONS,
        [False, True],
    ),
    ids=str,
)
def test_options(dtype, options, inplace):
    checks.check_options(CPU, dtype, options, inplace)
    checks.check_options(CPU, dtype, options, inplace, (3, 11, 2, 2))


@full
@pytest.mark.parametrize("dtype", by_default(TOLERANCE, torch.bfloat16))
def test_inplace(dtype):
    checks.check_inplace(CPU, dtype)
    checks.check_nothing_counts(CPU, dtype, inplace=True)
    checks.check_nothing_counts(CPU, dtype, inplace=False)


@full
def test_the_callers_logits_are_his():
    checks.check_logits_are_kept(CPU)
    checks.check_inplace_without_gradient(CPU)


@full
@pytest.mark.parametrize("inplace", [True, *in_full(False)])
def test_small_gradients(inplace):
    checks.check_a_loss_scale_saves_small_gradients(CPU, inplace)


def test_double_backward_raises():
    checks.check_double_backward(CPU)


def test_num_items_in_batch():
    checks.check_num_items(CPU, lambda tensor: tensor)


@full
def test_odd_logits():
    checks.check_odd_logits(CPU)


@full
def test_layouts():
    checks.check_layouts(CPU)


def test_wrong_inputs():
    checks.check_wrong_inputs(CPU)


@full
def test_the_module_passes_its_settings_on():
    logits, targets, weight = checks.case(CPU)
    settings = {"ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.2, "softcap": 2.0}
    module = FusedCrossEntropy(weight, **settings, inplace=True)
    targets = targets.clamp(min=0)
    torch.testing.assert_close(module(logits, targets), cross_entropy(logits, targets, weight, **settings))
    assert "softcap=2.0" in repr(module) and "inplace=True" in repr(module)
    items = FusedCrossEntropy()(logits, targets, num_items_in_batch=5)
    torch.testing.assert_close(items, FusedCrossEntropy(reduction="sum")(logits, targets) / 5)
    leaf = logits.clone().requires_grad_()
    logits = leaf * 1
    module(logits, targets).backward()
    assert torch.equal(logits, leaf.grad)
