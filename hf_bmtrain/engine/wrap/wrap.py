"""`wrap`, which shards a model in place: it checks the model, chooses blocks, shards parameters, patches methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..blocks.block import CheckpointBlock, TransformerBlockList, enlarge, extend
from ..blocks.distributed_module import DistributedModule
from ..runtime.world import World
from ..sharding.parameter import DistributedParameter
from ..sharding.slots import Place, find_places, shard_places, tensor_facts
from ..sharding.storage import StorageKind
from .extension import Extension, WrapPlan
from .find import Chain, choose_chains
from .model_hook import follow_accelerator, install_hook, keep_cache_out
from .patches import keep_ranks_together, refuse_resizing, route_recomputation
from .refuse import admit, admit_compiled, admit_parameters, holds_additions, refuse_other_blocks
from .root_params import name_buffers, place_buffers, root_places, shard_root, shared_parameters
from .uneven import follow_additions, negotiate_if_uneven

_log = logging.getLogger("hf_bmtrain")


def wrap(
    model: torch.nn.Module,
    world: World,
    zero_level: int,
    use_checkpoint: object,
    compile: dict[str, Any] | None,
    blocks: Iterable[torch.nn.Module] | None,
    extensions: Sequence[Extension],
) -> None:
    """Shard all parameters of `model` in place. If it was wrapped before, shard only those that were added since.

    Collective: every rank must call it. If the model was wrapped before, `zero_level`, `use_checkpoint` and `compile`
    are ignored.

    Args:
        model: the model.
        world: the ranks that share the parameters.
        zero_level: 3 frees the blocks' full parameters between forward and backward, and 2 keeps them.
        use_checkpoint: whether blocks recompute their forwards in backward: True, False, or another value that
            `auto_wrap` documents.
        compile: the keyword arguments of torch.compile, with which the blocks are compiled; None to not compile them.
        blocks: the modules to shard as blocks (transformer layers, for example), in execution order. None: the items of
            the model's outermost ModuleLists. If `model` was wrapped before, these must be its blocks.
        extensions: objects that add features by changing how the model is wrapped, see `Extension`.

    Raises:
        ValueError: on every rank, if the model cannot be sharded, and all ranks found the same reason.
        RuntimeError: on every rank, in these cases:

            * The ranks have different models.
            * Only some ranks found a reason why the model cannot be sharded.
            * The ranks found different reasons why the model cannot be sharded.
    """
    # If the last backward has failed, the schedule still refers to its blocks, gradients and pending reductions. Drop
    # these references: the user may have deleted that model, and its memory could otherwise not be freed.
    world.schedule.discard_failed_backward()
    late = holds_additions(model)
    chains, lists = _choose_chains(model, world, blocks, late, extensions)
    layers: Chain = list(dict.fromkeys(block for chain in chains for block in chain))
    if late:
        layers = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
    root = _root(model, layers)
    plan = WrapPlan(model, world, layers, root, shared_parameters(layers, root), compile is not None, late)
    if late:
        _shard_additions(plan)
    else:
        _refuse_together(world, lambda: [each.choose(plan) for each in extensions])
        for each in extensions:
            each.prepare(plan)
        plan = plan._replace(shared=shared_parameters(layers, root))
        _shard_layers(plan, zero_level, use_checkpoint, extensions)
        shard_root(world, root_places(layers, root, plan.shared), root)
        _link(plan, chains, lists, compile)
        _patch(plan, model.modules())
        follow_accelerator(model, world.device)
        refuse_resizing(model)
        negotiate_if_uneven(plan, chains)
    for each in extensions:
        each.connect(plan)
    if not late:
        _report(plan, f"{len(layers)} blocks in {len(chains)} lists, {len(root)} modules outside blocks", zero_level)


def _choose_chains(
    model: torch.nn.Module,
    world: World,
    blocks: Iterable[torch.nn.Module] | None,
    late: bool,
    extensions: Sequence[Extension],
) -> tuple[list[Chain], list[torch.nn.ModuleList]]:
    """Choose the modules that become blocks. Raise an error if the model cannot be wrapped, or differs between ranks.

    Collective: every rank must call it. Returns the blocks as chains (lists in execution order), and the ModuleLists
    that contain them. If the model was wrapped before (`late`), both are empty, because its blocks exist already.

    model: the model.
    world: the ranks that share the parameters.
    blocks: the modules that the user passed, or None to choose the items of the model's outermost ModuleLists.
    late: whether the model was wrapped before.
    extensions: may refuse the model, and may accept parameters whose class is not torch.nn.Parameter.
    """
    chains: list[Chain] = []
    lists: list[torch.nn.ModuleList] = []

    def recognized(parameter: torch.nn.Parameter) -> bool:
        return any(each.recognizes(parameter) for each in extensions)

    def choose() -> None:
        if not late:
            admit(model)
        for each in extensions:
            each.admit(model, late)
        admit_parameters(model, recognized)
        if late and blocks is not None:
            refuse_other_blocks(model, [block for chain in choose_chains(model, blocks)[0] for block in chain])
        if not late:
            found = choose_chains(model, blocks)
            admit_compiled(model, (block for chain in found[0] for block in chain))
            chains.extend(found[0])
            lists.extend(found[1])

    _refuse_together(world, choose)
    names = {module: name for name, module in model.named_modules()}
    chosen = {
        f"block '{names[block]}'": f"{type(block).__qualname__} in list {number}"
        for number, chain in enumerate(chains)
        for block in chain
    }
    facts = {name: value for each in extensions for name, value in each.facts(model).items()}
    world.check_same_on_all_ranks("auto_wrap", {**tensor_facts(model), **facts, **chosen})
    return chains, lists


def _refuse_together(world: World, check: Callable[[], object]) -> None:
    """Call `check` on every rank, and raise the ValueError of `check` only if it is the same on all ranks.

    If the ranks got different errors, or only some ranks got an error, raise RuntimeError on all ranks. Collective:
    every rank must call it.

    world: the ranks that compare their errors.
    check: a function without arguments that raises ValueError if the model cannot be wrapped.
    """
    refusal = None
    try:
        check()
    except ValueError as error:
        refusal = error
    world.check_same_on_all_ranks("auto_wrap", {"the reason to refuse the model": refusal})
    if refusal is not None:
        raise refusal


def _root(model: torch.nn.Module, blocks: Chain) -> Chain:
    """Return the modules of `model` that are neither in `blocks` nor inside one of them."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def _shard_layers(plan: WrapPlan, zero_level: int, use_checkpoint: object, extensions: Sequence[Extension]) -> None:
    """Shard the parameters of each layer in `plan.layers`, and turn the layer into a CheckpointBlock.

    Parameters that a layer shares with other layers or with modules outside all layers (`plan.shared`) are left out.
    Collective: every rank must call it.

    zero_level: 3 frees the full parameters between forward and backward, and 2 keeps them.
    use_checkpoint: whether blocks recompute their forwards in backward, as in `wrap`.
    extensions: determine how parameters are stored, and which get separate flat buffers.
    """
    separate = {key for each in extensions for key in each.separate(plan)}

    def kind_of(parameter: torch.nn.Parameter) -> StorageKind | None:
        return next((kind for each in extensions if (kind := each.kind(parameter)) is not None), None)

    for layer in plan.layers:
        own = [place for place in find_places(layer.modules()) if id(place[2]) not in plan.shared]
        sharded = shard_places(plan.world, own, plan.world.schedule.blocks, kind_of, separate)
        extend(layer, sharded, plan.world, use_checkpoint, zero_level)


