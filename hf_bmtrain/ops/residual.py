"""Float32 masters of half-precision weights, and a 16-bit form of them: what a master has beyond its bfloat16 weight.

Read as integers, the bits of neighbouring float32 numbers of one sign are neighbours, and those of a bfloat16 number
are the upper half of its float32 bits. A master that is rounded to nearest even therefore lies

    residual = bits(master) - 65536 · bits(weight),    -32768 ≤ residual ≤ 32768

above its weight (in magnitude), subnormals, zeros and what overflows to inf included. That is one value more than 16
bits have, and all are needed: an even weight has both its ties. So 32768 is kept as -32768 with a mark, which is the
sign of exp_avg_sq: a sum of squares has none. NaN is kept as 0.

    residual     (n,) int16
    exp_avg_sq   (n,) float32, its sign the mark

`join` gives a master that rounds to the weight it is given, whichever that is. A weight that was written since `split`
so takes its master along, at the same distance; where the number at that distance does not round to it, the weight is
the master. The kernels' own form of both is in kernels/adam.cu.

`Master` is all that an optimizer needs to know of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_TIE = 1 << 15
_PIECE = 1 << 20  # elements at once, so that intermediate results take little memory


@dataclass(frozen=True)
class Master:
    """The float32 masters of `weight`, in the form in which they are stored. All tensors are (n,).

    stored: None where the weights are float32 and their own masters; float32 masters of half-precision weights; or
    int16 residuals of bfloat16 weights, whose marks are then the signs of exp_avg_sq.
    """

    weight: torch.Tensor
    stored: torch.Tensor | None
    exp_avg_sq: torch.Tensor

    @property
    def is_residual(self) -> bool:
        return self.stored is not None and self.stored.dtype == torch.int16

    def part(self, part: slice, device: torch.device) -> Master:
        """The masters of the elements in `part`, on `device`: views where they are there already."""
        stored = None if self.stored is None else self.stored[part].to(device)
        return Master(self.weight[part].to(device), stored, self.exp_avg_sq[part].to(device))

    def read(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (master, exp_avg_sq without marks), both float32 and only to be read.

        Joined from residuals, both are new and on `device` (None: where the residuals are); otherwise they are the
        stored tensors themselves.
        """
        if self.stored is None:
            return self.weight, self.exp_avg_sq
        if not self.is_residual:
            return self.stored, self.exp_avg_sq
        return join(self.weight.to(self.stored.device), self.stored, self.exp_avg_sq, device)

    def write(self, master: torch.Tensor) -> None:
        """Store `master`, float32 with n elements, of any device.

        A residual is a distance from the weight, so then the weight is written too: `master` rounded to nearest even.
        """
        if not self.is_residual:
            (self.weight if self.stored is None else self.stored).copy_(master.reshape(self.weight.shape))
            return
        assert self.stored is not None
        weight = torch.empty_like(self.stored, dtype=torch.bfloat16)
        split(master.reshape(weight.shape).to(weight.device), weight, self.stored, self.exp_avg_sq)
        self.weight.copy_(weight)

    def reset(self) -> None:
        """Make every master its weight."""
        if self.is_residual:
            assert self.stored is not None
            self.stored.zero_()
        elif self.stored is not None:
            self.stored.copy_(self.weight)

    def follow_weight(self) -> None:
        """Let float32 masters follow weights that are no longer their rounding: someone else has written those.

        A bfloat16 weight takes its master along, at the distance that it had from its rounding: at most half a unit in
        the last place, and the master rounds to the weight. (A residual is nothing but that distance, and does not tell
        which weights were written; so both forms do the same.) The master of a float16 weight becomes the weight.
        """
        if self.stored is None or self.is_residual:
            return
        weight = self.weight.to(self.stored.device)
        if weight.dtype == torch.bfloat16:
            return follow(self.stored, weight)
        for p, w in _pieces(self.stored, weight):
            p.copy_(torch.where(w == p.to(w.dtype), p, w.float()))


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
