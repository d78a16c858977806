"""Float32 master weights, and 16-bit residuals, in which the master weights of bfloat16 weights can be stored.

A master weight, or master, is the full-precision copy of a half-precision weight, which the optimizer updates. A
residual is the difference between the bits of a master and those of its weight, read as integers. A bfloat16 number
consists of the upper 16 bits of a float32 number, so the bits of the weight are shifted:

    residual = bits(master) - 65536 · bits(weight),    -32768 ≤ residual ≤ 32768

The bounds hold because a weight is its master rounded to nearest even. Weight and residual determine the master
exactly.

Residuals are stored as int16. The value 32768 does not fit in int16. It is stored as -32768 and marked by a tie flag: a
negative sign of exp_avg_sq, Adam's second moment, which itself is never negative. Without an exp_avg_sq, it is stored
as 32767, which moves the master by its last bit towards the weight. The residual of NaN is stored as 0.

`split` computes residuals, and `join` restores the masters. If a weight was changed after `split`, `join` moves its
master by the same difference. A master that would then not round to the new weight is set to this weight. The kernels
compute the same as `split` and `join`; see kernels/adam.cuh. Optimizers use the class `Master`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_TIE = 1 << 15
_CHUNK = 1 << 20  # elements that are converted at a time, which limits the memory of temporary tensors


@dataclass(frozen=True)
class Master:
    """The float32 master weights of n weights, in the form in which they are stored.

    Master weights are full-precision copies of half-precision weights, which the optimizer updates. All tensors are
    (n,).

    Attributes:
        weight: the weights.
        stored: the master weights, in float32. Those of bfloat16 weights may instead be stored as int16 residuals,
            their differences from the weights. To compute a residual, convert the weight to float32, read the bits of
            master weight and weight as integers, and subtract the weight's integer from the master weight's. None for
            float32 weights, which need no copies.
        exp_avg_sq: Adam's second moment, float32. The moment itself is never negative. If `stored` contains residuals,
            a negative sign is a tie flag: it marks a residual of 32768, which does not fit in int16 and is stored as
            -32768. None if the optimizer has no second moment in float32. There are no tie flags then, and a residual
            of 32768 is stored as 32767.
    """

    weight: torch.Tensor
    stored: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None

    @property
    def is_residual(self) -> bool:
        return self.stored is not None and self.stored.dtype == torch.int16

    def part(self, part: slice, device: torch.device) -> Master:
        """Return a Master of the elements in the slice `part`, with all tensors on `device`. Do not write to it.

        Used to read the master weights in pieces, so that temporary tensors are small. Tensors that are already on
        `device` are returned as views. The others are copied, so a write to them would be lost.
        """
        stored = None if self.stored is None else self.stored[part].to(device)
        exp_avg_sq = None if self.exp_avg_sq is None else self.exp_avg_sq[part].to(device)
        return Master(self.weight[part].to(device), stored, exp_avg_sq)

    def read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the master weights (full-precision copies) and Adam's second moment, both (n,) float32.

        Used by code other than the optimizer's update, for example to compute statistics of updates.

        If the master weights are stored in float32, or the weights themselves are float32, the results are the stored
        tensors, so do not write to them. If the master weights are stored as residuals (their differences from the
        weights), the results are new tensors. The second moment is None if the optimizer has none in float32.
        """
        if self.stored is None:
            return self.weight, self.exp_avg_sq
        if not self.is_residual:
            return self.stored, self.exp_avg_sq
        return join(self.weight.to(self.stored.device), self.stored, self.exp_avg_sq)

    def write(self, master: torch.Tensor) -> None:
        """Store new master weights (full-precision copies of weights), which come, for example, from a checkpoint.

        Called when a parameter's optimizer state is copied into newly allocated state tensors.

        * If the master weights are stored as residuals (their differences from the weights), the weights are set to the
          master weights rounded to nearest even.
        * If the master weights are stored in float32, the weights do not change until the optimizer's next step.
        * Float32 weights need no master weights, so the weights themselves are set to the new values.

        Args:
            master: float32 with n elements, of any shape and on any device.
        """
        if not self.is_residual:
            (self.weight if self.stored is None else self.stored).copy_(master.reshape(self.weight.shape))
            return
        assert self.stored is not None
        weight = torch.empty_like(self.stored, dtype=torch.bfloat16)
        split(master.reshape(weight.shape).to(weight.device), weight, self.stored, self.exp_avg_sq)
        self.weight.copy_(weight)

    def reset(self) -> None:
        """Set every master weight (the full-precision copy that the optimizer updates) to the value of its weight.

        Optimizers call this when they have allocated new state, in which the master weights are not set yet.
        """
        if self.is_residual:
            assert self.stored is not None
            self.stored.zero_()
        elif self.stored is not None:
            self.stored.copy_(self.weight)

    def follow_weight(self) -> None:
        """Update float32 master weights after code other than the optimizer has changed the weights.

        Optimizers call this before they use or return master weights that may be out of date. A master weight is out of
        date if it does not round to its weight in the weight's dtype. Such master weights change as follows; all others
        stay as they are.

        * A float16 weight: the master is set to the weight.
        * A bfloat16 weight: the master keeps its distance from the weight, that is, new master = new weight + (old
          master - old weight). This is computed with the bits of the float32 numbers, read as integers. The old weight
          was overwritten, but is known: it is the old master rounded to bfloat16. If the new master would not round to
          the new weight, it is set to the new weight.

        This does nothing if the master weights are stored as residuals, which are relative to the present weights, or
        if the weights are float32 and need no master weights.
        """
        if self.stored is None or self.is_residual:
            return
        # Write to `.data`, which has a separate version counter. A background save raises an error if the version of a
        # tensor that it saves has changed, and this write must not cause that error. The save still notices the change:
        # masters change here only if their weights have changed before, and the save checks the weights' versions, too.
        for p, w in _in_chunks(self.stored.data, self.weight.to(self.stored.device)):
            if w.dtype == torch.bfloat16:
                p.copy_(_at(w, _distance(p, p.bfloat16())))
            else:
                p.copy_(torch.where(w == p.to(w.dtype), p, w.float()))


