"""One step of an optimizer whose state comes in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..ops.adam_step import Elements
from .slabs import Chunk, Part
from .state import RunState


class ChunkUpdate:
    """What whoever carries the chunks needs of the runs, and the arithmetic for each part that has arrived.

    gradients: (n,) of each run, by its number, on the parameters' device.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        states: Sequence[RunState],
        runs: Sequence[int],
        update: Callable[[int, Elements], object],
    ) -> None:
        """chunks: all those of `runs`, by number. update: steps `Elements` of a run, which is given by its number."""
        self.chunks, self._states, self._update = chunks, states, update
        self.gradients = {number: states[number].run.gradient() for number in runs}

    def gradient(self, part: Part) -> torch.Tensor:
        return self.gradients[part.run][part.of_run]

    def weight(self, part: Part) -> torch.Tensor:
        return self._states[part.run].run.weights[part.of_run]

    def apply(
        self,
        part: Part,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor | None],
        weight: torch.Tensor,
    ) -> None:
        """Update one part, which lies in `state` (master, exp_avg, exp_avg_sq of the chunk) and in `weight`.

        Where there is no master, the weight is its own.
        """
        master, exp_avg, exp_avg_sq = (None if tensor is None else tensor[part.of_chunk] for tensor in state)
        assert exp_avg is not None and exp_avg_sq is not None
        base = self._states[part.run].index_base + part.of_run.start
        if master is None:
            elements = Elements(gradient, weight, exp_avg, exp_avg_sq, None, base)
        else:
            elements = Elements(gradient, master, exp_avg, exp_avg_sq, weight, base)
        self._update(part.run, elements)
