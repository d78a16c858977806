"""The forward and backward of a module that processes its tokens in chunks.

In autograd's graph, the module consists of two nodes. In the forward, `_Keep` saves the input, and then `_Compute`
computes the output and saves nothing. In backward, `_Compute` runs first and only passes the output's gradient to
`_Keep`. Then `_Keep` recomputes each chunk and computes all gradients.

Two nodes save time if the block of an MLP is recomputed. torch's checkpoint ends the recomputation of a block as soon
as it has the last tensor that autograd saved in the forward. If nothing after the MLP saves a tensor, the last one is
the MLP's input, so the recomputation of the block ends before the MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...engine.base.torch_internals import autocast_type
from ...engine.blocks.sharded_module import OnlyWhileSharded


class ChunkedMlp(OnlyWhileSharded):
    """Base class of MLPs that process their tokens in chunks.

    `MlpChunks` replaces the class of an MLP by a subclass of this class and of the MLP's own class.

    chunks: the number of chunks into which a forward divides its tokens.
    """

    chunks: ClassVar[int]

    # This is a property, because libraries such as Liger replace the forward of single modules: they store a function
    # in the module's `__dict__`. Such a function would hide a method of this class, and compute all tokens at once. But
    # it does not hide a property, and the property can call the function once for each chunk.
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
    """Compute the forward of an MLP in chunks of tokens, one after another.

    module: the MLP.
    whole: its own forward, which computes all tokens at once.
    args, kwargs: the arguments of the MLP: a single tensor, by position or by name.
    """
    (tokens,) = (*args, *kwargs.values())
    name = f"mlp_chunks={module.chunks}: {type(module).__name__}"

    def of_piece(piece: Tensor) -> Tensor:
        # The MLP must not write to a piece of its input. A piece may be a copy. Other code that reads the input, such
        # as a residual connection, would then not see the write. Also, the backward runs the MLP again, and would
        # repeat the write.
        before = None if piece is tokens else piece._version
        output = whole(piece)
        if before is not None and piece._version != before:
            raise RuntimeError(
                f"{name} changed its input in place in its forward. Each chunk may be a copy of a part of the input, "
                "so the rest of the model would not read the changed values. Change the MLP so that it modifies a copy "
                "of its input, or leave mlp_chunks out."
            )
        if output.shape[:-1] != piece.shape[:-1]:
            raise ValueError(
                f"{name} returned a tensor of shape {tuple(output.shape)} for a chunk of tokens of shape "
                f"{tuple(piece.shape)}, so it does not compute each token on its own. Leave mlp_chunks out."
            )
        return output

    buffers = {key: buffer for key, buffer in module.named_buffers() if not buffer.is_inference()}
    versions = {key: buffer._version for key, buffer in buffers.items()}
    output = in_chunks(module.chunks, of_piece, [*module.parameters()], tokens)
    changed = [key for key, buffer in buffers.items() if buffer._version != versions[key]]
    if changed:
        raise RuntimeError(
            f"{name} changed its buffers {changed} in its forward. It would change them once for each chunk, and again "
            "in backward, which recomputes each chunk. Leave mlp_chunks out."
        )
    return output


@dataclass(eq=False)
class _Call:
    """One forward of a module that processes its tokens in chunks, with the values that its backward needs.

    Attributes:
        forward: the forward of the module.
        count: the number of chunks.
        parameters: the parameters of the module that require a gradient.
        autocast: the device type and the dtype of autocast, and whether it was enabled in the forward.
        random: pairs (generator, its state before the forward), for torch's default generators.
        gradient: the gradient of the output. It is stored by the backward of `_Compute`, the autograd function that
            computes the output, and read by the backward of `_Keep`, which saves the input.
    """

    forward: Callable[[Tensor], Tensor]
    count: int
    parameters: list[Tensor]
    autocast: tuple[str, torch.dtype, bool]
    random: list[tuple[torch.Generator, Tensor]]
    gradient: Tensor | None = None

    @contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """Context manager for the backward, in which the chunks draw the same random numbers as in the forward.

        It sets the random generators to their states from before the forward. At the end of the context, it restores
        the states from before the context.
        """
        present = [(generator, generator.get_state()) for generator, _ in self.random]
        try:
            _set_states(self.random)
            yield
        finally:
            _set_states(present)


def _set_states(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def in_chunks(count: int, forward: Callable[[Tensor], Tensor], parameters: list[Tensor], tokens: Tensor) -> Tensor:
    """Compute `forward(tokens)` in `count` chunks of tokens, one after another, to save memory in forward and backward.

    The backward recomputes one chunk, computes the gradients of that chunk, and then goes on to the next. It draws the
    same random numbers as the forward, if `forward` draws them from torch's default generators. If `count` is 1, there
    is only one token, or no gradient is needed, the tokens are not divided: `forward` is called once, for all tokens.

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
    autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    drawn = [torch.default_generator]
    if tokens.device.type not in ("cpu", "meta"):
        drawn.append(torch.get_device_module(tokens.device).default_generators[tokens.device.index])
    random = [(generator, generator.get_state()) for generator in drawn]
    call = _Call(forward, count, trained, autocast, random)
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
        with torch.enable_grad(), call.same_random_numbers():
            for at, piece, given in _pieces(call.count, tokens, gradient):
                piece = piece.detach().requires_grad_(through)
                wanted = [*call.parameters, *([piece] if through else [])]
                # Use autocast as in the forward, but without its cache, which would keep the cast weights in memory.
                with torch.autocast(*call.autocast, cache_enabled=False):
                    output = call.forward(piece)
                found = torch.autograd.grad(output, wanted, given, allow_unused=True)
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
        # Return zeros that take no memory as the gradient of `tokens`. `_Keep` ignores them: it reads `call.gradient`.
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

    None means that there is no gradient. `total` is changed in place. It is float32, or float64 if the gradient is.
    """
    if gradient is None:
        return total
    if total is None:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return total.add_(gradient)
