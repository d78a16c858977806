"""Shard a model's root parameters, and move the modules' buffers to this rank's device.

Root parameters belong to no block (sharded layer), because modules outside blocks or several blocks use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..blocks.block import CheckpointBlock
from ..blocks.distributed_module import distribute
from ..runtime.world import World
from ..sharding.parameter import DistributedParameter, Origin
from ..sharding.slots import Place, find_places, shard_places
from ..sharding.state_dict import unexpanded

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

    Root parameters are those that are not sharded with a block: all parameters of the modules in `outside`, and the
    parameters of `blocks` whose ids are in `shared`. The places in `outside` come first.

    Args:
        blocks: the modules that are or become blocks (layers that are sharded one by one).
        outside: the modules that are neither blocks nor inside one.
        shared: the ids of the shared parameters, from `shared_parameters`.
    """
    inside = find_places(module for block in blocks for module in block.modules())
    return [*find_places(outside), *(place for place in inside if id(place[2]) in shared)]


def shard_root(world: World, places: Sequence[Place], outside: Iterable[torch.nn.Module]) -> None:
    """Shard the root parameters, which are used by modules outside blocks or by several blocks.

    Collective: every rank must call it. The modules in `outside` and `places` become DistributedModules, which
    all-gather a parameter when their forward reads it.

    Args:
        world: the ranks that share the parameters.
        places: (module, name, parameter) of each root parameter, as `root_places` returns them.
        outside: the modules outside blocks. ModuleLists without parameters of their own are not changed.
    """
    # Each large parameter is a group of its own, with its id as the key. All small parameters are in one group (key 0),
    # so that they share flat buffers.
    groups: dict[int, list[Place]] = {0: []}
    for place in places:
        large = place[2].numel() >= OWN_BUFFER_NUMEL
        groups.setdefault(id(place[2]) if large else 0, []).append(place)
    for group in groups.values():
        shard_places(world, group, world.schedule.outside)
    for module in [*outside, *(module for module, _, _ in places)]:
        if not isinstance(module, torch.nn.ModuleList) or find_places([module]):
            distribute(module, world.schedule)


def name_buffers(model: torch.nn.Module, world: World) -> None:
    """Record the names of flat buffers and sharded parameters, so that messages can name them.

    A flat buffer is named after the first of its parameters, for example "'layers.0.mlp.up_proj.weight' and 8 other
    parameters of LlamaModel". Its name is stored in the world's monitor, the object that reports failures of ranks.

    The attribute `origin` (an `Origin`) of each sharded parameter is set. It contains the path of the parameter's block
    in the model, such as "layers.0", and the parameter's name in this block, such as "mlp.up_proj.weight". For a
    parameter outside blocks, the path is "", and the name is the parameter's full name in the model.

    Args:
        model: the model, whose parameters are sharded.
        world: the world of the model.
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
        others = len(held) - 1
        rest = f" and {others} other parameter{'s' * (others > 1)}" if others else ""
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
    # {id(buffer): (the buffer, the tensor that replaces it)}, because several modules may have the same buffer. The
    # reference to the buffer ensures that no other tensor gets its id.
    sent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            placed = buffer.to(world.device)
            if world.size > 1 and (placed.layout is not torch.strided or placed.is_quantized):
                # Some sparse, mkldnn and quantized tensors support neither `broadcast` nor `copy_`. So rank 0's tensor
                # is sent as a Python object, and replaces the module's buffer.
                if id(buffer) not in sent:
                    opaque = placed.layout is torch._mkldnn  # pyright: ignore[reportAttributeAccessIssue]
                    value = buffer.to_dense() if opaque else buffer.cpu()  # tensors of mkldnn cannot be pickled
                    first = world.control.broadcast_object(value if world.rank == 0 else None)
                    received = first.to_mkldnn() if opaque else first.to(world.device)
                    sent[id(buffer)] = buffer, placed if world.rank == 0 else received
                module._buffers[name] = sent[id(buffer)][1]
                continue
            module._buffers[name] = placed
            if world.size > 1 and placed.numel():
                once = unexpanded(placed)  # torch cannot write to an expanded buffer
                values = once.clone(memory_format=torch.contiguous_format)
                world.gather.broadcast(values, 0).wait()
                once.copy_(values)
