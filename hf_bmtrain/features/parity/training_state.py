"""Save everything that the steps of `check_parity` change, and restore it afterwards."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.blocks.block import CheckpointBlock
from ...engine.blocks.recompute import ALWAYS, NEVER
from ...engine.runtime.world import World
from ...engine.sharding.parameter import DistributedParameter
from ..replay.replay import Snapshot


class TrainingState:
    """A copy of the weights, gradients, buffers and attributes of `model`, and of the states of the random generators.

    Only this rank's shards of the weights are copied. Creating this object also changes the model until `restore`:
    sharded parameters have no gradients and no gradient hooks, and the backward recomputes every block (transformer
    layer) that training may recompute. This replaces use_checkpoint="auto", which would otherwise measure the memory of
    the steps of `check_parity`.

    Args:
        model: the wrapped model.
        world: the ranks over which it is sharded.
    """

    def __init__(self, model: torch.nn.Module, world: World) -> None:
        self._world = world
        self._forward = Snapshot.of(model, world.device)
        sharded_params = [p for p in model.parameters() if isinstance(p, DistributedParameter)]
        self._weights = [(sharded, sharded.part.clone()) for sharded in sharded_params]
        self._others = [(p, p.grad) for p in model.parameters() if not isinstance(p, DistributedParameter)]
        self._states: list[Any] = [module._bmt for module in model.modules() if isinstance(module, CheckpointBlock)]
        self._policies = [state.recompute for state in self._states]
        for state in self._states:
            state.recompute = NEVER if state.recompute is NEVER else ALWAYS
        self._gradients = [b.gradient.set_aside() for b in dict.fromkeys(sharded.buffer for sharded in sharded_params)]

    def rewind(self) -> None:
        """Restore buffers, attributes and random generators, so that the next forward starts from the same state.

        `check_parity` calls this between the run with shards and the run with full weights. Unlike `restore`, it leaves
        gradients, weights and the recomputation of blocks as they are.
        """
        self._forward.restore()

    @torch.no_grad()
    def restore(self, weights: bool) -> None:
        """Restore the model and the random generators to their state before this object was created.

        This restores gradients, buffers and attributes, and lets each block decide again as before whether to recompute
        its forward. If a backward has failed, its gradients are dropped first.

        weights: whether to restore the weights too, which is needed only if they may have been written.
        """
        self._world.schedule.discard_failed_backward()
        self.rewind()
        if weights:
            for sharded, value in self._weights:
                sharded.part.copy_(value)
        for restore in self._gradients:
            restore()
        for parameter, gradient in self._others:
            parameter.grad = gradient
        for state, policy in zip(self._states, self._policies):
            state.recompute = policy
