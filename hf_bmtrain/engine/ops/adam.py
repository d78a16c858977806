"""AdamW on a range of adjacent elements, in one kernel launch.

Hyper-parameters, step counts, the clip factor and the flag that skips a step are tensors on the device, so the host
does not wait for the device. An optimizer step first calls `adam_prepare`, which can prepare many ranges at once, and
then calls `adam_update` for each range. For CUDA tensors, both functions launch a kernel. For other tensors, they
compute the same with torch.
"""

from functools import cache

import torch
from torch import Tensor

from ..base.arguments import expect
from ..base.launch import C_NAMES, Variant, kernel
from .residual import join, split

THREADS = 256
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "hold_steps", "l2")
RECORD = (  # the fields of struct Record in kernels/adam.cuh
    "skip", "grad_scale", "decay", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "step_size", "inverse_root",
    "eps", "seed", "l2",
)  # fmt: skip
_REFERENCE_CHUNK = 1 << 20


@cache
def variant(
    grad: torch.dtype,
    exp_avg: torch.dtype,
    weight: torch.dtype | None,
    master: torch.dtype = torch.float32,
    coupled: bool = False,
) -> Variant:
    """Return the Variant of the AdamW kernels for a combination of dtypes, to pass to `kernel`, which compiles it.

    A Variant is a CUDA source file and the macros with which it is compiled.

    Args:
        grad: the dtype of the gradients.
        exp_avg: the dtype of the first moment, float32 or bfloat16.
        weight: the dtype of 16-bit weights, or None for float32 weights, which need no separate master weights.
        master: the dtype in which the float32 master weights are stored: float32, or int16 for residuals (their
            differences from the weights).
        coupled: whether the kernel adds `l2 * master` to the gradient (L2 regularization with the factor l2). If False,
            the kernel is compiled without this term, because even a term that is always zero could change how the
            compiler fuses other operations, and thereby their rounding.

    Raises:
        ValueError: the combination is not supported.
    """
    pairs = (*macros(grad, weight, master, coupled), ("EXP_AVG", C_NAMES[exp_avg]))
    return Variant("adam", tuple(sorted(pairs)))


def macros(
    grad: torch.dtype, weight: torch.dtype | None, master: torch.dtype, coupled: bool
) -> tuple[tuple[str, str], ...]:
    """Return the macros with which all AdamW kernels are compiled for a combination of dtypes.

    The kernel of eight_bits.py, which stores the moments in 8 bits, needs only these macros. For the kernels of this
    file, `variant` adds the dtype of the first moment. The result is a tuple of (name, value) pairs, sorted by name.

    Args:
        grad: the dtype of the gradients.
        weight: the dtype of 16-bit weights, or None for float32 weights, which need no separate master weights.
        master: the dtype in which the float32 master weights are stored: float32, or int16 for residuals (their
            differences from the weights).
        coupled: whether the kernel adds l2 (the factor of L2 regularization) times the master to the gradient.

    Raises:
        ValueError: the combination is not supported.
    """
    if weight is not None and grad not in (weight, torch.float32):
        raise ValueError(
            f"gradients of a {weight} weight must be {weight} or float32, got {grad}. Convert them before the step."
        )
    if master == torch.int16 and weight != torch.bfloat16:
        raise ValueError(
            f"float32 master weights can be stored as int16 residuals only for bfloat16 weights, but the dtype of the "
            f"weights is {weight}. Pass float32 master weights."
        )
    return (
        ("COUPLED", "true" if coupled else "false"),
        ("GRAD", C_NAMES[grad]),
        ("MASTER", {torch.float32: "float", torch.int16: "short"}[master]),
        ("WEIGHT", C_NAMES[weight] if weight else "none"),
    )


