"""Record the outputs of blocks, and of modules with parameters outside blocks, for `check_parity`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import pytree
from ...engine.blocks.block import CheckpointBlock
from ...engine.blocks.schedule import Schedule

Outputs = dict[tuple[str, str], list[torch.Tensor]]
"""{(module name, label): copies, in host memory, of the floating-point tensors that a call of the module returned}. The
label tells the calls of a module apart: for a module "head" it is "head", "head (call 2)", and so on."""


def watched_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return {name: module} of the modules of `model` whose outputs `check_parity` compares.

    These are the outermost blocks, and the modules outside blocks that have parameters of their own, except `model`
    itself.
    """
    found: dict[str, torch.nn.Module] = {}
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, CheckpointBlock):
            inside.update(module.modules())
        if isinstance(module, CheckpointBlock) or (module._parameters and module is not model):
            found[name] = module
    return found


@contextmanager
def recorded(modules: dict[str, torch.nn.Module], schedule: Schedule) -> Iterator[Outputs]:
    """Context manager inside which the outputs of `modules` are recorded.

    `check_parity` runs the model with sharded parameters in one such context, and with full parameters in another, and
    compares the outputs. Calls of the modules are not recorded in forwards that only measure something, or that
    recompute activations in backward.

    Args:
        modules: {name: module}, the modules whose outputs are recorded.
        schedule: the world's schedule. Its attribute `repeats` is True in the forwards that are not recorded.

    Yields:
        A dict to which each call of a module adds {(module name, label): copies, in host memory, of the floating-point
        tensors that the call returned}. The label tells the calls of a module apart: for a module "head" it is "head",
        "head (call 2)", and so on.
    """
    outputs: Outputs = {}
    calls = dict.fromkeys(modules, 0)

    def record(name: str, result: Any) -> None:
        if schedule.repeats:
            return
        calls[name] += 1
        key = name, name if calls[name] == 1 else f"{name} (call {calls[name]})"
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs[key] = [leaf.detach().to("cpu", copy=True) for leaf in leaves if leaf.is_floating_point()]

    def hook(name: str) -> Any:
        return lambda module, args, result: record(name, result)

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