def _link(
    plan: WrapPlan, chains: list[Chain], lists: list[torch.nn.ModuleList], compile: dict[str, Any] | None
) -> None:
    """Link the blocks of each chain for prefetching, turn `lists` into TransformerBlockLists, and compile the blocks.

    A list that is an instance of a subclass of ModuleList keeps its class. Also turns off the model's own gradient
    checkpointing, because the blocks recompute their forwards themselves.

    plan: the model and its blocks.
    chains: lists of blocks in execution order.
    lists: the ModuleLists that contain the blocks.
    compile: the keyword arguments of torch.compile, with which the blocks are compiled; None to not compile them.
    """
    for module_list in lists:
        # Do not change the class of a user's subclass of ModuleList: the list would lose the methods of the subclass.
        if type(module_list) is torch.nn.ModuleList:
            module_list.__class__ = TransformerBlockList
    for chain in chains:
        TransformerBlockList.link(chain)  # pyright: ignore[reportArgumentType]
    if compile is not None:
        layers: list[Any] = plan.layers
        for block in layers:
            block.compile(**compile)
    route_recomputation(plan.model, plan.layers)


def _shard_additions(plan: WrapPlan) -> None:
    """Shard the parameters that were added after the model was wrapped, such as adapters or a new head.

    Collective: every rank must call it.

    plan: the model, and its division into blocks and other modules.
    """
    world, count = plan.world, 0
    layers: list[Any] = plan.layers
    for block in layers:
        block._bmt.forget_deleted(leave=True)
        own = [place for place in find_places(block.modules()) if id(place[2]) not in plan.shared and _is_new(place)]
        count += len(own)
        if own:
            enlarge(block, shard_places(world, own, world.schedule.blocks))
    left = [place for place in root_places(layers, plan.root, plan.shared) if _is_new(place)]
    fresh = [module for module in plan.root if not isinstance(module, DistributedModule)]
    shard_root(world, left, fresh)
    _patch(plan, fresh)
    follow_additions(plan)
    _log.info("rank %d: sharded %d new parameters in blocks and %d outside blocks", world.rank, count, len(left))


def _is_new(place: Place) -> bool:
    return not isinstance(place[2], DistributedParameter)


def _patch(plan: WrapPlan, fresh: Iterable[torch.nn.Module]) -> None:
    """Move the modules' buffers (`register_buffer`) to the device, patch the model's methods and install its hooks.

    Collective: every rank must call it.

    plan: the model, whose parameters are sharded already, and its blocks.
    fresh: the modules to pass to `keep_cache_out`: all modules or, if the model was wrapped before, only the new
        modules outside blocks.
    """
    place_buffers(plan.model, plan.world)
    name_buffers(plan.model, plan.world)
    keep_cache_out(fresh, plan.layers)
    if plan.world.size > 1:
        keep_ranks_together(plan.model, plan.layers)
    install_hook(plan.model)


def _report(plan: WrapPlan, sharded: str, level: int) -> None:
    kind = type(plan.model).__name__
    _log.info("rank %d: sharded %s: %s, zero_level %d", plan.world.rank, kind, sharded, level)
    if not plan.layers:
        _log.warning(
            "%s has no blocks, because it has no nn.ModuleList of layers, or blocks= is empty. All of its parameters "
            "may be unsharded at the same time. To save memory, pass its layers: auto_wrap(model, blocks=[...]).",
            kind,
        )  # fmt: skip
