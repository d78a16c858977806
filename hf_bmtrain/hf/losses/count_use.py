"""Observe whether the computation of a loss uses `num_items_in_batch`, the number of labels of a step."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.base.torch_internals import pytree
from ...engine.blocks.block import CheckpointBlock
from .hooks import COUNT, keep_hooks

_READS = {
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__int__", "__float__", "__complex__", "__bool__"),
    *("__index__", "__array__", "__dlpack__", "__reduce_ex__", "__setitem__"),
}
"""Names of functions of torch that use the value of a tensor, but return no tensor. Formatting it as text is not one of
them, because programs print it."""


class CountUse:
    """Observes whether code that computes a loss uses the argument `num_items_in_batch`.

    `num_items_in_batch` is the number of labels in all micro-batches of a step on all ranks. Trainer expects code to
    divide the loss by it. If code ignores it, the loss is taken for a mean over this rank's labels, and the caller
    corrects it.

    Pass the tensor that `observed` returns to the code, in place of `num_items_in_batch`. After the code has run, read
    `seen`. Computing with the tensor and reading its value count as a use. Printing it, or reading its dtype, shape or
    device, does not.

    Attributes:
        seen: whether code has used the tensor that the last call of `observed` returned.
    """

    def __init__(self) -> None:
        self.seen = False

    def observed(self, count: Any) -> torch.Tensor:
        """Return `count` as a tensor whose use sets `seen` to True. Until then, `seen` is False.

        count: `num_items_in_batch`, a tensor of one element or a number.
        """
        self.seen, plain = False, count if isinstance(count, torch.Tensor) else torch.tensor(count, device="cpu")
        tensor = plain.as_subclass(_Observed)
        tensor.plain, tensor.use = plain, self
        return tensor


def _uses_in(given: Any) -> list[CountUse]:
    return [value.use for value in pytree.tree_leaves(given) if isinstance(value, _Observed)]


def hide_from_blocks(model: Any) -> None:
    """Let the blocks of `model` get `num_items_in_batch` as a plain tensor, and not as one that `CountUse` observes.

    `num_items_in_batch` is the number of labels of a step, by which a loss may be divided. Transformers' models pass
    all their keyword arguments on to their layers. The layers do not compute the loss, but the engine and compiled
    blocks may read the arguments of layers, and such a read must not count as a use.

    model: the sharded model, after a call of `claim_hooks`.
    """
    for module in model.modules():
        if isinstance(module, CheckpointBlock):
            keep_hooks(model, module.register_forward_pre_hook(_hide, with_kwargs=True, prepend=True))


def _hide(block: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    count = kwargs.get(COUNT)
    return (args, {**kwargs, COUNT: count.plain}) if isinstance(count, _Observed) else None


class _Observed(torch.Tensor):
    """A tensor that sets `use.seen` to True when code uses its value.

    torch's functions get `plain` instead, so their results are not observed, and torch.compile can trace them.

    Attributes:
        plain: a plain tensor with the same value, whose use is not observed.
        use: the CountUse whose `observed` returned this tensor.
    """

    plain: torch.Tensor
    use: CountUse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        uses = _uses_in(given)
        args, kwargs = pytree.tree_map(lambda value: value.plain if isinstance(value, _Observed) else value, given)
        result = func(*args, **kwargs)
        # Reading the dtype, shape or device does not count as a use. torch.compile reads them even if nothing uses the
        # tensor.
        if isinstance(result, torch.Tensor) or getattr(func, "__name__", "") in _READS:
            for use in uses:
                use.seen = True
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.tensor(count), new_tensor, full and the like read the value of a tensor that is passed in place of a
        # number. They call this method, but not `__torch_function__`.
        given = args, kwargs or {}
        for use in _uses_in(given):
            use.seen = True
        args, kwargs = pytree.tree_map(lambda value: value.plain if isinstance(value, _Observed) else value, given)
        return func(*args, **kwargs)