def adam_prepare(grad_scale: Tensor, found_inf: Tensor, hyper: Tensor, steps: Tensor, records: Tensor) -> None:
    """Compute the factors that `adam_update` needs in this step, as one record for each run.

    A run is a range of elements with the same hyper-parameters and step count. The host does not wait for the device.
    All tensors are contiguous and on one device.

    Args:
        grad_scale: (1,) float32, the divisor of the gradients: the loss scale divided by the clip factor.
        found_inf: (1,) float32, nonzero if the step must be skipped.
        hyper: (runs, 7) float64. HYPER names the columns. The column hold_steps is the number of steps at the
            beginning in which the learning rate is 0.
        steps: (runs,) float32, the number of steps that each run has taken. It is incremented in place unless the step
            is skipped.
        records: (runs, 12) float32, written. RECORD names the columns. The column "grad_scale" contains the reciprocal
            of the argument `grad_scale`. The column "l2" contains the hyper-parameter l2 times `grad_scale`, because it
            is applied before the gradient is divided. The column "seed" contains the bits of an int32, the number of
            the run's step.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device described above, or is not contiguous.
    """
    runs, device = len(hyper), records.device
    expect("grad_scale", grad_scale, (torch.float32,), (1,), device)
    expect("found_inf", found_inf, (torch.float32,), (1,), device)
    expect("hyper", hyper, (torch.float64,), (runs, len(HYPER)), device)
    expect("steps", steps, (torch.float32,), (runs,), device)
    expect("records", records, (torch.float32,), (runs, len(RECORD)), device)
    if runs == 0:
        return
    if records.is_cuda:
        chosen = variant(torch.float32, torch.float32, None)  # any dtypes, because this kernel does not depend on them
        launch = kernel(chosen, "adam_prepare", records.device)
        return launch(-(-runs // 32), 32, grad_scale, found_inf, hyper, runs, steps, records)
    skip = found_inf != 0
    steps += (~skip).float()
    lr, beta1, beta2, eps, weight_decay, hold_steps, l2 = hyper.unbind(1)
    one, taken = torch.ones_like(lr), steps.double()
    lr = torch.where(taken > hold_steps, lr, 0.0)
    columns = (
        one * skip, one / grad_scale.double(), 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2,
        lr / (1 - beta1**taken), (1 - beta2**taken).rsqrt(), eps,
    )  # fmt: skip
    records[:, : len(columns)] = torch.stack(columns, 1)
    bits = records.view(torch.int32)
    bits[:, 10] = steps.to(torch.int32)
    records[:, 11] = l2 * grad_scale.double()


def adam_update(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None,
    record: Tensor,
    index_base: int = 0,
    coupled: bool = False,
) -> None:
    """Make one AdamW step on n adjacent elements, in place. Do nothing if `record` says that the step is skipped.

    weight_decay is decoupled, and eps is added outside the square root (Loshchilov and Hutter 2019). All tensors are
    contiguous, are on one device, and do not overlap.

    Args:
        grad: (n,), only read: float32, or the dtype of `weight`. If `weight` is None: float32, float16 or bfloat16.
        master: (n,), updated: the float32 master weights. If `weight` is None, they are the parameter itself. For
            bfloat16 weights, `master` may instead contain int16 residuals, the differences between master weights and
            weights (see residual.py). In this case `weight` is read too. A residual of 32768 does not fit in int16. It
            is stored as -32768, and marked by a negative sign of the element's exp_avg_sq.
        exp_avg: (n,) float32, or bfloat16 with stochastic rounding. Updated.
        exp_avg_sq: (n,) float32. Updated.
        weight: (n,) float16 or bfloat16, written with the updated master weights, rounded to nearest even. None if
            `master` is the parameter itself.
        record: (12,) float32, the hyper-parameters and the skip flag, as computed by `adam_prepare` for these elements.
        index_base: the position of element 0 among all elements of the optimizer. An element's position and the number
            of the step determine the random bits of stochastic rounding. Neither depends on the number of ranks, so
            rounding does not change when training continues on a different number of ranks.
        coupled: whether to use L2 regularization (Kingma and Ba 2015): the field "l2" of `record` times the master is
            added to the gradient. If False, this field must be 0.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device described above, or is not contiguous, or the
            combination of dtypes is not supported.
    """
    n, device = master.numel(), master.device
    expect("master", master, (torch.float32, torch.int16), (n,), device)
    expect("grad", grad, C_NAMES, (n,), device)
    expect("exp_avg", exp_avg, (torch.float32, torch.bfloat16), (n,), device)
    expect("exp_avg_sq", exp_avg_sq, (torch.float32,), (n,), device)
    if weight is not None:
        expect("weight", weight, (torch.float16, torch.bfloat16), (n,), device)
    expect("record", record, (torch.float32,), (len(RECORD),), device)
    chosen = variant(grad.dtype, exp_avg.dtype, None if weight is None else weight.dtype, master.dtype, coupled)
    if n == 0 or master.is_meta:
        return
    if not master.is_cuda:
        return update_reference(grad, master, exp_avg, exp_avg_sq, weight, record, index_base)
    tensors = [grad, master, exp_avg, exp_avg_sq] + ([] if weight is None else [weight])
    # Access in aligned groups of 4 elements is faster. It is possible if all tensors begin at the same distance, in
    # elements, from an aligned address, as parts of flat buffers with the same layout do.
    head, quads = _aligned_part(n, tensors)
    blocks = -(-max(quads, n - 4 * quads) // THREADS)
    kernel(chosen, "adam_update", master.device)(
        blocks, THREADS, grad, master, exp_avg, exp_avg_sq, weight, n, head, quads, index_base, record
    )


def _aligned_part(n: int, tensors: list[Tensor]) -> tuple[int, int]:
    """Find the longest range of elements that a kernel can access in aligned groups of 4, in all of `tensors`.

    Returns (index of the range's first element, number of groups). The number is 0 if there is no such range. A group
    is aligned if its memory address is a multiple of its size in bytes.

    n: the number of elements of each tensor.
    """
    heads = {(-tensor.data_ptr() // tensor.element_size()) % 4 for tensor in tensors}
    head = heads.pop()
    return (0, 0) if heads or head >= n else (head, (n - head) // 4)


def update_reference(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None,
    record: Tensor,
    index_base: int = 0,
) -> None:
    """Compute the same as `adam_update` with torch, up to rounding, on any device. The host waits for the device.

    `adam_update` calls this function for tensors that are not on a CUDA device, and tests compare the kernel with it.
    If `exp_avg` is bfloat16, it is rounded stochastically, with the same random bits as in the kernel.

    Args:
        grad: (n,), only read. For the dtypes of this and the other tensors, see `adam_update`.
        master: (n,), updated: the float32 master weights, or int16 residuals (the differences between master weights
            and bfloat16 weights).
        exp_avg: (n,), updated.
        exp_avg_sq: (n,), updated.
        weight: (n,), written with the updated master weights, rounded to nearest even. With residuals, it is read too,
            because only weights and residuals together determine the master weights. None if `master` is the parameter
            itself.
        record: (12,) float32, the hyper-parameters and the skip flag, as computed by `adam_prepare` for these elements.
        index_base: the position of element 0 among all elements of the optimizer. An element's position and the number
            of the step determine its random bits.
    """
    r = dict(zip(RECORD, record.tolist(), strict=True))
    seed = int(record.view(torch.int32)[RECORD.index("seed")])
    if r["skip"]:
        return
    for start in range(0, master.numel(), _REFERENCE_CHUNK):
        part = slice(start, start + _REFERENCE_CHUNK)
        g = grad[part].float()
        m, v, p = exp_avg[part].float(), exp_avg_sq[part], master[part]
        if master.dtype == torch.int16:
            assert weight is not None
            p, v = join(weight[part], master[part], exp_avg_sq[part])
            assert v is not None
        if r["l2"]:
            g = g + p * r["l2"]
        g = g * r["grad_scale"]
        m = m + (g - m) * r["one_minus_beta1"]
        v.mul_(r["beta2"]).addcmul_(g, g, value=r["one_minus_beta2"])
        p.mul_(r["decay"]).addcdiv_(m, v.sqrt().mul_(r["inverse_root"]).add_(r["eps"]), value=-r["step_size"])
        exp_avg[part] = round_stochastic(m, index_base + start, seed) if exp_avg.dtype == torch.bfloat16 else m
        if master.dtype == torch.int16:
            assert weight is not None
            exp_avg_sq[part] = v
            split(p, weight[part], master[part], exp_avg_sq[part])
        elif weight is not None:
            weight[part] = p


def round_stochastic(x: Tensor, index_base: int, seed: int) -> Tensor:
    """Round float32 to bfloat16 stochastically.

    A value x between two adjacent bfloat16 numbers a and b is rounded to b with probability (x - a) / (b - a), and to a
    with the remaining probability. So the expected result is x.

    Args:
        x: (n,) float32. inf and NaN are not changed.
        index_base: the position of element 0 among all elements of the optimizer.
        seed: the number of the step. Together with an element's position it determines the element's random bits.
    """
    bits, random = x.view(torch.int32), random_bits(index_base, x.numel(), seed, x.device)
    finite = torch.isfinite(x)
    up = (bits + (random >> 16).to(torch.int32)) & -65536
    return torch.where(finite, up.view(torch.float32), x).to(torch.bfloat16)


def random_bits(index_base: int, numel: int, seed: int, device: torch.device) -> Tensor:
    """Return 32 pseudo-random bits for each of `numel` elements, (numel,) int64.

    Args:
        index_base: the position of the first element among all elements of the optimizer.
        numel: the number of elements.
        seed: the number of the step. The bits of an element depend only on this number and the element's position.
        device: the device of the result.
    """
    element = torch.arange(index_base, index_base + numel, device=device)
    low = (element & 0xFFFFFFFF) ^ (seed * 0x9E3779B9 & 0xFFFFFFFF)
    return _mix((_mix(low) + (element >> 32)) & 0xFFFFFFFF)


def _mix(h: Tensor) -> Tensor:
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & 0xFFFFFFFF
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)
