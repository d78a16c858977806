"""Any nn.Module in, sharded in place."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch

from .block import CheckpointBlock, TransformerBlockList, extend
from .module import DistributedModule, distribute
from .slot import Place, find_places, shard_places
from .world import World, check_zero_level, current_world

_log = logging.getLogger("hf_bmtrain")
_LARGE = 1 << 20
"""Elements from which a parameter outside blocks gets a flat buffer of its own, whole only while it is needed."""


def auto_wrap(model: torch.nn.Module, zero_level: int | None = None, use_checkpoint: bool = True) -> torch.nn.Module:
    """Shard `model` over the world, in place, and return it. Collective.

    The items of the outermost `nn.ModuleList`s that hold parameters become CheckpointBlocks and the lists
    TransformerBlockLists; everything else reads its parameters through DistributedModule. Classes keep their
    names, `state_dict` its keys, tied weights their tie. The model moves to the rank's device; rank 0's weights
    and buffers are everyone's. `model.parameters()` yields 1-D slices afterwards: make the optimizer from them,
    and cast the model before wrapping.

    zero_level: 3 frees a block's parameters between forward and backward, 2 keeps them; None takes the world's.
    use_checkpoint: recompute each block in backward instead of keeping its activations.
    """
    world = current_world()
    level = world.zero_level if zero_level is None else zero_level
    check_zero_level(level)
    _refuse(model)
    lists = find_block_lists(model)
    blocks = list(dict.fromkeys(block for blocks in lists for block in blocks))
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    shared = _shared_parameters(blocks, outside)
    left: list[Place] = find_places(outside)
    for block in blocks:
        places = find_places(block.modules())
        left += [place for place in places if id(place[2]) in shared]
        own = [place for place in places if id(place[2]) not in shared]
        extend(block, shard_places(world.step, own, world.device), world.step, use_checkpoint, level)
    _shard_outside(world, left, outside)
    for module_list in lists:
        _link(module_list)
    _place_buffers(model, world)
    _route_recomputation(model, blocks)
    _keep_cache_out(model, blocks)
    if world.size > 1:
        _keep_ranks_together(model)
    sharded = f"{type(model).__name__}: {len(blocks)} blocks in {len(lists)} lists, {len(outside)} modules outside"
    _log.info("rank %d: sharded %s, zero_level %d, recompute %s", world.rank, sharded, level, use_checkpoint)
    return model


BMTrainModelWrapper = auto_wrap


def find_block_lists(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The outermost ModuleLists whose items hold parameters; a list of lists is descended into."""
    found: list[torch.nn.ModuleList] = []

    def visit(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.ModuleList):
            items = [item for item in module if any(True for _ in item.parameters())]
            if items and not any(isinstance(item, torch.nn.ModuleList) for item in items):
                found.append(module)
                return
        for child in module.children():
            visit(child)

    visit(model)
    return list(dict.fromkeys(found))


def _refuse(model: torch.nn.Module) -> None:
    if isinstance(model, (DistributedModule, CheckpointBlock)):
        raise ValueError("auto_wrap: this model is wrapped already.")
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if names:
        raise ValueError(
            f"auto_wrap: {len(names)} parameters are on the meta device and have no values (first: {names[0]}). "
            "Load or initialise the model on CPU before wrapping."
        )
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise ValueError(f"auto_wrap: unwrap {type(model).__name__} first and pass `.module`; both would reduce.")


def _shared_parameters(blocks: list[torch.nn.Module], outside: list[torch.nn.Module]) -> set[int]:
    """The ids of parameters used by two blocks, or by a block and the rest of the model: they live outside."""
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for _, _, parameter in find_places(block.modules()):
            owners.setdefault(id(parameter), set()).add(number)
    for _, _, parameter in find_places(outside):
        owners.setdefault(id(parameter), set()).add(-1)
    return {key for key, numbers in owners.items() if len(numbers) > 1}


