"""TransformerBlockList: blocks in execution order; and BMTrain's list for pipelines, with one stage."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..base.arguments import expect_kind, expect_number
from .block import CheckpointBlock


class TransformerBlockList(torch.nn.ModuleList):
    """CheckpointBlocks in execution order, linked to their neighbours for prefetching.

    Makes every module a CheckpointBlock. The list can be iterated over, indexed and sliced like any ModuleList (a slice
    is a plain ModuleList), and called as in BMTrain: `list(x, *args)` passes x through all blocks, which all get the
    same `args` and `kwargs`. Collective.

    Args:
        modules: the layers, in execution order.
        num_hidden: the number of leading arguments that are hidden states, passed from block to block. Each block
            returns as many, as a tuple if there are several.
    """

    num_hidden: int = 1  # of a list whose class was extended in place, too

    def __init__(self, modules: Iterable[torch.nn.Module], num_hidden: int = 1) -> None:
        wanted = "at least 1: it counts the hidden states that go from block to block"
        expect_number("num_hidden", num_hidden, wanted, lambda number: number >= 1, integer=True)
        expect_kind("modules", modules, Iterable, "a list of torch.nn.Modules")
        layers = list(modules)
        for layer in layers:
            expect_kind("modules", layer, torch.nn.Module, "torch.nn.Modules alone")
        super().__init__([CheckpointBlock(layer) for layer in layers])
        self.num_hidden = num_hidden
        self.link()

    def link(self) -> None:
        """Link every block to its neighbours in the list."""
        blocks: list[Any] = list(dict.fromkeys(self))
        for block, following in zip(blocks, blocks[1:]):
            block._bmt.next, following._bmt.previous = weakref.ref(following._bmt), weakref.ref(block._bmt)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Pass hidden states through all blocks.

        Args:
            *args: the hidden states, as many as `num_hidden`, and further arguments that all blocks get.
            return_hidden_states: whether to append, for each hidden state, the inputs of all blocks, stacked on a new
                dimension 0: (blocks, ...).
            **kwargs: keywords that all blocks get.

        Returns:
            The last block's hidden state, or a tuple if there are several or `return_hidden_states` is set.

        Raises:
            ValueError: there are fewer arguments than hidden states, or a block returns another number of them.
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


class PipelineTransformerBlockList(TransformerBlockList):
    """TransformerBlockList under the name of BMTrain's list for pipelines. It has one stage and computes the same.

    Args:
        modules: the layers, in execution order.
        num_hidden: as in TransformerBlockList.
    """

    def forward(
        self, *args: Any, batch_related: Iterable[int] = (), return_hidden_states: bool = False, **kwargs: Any
    ) -> Any:
        """Pass hidden states through all blocks, as TransformerBlockList does.

        Args:
            *args: as in TransformerBlockList.
            batch_related: an argument of BMTrain's, what it cuts into micro-batches; ignored.
            return_hidden_states: as in TransformerBlockList.
            **kwargs: as in TransformerBlockList.
        """
        return super().forward(*args, return_hidden_states=return_hidden_states, **kwargs)
