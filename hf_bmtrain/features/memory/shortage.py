"""Text that is added to out-of-memory errors: a table of what takes memory, and advice on how to save memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...engine.blocks.block import CheckpointBlock
from ...engine.blocks.observer import Observer
from ...engine.blocks.recompute import ALWAYS
from ...engine.runtime.world import World
from ...engine.sharding.slots import buffers_of


def follow_shortage(model: torch.nn.Module, world: World) -> None:
    """Make all later out-of-memory errors describe the memory of `model`, and no longer that of an earlier model.

    Args:
        model: the model that has just been sharded.
        world: the ranks over which it is sharded. The error on a rank describes the memory of that rank.
    """
    shortage = world.schedule.observer(Shortage)
    if shortage is None:
        world.schedule.observe(Shortage(model, world))
    else:
        shortage.follow(model)


class Shortage(Observer):
    """Adds to out-of-memory errors a table of what takes memory, and advice on how to save memory.

    This observer is registered by `follow_shortage`. When memory runs out, the schedule calls `out_of_memory`, and adds
    the returned text to the error as a note (in Python 3.10, it logs the text). The table and the advice are about this
    rank's memory and about one model: the one that was last passed to the constructor or to `follow`.

    Args:
        model: the sharded model.
        world: the ranks over which it is sharded.
    """

    position = 10

    def __init__(self, model: torch.nn.Module, world: World) -> None:
        self._world = world
        self.follow(model)

    def follow(self, model: torch.nn.Module) -> None:
        """Make later out-of-memory errors describe the memory of `model`, instead of that of an earlier model."""
        self._model = weakref.ref(model)

    def out_of_memory(self) -> str:
        model = self._model()
        if model is None:
            return "What takes this memory is unknown: the last model that auto_wrap sharded has been deleted."
        lines = [f"Memory on rank {self._world.rank}, in GiB:", *self._table(model)]
        return "\n".join([*lines, "To save memory, try in this order:", *self._advice(model)])

    def _table(self, model: torch.nn.Module) -> list[str]:
        """Return the lines of a table: how many GiB each kind of tensor of `model` (such as gradient shards) takes."""
        buffers = buffers_of(model)
        full = [b for b in buffers if b.sharded and (b.is_unsharded or b.keeps_address)]
        gradients = [b.gradient.shard for b in buffers if b.gradient.shard is not None]
        rows = {
            "shards of the parameters": sum(shard.nbytes for b in buffers for shard in b.storage.memory().stored),
            f"unsharded parameters, in {len(full)} groups (usually one per block)": sum(b.full_nbytes for b in full),
            "shards of the gradients": sum(shard.nbytes for shard in gradients),
        }
        taken = self._world.schedule.mapped_bytes
        if self._world.device_memory is not None:
            taken += self._world.device_memory.allocated()
        rows["optimizer state, activations and temporary tensors"] = max(0, taken - sum(rows.values()))
        rows["all tensors"] = taken
        return [f"  {nbytes / 2**30:8.2f}  {what}" for what, nbytes in rows.items()]

    def _advice(self, model: torch.nn.Module) -> list[str]:
        """Return numbered lines, each with one way to save memory when training `model`, in the order to try them."""
        states: list[Any] = [block._bmt for block in model.modules() if isinstance(block, CheckpointBlock)]
        advice = []
        if any(buffer.is_resident and not buffer.keeps_address for buffer in buffers_of(model)):
            advice.append("auto_wrap(model, keep_frozen=False) also shards frozen parameters between steps")
        if any(state.recompute is not ALWAYS for state in states):
            advice.append("auto_wrap(model, use_checkpoint=True) keeps only block inputs, and recomputes the rest")
        freed = [state for state in states if not any(buffer.keeps_address for buffer in state.buffers)]
        if self._world.size > 1 and any(state.zero_level == 2 for state in freed):
            advice.append("zero_level=3 frees a block's unsharded parameters between its forward and its backward")
        advice += [
            "bmt.optim.AdamOffloadOptimizer keeps the optimizer's state in host memory",
            "bmt.hf.fuse_causal_loss(model) computes the loss of a language model without storing its logits",
            "smaller batches, with gradient accumulation over several of them, need less memory for activations",
            "with more ranks, each one stores a smaller part of parameters, gradients and optimizer state",
        ]
        return [f"  {number}. {line}." for number, line in enumerate(advice, 1)]
