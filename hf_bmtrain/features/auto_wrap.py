"""The automatic wrapper: shard any `nn.Module` in place."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..checkpoint.materialize import fill_from
from ..engine.base.arguments import expect_module
from ..engine.blocks.block import CheckpointBlock, enlarge, extend
from ..engine.blocks.block_list import TransformerBlockList
from ..engine.blocks.distributed_module import DistributedModule
from ..engine.runtime.world import World, check_zero_level, current_world
from ..engine.sharding.buffer import ShardedBuffer
from ..engine.sharding.parameter import DistributedParameter
from ..engine.sharding.slots import Place, Slot, find_places, shard_places, tensor_facts
from ..engine.sharding.storage import StorageKind
from ..engine.wrap.find import Chain, adapter_parameters, choose_chains
from ..engine.wrap.model_hook import install_hook
from ..engine.wrap.patches import (
    follow_accelerator,
    keep_cache_out,
    keep_ranks_together,
    let_parametrize,
    refuse_resizing,
    route_recomputation,
)
from ..engine.wrap.refuse import admit, admit_parameters, check_arguments, holds_additions
from ..engine.wrap.root_params import name_buffers, place_buffers, places_outside, shard_outside, shared_parameters
from .float8.calibrate import install_signal_guard
from .float8.choose import UseFloat8, apply_float8, check_late_float8, choose_float8
from .float8.gather import choose_gathered, link_layers
from .float8.storage import Float8Kind
from .lora.linear import fuse_lora
from .memory.policy import UseCheckpoint
from .memory.residents import KeepFrozen, apply_keep_frozen, extend_keep_frozen
from .memory.shortage import follow_shortage
from .packed.bitsandbytes import adopt_quantized, quantized_facts, refuse_quantized
from .packed.choose import choose_quantized
from .packed.storage import PackedKind

_log = logging.getLogger("hf_bmtrain")


def auto_wrap(
    model: torch.nn.Module,
    zero_level: int | None = None,
    use_checkpoint: UseCheckpoint = True,
    compile: bool | str = False,
    blocks: Iterable[torch.nn.Module] | None = None,
    weights: str | os.PathLike | None = None,
    keep_frozen: KeepFrozen = "auto",
    quantize_frozen: str | None = None,
    float8: UseFloat8 = False,
    keep: Sequence[str] = (),
) -> torch.nn.Module:
    """Shard a model over all ranks, in place, and return it. Collective.

    The items of the outermost `nn.ModuleList`s that hold parameters become CheckpointBlocks, and the lists
    TransformerBlockLists; every other module reads its parameters as a DistributedModule does. Class names, the keys of
    `state_dict` and tied weights are preserved. The model moves to the rank's device, and all ranks get rank 0's
    weights and buffers. Afterwards `model.parameters()` yields 1-D shards, so create the optimizer afterwards, and cast
    the model before.

    Call `auto_wrap(model)` again after adding parameters, such as adapters: each is sharded with the block it is in.

    Args:
        model: the model, on any device; on the meta device with `weights`.
        zero_level: 3 frees a block's full parameters between forward and backward, 2 keeps them; None takes the
            world's.
        use_checkpoint: whether to recompute each block in backward instead of keeping its activations. With "auto" on a
            GPU the first step is measured, and then only as many blocks are recomputed as memory requires; if none is,
            as many as memory allows stay unsharded from forward to backward. On the CPU, whose memory is not measured,
            "auto" recomputes none.
        compile: whether to compile the blocks with torch.compile, by its default backend or the named one.
        blocks: the modules that become blocks instead, in execution order; a ModuleList or Sequential stands for its
            items.
        weights: a folder or file, as `load` takes it, with the values of a model on the meta device. Each rank copies
            1/N.
        keep_frozen: whether frozen parameters stay unsharded between steps. True: all. False: none. "auto": as many as
            fit on the GPU.
        quantize_frozen: "nf4" or "fp8" packs the frozen matrices of blocks, which are read-only then; None packs none.
        float8: whether linear layers of blocks compute in float8: True or "rows".
        keep: names of modules that do not compute in float8.

    Returns:
        `model`.

    Raises:
        ValueError: the model cannot be sharded, for a reason that the message gives, or an argument is out of range.
        RuntimeError: the ranks' models or arguments differ.

    Example::

        model = bmt.auto_wrap(AutoModelForCausalLM.from_pretrained(name))
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4)
    """
    world = current_world()
    check_arguments(model, use_checkpoint, compile, blocks, weights, keep_frozen, quantize_frozen, float8, keep)
    level = world.zero_level if zero_level is None else zero_level
    check_zero_level(level)
    asked = {"zero_level": level, "use_checkpoint": use_checkpoint, "compile": compile, "keep_frozen": keep_frozen}
    world.agree("auto_wrap", asked | {"quantize_frozen": quantize_frozen, "float8": float8, "keep": [*keep]})
    if weights is not None:
        fill_from(model, weights, world)
    chains, lists = _choose(model, blocks, world)
    if holds_additions(model):
        return _shard_additions(model, world, float8)
    layers = list(dict.fromkeys(block for chain in chains for block in chain))
    outside = _outside(model, layers)
    quantization, linears = _choose_precision(model, world, layers, outside, quantize_frozen, float8, keep)
    adopt_quantized(model, layers, outside, world.device)
    shared = shared_parameters(layers, outside)
    for block, sharded in _shard_layers(model, world, layers, shared, quantization, linears):
        extend(block, sharded, world, use_checkpoint, level)
    shard_outside(world, places_outside(layers, outside, shared), outside)
    _connect(model, chains, lists, layers, compile)
    _finish(model, world, model.modules(), layers)
    follow_accelerator(model, world.device)
    refuse_resizing(model)
    install_signal_guard(model, linears, layers, world, bool(compile))  # behind hooks that refuse or change arguments
    apply_keep_frozen(model, world, keep_frozen)
    _report(model, world, f"{len(layers)} blocks in {len(chains)} lists, {len(outside)} modules outside", level)
    return model


def _choose_precision(
    model: torch.nn.Module,
    world: World,
    layers: Chain,
    outside: Chain,
    quantize_frozen: str | None,
    float8: UseFloat8,
    keep: Sequence[str],
) -> tuple[PackedKind | None, dict[str, torch.nn.Module]]:
    """Return the parameters that are packed, and the layers that compute in float8. Changes nothing. Collective.

    Raises ValueError, on every rank, if there are none for an argument that asks for some.
    """
    refusal, quantization, linears = None, None, {}
    apart = shared_parameters(layers, outside) | adapter_parameters(model)
    try:
        quantization = choose_quantized(model, layers, apart, quantize_frozen)
        linears = choose_float8(model, layers, world.device, float8, keep)
    except ValueError as error:
        refusal = error
    world.agree("auto_wrap", {"the reason to refuse the model": refusal})
    if refusal is not None:
        raise refusal
    return quantization, linears


def _shard_layers(
    model: torch.nn.Module,
    world: World,
    layers: Chain,
    shared: set[int],
    quantization: PackedKind | None,
    linears: dict[str, torch.nn.Module],
) -> Iterator[tuple[torch.nn.Module, tuple[list[ShardedBuffer], list[Slot]]]]:
    """Shard the parameters of `layers` but for the `shared` ones, and yield each layer with its buffers and slots.

    Adapters have buffers of their own, also frozen ones: an adapter that is made active later is reduced by itself. So
    have the weights of the `linears`, which compute in float8.
    """
    apply_float8(linears)
    adapters, for_float8 = adapter_parameters(model), choose_gathered(model, linears.values(), world)
    float8 = Float8Kind()

    def kind_of(parameter: torch.nn.Parameter) -> StorageKind | None:
        if quantization is not None and id(parameter) in quantization.names:
            return quantization
        return float8 if id(parameter) in for_float8 and not hasattr(parameter, "storage_kind") else None

    for layer in layers:
        own = [place for place in find_places(layer.modules()) if id(place[2]) not in shared]
        yield layer, shard_places(world, own, world.schedule.blocks, kind_of, adapters)
    link_layers(linears.values())


def _connect(
    model: torch.nn.Module,
    chains: list[Chain],
    lists: list[torch.nn.ModuleList],
    layers: list[Any],
    compile: bool | str,
) -> None:
    """Tell the blocks of each chain their neighbours, make block lists of the ModuleLists, and compile the blocks.

    The blocks recompute what `model` would.
    """
    for module_list in lists:
        if type(module_list) is torch.nn.ModuleList:  # a subclass keeps its class
            module_list.__class__ = TransformerBlockList
    for chain in chains:
        TransformerBlockList.link(chain)  # pyright: ignore[reportArgumentType]
    if compile:
        for block in layers:
            block.compile(backend="inductor" if compile is True else compile)
    route_recomputation(model, layers)


@functools.wraps(auto_wrap, assigned=("__annotations__",))
def BMTrainModelWrapper(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Shard a model as `auto_wrap` does, but return one that needs no sharding as it is. Collective.

    That is a DistributedModule, a block, a list of blocks, and a model whose parameters are all sharded already.

    Args:
        model: the model.
        *args: of `auto_wrap`.
        **kwargs: of `auto_wrap`.

    Returns:
        `model`.
    """
    expect_module("model", model)
    if isinstance(model, TransformerBlockList) or (
        any(isinstance(module, (CheckpointBlock, DistributedModule)) for module in model.modules())
        and all(isinstance(parameter, DistributedParameter) for parameter in model.parameters())
    ):
        return model
    return auto_wrap(model, *args, **kwargs)


