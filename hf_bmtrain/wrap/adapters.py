"""Parameters that came into a model after it was sharded: adapters, a new head."""

from __future__ import annotations

import logging

import torch

from ..blocks.block import CheckpointBlock
from ..blocks.module import DistributedModule
from ..recompute.replay import Replay
from ..runtime.world import World
from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter
from ..sharding.slots import Place, Slot, find_places, shard_places
from ..sharding.state_dict import slice_loads
from .check import admit_parameters
from .outside import place_buffers, shard_outside, shared_parameters
from .patches import keep_cache_out, keep_ranks_together

_log = logging.getLogger("hf_bmtrain")


def adopt(model: torch.nn.Module, world: World) -> torch.nn.Module:
    """Shard what is new in `model`, each parameter with the block it lies in. Collective."""
    blocks = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    admit_parameters(model)
    shared = shared_parameters(blocks, outside)
    left, count = _new(outside), 0
    for block in blocks:
        places = _new(block.modules())
        left += [place for place in places if id(place[2]) in shared]
        own = [place for place in places if id(place[2]) not in shared]
        count += len(own)
        if own:
            _enlarge(block, *shard_places(world, own, world.schedule.blocks))
    fresh = [module for module in outside if not isinstance(module, DistributedModule)]
    shard_outside(world, left, fresh)
    place_buffers(model, world)
    keep_cache_out(fresh, blocks)
    if world.size > 1:
        keep_ranks_together(model, blocks)
    _log.info("rank %d: sharded %d new parameters in blocks and %d outside", world.rank, count, len(left))
    return model


def _new(modules) -> list[Place]:
    return [place for place in find_places(modules) if not isinstance(place[2], DistributedParameter)]


def _enlarge(block: CheckpointBlock, buffers: list[ShardedBuffer], slots: list[Slot]) -> None:
    block._bmt.add(buffers, slots, Replay(block))
    slice_loads(slots)