def split(master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor | None) -> None:
    """Split float32 master weights into bfloat16 weights and 16-bit residuals. All tensors are (n,).

    Called when master weights are loaded, and by the reference implementations of AdamW steps. The kernels compute the
    same.

    A residual is the difference between a master weight and its weight: their bits, read as integers, are subtracted.
    The value 32768, which does not fit in int16, is stored as -32768 and marked by a tie flag, the sign of
    `exp_avg_sq`.

    Args:
        master: the master weights, only read.
        weight: written with the master weights, rounded to nearest even.
        residual: written with the residuals, int16.
        exp_avg_sq: Adam's second moment, float32. Its signs are set to the tie flags; its magnitudes do not change.
            With None there are no tie flags, and the stored master may differ from `master` in its last bit.
    """
    if exp_avg_sq is None:
        for p, w, r in _in_chunks(master, weight, residual):
            w.copy_(p)
            r.copy_(_distance(p, w).clamp_(max=_TIE - 1))
        return
    for p, w, r, v in _in_chunks(master, weight, residual, exp_avg_sq):
        w.copy_(p)
        distance = _distance(p, w)
        tie = distance == _TIE
        r.copy_(torch.where(tie, -_TIE, distance))
        v.copy_(torch.where(tie, -v.abs(), v.abs()))


def join(
    weight: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor | None, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the float32 master weights of bfloat16 weights, computed from residuals. This reverses `split`.

    Called when master weights are saved or read, and by the reference implementations of AdamW steps. The kernels
    compute the same. All tensors are (n,).

    Args:
        weight: the bfloat16 weights.
        residual: the residuals, int16: the differences between master weights and weights.
        exp_avg_sq: Adam's second moment, float32. A negative sign is a tie flag: it marks a residual of 32768, which is
            stored as -32768. None if there are no tie flags.
        device: the device of the results; None uses the device of the arguments.

    Returns:
        Two new float32 tensors (n,): the master weights, and exp_avg_sq without the negative signs. The second is None
        if exp_avg_sq is None.
    """
    if exp_avg_sq is None:
        master = torch.empty(weight.shape, dtype=torch.float32, device=device or weight.device)
        for p, w, r in _in_chunks(master, weight, residual):
            p.copy_(_at(w, r.int()))
        return master, None
    master, unmarked = (torch.empty_like(exp_avg_sq, device=device) for _ in range(2))
    for p, u, w, r, v in _in_chunks(master, unmarked, weight, residual, exp_avg_sq):
        tie = v.view(torch.int32) < 0
        p.copy_(_at(w, r.int() + (tie.int() << 16)))
        u.copy_(v.abs())
    return master, unmarked


def _in_chunks(*tensors: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    return zip(*(tensor.split(_CHUNK) for tensor in tensors), strict=True)


def _distance(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the residuals (int32) of float32 master weights: their differences from their bfloat16 weights.

    To compute a residual, the bits of the master weight, and of the weight converted to float32, are read as integers
    and subtracted. The residual of NaN is 0.
    """
    return torch.where(master.isnan(), 0, master.view(torch.int32) - _bits(weight))


def _at(weight: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Compute float32 master weights from bfloat16 weights and residuals.

    A master weight that would not round to its weight is replaced by the weight.

    distance: the residuals, int32: the bits of each master weight, read as an integer, minus those of its weight.
    """
    master = (_bits(weight) + distance).view(torch.float32)
    rounds = master.bfloat16().view(torch.int16) == weight.view(torch.int16)
    return torch.where(rounds, master, weight.float())


def _bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16).int() << 16
