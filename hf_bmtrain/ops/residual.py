"""A float32 master as what it has beyond its bfloat16 weight: 16 bits, and one more for ties.

Read as integers, the bits of neighbouring float32 numbers of one sign are neighbours, and those of a bfloat16 number
are the upper half of its float32 bits. A master that is rounded to nearest even therefore lies

    residual = bits(master) - 65536 · bits(weight),    -32768 ≤ residual ≤ 32768

above its weight (in magnitude), subnormals, zeros and what overflows to inf included. That is one value more than 16
bits have, and all are needed: an even weight has both its ties. So 32768 is kept as -32768 with a mark, which is the
sign of exp_avg_sq: a sum of squares has none. NaN is kept as 0.

    residual     (n,) int16
    exp_avg_sq   (n,) float32, its sign the mark

`join` gives a master that rounds to the weight it is given, whichever that is. A weight that was written since `split`
so takes its master along, at the same distance; where what lies there does not round to it, the weight is the master.
The kernels' own form of both stands in kernels/adam.cu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_TIE = 1 << 15
_PIECE = 1 << 20  # elements at once: what is computed on the way takes little memory


def split(master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Write weight (bfloat16), residual and the mark on exp_avg_sq for a float32 `master`; (n,) each."""
    for p, w, r, v in _pieces(master, weight, residual, exp_avg_sq):
        w.copy_(p)
        distance = _distance(p, w)
        mark = distance == _TIE
        r.copy_(torch.where(mark, -_TIE, distance))
        v.copy_(torch.where(mark, -v.abs(), v.abs()))


def join(
    weight: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(master, exp_avg_sq without the mark), float32 (n,) each, new, on `device`: None for that of the arguments."""
    master, unmarked = (torch.empty_like(exp_avg_sq, device=device) for _ in range(2))
    for p, u, w, r, v in _pieces(master, unmarked, weight, residual, exp_avg_sq):
        mark = v.view(torch.int32) < 0
        p.copy_(_at(w, r.int() + (mark.int() << 16)))
        u.copy_(v.abs())
    return master, unmarked


def follow(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Make `master` (float32, in place) what `join` makes of its residual and of `weight`, written by someone else."""
    for p, w in _pieces(master, weight):
        p.copy_(_at(w, _distance(p, p.bfloat16())))


def _pieces(*tensors: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    return zip(*(tensor.split(_PIECE) for tensor in tensors), strict=True)


def _distance(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int32: the residual of `master`, which rounds to `weight`, in full."""
    return torch.where(master.isnan(), 0, master.view(torch.int32) - _bits(weight))


def _at(weight: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """The float32 number at `distance` from `weight` if it rounds to it, otherwise `weight`."""
    master = (_bits(weight) + distance).view(torch.float32)
    rounds = master.bfloat16().view(torch.int16) == weight.view(torch.int16)
    return torch.where(rounds, master, weight.float())


def _bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16).int() << 16
