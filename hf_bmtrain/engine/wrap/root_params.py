"""Shard a model's root parameters, and move the modules' buffers to this rank's device.

Root parameters belong to no block (sharded layer), because they are outside all blocks or shared by several modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..blocks.block import CheckpointBlock
from ..blocks.distributed_module import distribute
from ..runtime.world import World
from ..sharding.parameter import DistributedParameter, Origin
from ..sharding.slots import Place, find_places, shard_places

OWN_BUFFER_NUMEL = 1 << 20
"""A root parameter with at least this many elements gets its own flat buffer, so that it is all-gathered alone."""


def shared_parameters(blocks: Sequence[torch.nn.Module], outside: Iterable[torch.nn.Module]) -> set[int]:
    """Return the ids of the parameters that are used by several of `blocks`, or by a block and a module in `outside`.

    Such a parameter, for example a tied weight, belongs to no block and is sharded as a root parameter.

    Args:
        blocks: the modules that are or become blocks (layers that are sharded one by one).
        outside: the modules that are neither blocks nor inside one.
    """
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for _, _, parameter in find_places(block.modules()):
            owners.setdefault(id(parameter), set()).add(number)
    for _, _, parameter in find_places(outside):
        owners.setdefault(id(parameter), set()).add(-1)
    return {key for key, numbers in owners.items() if len(numbers) > 1}


def root_places(blocks: Sequence[torch.nn.Module], outside: Iterable[torch.nn.Module], shared: set[int]) -> list[Place]:
    """Return (module, name, parameter) for every place at which a root parameter is registered.

    Root parameters are those that are not sharded with a block: all parameters of the modules in `outside`, and those
    inside `blocks` that several modules share. The places in `outside` come first.

    Args:
        blocks: the modules that are or become blocks (layers that are sharded one by one).
        outside: the modules that are neither blocks nor inside one.
        shared: the ids of the shared parameters, from `shared_parameters`.
    """
    inside = find_places(module for block in blocks for module in block.modules())
    return [*find_places(outside), *(place for place in inside if id(place[2]) in shared)]


def shard_root(world: World, places: Sequence[Place], outside: Iterable[torch.nn.Module]) -> None:
    """Shard the root parameters, which are outside blocks or shared by several modules.

    Collective: every rank must call it. The modules in `outside` and `places` become DistributedModules, which
    all-gather a parameter when their forward reads it.

    Args:
        world: the ranks that share the parameters.
        places: (module, name, parameter) of each root parameter, as `root_places` returns them.
        outside: the modules outside blocks. ModuleLists without parameters of their own are not changed.
    """
    groups: dict[int, list[Place]] = {0: []}  # key 0: all small parameters, which share buffers
    for place in places:
        large = place[2].numel() >= OWN_BUFFER_NUMEL
        groups.setdefault(id(place[2]) if large else 0, []).append(place)
    for group in groups.values():
        shard_places(world, group, world.schedule.outside)
    for module in [*outside, *(module for module, _, _ in places)]:
        if not isinstance(module, torch.nn.ModuleList) or find_places([module]):
            distribute(module, world.schedule)


def name_buffers(model: torch.nn.Module, world: World) -> None:
    """Give every flat buffer a name for messages, and set the attribute `origin` of every sharded parameter.

    A flat buffer is named after the first of its parameters. The origin of a parameter contains the path of its block
    in the model, and the name of the parameter in this block.

    Args:
        model: the model, whose parameters are sharded.
        world: the world of the model. The names are stored in its monitor, the object that reports failures of ranks.
    """
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
    """Move the module buffers (running means, masks, rotary tables) of `model` to this rank's device, `world.device`.

    Collective: every rank must call it. All ranks get rank 0's values.

    Args:
        model: the model, whose buffers are replaced.
        world: the ranks. Rank 0 broadcasts its buffers.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            placed = buffer.to(world.device)
            module._buffers[name] = placed
            if world.size > 1 and placed.numel():
                # torch cannot write to an expanded buffer, whose elements share memory, so write each of them once.
                once = placed[tuple([slice(1 if stride == 0 else None) for stride in placed.stride()])]
                flat = once.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
                world.gather.broadcast(flat, 0).wait()
                once.copy_(flat.view(once.dtype).view(once.shape))
