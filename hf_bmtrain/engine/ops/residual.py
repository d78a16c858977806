"""Float32 masters of half-precision weights, and their 16-bit form: the residual of a master to its bfloat16 weight.

Read as integers, the bits of adjacent float32 numbers of one sign are adjacent integers, and the bits of a bfloat16
number are the upper half of its float32 bits. If the weight is its master rounded to nearest even, their difference is

    residual = bits(master) - 65536 · bits(weight),    -32768 ≤ residual ≤ 32768

in magnitude, also for subnormals, zeros and masters that overflow to inf. That is one value more than 16 bits can
hold, and all are needed: an even weight has both its ties. So 32768 is stored as -32768 with a tie flag, the sign of
exp_avg_sq, which as a sum of squares has none itself. NaN is stored as 0.

    residual     (n,) int16
    exp_avg_sq   (n,) float32, its sign the tie flag

`join` returns a master that rounds to the given weight. If the weight was written since `split`, its master is at the
same distance from the new weight or, if the number at that distance does not round to it, the weight itself. The
kernels' own form of both is in kernels/adam.cu. Optimizers use `Master`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_TIE = 1 << 15
_CHUNK = 1 << 20  # elements at a time, to bound the memory of intermediate results


@dataclass(frozen=True)
class Master:
    """The float32 masters of `weight`, in their stored form. All tensors are (n,).

    stored: None for float32 weights, which are their own masters; float32 masters of half-precision weights; or int16
    residuals of bfloat16 weights, whose tie flags are then the signs of exp_avg_sq.
    """

    weight: torch.Tensor
    stored: torch.Tensor | None
    exp_avg_sq: torch.Tensor

    @property
    def is_residual(self) -> bool:
        return self.stored is not None and self.stored.dtype == torch.int16

    def part(self, part: slice, device: torch.device) -> Master:
        """Return the masters of the elements in `part`, on `device`: views if they are stored there."""
        stored = None if self.stored is None else self.stored[part].to(device)
        return Master(self.weight[part].to(device), stored, self.exp_avg_sq[part].to(device))

    def read(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (master, exp_avg_sq without tie flags), both float32, which the caller must not write.

        For residuals both are new and on `device` (None: the residuals' device); otherwise they are the stored tensors.
        """
        if self.stored is None:
            return self.weight, self.exp_avg_sq
        if not self.is_residual:
            return self.stored, self.exp_avg_sq
        return join(self.weight.to(self.stored.device), self.stored, self.exp_avg_sq, device)

    def write(self, master: torch.Tensor) -> None:
        """Store `master`, float32 with n elements, on any device.

        If masters are stored as residuals, the weight is written as well: `master` rounded to nearest even.
        """
        if not self.is_residual:
            (self.weight if self.stored is None else self.stored).copy_(master.reshape(self.weight.shape))
            return
        assert self.stored is not None
        weight = torch.empty_like(self.stored, dtype=torch.bfloat16)
        split(master.reshape(weight.shape).to(weight.device), weight, self.stored, self.exp_avg_sq)
        self.weight.copy_(weight)

    def reset(self) -> None:
        """Set every master to its weight."""
        if self.is_residual:
            assert self.stored is not None
            self.stored.zero_()
        elif self.stored is not None:
            self.stored.copy_(self.weight)

    def follow_weight(self) -> None:
        """Update float32 masters whose weights were written from outside, and so are no longer their rounding.

        The master of a bfloat16 weight keeps its distance from its rounding: at most half a unit in the last place,
        and the master rounds to the weight. (Residuals store only that distance, so both forms do the same.) The
        master of a float16 weight becomes the weight.
        """
        if self.stored is None or self.is_residual:
            return
        for p, w in _in_chunks(self.stored, self.weight.to(self.stored.device)):
            if w.dtype == torch.bfloat16:
                p.copy_(_at(w, _distance(p, p.bfloat16())))
            else:
                p.copy_(torch.where(w == p.to(w.dtype), p, w.float()))


def split(master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Write weight (bfloat16), residual and the tie flag on exp_avg_sq for a float32 `master`; (n,) each."""
    for p, w, r, v in _in_chunks(master, weight, residual, exp_avg_sq):
        w.copy_(p)
        distance = _distance(p, w)
        tie = distance == _TIE
        r.copy_(torch.where(tie, -_TIE, distance))
        v.copy_(torch.where(tie, -v.abs(), v.abs()))


def join(
    weight: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new (master, exp_avg_sq without tie flags), float32 (n,), on `device` (None: that of the arguments)."""
    master, unmarked = (torch.empty_like(exp_avg_sq, device=device) for _ in range(2))
    for p, u, w, r, v in _in_chunks(master, unmarked, weight, residual, exp_avg_sq):
        tie = v.view(torch.int32) < 0
        p.copy_(_at(w, r.int() + (tie.int() << 16)))
        u.copy_(v.abs())
    return master, unmarked


def _in_chunks(*tensors: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    return zip(*(tensor.split(_CHUNK) for tensor in tensors), strict=True)


def _distance(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the residual of `master`, which rounds to `weight`, as int32."""
    return torch.where(master.isnan(), 0, master.view(torch.int32) - _bits(weight))


def _at(weight: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Return the float32 number at `distance` from `weight` if it rounds to `weight`, otherwise `weight`."""
    master = (_bits(weight) + distance).view(torch.float32)
    rounds = master.bfloat16().view(torch.int16) == weight.view(torch.int16)
    return torch.where(rounds, master, weight.float())


def _bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16).int() << 16
