"""Gradients on their way into a flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import Layout


class Packing:
    """Writes every parameter's gradient to its place in `flat`; padding and what has no gradient become zero."""

    def __init__(self, flat: torch.Tensor, layout: Layout, shapes: Sequence[torch.Size]) -> None:
        self.flat = flat
        # `.data` has a version counter of its own: packing is nothing autograd should see.
        parts = flat.data.split_with_sizes(layout.sizes)
        self._views = [part.view(shape) for part, shape in zip(parts[1::2], shapes)]
        self._gaps = [gap for gap in parts[::2] if gap.numel()]
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
        views, sources, zeros = [], [], list(self._gaps)
        for index, (view, gradient) in enumerate(zip(self._views, gradients)):
            if gradient is not None and index in self._present:
                view.add_(gradient)
            elif gradient is not None:
                views.append(view)
                sources.append(gradient)
            elif index not in self._present:
                zeros.append(view)
        if views:
            torch._foreach_copy_(views, sources)
        if zeros:
            torch._foreach_zero_(zeros)
        self._present.clear()
        return self.flat

    def reset(self) -> None:
        """Forget what was packed."""
        self._present.clear()
