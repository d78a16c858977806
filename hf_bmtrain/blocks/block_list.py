"""Blocks in execution order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .block import CheckpointBlock


class TransformerBlockList(torch.nn.ModuleList):
    """CheckpointBlocks in execution order, each knowing its neighbours, so that gathers run ahead.

    Iterable, indexable and sliceable like any ModuleList (a slice is a plain ModuleList), and callable as in
    BMTrain: `list(x, *args)` feeds x through all blocks, which all get the same `args` and `kwargs`.

    num_hidden: how many leading arguments are hidden states, fed from block to block; each block then returns as
    many, a tuple where they are several.
    """

    num_hidden: int = 1  # of a list whose class was extended in place, too

    def __init__(self, modules: Iterable[torch.nn.Module], num_hidden: int = 1) -> None:
        if num_hidden < 1:
            raise ValueError(f"num_hidden counts the hidden states that go from block to block, got {num_hidden}")
        super().__init__([CheckpointBlock(module) for module in modules])
        self.num_hidden = num_hidden
        self.link()

    def link(self) -> None:
        """Tell every block its neighbours, in the order of the list."""
        blocks: list[Any] = list(dict.fromkeys(self))
        for block, following in zip(blocks, blocks[1:]):
            block._bmt.next, following._bmt.previous = following._bmt, block._bmt

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """The last block's hidden state, or the tuple of them.

        return_hidden_states: after the last ones follow, for each hidden state, what entered every block, stacked
        on a new dimension 0, shape (blocks, ...).
        """
        if len(args) < self.num_hidden:
            raise ValueError(f"this list passes on {self.num_hidden} hidden states, got {len(args)} arguments")
        hidden, rest = args[: self.num_hidden], args[self.num_hidden :]
        entered: list[tuple] = []
        for number, block in enumerate(self):
            entered.append(hidden)
            hidden = self._as_hidden(number, block(*hidden, *rest, **kwargs))
        if return_hidden_states:
            return (*hidden, *(torch.stack(states) for states in zip(*entered)))
        return hidden if self.num_hidden > 1 else hidden[0]

    def _as_hidden(self, number: int, outputs: Any) -> tuple:
        hidden = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        if len(hidden) != self.num_hidden:
            raise ValueError(
                f"block {number} returned {len(hidden)} values, but this list passes on {self.num_hidden}: give "
                f"TransformerBlockList num_hidden={len(hidden)}, or return what the next block takes."
            )
        return hidden

    def __getitem__(self, index):
        if isinstance(index, slice):
            return torch.nn.ModuleList(list(self._modules.values())[index])
        return super().__getitem__(index)