def _choose(
    model: torch.nn.Module, blocks: Iterable[torch.nn.Module] | None, world: World
) -> tuple[list[Chain], list[torch.nn.ModuleList]]:
    """Return the result of `choose_chains`, none for additions. Collective.

    Raises ValueError if the model cannot be sharded, and RuntimeError unless every rank has the same model and blocks.
    """
    chains, lists, refusal = [], [], None
    try:
        if holds_additions(model):
            admit_parameters(model)
            refuse_quantized(model, "add it before the first auto_wrap.")
        else:
            admit(model)
            chains, lists = choose_chains(model, blocks)
    except ValueError as error:
        refusal = error
    world.agree("auto_wrap", {"the reason to refuse the model": refusal})
    if refusal is not None:
        raise refusal
    names = {module: name for name, module in model.named_modules()}
    chosen = {
        f"block '{names[block]}'": f"{type(block).__qualname__} in list {number}"
        for number, chain in enumerate(chains)
        for block in chain
    }
    world.agree("auto_wrap", {**tensor_facts(model), **quantized_facts(model), **chosen})
    return chains, lists


def _shard_additions(model: torch.nn.Module, world: World, float8: UseFloat8) -> torch.nn.Module:
    """Shard the parameters that were added to `model` since it was wrapped (adapters, a new head). Collective."""
    check_late_float8(model, float8)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
    outside = _outside(model, layers)
    shared, count = shared_parameters(layers, outside), 0
    for block in layers:
        own = [place for place in find_places(block.modules()) if id(place[2]) not in shared and _is_new(place)]
        count += len(own)
        if own:
            enlarge(block, shard_places(world, own, world.schedule.blocks))
    left = [place for place in places_outside(layers, outside, shared) if _is_new(place)]
    fresh = [module for module in outside if not isinstance(module, DistributedModule)]
    shard_outside(world, left, fresh)
    _finish(model, world, fresh, layers)
    extend_keep_frozen(model, world)
    _log.info("rank %d: sharded %d new parameters in blocks and %d outside", world.rank, count, len(left))
    return model


