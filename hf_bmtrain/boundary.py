"""Two identity functions for autograd that tell an owner when backward reaches and when it has left its layers.

`enter_backward` stands on the outputs: its backward runs once all their gradients are there, so before any node
of the layers. `leave_backward` stands on the inputs: its backward runs once all their gradients are there, so
after the nodes that made them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


class BackwardOwner(Protocol):
    def before_backward(self, token: Any) -> None:
        """Called with what was given to `enter_backward`, ahead of the layers' backward."""

    def after_backward(self) -> None:
        """Called when the gradients of all inputs exist."""


class _EnterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, owner: BackwardOwner, token: Any, *outputs: torch.Tensor):
        ctx.owner, ctx.token = owner, token
        ctx.set_materialize_grads(False)
        # detach() and not the tensor itself: an input returned as it is becomes a view that may not be modified.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A backward of a backward (create_graph=True) through a sharded model is not supported: its weights "
                "are gathered for one backward only. Compute gradient penalties on a model that is not wrapped."
            )
        ctx.owner.before_backward(ctx.token)
        return None, None, *gradients


class _LeaveBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, owner: BackwardOwner, *inputs: torch.Tensor):
        ctx.owner = owner
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.owner.after_backward()
        return None, *gradients


def enter_backward(owner: BackwardOwner, token: Any, outputs: Any) -> tuple[Any, bool]:
    """`outputs` (any pytree) with the boundary behind its differentiable tensors, and whether there were any."""
    leaves, spec = pytree.tree_flatten(outputs)
    for leaf in leaves:
        _refuse_opaque(leaf)
    places = _differentiable(leaves)
    if not places:
        return outputs, False
    for place, leaf in zip(places, _EnterBackward.apply(owner, token, *(leaves[i] for i in places))):
        leaves[place] = leaf
    return pytree.tree_unflatten(leaves, spec), True


def leave_backward(owner: BackwardOwner, inputs: Any) -> tuple[Any, list[torch.Tensor]]:
    """`inputs` (any pytree) with the boundary in front, and the differentiable tensors it now holds.

    Without such a tensor backward does not come past the inputs: the owner must end with the whole backward.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    places = _differentiable(leaves)
    if not places:
        return inputs, []
    guarded = _LeaveBackward.apply(owner, *(leaves[i] for i in places))
    for place, leaf in zip(places, guarded):
        leaves[place] = leaf
    return pytree.tree_unflatten(leaves, spec), list(guarded)


def _refuse_opaque(leaf: Any) -> None:
    """Differentiable tensors inside an object that pytree does not open would leave without the boundary."""
    inside = getattr(leaf, "__dict__", None)
    if inside and not isinstance(leaf, torch.Tensor):
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inside.values()):
            raise RuntimeError(
                f"The forward of a sharded layer or model returned a {type(leaf).__name__}, whose tensors cannot be "
                "found. Return tensors, tuples, dicts or a transformers ModelOutput, or register the class with "
                "torch.export.register_dataclass."
            )


def _differentiable(leaves: list[Any]) -> list[int]:
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
