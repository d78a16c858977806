"""AdamW with moments stored in 8 bits: one code for each element, and one exponent for each block of 32 elements.

The first moment m and the square root √v of the second moment are stored. A code is a floating-point number of 8 bits
with a magnitude below 2. It may be subnormal, but not inf or NaN. The stored value is this number times 2ᴱ, where E is
the block's exponent.

    m    1 sign bit, 3 exponent bits and 4 fraction bits; the smallest magnitude above 0 is 2ᴱ⁻¹⁰
    √v   3 exponent bits and 5 fraction bits; the smallest number above 0 is 2ᴱ⁻¹¹

An update rounds stochastically, with the random bits of adam.py. With rounding to nearest, changes of a moment by less
than half the distance between two codes would always be lost. Blocks begin at a parameter's start, and parameters are
divided between ranks at multiples of 32 elements, so neither codes nor random bits depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.arguments import expect
from ..base.launch import C_NAMES, Variant, kernel
from .adam import RECORD, macros, random_bits
from .residual import join, split

BLOCK = 32
_CHUNK = 1 << 20
_COUNT = 8  # the number of elements that one thread updates, as in adam8.cu
THREADS = 128
_M_FRACTION, _ROOT_FRACTION = 4, 5
_SHIFT = 2.0**120
"""The factor with which 8-bit codes are decoded. First shift a code, without its sign, so that its fraction bits become
the highest fraction bits of a float32. Then multiply this float32 by the factor. The product is the number (below 2)
that the code represents."""

SMALLEST_EPS = 2.0**-63
"""A smaller eps counts as this number, the square root of the smallest normal float32. With eps=0, an element whose
gradients have all been 0, such as one of the padding, would become 0/0. With L2 regularization, this nan would enter
the element's moments, and then the exponent that all elements of the block share."""


