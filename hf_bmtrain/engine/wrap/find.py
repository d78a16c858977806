"""Choose the modules of a model that become blocks, and the order in which they are expected to run."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Chain = list[torch.nn.Module]
"""Blocks in execution order."""
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)


def find_block_lists(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """Return the outermost ModuleLists of `model` whose items can become blocks (layers that are sharded one by one).

    At least one item must have parameters. The following lists are skipped, but lists inside their items may be
    returned instead:

    * Lists of ModuleLists.
    * Lists that contain None (an optional module between layers).
    * Lists with embeddings. A block all-gathers its weights when it is called, but some models, such as SAM and models
      with tied heads, read the weights of such embeddings without calling them.
    """
    if isinstance(model, torch.nn.ModuleList) and all(_may_be_block(item) for item in model):
        items = [item for item in model if any(True for _ in item.parameters())]
        if items and not any(isinstance(item, torch.nn.ModuleList) for item in items):
            return [model]
    return list(dict.fromkeys(found for child in model.children() for found in find_block_lists(child)))


def _may_be_block(item: torch.nn.Module | None) -> bool:
    return item is not None and not isinstance(item, torch.nn.Embedding)


def choose_chains(
    model: torch.nn.Module, blocks: Iterable[torch.nn.Module] | None
) -> tuple[list[Chain], list[torch.nn.ModuleList]]:
    """Return the modules that become blocks, as chains, and the ModuleLists that contain them.

    A chain is a list of blocks in execution order. While a block runs in forward, the weights of the next block of its
    chain are prefetched. In backward, the weights of the previous block are prefetched. Later, `wrap` turns the
    ModuleLists into TransformerBlockLists.

    Args:
        model: the model.
        blocks: the modules that the user passed, or None to use the result of `find_block_lists`. The items of each
            ModuleList or Sequential form a chain; all other modules together form one more chain.

    Returns:
        The chains, and the ModuleLists that were found or passed.

    Raises:
        ValueError: in these cases:

            * `blocks` is a single layer instead of a list.
            * `blocks` contains an object that is not a submodule of the model.
            * `blocks` contains a module and also a module inside it.
    """
    if blocks is None:
        lists = find_block_lists(model)
        return [list(dict.fromkeys(found)) for found in lists], lists
    if isinstance(blocks, torch.nn.Module) and not isinstance(blocks, _LISTS):
        raise ValueError(
            f"blocks= must be a list of modules of the model, got one {type(blocks).__name__}. Pass it in a list."
        )
    asked = [blocks] if isinstance(blocks, torch.nn.Module) else list(blocks)
    lists = [item for item in asked if isinstance(item, torch.nn.ModuleList)]
    chains = [list(dict.fromkeys(item)) for item in asked if isinstance(item, _LISTS)]
    single = [item for item in asked if not isinstance(item, _LISTS)]
    chains += [list(dict.fromkeys(single))] if single else []
    _check_asked(model, [block for chain in chains for block in chain])
    return chains, lists


def _check_asked(model: torch.nn.Module, blocks: Chain) -> None:
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        if not isinstance(block, torch.nn.Module) or not names.get(block):
            raise ValueError(
                f"blocks= contains a {type(block).__name__} that is not part of this {type(model).__name__}. Pass "
                "modules of the model itself, such as model.encoder.layers (a ModuleList means all of its items)."
            )
        for inner in block.modules():
            if inner is not block and inner in blocks:
                raise ValueError(
                    f"blocks= contains '{names[inner]}' and also '{names[block]}', which contains it, but a parameter "
                    "can belong to one block only. Pass one of the two."
                )


def adapter_parameters(model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters of all adapters in `model`, frozen or not.

    Extensions call this to treat adapters separately, for example to give them flat buffers of their own. PEFT's layers
    list the names of their submodules that belong to adapters in the attribute `adapter_layer_names`.
    """
    held = [
        getattr(module, name, None) for module in model.modules() for name in getattr(module, "adapter_layer_names", ())
    ]
    return {id(parameter) for each in held if isinstance(each, torch.nn.Module) for parameter in each.parameters()}


def is_router(path: str) -> bool:
    """Return whether a module is a router (which chooses the experts of each token) or is inside a router.

    Extensions call this to leave routers in full precision, because rounding could change which experts are chosen.

    path: the module's path in its model. The result is True if "router" or "gate" is one of the names in the path, as
        in "model.layers.0.mlp.gate". This name need not be the last one. For example, many routers contain a linear
        layer, such as "model.layers.0.mlp.router.classifier". If PEFT adds an adapter to a router, the path of the
        router itself becomes "model.layers.0.mlp.gate.base_layer".
    """
    return not {"router", "gate"}.isdisjoint(path.split("."))
