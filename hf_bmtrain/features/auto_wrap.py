"""`auto_wrap`, and the list of the features that a wrapped model can have."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..checkpoint.materialize import fill_from
from ..engine.base.arguments import expect_flag, expect_kind, expect_module, expect_path
from ..engine.blocks.block import CheckpointBlock
from ..engine.blocks.block_list import TransformerBlockList
from ..engine.blocks.block_state import BlockState
from ..engine.blocks.distributed_module import DistributedModule
from ..engine.blocks.recompute import Recompute
from ..engine.runtime.world import check_zero_level, current_world
from ..engine.sharding.parameter import DistributedParameter
from ..engine.wrap.extension import Extension
from ..engine.wrap.wrap import wrap
from .float8 import Float8
from .lora import Lora
from .memory import Memory, choose_recompute
from .options import KeepFrozen, Options, UseCheckpoint, UseFloat8, check_use_checkpoint
from .packed import Packed
from .replay.replay import Replay


def extensions_of(options: Options) -> list[Extension]:
    """Return the features of a wrapped model, in the order in which they are asked."""
    return [Lora(), Packed(options), Float8(options), Memory(options)]


class LayerFeatures:
    """What every block is made with, also by `CheckpointBlock` alone."""

    def check(self, use_checkpoint: object) -> None:
        check_use_checkpoint(use_checkpoint)

    def recompute(self, use_checkpoint: Any, block: BlockState) -> Recompute:
        return choose_recompute(use_checkpoint, block, current_world())

    def replay(self, layer: torch.nn.Module) -> Replay:
        return Replay(layer)


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
    expect_module("model", model)
    if not isinstance(compile, str) or not compile:
        expect_flag("compile", compile)
    if blocks is not None and not isinstance(blocks, torch.nn.Module):  # `choose_chains` has its own error for one
        expect_kind("blocks", blocks, Iterable, "a list of modules of the model, or None")
    if weights is not None:
        expect_path("weights", weights)
    level = world.zero_level if zero_level is None else zero_level
    options = Options(
        zero_level=level,
        use_checkpoint=use_checkpoint,
        compile=compile,
        keep_frozen=keep_frozen,
        quantize_frozen=quantize_frozen,
        float8=float8,
        keep=keep,
    )
    check_zero_level(level)
    world.check_same_on_all_ranks("auto_wrap", options.facts())
    if weights is not None:
        fill_from(model, weights, world)
    wrap(model, world, level, use_checkpoint, compile, blocks, extensions_of(options))
    return model


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