class Moments(NamedTuple):
    """Adam's moments of n elements, stored in 8 bits.

    Each moment has a code for each element and an exponent for each block of 32 elements. The code is a floating-point
    number of 8 bits, which is multiplied by 2 to the power of the exponent. An exponent E is stored as 127 + E, as in
    float32. If the stored exponent is 0, `read` returns 0 for the whole block.

    Attributes:
        exp_avg: (n,) uint8, the codes of the first moment.
        exp_avg_exponents: (⌈n/32⌉,) uint8, the exponents of the first moment.
        exp_avg_sq: (n,) uint8, the codes of the square root of the second moment.
        exp_avg_sq_exponents: (⌈n/32⌉,) uint8, the exponents of the square root of the second moment.
    """

    exp_avg: Tensor
    exp_avg_exponents: Tensor
    exp_avg_sq: Tensor
    exp_avg_sq_exponents: Tensor

    @classmethod
    def zeros(cls, numel: int, device: torch.device) -> Moments:
        """Return the moments of `numel` elements on `device`, set to zero."""
        sizes = numel, -(-numel // BLOCK)
        return cls(*(torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes * 2))

    def part(self, start: int, stop: int) -> Moments:
        """Return the moments of elements start:stop, as views, for example those of one parameter.

        Each block of 32 elements shares an exponent, so two parts must not divide a block between them. `start` must be
        a multiple of 32. `stop` must be a multiple of 32, the end of a parameter, or the end of these moments. (The
        elements between the end of a parameter and the next multiple of 32 are padding.)
        """
        assert start % BLOCK == 0, start
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        return Moments(self[0][start:stop], self[1][blocks], self[2][start:stop], self[3][blocks])

    def read(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Decode Adam's moments. Return the first and the second moment, each (n,) float32.

        device: the device of the computation and the results; None uses the device of the codes.
        """
        codes, exponents, root_codes, root_exponents = (x if device is None else x.to(device) for x in self)
        exp_avg = decode((codes & 127), exponents, _M_FRACTION)
        root = decode(root_codes, root_exponents, _ROOT_FRACTION)
        return torch.where(codes > 127, -exp_avg, exp_avg), root.square_()

    def write(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Encode new values of Adam's moments into the tensors of this object, rounded to nearest.

        Used for moments that come, for example, from a checkpoint. The optimizer's steps do not call this, because they
        round stochastically. A small second moment is rounded up instead of to 0, because AdamW divides by its root.

        Args:
            exp_avg: the first moment, (n,) float32 on any device.
            exp_avg_sq: the second moment, (n,) float32 on any device.
        """
        self._store(exp_avg.to(self.exp_avg.device), exp_avg_sq.to(self.exp_avg.device).sqrt(), None)

    def _store(self, exp_avg: Tensor, root: Tensor, random: Tensor | None) -> None:
        low, high = (None, None) if random is None else (random & 0xFFFF, random >> 16)
        codes, exponents = encode(exp_avg.abs(), _M_FRACTION, low)
        self.exp_avg.copy_(codes | (exp_avg.signbit().to(torch.uint8) << 7))
        self.exp_avg_exponents.copy_(exponents)
        codes, exponents = encode(root, _ROOT_FRACTION, high)
        # Round a small √v up to the smallest number above 0, because with v = 0 the update would be m / eps.
        self.exp_avg_sq.copy_(torch.maximum(codes, (root > 0).to(torch.uint8)))
        self.exp_avg_sq_exponents.copy_(exponents)

    def chunks(self) -> Iterator[tuple[slice, Moments]]:
        """Yield (slice, Moments) for consecutive ranges that together cover all elements. The Moments are views.

        Code that decodes and updates moments works on one range at a time, to limit the memory of temporary tensors. A
        write to the yielded moments changes those of this object.
        """
        for start in range(0, len(self.exp_avg), _CHUNK):
            stop = min(start + _CHUNK, len(self.exp_avg))
            yield slice(start, stop), self.part(start, stop)


def encode(magnitudes: Tensor, fraction: int, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round magnitudes to 8-bit codes, with a common exponent for each block of 32 elements.

    A code is a floating-point number with 3 exponent bits and `fraction` fraction bits, and without a sign. With 4
    fraction bits, the highest bit of a code is 0. `Moments` stores the sign of the first moment there.

    Args:
        magnitudes: (n,) float32, none negative: the absolute values of the first moment, or the square roots of the
            second moment.
        fraction: the number of fraction bits: 4 for the first moment, 5 for the square roots of the second moment.
        random: (n,) random integers from 0 to 65535, for stochastic rounding. None rounds to nearest.

    Returns:
        The codes (n,) and the blocks' exponents (⌈n/32⌉,), both uint8.
    """
    n = len(magnitudes)
    padded = torch.nn.functional.pad(magnitudes, (0, -n % BLOCK)).view(-1, BLOCK)
    dropped = 23 - fraction
    # Choose the exponent E of each block so that the block's largest magnitude, x, is not clamped. A code represents a
    # number below 2, which is multiplied by 2ᴱ. With f fraction bits, the two largest such numbers are a = 2 - 2·2⁻ᶠ
    # and b = 2 - 2⁻ᶠ (1.875 and 1.9375 if f is 4). Let K be the exponent of x as a float32: 2ᴷ ≤ x < 2ᴷ⁺¹.
    # * If E were always K, an x above b·2ᴷ would be clamped in every step, so a moment could never grow to 2ᴷ⁺¹.
    # * Therefore E is K + 1 if x is above a·2ᴷ, and otherwise K. For an x from a·2ᴷ to b·2ᴷ, both would do, because the
    #   same numbers of this interval can be represented with E = K and with E = K + 1.
    # The next line computes E + 127 from the bits of x. It adds 2·2²³⁻ᶠ - 1 to them, which carries into the exponent
    # bits if and only if x is above a·2ᴷ.
    exponents = (padded.view(torch.int32).amax(1).long() + (2 << dropped) - 1 >> 23).clamp_(max=255).int()
    inverse = ((254 - exponents).clamp_(min=0) << 23).view(torch.float32)
    bits = (padded * inverse[:, None] / _SHIFT).view(torch.int32).view(-1)[:n]
    add = 1 << dropped - 1 if random is None else (random << dropped - 16).to(torch.int32)
    return ((bits + add) >> dropped).clamp_(max=(8 << fraction) - 1).to(torch.uint8), exponents.to(torch.uint8)


def decode(codes: Tensor, exponents: Tensor, fraction: int) -> Tensor:
    """Return the magnitudes, (n,) float32, that 8-bit codes and their exponents represent.

    Args:
        codes: (n,) uint8, the first result of `encode`. Remove the sign bits that `Moments` has added to the codes of
            the first moment.
        exponents: (⌈n/32⌉,) uint8, the second result of `encode`: one exponent for every 32 consecutive codes.
        fraction: the number of fraction bits that was passed to `encode`: 4 for the first moment, 5 for the square
            roots of the second moment.
    """
    n = len(codes)
    numbers = (codes.int() << (23 - fraction)).view(torch.float32) * _SHIFT
    padded = torch.nn.functional.pad(numbers, (0, -n % BLOCK)).view(-1, BLOCK)
    return (padded * (exponents.int() << 23).view(torch.float32)[:, None]).view(-1)[:n]


def variant(grad: torch.dtype, weight: torch.dtype | None, master: torch.dtype, coupled: bool = False) -> Variant:
    """Return the Variant of the 8-bit AdamW kernel for a combination of dtypes, to pass to `kernel`, which compiles it.

    A Variant is a CUDA source file and the macros with which it is compiled.

    Args:
        grad: the dtype of the gradients.
        weight: the dtype of 16-bit weights, or None for float32 weights, which need no separate master weights.
        master: the dtype in which the float32 master weights are stored: float32, or int16 for residuals (their
            differences from the weights).
        coupled: whether the kernel adds l2 (the factor of L2 regularization) times the master to the gradient.

    Raises:
        ValueError: the combination is not supported.
    """
    return Variant("adam8", macros(grad, weight, master, coupled))


def adam8_update(
    grad: Tensor,
    master: Tensor,
    moments: Moments,
    weight: Tensor | None,
    record: Tensor,
    index_base: int = 0,
    coupled: bool = False,
) -> None:
    """Make one AdamW step on n adjacent elements, in place, like `adam_update` but with moments in 8 bits.

    The step computes the new moments in float32, updates the master weights with them, and then stores the moments in 8
    bits. Only the moments are rounded stochastically. All tensors are contiguous, are on one device, and do not
    overlap.

    Args:
        grad: (n,), only read: float32, or the dtype of `weight`. If `weight` is None: float32, float16 or bfloat16.
        master: (n,), updated: the float32 master weights. If `weight` is None, they are the parameter itself. For
            bfloat16 weights, `master` may instead contain int16 residuals. A residual is the 32 bits of the master
            weight, read as an integer, minus the 16 bits of the weight followed by 16 zeros (see residual.py). A
            residual of 32768 does not fit in int16. It is stored as 32767, which moves the master weight to the
            adjacent float32 number in the direction of the weight.
        moments: the moments of these elements, updated.
        weight: (n,) float16 or bfloat16, written with the new master weights, rounded to nearest even. With residuals,
            it is read too. None if `master` is the parameter itself.
        record: (12,) float32, the hyper-parameters and the skip flag, as computed by `adam_prepare` for these elements.
        index_base: the position of element 0 among all elements of the optimizer. An element's position and the number
            of the step determine its random bits for stochastic rounding.
        coupled: whether to use L2 regularization: the field "l2" of `record` times the master is added to the gradient.
            If False, this field must be 0.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device described above, or is not contiguous, or the
            combination of dtypes is not supported.
    """
    n, device = master.numel(), master.device
    expect("master", master, (torch.float32, torch.int16), (n,), device)
    expect("grad", grad, C_NAMES, (n,), device)
    for name, codes in moments._asdict().items():
        expect(name, codes, (torch.uint8,), (-(-n // BLOCK) if name.endswith("exponents") else n,), device)
    if weight is not None:
        expect("weight", weight, (torch.float16, torch.bfloat16), (n,), device)
    expect("record", record, (torch.float32,), (len(RECORD),), device)
    chosen = variant(grad.dtype, None if weight is None else weight.dtype, master.dtype, coupled)
    if n == 0 or master.is_meta:
        return
    if not master.is_cuda:
        return update_reference(grad, master, moments, weight, record, index_base)
    tensors = [grad, master, moments.exp_avg, moments.exp_avg_sq] + ([] if weight is None else [weight])
    aligned = all(tensor.data_ptr() % min(_COUNT * tensor.element_size(), 16) == 0 for tensor in tensors)
    kernel(chosen, "adam8_update", master.device)(
        -(-n // (_COUNT * THREADS)), THREADS, grad, master, *moments, weight, n, int(aligned), index_base, record
    )


def update_reference(
    grad: Tensor, master: Tensor, moments: Moments, weight: Tensor | None, record: Tensor, index_base: int
) -> None:
    """Compute the same as `adam8_update` with torch, up to rounding, on any device. The host waits for the device.

    `adam8_update` calls this function on the CPU, and the kernel on CUDA. The moments are rounded stochastically, with
    the same random bits as in the kernel.

    Args:
        grad: (n,), only read. For the dtypes of this and the other tensors, see `adam8_update`.
        master: (n,), updated: the float32 master weights, or int16 residuals (the differences between master weights
            and bfloat16 weights).
        moments: the moments of these elements, updated.
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
    for part, stored in moments.chunks():
        g, p = grad[part].float(), master[part]
        m, v = stored.read()
        if master.dtype == torch.int16:
            assert weight is not None
            p, _ = join(weight[part], master[part], None)
        if r["l2"]:
            g = g + p * r["l2"]
        g = g * r["grad_scale"]
        m = m + (g - m) * r["one_minus_beta1"]
        root = v.mul_(r["beta2"]).addcmul_(g, g, value=r["one_minus_beta2"]).sqrt_()
        p.mul_(r["decay"]).addcdiv_(
            m, (root * r["inverse_root"]).add_(max(r["eps"], SMALLEST_EPS)), value=-r["step_size"]
        )
        stored._store(m, root, random_bits(index_base + part.start, len(m), seed, m.device))
        if master.dtype == torch.int16:
            assert weight is not None
            split(p, weight[part], master[part], None)
        elif weight is not None:
            weight[part] = p
