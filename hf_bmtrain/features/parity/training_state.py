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
    """Saves what the steps of `check_parity` change, so that training continues afterwards as if they had not run.

    It contains copies of this rank's weight shards, of the modules' buffers, and of the states of random generators. It
    also refers to the values of the modules' attributes; tensors among them are not copied. Creating this object
    changes the model until `restore` is called:

    * Gradients and gradient hooks are set aside. The steps of `check_parity` begin without gradients, and call none of
      these hooks.
    * Every block is recomputed in backward, unless its recomputation is off. This replaces the policy of
      use_checkpoint="auto", which would otherwise measure the memory of these steps.

    Args:
        model: the wrapped model.
        world: the ranks over which it is sharded.

    Attributes:
        hooks: the number of gradient hooks of the parameters, which are set aside until `restore`.
    """

    def __init__(self, model: torch.nn.Module, world: World) -> None:
        self._world = world
        self._forward = Snapshot.of(model, world.device)
        sharded_params = [p for p in model.parameters() if isinstance(p, DistributedParameter)]
        self.hooks = sum(len(p._gradient_hooks) for p in sharded_params)
        self._weights = [(sharded, sharded.part.clone()) for sharded in sharded_params]
        self._others = [(p, p.grad) for p in model.parameters() if not isinstance(p, DistributedParameter)]
        found = [hooks for p, _ in self._others if (hooks := p._post_accumulate_grad_hooks)]
        self._hooks = [(hooks, dict(hooks)) for hooks in found]
        self.hooks += sum(map(len, found))
        for hooks in found:
            hooks.clear()  # in place, because autograd refers to this dict
        for parameter, _ in self._others:
            parameter.grad = None  # otherwise a backward would add to the saved gradient in place
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

        If the backward of a `check_parity` step has raised an exception, its unfinished gradients and reductions are
        dropped first. Then gradients, gradient hooks, buffers, attributes, random generators, and the policy by which
        each block decides whether to recompute its forward are restored.

        weights: whether to restore the weights too, which is needed only if an optimizer may have written them.
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
        for hooks, kept in self._hooks:
            hooks.update(kept)
        for state, policy in zip(self._states, self._policies):
            state.recompute = policy
