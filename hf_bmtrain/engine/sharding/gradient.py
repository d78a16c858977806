"""The gradient of a flat buffer: averaged over the ranks into the shard, accumulated, handed to the slices."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..base.torch_internals import WithoutTorchFunction
from ..comm.collective_log import code
from ..comm.reduce import PendingReduce, Reducer
from ..comm.streams import finish
from ..ops.grad_norm import Segments, as_real
from ..tensors.norms import SegmentNorms
from ..tensors.placement import Placement
from ..tensors.tensor import SET_GRAD, ShardTensor
from .unused import UnusedParameters


class GradientBuffer:
    """Owns `shard`, this rank's part of the flat gradient, which exists while a slice has a `.grad`.

    wholes: the whole parameters, whose `.grad` autograd sets. slices: weak references to this rank's slices, set once
    they are made; a slice may be dropped with its module. A new accumulation begins if no slice has a `.grad`. While
    several backwards accumulate, half-precision gradients are summed in float32 and rounded once into `shard`. A
    parameter without a gradient on this rank counts as zero, and its slice's `.grad` stays None if no rank has one.
    requires_grad: of each slice; the slices write it. trained: of each slice, whether it required a gradient when one
    was reduced. number: the buffer's.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        reducer: Reducer,
        full_params: list[torch.nn.Parameter],
        like: torch.Tensor,
        unused: UnusedParameters,
    ) -> None:
        """placements: of the wholes. like: the parameters' shard, whose shape, dtype and device the gradient's has."""
        self._placements, self._reducer, self._full_params, self._like = placements, reducer, full_params, like
        self._communicator = placements[0].communicator
        self._unused, self._alone = unused, self._communicator.size == 1
        self.number = unused.number
        self._entry = code("reduction of the gradient of", self.number)
        self.slices: list[weakref.ref[Any]] = []
        self._indices = range(len(full_params))
        self._local_ranges = [placement.range for placement in placements]
        self.requires_grad = [full.requires_grad for full in full_params]
        self.trained = [False] * len(full_params)
        self._full_params_require_grad = list(self.requires_grad)
        self._noted_require_grad = list(self.requires_grad)
        self._begun = False  # the shard is being written, from the first gradient of a backward to `receive`
        self._pending: PendingReduce | None = None  # from `send` to `receive`
        self._collected: set[int] = set()
        self._absent: list[int] = []  # from `send` to `decide`: not used by this rank, and without a `.grad`
        self._squares: torch.Tensor | None = None
        self._norms: SegmentNorms | None = None
        self.shard: torch.Tensor | None = None
        self._total: torch.Tensor | None = None  # the running sum
        self._handed: list[torch.Tensor | None] = [None] * len(full_params)
        sizes = placements[0].layout.shard_sizes(self._communicator.rank)
        present = [position for position, size in enumerate(sizes) if size or position % 2]  # gaps that are not empty
        self._sizes = [sizes[position] for position in present]
        self._parts = [number for number, position in enumerate(present) if position % 2]
        self._version = -1
        self._segments: Segments | None = None  # torch measures float64
        self._is_complex = like.is_complex()
        if like.dtype.to_real() != torch.float64:
            numbers = 2 if self._is_complex else 1  # an element is so many real numbers
            ends = [*(local_range.shard_start for local_range in self._local_ranges), self._local_ranges[-1].shard_stop]
            self._segments = Segments([numbers * end for end in ends], like.device)

    @property
    def trainable(self) -> bool:
        """True if any slice requires a gradient."""
        return any(self.requires_grad)

    def follow_requires_grad(self) -> None:
        """Make the wholes require gradients as their slices do, which may have changed since the last forward."""
        if self.requires_grad != self._full_params_require_grad:
            for full, required in zip(self._full_params, self.requires_grad):
                full.requires_grad_(required)
            self._full_params_require_grad = list(self.requires_grad)

    def free_if_unused(self) -> None:
        """Drop the shard if no slice has a `.grad`, so that its memory is free during the next forward."""
        if self.shard is not None and not self._begun and not self._absent and self._fresh:
            self.shard = self._total = self._squares = self._norms = None
            self._handed = [None] * len(self._handed)

    @property
    def _fresh(self) -> bool:
        for reference in self.slices:
            local = reference()
            if local is not None and local.grad_now is not None:
                return False
        return True

    @property
    def _gradients(self) -> list[torch.Tensor | None]:
        """The `.grad` of every slice, None for one that was dropped."""
        return [None if (local := reference()) is None else local.grad_now for reference in self.slices]

    def set_aside(self) -> Callable[[], None]:
        """Leave the slices without `.grad` and hooks. Returns a function that puts all back as it is now.

        For a backward that is no part of training, such as a comparison's.
        """
        slices = [local for each in self.slices if (local := each()) is not None]
        gradients = [(local, local.grad, local._gradient_hooks.copy()) for local in slices]
        names = ("shard", "_total", "_squares", "_norms", "_handed", "_version")
        values = {name: getattr(self, name) for name in names}
        self.shard = self._total = self._squares = self._norms = None
        self._handed = [None] * len(self._handed)
        for local in slices:
            local.grad = None
            local._gradient_hooks.clear()  # a handle refers to this dict

        def restore() -> None:
            for local, gradient, hooks in gradients:
                local.grad = gradient
                local._gradient_hooks.update(hooks)
            vars(self).update(values)

        return restore

    # -- one backward -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Take over the gradient of parameter `index` before `send`. Several are added up."""
        if self.requires_grad[index]:  # it may have been frozen since the forward
            self._collected.add(index)
            self._reducer.collect(index, gradient, self._begin)

    @property
    def is_pending(self) -> bool:
        """True if it was sent and not received."""
        return self._pending is not None

    def own(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield this rank's gradients that `send` will average, each with its index, but for what was collected."""
        for index, full in enumerate(self._full_params):
            if full.grad is not None:
                yield index, full.grad

    def send(self) -> None:
        """Start to average what was collected and the `.grad` of every whole over the ranks."""
        shard, total = self._begin()
        # Parameters that were frozen since the forward get no more gradient.
        gradients = [full.grad if required else None for full, required in zip(self._full_params, self.requires_grad)]
        for full in self._full_params:
            full.grad = None
        if self.requires_grad != self._noted_require_grad:  # a rank where it is another would give zeros to the mean
            self._noted_require_grad = list(self.requires_grad)
            self._communicator.collective_log.note(code("change of requires_grad in", self.number))
        self.trained = [*map(operator.or_, self.trained, self.requires_grad)]
        self._communicator.collective_log.note(self._entry)
        self._unused.sent += 1
        lacking = [index for index, gradient in enumerate(gradients) if gradient is None]
        if lacking:
            self._note_absent(lacking)
        if self._collected:
            self._collected.clear()
        self._pending = self._reducer.send(gradients, shard, total)

    def _note_absent(self, lacking: list[int]) -> None:
        """Note and post which parameters this rank did not use, but for those that have a `.grad` in any case."""
        present = self._gradients
        self._absent = [
            index
            for index in lacking
            if self.requires_grad[index] and index not in self._collected and present[index] is None
        ]
        if self._absent:
            self._unused.post(self._absent)

    def receive(self) -> bool:
        """Wait for the mean, which is added to an accumulation, and set the slices' `.grad` to views of `shard`.

        The slices of parameters that this rank did not use are left to `decide`. Returns True if there are any.
        """
        assert self._pending is not None and self.shard is not None
        self._pending.wait()
        self._squares, self._pending, self._begun = self._pending.squares, None, False
        torch.autograd.graph.increment_version(self.shard)  # a reduction and packing do not count their writes
        self._version = self.shard._version
        if self._segments is not None:
            values = as_real(self.shard) if self._is_complex else self.shard
            self._norms = SegmentNorms(values, self._segments, self._communicator, self._squares)
        if not self._absent:
            self._hand_out(self._indices)
            return False
        # Hooks are called in the same order on every rank, which they may rely on.
        hooked = any(local is not None and local._gradient_hooks for local in (each() for each in self.slices))
        if hooked or self._alone:
            self._absent, unused = [], self._find_unused()
            self._hand_out(index for index in self._indices if index not in unused)
            return False
        absent = set(self._absent)
        self._hand_out(index for index in self._indices if index not in absent)
        return True

    def decide(self) -> None:
        """Set the `.grad` of parameters that another rank used. The host waits until all gradients have arrived.

        Nothing happens if the gradient was sent again since, which decides as well.
        """
        if self._pending is not None or not self._absent:
            return
        unused = self._find_unused()
        absent, self._absent = self._absent, []
        self._hand_out(index for index in absent if index not in unused)

    def _find_unused(self) -> set[int]:
        if not self._alone:
            finish(self._like.device)
        return self._unused.agree(self._absent)

    def discard(self) -> None:
        """Forget what autograd has computed, what was collected and what was sent."""
        for full in self._full_params:
            full.grad = None
        self._reducer.discard()
        self._collected.clear()
        self._absent = []
        if self._pending is not None:
            self._pending.cancel()  # it may have written the shard
            self._pending = self._squares = None
        self._begun = False

    def _begin(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the shard for this backward's mean, and the running sum if an accumulation has begun."""
        assert self._pending is None, "the previous gradient was not received"
        if not self._begun:
            if self._absent:
                self.decide()
            self.free_if_unused()
            if self._fresh:
                self.shard = torch.empty_like(self._like)
            else:
                self._resume_total()
            self._begun = True
        assert self.shard is not None
        return self.shard, self._total

    # -- accumulation -------------------------------------------------------------------------------------------

    @property
    def intact(self) -> bool:
        """True if every slice's `.grad` is still the view of `shard` that was handed out."""
        for mine, handed in zip(self._gradients, self._handed):
            if mine is not None and mine is not handed:
                return False
        return True

    @property
    def _unwritten(self) -> bool:
        return self.shard is not None and self.shard._version == self._version

    def squares(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Return the sums of squares of these adjacent slices' `.grad`s, (k,) float64; None if not measured yet."""
        if self._squares is None or not self._unwritten:
            return None
        gradients, handed = self._gradients, self._handed
        if any(gradients[index] is None or gradients[index] is not handed[index] for index in indices):
            return None
        return self._squares[indices[0] : indices[-1] + 1]

    def wide(self, start: int, stop: int) -> torch.Tensor | None:
        """Return elements start:stop of the float32 running sum, or None if `.grad` is not rounded from one."""
        if self._total is None or not self._unwritten:
            return None
        return self._total[start:stop]

    def _resume_total(self) -> None:
        """Set the running sum to the present `.grad` of the slices, which may be the user's own."""
        if self.shard is None:
            self.shard = torch.zeros_like(self._like)
        if self._total is None or not self._unwritten:
            wide = torch.promote_types(self.shard.dtype, torch.float32)
            self._total = self.shard if wide == self.shard.dtype else self.shard.to(wide)
        with WithoutTorchFunction():
            for gradient, local_range, handed in zip(self._gradients, self._local_ranges, self._handed):
                if gradient is handed and gradient is not None:
                    continue
                target = self._total[local_range.shard_start : local_range.shard_stop]
                target.zero_() if gradient is None else target.copy_(gradient)

    def _hand_out(self, indices: Iterable[int]) -> None:
        """Set the `.grad` of these slices, and call their hooks."""
        assert self.shard is not None
        norms = self._norms
        parts = self.shard.split_with_sizes(self._sizes)
        required, handed, placements, hooked = self.requires_grad, self._handed, self._placements, []
        with WithoutTorchFunction():
            for index in indices:
                local = self.slices[index]()
                if local is None:
                    continue
                if required[index] and (handed[index] is None or local.grad_now is not handed[index]):
                    part: Any = parts[self._parts[index]]
                    part.__class__ = ShardTensor  # `part` has no other reference, and `of` would make a second tensor
                    part.placement, part.segment = placements[index], None if norms is None else (norms, index)
                    SET_GRAD(local, part)
                    handed[index] = local.grad_now = part
                if local._gradient_hooks:
                    hooked.append(local)
        for local in hooked:
            for hook in list(local._gradient_hooks.values()):
                hook(local)
