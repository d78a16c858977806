"""The forward and backward of a module that computes its tokens in chunks.

In autograd's graph, the module consists of two nodes: first `_Keep`, which saves the input, and then `_Compute`, which
computes the output and saves nothing. The last tensor that a recomputed block saves is therefore the input of its MLP,
and torch's checkpoint ends the recomputation there. In backward, `_Compute` runs first and only passes the output's
gradient to `_Keep`, which computes all gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...engine.base.torch_internals import autocast_type
from ...engine.blocks.sharded_module import OnlyWhileSharded, extend_class


class ChunkedMlp(OnlyWhileSharded):
    """Base class of MLPs that compute their tokens in chunks.

    `compute_in_chunks` replaces the class of an MLP by a subclass of this class and of the MLP's own class.

    chunks: the number of chunks.
    """

    chunks: ClassVar[int]

    # This is a property, because libraries such as Liger replace the forward of single modules: they store a function
    # in the module's `__dict__`. That function would hide a method of this class, and compute all tokens at once. It
    # does not hide a property, which can then compute the function in chunks.
    @property
    def forward(self) -> Callable[..., Tensor]:
        replaced = self.__dict__.get("forward")
        return functools.partial(_forward, self, super().forward if replaced is None else replaced)

    @forward.setter
    def forward(self, replacement: Callable[..., Tensor]) -> None:
        self.__dict__["forward"] = replacement

    @forward.deleter
    def forward(self) -> None:
        del self.__dict__["forward"]


def _forward(module: ChunkedMlp, whole: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Compute the forward `whole` of an MLP in chunks. The arguments after it are those of the MLP: one tensor."""
    (tokens,) = (*args, *kwargs.values())
    return in_chunks(module.chunks, whole, [*module.parameters()], tokens)


def compute_in_chunks(module: torch.nn.Module, chunks: int) -> None:
    """Make a module, such as an MLP, compute its tokens in chunks, to save memory. The module's class is replaced.

    Args:
        module: the module. Its forward must take one tensor, (..., tokens, features).
        chunks: the number of chunks.
    """
    module.__class__ = _extended_class(type(module), chunks)


@functools.cache
def _extended_class(cls: Any, chunks: int) -> Any:
    """Return the class that replaces `cls`, the class of an MLP: a subclass of ChunkedMlp and `cls`.

    chunks: the number of chunks, which becomes the class attribute `chunks`.
    """
    return extend_class(ChunkedMlp, cls, {"chunks": chunks})


@dataclass(eq=False)
class _Call:
    """One forward of a module that computes its tokens in chunks, with the values that its backward needs.

    Attributes:
        forward: the forward of the module.
        count: the number of chunks.
        parameters: the parameters of the module that require a gradient.
        autocast: the device type and the dtype of autocast in the forward, or None if it was off.
        gradient: the gradient of the output. It is stored by the backward of `_Compute`, the autograd function that
            computes the output, and read by the backward of `_Keep`, which saves the input.
    """

    forward: Callable[[Tensor], Tensor]
    count: int
    parameters: list[Tensor]
    autocast: tuple[str, torch.dtype] | None
    gradient: Tensor | None = field(default=None)

    def context(self) -> AbstractContextManager[Any]:
        """Return a context manager that restores the forward's autocast for the backward.

        Autocast's cache is off, because it would keep the cast weights in memory.
        """
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.autocast[0], dtype=self.autocast[1], cache_enabled=False)


def in_chunks(count: int, forward: Callable[[Tensor], Tensor], parameters: list[Tensor], tokens: Tensor) -> Tensor:
    """Compute `forward(tokens)` in `count` chunks of tokens, one after another, to save memory in forward and backward.

    The backward recomputes each chunk, and computes its gradients before it recomputes the next chunk. Tokens are not
    divided if `count` is 1 or no gradient is needed: `forward` is then called once, for all tokens.

    Args:
        count: the number of chunks. If there are fewer tokens, there is one chunk per token.
        forward: the forward of a module, which takes and returns one tensor.
        parameters: the parameters that `forward` reads. The backward computes gradients of those that require one.
        tokens: the input of the module, (..., tokens, features).

    Returns:
        The output, (..., tokens, features of the output).
    """
    count = min(count, tokens.shape[-2] if tokens.dim() > 1 else 1)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if count < 2 or not torch.is_grad_enabled() or not (trained or tokens.requires_grad):
        return forward(tokens)
    device = autocast_type(tokens.device)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    call = _Call(forward, count, trained, dtype and (device, dtype))
    return _Compute.apply(call, _Keep.apply(call, tokens, *trained))


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, tokens: Tensor, *parameters: Tensor):
        ctx.call = call
        ctx.save_for_backward(tokens)
        return tokens.detach()

    @staticmethod
    def backward(ctx: Any, *nothing: Tensor):
        (tokens,), call = ctx.saved_tensors, ctx.call
        gradient, call.gradient = call.gradient, None
        through = ctx.needs_input_grad[1]
        of_tokens = torch.empty_like(tokens) if through else None
        sums: list[Tensor | None] = [None] * len(call.parameters)
        with torch.enable_grad(), call.context():
            for at, piece, given in _pieces(call.count, tokens, gradient):
                piece = piece.detach().requires_grad_(through)
                wanted = [*call.parameters, *([piece] if through else [])]
                found = torch.autograd.grad(call.forward(piece), wanted, given, allow_unused=True)
                if of_tokens is not None:
                    of_tokens.narrow(-2, at, piece.shape[-2]).copy_(found[-1])
                sums = [_added(total, each) for total, each in zip(sums, found)]
        dtypes = [parameter.dtype for parameter in call.parameters]
        return None, of_tokens, *(None if total is None else total.to(dtype) for total, dtype in zip(sums, dtypes))


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, tokens: Tensor):
        ctx.call, ctx.shape = call, tokens.shape
        whole: Any = None
        for at, piece in _pieces(call.count, tokens):
            output = call.forward(piece)
            if whole is None:
                whole = output.new_empty(*tokens.shape[:-1], output.shape[-1])
            whole.narrow(-2, at, piece.shape[-2]).copy_(output)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        ctx.call.gradient = gradients[0]
        # The gradient of `tokens` is a placeholder that takes no memory: `_Keep` reads `call.gradient` instead.
        return None, gradients[0].new_zeros(()).expand(ctx.shape)


def _pieces(count: int, *tensors: Any) -> Any:
    """Split each of `tensors`, (..., tokens, features), into `count` chunks of tokens.

    For each chunk, yield (the index of its first token, its part of the first tensor, its part of the second, ...).
    """
    at = 0
    for views in zip(*(tensor.tensor_split(count, -2) for tensor in tensors)):
        yield at, *(view.contiguous() for view in views)  # the forward may expect a contiguous input
        at += views[0].shape[-2]


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add a weight's gradient of one chunk to `total`, the sum over the earlier chunks, and return the sum.

    None stands for no gradient. `total` is changed in place. It is float32, or float64 if the gradient is.
    """
    if gradient is None:
        return total
    if total is None:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return total.add_(gradient)
