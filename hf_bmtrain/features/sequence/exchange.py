"""Differentiable exchanges between the ranks of a group that share rows (sequences).

Every rank of the group must call each of these functions, and run its backward.

Each rank computes gradients of parameters from its own tokens only. The gradient for whole rows is the sum over the
ranks of the group. But gradients are later averaged over all ranks, which also divides this sum by the size of the
group. The functions below correct this in backward: `gather_tokens` multiplies the gradient by the size of the group,
and `mean_over_group` does not divide the gradient by the size, unlike the usual backward of a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .parts import Parts

Division = Sequence[Sequence[range]]
"""For each tensor that is exchanged, a list with the range of attention heads of each rank."""


def heads_from_rows(parts: Parts, heads: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Turn this rank's tokens, with all heads, into all tokens, with this rank's heads (one all-to-all).

    Called before attention, for queries, keys and values, so that each rank can compute the attention of its heads over
    all tokens of the rows (sequences). Collective: every rank of the group that shares the rows must call it.

    Args:
        parts: the division of the tokens of a row among the ranks of the group.
        heads: for each tensor, the range of attention heads of each rank. Several ranks may have the same head, for
            example if there are fewer key-value heads than ranks.
        *tensors: (this rank's tokens, rows, all heads, d), of one dtype. The head size d may differ between them.

    Returns:
        For each tensor, (all tokens, rows, this rank's heads, d). The results are views of one buffer.
    """
    return _HeadsFromRows.apply(parts, heads, *tensors)


def rows_from_heads(parts: Parts, heads: Sequence[range], tensor: Tensor) -> Tensor:
    """Turn all tokens, with this rank's heads, into this rank's tokens, with all heads (one all-to-all).

    Called after attention, in which each rank has computed the output of its heads for all tokens of the rows
    (sequences). Collective: every rank of the group that shares the rows must call it.

    Args:
        parts: the division of the tokens of a row among the ranks of the group.
        heads: for each rank of the group, the range of its attention heads; no two ranks have the same head.
        tensor: (all tokens, rows, this rank's heads, d), where d is the size of a head.

    Returns:
        (this rank's tokens, rows, all heads, d)
    """
    return _RowsFromHeads.apply(parts, heads, tensor)


def gather_tokens(parts: Parts, tensor: Tensor) -> Tensor:
    """Gather the tokens of all ranks that share rows: (rows, this rank's tokens, ...) becomes (rows, all tokens, ...).

    Collective: every rank of the group must call it. All ranks of the group must compute the same loss from the result.
    Then the gradient of the result is equal on these ranks, and backward needs no communication: it selects this rank's
    tokens of the gradient, and multiplies them by the number of ranks in the group.

    The multiplication corrects the gradients of parameters. Each rank computes gradients of parameters from its own
    tokens only, so these gradients should be summed over the group. Instead, they are later averaged over all ranks,
    which also divides the sum by the size of the group.

    Args:
        parts: the division of the tokens of a row (sequence) among the ranks.
        tensor: (rows, this rank's tokens, ...).
    """
    return _GatherTokens.apply(parts, tensor)


def mean_over_group(parts: Parts, loss: Tensor) -> Tensor:
    """Return the mean of the losses (scalars) of the ranks that share rows.

    Collective: every rank of the group must call it.

    The backward passes the gradient of the mean on to each rank's loss. It does not divide the gradient by the number
    of ranks in the group, because this division follows later: each rank computes gradients of parameters from its own
    tokens only, and these gradients are then averaged over all ranks.

    Args:
        parts: the division of the tokens of a row (sequence) among the ranks.
        loss: this rank's loss, a scalar.
    """
    return _MeanOverGroup.apply(parts, loss)


