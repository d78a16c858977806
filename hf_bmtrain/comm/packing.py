"""Gradients on their way into a flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops.torch_internals import foreach_copy_, foreach_zero_
from .layout import Layout


class Packing:
    """Writes every parameter's gradient to its place in `flat`; padding and what has no gradient become zero."""

    def __init__(self, flat: torch.Tensor, layout: Layout, shapes: Sequence[torch.Size]) -> None:
        self.flat = flat
        # `.data` has a version counter of its own: packing is nothing autograd should see.
        parts = flat.data.split_with_sizes(layout.sizes)
        self._views = [part.view(shape) for part, shape in zip(parts[1::2], shapes)]
        self._gaps = [gap for gap in parts[::2] if gap.numel()]
        self._targets = [*self._views, *self._gaps]
        zeros = flat.new_zeros(max([gap.numel() for gap in self._gaps], default=0))
        self._zeros = [zeros[: gap.numel()] for gap in self._gaps]
        self._present: set[int] = set()

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Pack one gradient now, or add it to what came before."""
        if index in self._present:
            self._views[index].add_(gradient)
        else:
            self._views[index].copy_(gradient)
            self._present.add(index)

    def complete(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Pack the rest in one launch, and return `flat`."""
        if self._present or [gradient for gradient in gradients if gradient is None]:
            views, sources, zeros = self._sort(gradients)
        else:
            views, sources, zeros = self._targets, [*gradients, *self._zeros], []
        if views:
            foreach_copy_(views, sources)
        if zeros:
            foreach_zero_(zeros)
        self._present.clear()
        return self.flat

    def _sort(self, gradients: Sequence[torch.Tensor | None]) -> tuple[list, list, list]:
        """Views to be written, from which gradients, and views to be zeroed; adds to what is there already."""
        views, sources, zeros = [], [], list(self._gaps)
        for index, (view, gradient) in enumerate(zip(self._views, gradients)):
            if gradient is not None and index in self._present:
                view.add_(gradient)
            elif gradient is not None:
                views.append(view)
                sources.append(gradient)
            elif index not in self._present:
                zeros.append(view)
        return views, sources, zeros

    def reset(self) -> None:
        """Forget what was packed."""
        self._present.clear()