def _shard_outside(world: World, places: list[Place], outside: list[torch.nn.Module]) -> None:
    small = [place for place in places if place[2].numel() < _LARGE]
    large: dict[int, list[Place]] = {}
    for place in places:
        if place[2].numel() >= _LARGE:
            large.setdefault(id(place[2]), []).append(place)
    for group in (small, *large.values()):
        shard_places(world.step, group, world.device)
    for module in [*outside, *(module for module, _, _ in places)]:
        if not isinstance(module, torch.nn.ModuleList) or find_places([module]):
            distribute(module, world.step)


def _link(module_list: torch.nn.ModuleList) -> None:
    """Make the list a TransformerBlockList where it stands; a subclass of ModuleList keeps its class."""
    if type(module_list) is torch.nn.ModuleList:
        module_list.__class__ = TransformerBlockList
    TransformerBlockList.link(module_list)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def _place_buffers(model: torch.nn.Module, world: World) -> None:
    """The module buffers (running means, masks, rotary tables) on the rank's device, with rank 0's values."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            placed = buffer.to(world.device)
            module._buffers[name] = placed
            if world.size > 1 and placed.numel():
                flat = placed.contiguous().view(-1).view(torch.uint8)
                world.step.gather.broadcast(flat, 0).wait()
                placed.copy_(flat.view(placed.dtype).view(placed.shape))


def _route_recomputation(model: torch.nn.Module, blocks: list[Any]) -> None:
    """Hugging Face's own recomputation off; asked for later, as Trainer does, it is the blocks' that goes on."""
    for module in model.modules():
        for word in ("activation", "gradient"):  # the second is the older name
            disable = getattr(module, f"{word}_checkpointing_disable", None)
            if callable(disable):
                if word == "activation" or not hasattr(module, "activation_checkpointing_disable"):
                    disable()
                setattr(module, f"{word}_checkpointing_enable", functools.partial(_set_recompute, blocks, True))
                setattr(module, f"{word}_checkpointing_disable", functools.partial(_set_recompute, blocks, False))


def _set_recompute(blocks: list[Any], on: bool, *args, **kwargs) -> None:
    """In the place of gradient_checkpointing_enable and _disable; its options are those of torch's checkpoint."""
    _log.info("recompute %s in %d sharded blocks (asked for through the model)", on, len(blocks))
    for block in blocks:
        block._bmt.use_checkpoint = on


def _keep_cache_out(model: torch.nn.Module, blocks: list[Any]) -> None:
    """No key-value cache in a forward that is recomputed: it would be appended to twice."""

    def without_cache(module, args, kwargs):
        if torch.is_grad_enabled() and any(block._bmt.use_checkpoint for block in blocks):
            kwargs = {**kwargs, "use_cache": False}
        return args, kwargs

    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            if "use_cache" in inspect.signature(module.forward).parameters:
                module.register_forward_pre_hook(without_cache, with_kwargs=True)


def _keep_ranks_together(model: torch.nn.Module) -> None:
    """A collective runs in every block, so all ranks must call the same ones.

    Layer-drop, which draws on each rank for itself what to skip, is switched off. Generation goes on until every
    rank is done: transformers does that for modules with this mark, and where `generate` says otherwise it is told.
    """
    dropping = [module for module in model.modules() if getattr(module, "layerdrop", 0)]
    for module in dropping:
        module.layerdrop = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    if dropping:
        names = ", ".join(sorted({type(module).__name__ for module in dropping}))
        _log.warning("layer-drop is off in %s: each rank would skip other blocks, whose gathers then hang", names)
    for module in model.modules():
        module._is_fsdp_managed_module = True  # pyright: ignore[reportArgumentType]
        generate: Any = getattr(module, "generate", None)
        if callable(generate):
            synced = inspect.signature(generate).parameters.get("synced_gpus")
            if synced is not None and synced.default is False:
                module.generate = functools.partial(generate, synced_gpus=True)  # pyright: ignore
