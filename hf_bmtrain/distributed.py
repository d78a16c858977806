"""Results that concern all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .world import current_world


def sum_loss(loss: torch.Tensor) -> torch.Tensor:
    """The mean of a scalar `loss` over all ranks: float32, detached, on this device. Collective.

    (The name is BMTrain's; a mean is what it computes.)
    """
    world = current_world()
    mean = loss.detach().to(torch.float32, copy=True).reshape(1)
    world.step.reduce.all_reduce(mean).wait()
    return mean.div_(world.size).reshape(())


def gather_result(result: torch.Tensor) -> torch.Tensor:
    """`result` (n, …) of all ranks, concatenated on dim 0 in rank order, on its own device. Collective.

    Shapes and dtypes must be equal: ValueError on every rank otherwise. A scalar counts as (1,).
    """
    world = current_world()
    local = result.detach().reshape(1) if result.dim() == 0 else result.detach().contiguous()
    if world.control is None:
        return local.clone()
    mine = tuple(local.shape), local.dtype
    everyone: list = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.control)
    if any(other != mine for other in everyone):
        listing = ", ".join(f"rank {rank}: {shape} {dtype}" for rank, (shape, dtype) in enumerate(everyone))
        raise ValueError(f"gather_result needs equal shapes and dtypes, got {listing}. Pad to a common length first.")
    on_device = local.to(world.device)
    whole = on_device.new_empty((world.size * local.shape[0], *local.shape[1:]))
    as_bytes = on_device.reshape(-1).view(torch.uint8)
    world.step.gather.all_gather(whole.view(-1).view(torch.uint8), as_bytes).wait()
    return whole.to(result.device)
