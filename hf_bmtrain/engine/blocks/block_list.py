"""TransformerBlockList: blocks in execution order. Also BMTrain's list for pipelines, here with one stage."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..base.arguments import expect_kind, expect_number
from .block import CheckpointBlock


class TransformerBlockList(torch.nn.ModuleList):
    """CheckpointBlocks in execution order, each of which knows its neighbours, for prefetching.

    Collective: every rank must call it. Every module becomes a CheckpointBlock. The list can be iterated over, indexed
    and sliced like any ModuleList. (A slice is a plain ModuleList.) It can be called as in BMTrain: `blocks(x, *args,
    **kwargs)` passes `x` through all blocks, each of which gets the same `args` and `kwargs`.

    Args:
        modules: the layers, in execution order.
        num_hidden: the number of hidden states, which are the first arguments of a block and are passed from block to
            block. Each block returns as many values, in a tuple if there are several.
    """

    num_hidden: int = 1  # a class attribute, because `wrap` turns ModuleLists into this class without __init__

    def __init__(self, modules: Iterable[torch.nn.Module], num_hidden: int = 1) -> None:
        wanted = "at least 1, because it is the number of hidden states that are passed from block to block"
        expect_number("num_hidden", num_hidden, wanted, lambda number: number >= 1, integer=True)
        expect_kind("modules", modules, Iterable, "a list of torch.nn.Modules")
        layers = list(modules)
        for layer in layers:
            expect_kind("modules", layer, torch.nn.Module, "a list of torch.nn.Modules only")
        super().__init__([CheckpointBlock(layer) for layer in layers])
        self.num_hidden = num_hidden
        self.link()

    def link(self) -> None:
        """Set `next` and `previous` of every block in the list, for prefetching."""
        blocks: list[Any] = list(dict.fromkeys(self))
        for block, following in zip(blocks, blocks[1:]):
            block._bmt.next, following._bmt.previous = weakref.ref(following._bmt), weakref.ref(block._bmt)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Pass hidden states through all blocks.

        Args:
            *args: `num_hidden` hidden states, then further arguments, which are passed to every block.
            return_hidden_states: whether to also return, for each hidden state, its values before every block, stacked
                along a new dimension 0: (blocks, ...).
            **kwargs: passed to every block.

        Returns:
            The last block's hidden state, or a tuple if there are several or if `return_hidden_states` is set.

        Raises:
            ValueError: `args` has fewer than `num_hidden` elements, or a block does not return `num_hidden` values.
        """
        if len(args) < self.num_hidden:
            raise ValueError(
                f"This TransformerBlockList passes on {self.num_hidden} hidden states, but got {len(args)} positional "
                "arguments. Pass every hidden state by position, or set num_hidden."
            )
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
                f"Block {number} of a TransformerBlockList returned {len(hidden)} values instead of "
                f"{self.num_hidden}. Pass num_hidden={len(hidden)} to TransformerBlockList, or return only the hidden "
                "states that the next block takes."
            )
        return hidden

    def __getitem__(self, index):
        if isinstance(index, slice):
            return torch.nn.ModuleList(list(self._modules.values())[index])
        return super().__getitem__(index)


class PipelineTransformerBlockList(TransformerBlockList):
    """A TransformerBlockList with the name of BMTrain's list for pipelines. It has a single stage.

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
            batch_related: the arguments that BMTrain cuts into micro-batches. Accepted for compatibility and ignored.
            return_hidden_states: as in TransformerBlockList.
            **kwargs: as in TransformerBlockList.
        """
        return super().forward(*args, return_hidden_states=return_hidden_states, **kwargs)
