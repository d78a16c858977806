"""Whole parameters for a while, to read or to change them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..runtime.world import World, current_world
from .buffer import ShardedBuffer
from .parameter import DistributedParameter
from .slots import Slot, find_slots

Key = tuple[ShardedBuffer, int]


@contextmanager
def gathered(what: torch.nn.Module | Iterable[torch.Tensor] | torch.Tensor, modify: bool = False) -> Iterator[Any]:
    """Under `with bmt.gathered(model):` the model's parameters are whole, in their own shapes. Collective.

    what: a module, which is yielded, its attributes and `parameters()` whole; or a parameter or several, for which
    the whole tensors are yielded in a list. They are copies in the ranks' memory, made without gradients.

    modify: at the end what rank 0 has made of them becomes everyone's weights; a float32 master of AdamOptimizer
    follows where it differs. Without it a change raises RuntimeError at the end, as does, in both cases, putting
    another parameter or module in the place of one (resizing embeddings, tying): do that before auto_wrap. The
    model cannot be called, nor asked for its state_dict, inside. After an exception inside nothing is written.
    """
    world = current_world()
    occasion = f"gathered(modify={modify})"
    world.assemble(occasion)
    if isinstance(what, torch.nn.Module):
        slots = find_slots(what.modules())
        wholes = _copies([(slot.buffer, slot.index) for slot in slots])
        inside = _shown(what, slots, wholes)
        result: Any = what
    else:
        pieces = [what] if isinstance(what, torch.Tensor) else list(what)
        wholes = _copies([_key(piece) for piece in pieces])
        inside = None
        result = [wholes[_key(piece)] for piece in pieces]
    with torch.no_grad():
        if inside is None:
            yield result
        else:
            with inside:
                yield result
        world.assemble(f"end of {occasion}")
        (_write_back if modify else _check_unchanged)(world, wholes)


def _key(piece: torch.Tensor) -> Key:
    if not isinstance(piece, DistributedParameter):
        raise ValueError(
            f"gathered takes a model or sharded parameters, not a {type(piece).__name__} of shape "
            f"{tuple(piece.shape)}: an ordinary tensor is whole already."
        )
    return piece.buffer, piece.index


def _copies(keys: Sequence[Key]) -> dict[Key, torch.nn.Parameter]:
    """A whole parameter in memory of its own for each key, one buffer gathered at a time."""
    copies: dict[Key, torch.nn.Parameter] = {}
    for buffer in dict.fromkeys(buffer for buffer, _ in keys):
        with buffer.whole_now():
            for index in dict.fromkeys(index for other, index in keys if other is buffer):
                whole = buffer.wholes[index]
                copies[buffer, index] = torch.nn.Parameter(whole.detach().clone(), buffer.slices[index].requires_grad)
    return copies


@contextmanager
def _shown(model: torch.nn.Module, slots: Sequence[Slot], wholes: dict[Key, torch.nn.Parameter]) -> Iterator[None]:
    """The wholes stand in the model's slots; whatever happens, the slices and modules stand there again at the end."""
    modules = list(model.modules())
    children = [dict(module._modules) for module in modules]
    hooks = [module.register_forward_pre_hook(_refuse) for module in modules]
    hooks += [module.register_state_dict_pre_hook(_refuse) for module in modules]
    for slot in slots:
        slot.module._parameters[slot.name] = wholes[slot.buffer, slot.index]
    parameters = [dict(module._parameters) for module in modules]
    try:
        yield
        replaced = [
            type(module).__name__
            for module, own, parts in zip(modules, parameters, children)
            if not (_same(own, module._parameters) and _same(parts, module._modules))
        ]
    finally:
        for hook in hooks:
            hook.remove()
        for module, own, parts in zip(modules, parameters, children):
            module._parameters.clear()
            module._parameters.update(own)
            module._modules.clear()
            module._modules.update(parts)
        for slot in slots:
            slot.show_slice()
    if replaced:
        raise RuntimeError(
            f"gathered: another parameter or module was put into {', '.join(replaced)}, and nothing is changed: "
            "inside, values may change, not shapes, ties or layers. Resize, tie or replace before auto_wrap."
        )


def _same(before: dict, now: dict) -> bool:
    return list(before) == list(now) and all(now[name] is value for name, value in before.items())


def _refuse(*args: Any) -> None:
    raise RuntimeError(
        "Inside bmt.gathered the model holds copies: call it, or its state_dict() (which is whole anyway), after the "
        "`with`."
    )


def _write_back(world: World, wholes: dict[Key, torch.nn.Parameter]) -> None:
    misfits = [
        f"{tuple(buffer.slices[index].full_shape)} {buffer.shard.dtype} became {tuple(whole.shape)} {whole.dtype}"
        for (buffer, index), whole in wholes.items()
        if whole.dtype != buffer.shard.dtype or whole.shape != buffer.slices[index].full_shape
    ]
    problem = f"Shapes and dtypes are fixed by auto_wrap, change them before: {', '.join(misfits)}" if misfits else None
    world.raise_everywhere("gathered: nothing is changed", problem)
    for (buffer, index), whole in wholes.items():
        values = whole.detach().to(buffer.shard.device, copy=True).contiguous()
        if values.numel():
            world.gather.broadcast(_bytes(values), 0).wait()
        buffer.slices[index].copy_(buffer.slices[index].take(values))


def _check_unchanged(world: World, wholes: dict[Key, torch.nn.Parameter]) -> None:
    changed: list[str] = []
    for buffer in dict.fromkeys(buffer for buffer, _ in wholes):
        with buffer.whole_now():
            for (other, index), whole in wholes.items():
                if other is buffer and not torch.equal(_bytes(whole), _bytes(buffer.wholes[index])):
                    changed.append(str(tuple(buffer.wholes[index].shape)))
    problem = f"shapes {', '.join(changed)}" if changed else None
    world.raise_everywhere(
        "gathered: parameters were changed inside, which has no effect: write with bmt.gathered(..., modify=True)",
        problem,
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
