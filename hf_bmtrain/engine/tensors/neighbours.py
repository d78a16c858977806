"""Join tensors that are adjacent in memory, so that functions such as `torch._foreach_mul_` write fewer tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def join_neighbours(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Join tensors that are adjacent in memory, so that functions such as `torch._foreach_mul_` write fewer tensors.

    The sharded parameters of one flat buffer are adjacent in memory, and so are their gradients. Weight decay, for
    example, then multiplies one tensor per flat buffer instead of one per parameter. Call this only within
    `WithoutTorchFunction`, where a sharded tensor acts as a plain tensor of this rank's elements.

    Args:
        tensors: at least one tensor.

    Returns:
        Tensors that together have the elements of `tensors` and share their memory: a 1-D view in place of each run of
        adjacent tensors, and all other tensors unchanged.
    """
    first = tensors[0]
    size, dtype = first.element_size(), first.dtype
    if len(tensors) < 2 or first.data_ptr() + first.numel() * size != tensors[1].data_ptr():
        # The first two tensors are not adjacent, as is usual for optimizer state, which is allocated tensor by tensor.
        return tensors
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        return tensors
    joined: list[torch.Tensor] = []
    run: list[torch.Tensor] = []
    end = -1
    for each in tensors:
        start = each.data_ptr()
        if start != end or each.dtype != dtype:
            joined += _join(run)
            run, size, dtype = [], each.element_size(), each.dtype
        run.append(each)
        end = start + each.numel() * size
    return joined + _join(run)


def _join(run: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join the tensors of `run`, which follow one another in memory, into one 1-D view. Return it in a list.

    Returns `run` itself if its tensors belong to different allocations, which are adjacent by chance.
    """
    if len(run) < 2 or run[0].untyped_storage()._cdata != run[-1].untyped_storage()._cdata:
        return run
    return [run[0].detach().as_strided((sum(each.numel() for each in run),), (1,))]
