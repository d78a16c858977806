"""Join tensors that are adjacent in memory, so that functions such as `torch._foreach_mul_` write fewer tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def join_neighbours(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Join tensors that are adjacent in memory, so that functions such as `torch._foreach_mul_` write fewer tensors.

    The sharded parameters of one flat buffer are adjacent in memory unless there is padding between them, and so are
    their gradients. Weight decay, for example, then usually multiplies one tensor per flat buffer instead of one per
    parameter. Call this only within `WithoutTorchFunction`, where a sharded tensor acts as a plain tensor of this
    rank's elements.

    Args:
        tensors: at least one tensor.

    Returns:
        Tensors that together have the same elements as `tensors`, in the same memory. One 1-D view replaces each run of
        adjacent tensors of the same dtype. All other tensors are returned unchanged. If no two of the first four
        tensors are adjacent, or if a tensor is not contiguous, the result is `tensors` itself.
    """
    # Return early if there is nothing to join. To find out quickly, look only at the first four tensors. A model's
    # parameters (or their gradients) usually begin with one or two embeddings, which may not be adjacent. They are
    # followed by the parameters of the first layer, which are adjacent. So if a list has adjacent tensors, some of its
    # first four are adjacent. The state tensors of torch's optimizers are allocated one by one, so they cannot be
    # joined.
    if not any(_follows(second, first) for first, second in pairwise(tensors[:4])):
        return tensors
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        return tensors
    joined: list[torch.Tensor] = []
    run: list[torch.Tensor] = []
    size, dtype = tensors[0].element_size(), tensors[0].dtype
    end = -1
    for each in tensors:
        start = each.data_ptr()
        if start != end or each.dtype != dtype:
            joined += _join(run)
            run, size, dtype = [], each.element_size(), each.dtype
        run.append(each)
        end = start + each.numel() * size
    return joined + _join(run)


def _follows(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether `tensor` begins where `before` ends in memory."""
    return before.data_ptr() + before.numel() * before.element_size() == tensor.data_ptr()


def _join(run: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join the tensors of `run`, which follow one another in memory, into one 1-D view. Return it in a list.

    Returns `run` itself if its tensors belong to different allocations, which are adjacent by chance.
    """
    if len(run) < 2 or run[0].untyped_storage()._cdata != run[-1].untyped_storage()._cdata:
        return run
    return [run[0].detach().as_strided((sum(each.numel() for each in run),), (1,))]