def _scatter_heads(parts: Parts, heads: Division, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Turn this rank's tokens, with all heads, into all tokens, with this rank's heads, without autograd.

    Collective: every rank of the group must call it.

    parts: the division of the tokens of a row (sequence).
    heads: for each tensor, the heads of each rank. Several ranks may have the same head.
    tensors: (this rank's tokens, rows, all heads, d). The results are (all tokens, rows, this rank's heads, d).
    """
    own, rows = len(parts.own), tensors[0].shape[1]
    widths = [_width(heads, tensors, rank) for rank in range(parts.size)]
    sent = tensors[0].new_empty(own * rows * sum(widths))
    for rank, chunk in enumerate(sent.split([own * rows * width for width in widths])):
        views = _views(chunk.view(own, rows, widths[rank]), [len(each[rank]) for each in heads], tensors)
        for view, tensor, each in zip(views, tensors, heads):
            view.copy_(tensor[:, :, each[rank].start : each[rank].stop])
    width = widths[parts.rank]
    received = sent.new_empty(parts.length, rows, width)
    counts = [len(tokens) * rows * width for tokens in parts.tokens]
    parts.group.all_to_all(received.view(-1), sent, counts, [own * rows * each for each in widths]).wait()
    return _views(received, [len(each[parts.rank]) for each in heads], tensors)


def _collect_heads(parts: Parts, heads: Division, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Turn all tokens, with this rank's heads, into this rank's tokens, with all heads, without autograd.

    If several ranks have the same head, their values are summed. Collective: every rank of the group must call it.

    parts: the division of the tokens of a row (sequence).
    heads: for each tensor, the range of heads of each rank. The `stop` of the last rank's range is the number of heads.
    tensors: (all tokens, rows, this rank's heads, d). The results are (this rank's tokens, rows, all heads, d).
    """
    own, rows = len(parts.own), tensors[0].shape[1]
    widths = [_width(heads, tensors, rank) for rank in range(parts.size)]
    width = widths[parts.rank]
    sent = tensors[0].new_empty(parts.length, rows, width)
    for view, tensor in zip(_views(sent, [tensor.shape[2] for tensor in tensors], tensors), tensors):
        view.copy_(tensor)
    received = sent.new_empty(own * rows * sum(widths))
    counts = [len(tokens) * rows * width for tokens in parts.tokens]
    sizes = [own * rows * each for each in widths]
    parts.group.all_to_all(received, sent.view(-1), sizes, counts).wait()
    found = [tensor.new_zeros(own, rows, each[-1].stop, tensor.shape[3]) for tensor, each in zip(tensors, heads)]
    for rank, chunk in enumerate(received.split(sizes)):
        views = _views(chunk.view(own, rows, widths[rank]), [len(each[rank]) for each in heads], tensors)
        for view, tensor, each in zip(views, found, heads):
            tensor[:, :, each[rank].start : each[rank].stop] += view
    return found


def _width(heads: Division, tensors: Sequence[Tensor], rank: int) -> int:
    """Return the number of elements of the heads of `rank`, for one token of a row, in all `tensors` together."""
    return sum(len(each[rank]) * tensor.shape[3] for each, tensor in zip(heads, tensors))


def _views(packed: Tensor, counts: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split `packed` (tokens, rows, width) into one view (tokens, rows, heads, d) for each of `tensors`.

    counts: the number of heads of each view.
    tensors: one tensor for each view. Only the size of its last dimension is used, as the d of the view.
    """
    sizes = [count * tensor.shape[3] for count, tensor in zip(counts, tensors)]
    starts = [0, *accumulate(sizes)]
    return [
        packed[..., start : start + size].unflatten(-1, (count, tensor.shape[3]))
        for start, size, count, tensor in zip(starts, sizes, counts, tensors)
    ]


class _HeadsFromRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, heads: Division, *tensors: Tensor):
        ctx.parts, ctx.heads = parts, heads
        return tuple(_scatter_heads(parts, heads, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        return None, None, *_collect_heads(ctx.parts, ctx.heads, gradients)


class _RowsFromHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, heads: Sequence[range], tensor: Tensor):
        ctx.parts, ctx.heads = parts, heads
        return _collect_heads(parts, [heads], [tensor])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        return None, None, _scatter_heads(ctx.parts, [ctx.heads], gradients)[0]


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, tensor: Tensor):
        ctx.parts = parts
        first = tensor.transpose(0, 1).contiguous()  # tokens first, so that each rank's tokens are contiguous
        each = first[0].numel()
        full = first.new_empty(parts.length, *first.shape[1:])
        sent = first.view(-1).repeat(parts.size)
        counts = [len(tokens) * each for tokens in parts.tokens]
        # Use an all-to-all, because ranks may have different numbers of tokens. An all-gather would need padding.
        parts.group.all_to_all(full.view(-1), sent, counts, [first.numel()] * parts.size).wait()
        return full.transpose(0, 1).contiguous()  # because programs call `logits.view(-1, vocabulary)` on the result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        return None, ctx.parts.take(gradients[0], 1) * ctx.parts.size


class _MeanOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, loss: Tensor):
        total = loss.detach().clone().reshape(1)
        parts.group.all_reduce(total).wait()
        return total[0] / parts.size

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        return None, gradients[0]