def _is_new(place: Place) -> bool:
    return not isinstance(place[2], DistributedParameter)


def _outside(model: torch.nn.Module, blocks: Chain) -> Chain:
    """Return the modules of `model` that are not inside one of `blocks`."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def _finish(model: torch.nn.Module, world: World, fresh: Iterable[torch.nn.Module], blocks: list[Any]) -> None:
    """Place the module buffers, and patch the modules that were not wrapped before, `fresh`. Collective."""
    fused = sum(fuse_lora(block.modules()) for block in blocks if not block._bmt.compiled)
    if fused and world.rank == 0:
        _log.info("%d LoRA layers add their adapter in the product of their frozen layer", fused)
    place_buffers(model, world)
    name_buffers(model, world)
    keep_cache_out(fresh, blocks)
    let_parametrize(model)
    if world.size > 1:
        keep_ranks_together(model, blocks)
    install_hook(model)
    follow_shortage(model, world)


def _report(model: torch.nn.Module, world: World, sharded: str, level: int) -> None:
    _log.info("rank %d: sharded %s: %s, zero_level %d", world.rank, type(model).__name__, sharded, level)
    if sharded.startswith("0 blocks"):
        _log.warning(
            "%s has no nn.ModuleList with parameters, so no blocks were found: all of it is gathered for one forward "
            "and backward. To save memory name the layers: auto_wrap(model, blocks=[...]).",
            type(model).__name__,
        )
