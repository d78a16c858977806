"""Shard the parameters and place the buffers of a model outside its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..blocks.block import CheckpointBlock
from ..blocks.distributed_module import distribute
from ..runtime.world import World
from ..sharding.parameter import DistributedParameter, Origin
from ..sharding.slots import Place, find_places, shard_places

OWN_BUFFER_NUMEL = 1 << 20
"""Parameters outside blocks with at least this many elements get a flat buffer of their own, to be gathered alone."""


def shared_parameters(blocks: Sequence[torch.nn.Module], outside: Iterable[torch.nn.Module]) -> set[int]:
    """Return the ids of parameters used by two blocks, or by a block and the rest: they are sharded outside blocks."""
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for _, _, parameter in find_places(block.modules()):
            owners.setdefault(id(parameter), set()).add(number)
    for _, _, parameter in find_places(outside):
        owners.setdefault(id(parameter), set()).add(-1)
    return {key for key, numbers in owners.items() if len(numbers) > 1}


def root_places(blocks: Sequence[torch.nn.Module], outside: Iterable[torch.nn.Module], shared: set[int]) -> list[Place]:
    """Return the places of the modules `outside`, and those in `blocks` that hold `shared` parameters."""
    inside = find_places(module for block in blocks for module in block.modules())
    return [*find_places(outside), *(place for place in inside if id(place[2]) in shared)]


def shard_root(world: World, places: Sequence[Place], outside: Iterable[torch.nn.Module]) -> None:
    """Shard the parameters of `places`; make their modules, and those `outside`, DistributedModules. Collective."""
    groups: dict[int, list[Place]] = {0: []}  # 0: the small parameters, which come first
    for place in places:
        large = place[2].numel() >= OWN_BUFFER_NUMEL
        groups.setdefault(id(place[2]) if large else 0, []).append(place)
    for group in groups.values():
        shard_places(world, group, world.schedule.outside)
    for module in [*outside, *(module for module, _, _ in places)]:
        if not isinstance(module, torch.nn.ModuleList) or find_places([module]):
            distribute(module, world.schedule)


def name_buffers(model: torch.nn.Module, world: World) -> None:
    """Name the flat buffers by their parameters, and tell these where they are, for messages."""
    names: dict[int, list[str]] = {}
    blocks = [f"{name}." for name, module in model.named_modules() if isinstance(module, CheckpointBlock)]
    holders = {key: block for block in blocks for key in _keys(model.get_submodule(block[:-1]))}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if isinstance(parameter, DistributedParameter):
            names.setdefault(parameter.buffer.number, []).append(name)
            block = holders.get(id(parameter), "")
            block = block if name.startswith(block) else ""
            parameter.origin = Origin(world.buffers.made, number, block[:-1], name[len(block) :])
    for number, held in names.items():
        rest = f" and {len(held) - 1} other parameters" if len(held) > 1 else ""
        text = f"'{held[0]}'{rest} of {type(model).__name__}"
        before = sum(other < number and told.startswith(text) for other, told in world.monitor.names.items())
        world.monitor.names[number] = f"{text} (number {before + 1})" if before else text


def _keys(block: torch.nn.Module) -> list[int]:
    return [id(parameter) for parameter in block.parameters()]


@torch.no_grad()
def place_buffers(model: torch.nn.Module, world: World) -> None:
    """Move the module buffers (running means, masks, rotary tables) to the rank's device, with rank 0's values.

    Collective.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            placed = buffer.to(world.device)
            module._buffers[name] = placed
            if world.size > 1 and placed.numel():
                flat = placed.contiguous().view(-1).view(torch.uint8)
                world.gather.broadcast(flat, 0).wait()
                placed.copy_(flat.view(placed.dtype).view(placed.shape))
