"""Which slices an optimizer updates, and whether another one does too."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..runtime.world import buffers_made, current_world
from ..sharding.parameter import DistributedParameter


class Claim:
    """An optimizer's hold on its slices, so that no two use the same gradient.

    A slice knows who claims it. That a gradient is used is noted in the first step of an optimizer, before which
    nobody can know who comes next, and from then on only for slices that two of them claim. When one joins later,
    the number of backwards tells what the others have used.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._groups: list[tuple[list, int]] = []
        self._buffers_made = 0
        self._new: list[Any] = []
        self._shared: dict[int, Any] = {}
        self._rivals: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._backwards = -1

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the groups are those that were claimed, and nothing has been sharded since."""
        groups = optimizer.param_groups
        return (
            self._buffers_made == buffers_made()
            and len(groups) == len(self._groups)
            and all(group["params"] is known and len(known) == n for group, (known, n) in zip(groups, self._groups))
        )

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Claim every slice of the groups."""
        self._buffers_made = buffers_made()
        self._groups = [(group["params"], len(group["params"])) for group in optimizer.param_groups]
        self._new = [p for params, _ in self._groups for p in params if isinstance(p, DistributedParameter)]
        for piece in self._new:
            claims = [claim for reference in getattr(piece, "claims", ()) if (claim := reference()) is not None]
            for other in claims:
                if other is not self:
                    other._meet(self, piece)
                    self._shared[id(piece)] = piece
                    self._rivals.add(other)
            piece.claims = [weakref.ref(claim) for claim in dict.fromkeys((*claims, self))]

    def _meet(self, rival: Claim, piece: DistributedParameter) -> None:
        """`rival` claims `piece` as well."""
        self._rivals.add(rival)
        if id(piece) in self._shared:
            return
        self._shared[id(piece)] = piece
        if self._backwards == current_world().schedule.backwards and piece.buffer.gradient.is_handed(piece.index):
            self._note([piece])  # no backward since this one's step, and nobody has changed what it used

    def check(self) -> None:
        """RuntimeError where another optimizer has used a gradient that still lies there."""
        mine = self._optimizer()
        for piece in self._shared.values():
            used = getattr(piece, "used_gradient", None)
            if used is None or piece.grad is None:
                continue
            other, gradient, version = used[0](), used[1](), used[2]
            if other not in (None, mine) and gradient is piece.grad and gradient._version == version:
                raise RuntimeError(
                    f"{type(mine).__name__} and {type(other).__name__} both update the same slice (full shape "
                    f"{tuple(piece.full_shape)}) with the same gradient. Give each parameter to one optimizer, or "
                    "call zero_grad() between them."
                )

    def settle(self) -> None:
        """The step is made, and its gradients are used."""
        self._backwards = current_world().schedule.backwards
        if self._new or self._shared:
            self._note([*self._new, *self._shared.values()])
            self._new = []
            if not self._rivals:
                self._shared.clear()

    def _note(self, pieces: list[Any]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a GradSlice's version is asked for like any tensor's
            for piece in pieces:
                if piece.grad is not None:
                    piece.used_gradient = self._optimizer, weakref.ref(piece.grad), piece.grad._version
