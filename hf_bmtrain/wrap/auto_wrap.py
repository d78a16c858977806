"""Any nn.Module in, sharded in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ..blocks.block import extend
from ..blocks.block_list import TransformerBlockList
from ..recompute.policy import UseCheckpoint
from ..runtime.world import World, check_zero_level, current_world
from ..sharding.slots import Place, find_places, shard_places
from .adapters import adopt
from .check import admit, holds_additions
from .compile import compile_blocks
from .find import choose_chains
from .outside import place_buffers, shard_outside, shared_parameters
from .patches import (
    follow_accelerator,
    install_guard,
    keep_cache_out,
    keep_ranks_together,
    route_recomputation,
)

_log = logging.getLogger("hf_bmtrain")


def auto_wrap(
    model: torch.nn.Module,
    zero_level: int | None = None,
    use_checkpoint: UseCheckpoint = True,
    compile: bool | str = False,
    blocks: Iterable[torch.nn.Module] | None = None,
) -> torch.nn.Module:
    """Shard `model` over the world, in place, and return it. Collective.

    The items of the outermost `nn.ModuleList`s that hold parameters become CheckpointBlocks and the lists
    TransformerBlockLists; everything else reads its parameters through DistributedModule. Classes keep their
    names, `state_dict` its keys, tied weights their tie. The model moves to the rank's device; rank 0's weights
    and buffers are everyone's. `model.parameters()` yields 1-D slices afterwards: make the optimizer from them,
    and cast the model before wrapping. What cannot be sharded is refused with the reason (ValueError).

    A model that was wrapped before and got parameters since, such as adapters, is given to it again: those are
    sharded too, in the block they lie in.

    zero_level: 3 frees a block's parameters between forward and backward, 2 keeps them; None takes the world's.
    use_checkpoint: recompute each block in backward instead of keeping its activations. "auto": on a GPU the first
    step measures, and then only as many blocks recompute as memory asks for; where none does, as many as it allows
    stay whole from forward to backward. On the CPU, whose memory is not measured, none recomputes.
    compile: torch.compile the blocks, with its default backend or the one that is named.
    blocks: modules of the model to make blocks instead, in the order in which they run; a ModuleList or Sequential
    stands for its items.
    """
    world = current_world()
    level = world.zero_level if zero_level is None else zero_level
    check_zero_level(level)
    if holds_additions(model):
        return adopt(model, world)
    admit(model)
    chains, lists = choose_chains(model, blocks)
    layers = list(dict.fromkeys(block for chain in chains for block in chain))
    inside = {id(module) for block in layers for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    shared = shared_parameters(layers, outside)
    left: list[Place] = find_places(outside)
    for block in layers:
        places = find_places(block.modules())
        left += [place for place in places if id(place[2]) in shared]
        own = [place for place in places if id(place[2]) not in shared]
        extend(block, shard_places(world, own, world.schedule.blocks), world, use_checkpoint, level)
    shard_outside(world, left, outside)
    for module_list in lists:
        if type(module_list) is torch.nn.ModuleList:  # a subclass keeps its class
            module_list.__class__ = TransformerBlockList
    for chain in chains:
        TransformerBlockList.link(chain)  # pyright: ignore[reportArgumentType]
    place_buffers(model, world)
    route_recomputation(model, layers)
    keep_cache_out(model.modules(), layers)
    if compile:
        compile_blocks(layers, "inductor" if compile is True else compile)  # pyright: ignore[reportArgumentType]
    if world.size > 1:
        keep_ranks_together(model, layers)
    follow_accelerator(model, world.device)
    install_guard(model, world)
    _report(model, world, f"{len(layers)} blocks in {len(chains)} lists, {len(outside)} modules outside", level)
    return model


BMTrainModelWrapper = auto_wrap


def _report(model: torch.nn.Module, world: World, sharded: str, level: int) -> None:
    _log.info("rank %d: sharded %s: %s, zero_level %d", world.rank, type(model).__name__, sharded, level)
    if sharded.startswith("0 blocks"):
        _log.warning(
            "%s has no nn.ModuleList with parameters, so no blocks were found: all of it is gathered for one forward "
            "and backward. To save memory name the layers: auto_wrap(model, blocks=[...]).",
            type(model).__name__,
        )
