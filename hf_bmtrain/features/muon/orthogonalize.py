"""Muon's arithmetic on full matrices: the Newton–Schulz iteration, and the factor that multiplies the learning rate.

The operations and their order are those of torch.optim.Muon. For a 2-D matrix, both give bitwise equal results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

_FACTORS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
ADJUST_LR = tuple(_FACTORS)
"""The values of `adjust_lr_fn`, each of which selects a formula for the factor by which Muon multiplies the learning
rate. `adjust_lr_fn=None` selects the first formula, "original"."""


def rate_factor(adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """Return the factor by which Muon multiplies the learning rate for matrices of `shape`, with A rows and B columns.

    Args:
        adjust_lr_fn: selects the formula. "original", or None: √max(1, A/B). "match_rms_adamw": 0.2·√max(A, B).
            "spectral_unclamped": √(A/B).
        shape: (..., rows, columns), the shape of a matrix or of a stack of matrices.
    """
    return _FACTORS[adjust_lr_fn or ADJUST_LR[0]](shape[-2], shape[-1])


def orthogonalize(
    update: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return matrices with the singular vectors of `update` and singular values near 1.

    This is the quintic Newton–Schulz iteration of Keller Jordan (2024): X ← aX + (bA + cA²)X with A = XXᵀ, in bfloat16.

    Args:
        update: (rows, columns) or (count, rows, columns) bfloat16. Overwritten.
        coefficients: a, b and c.
        steps: the number of iterations.
        eps: the lower bound of the norm by which a matrix is divided at the start.

    Returns:
        A tensor of the shape of `update`, bfloat16, possibly not contiguous.
    """
    a, b, c = coefficients
    single, tall = update.dim() == 2, update.size(-2) > update.size(-1)
    x = update.mT if tall else update
    norm = x.norm() if single else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x.div_(norm.clamp(min=eps))
    multiply_add = torch.addmm if single else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
