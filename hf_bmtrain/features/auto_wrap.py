"""`auto_wrap`, and the list of features that it applies to a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..checkpoint.materialize import fill_from
from ..engine.base.arguments import expect_kind, expect_module, expect_path
from ..engine.blocks.block import CheckpointBlock, TransformerBlockList
from ..engine.blocks.block_state import BlockState
from ..engine.blocks.distributed_module import DistributedModule
from ..engine.blocks.recompute import InputStore, Recompute
from ..engine.runtime.world import current_world
from ..engine.sharding.parameter import DistributedParameter
from ..engine.wrap.extension import Extension
from ..engine.wrap.wrap import wrap
from .activations import OffloadActivations, input_store
from .cuda_graphs import CudaGraphs, compile_forward
from .experts import Experts
from .float8 import Float8
from .lora import Lora
from .masks import Masks
from .memory import Memory, choose_recompute
from .mlp import MlpChunks
from .options import FirstOptions, KeepFrozen, Options, UseCheckpoint, UseFloat8, check_use_checkpoint
from .packed import Packed
from .replay.replay import Replay
from .sequence import SequenceParallel
from .tensor_parallel.plan import TensorParallel


def extensions_of(options: Options) -> list[Extension]:
    """Return the Extension objects with which `auto_wrap` applies its features to a model, in the order of application.

    `wrap`, the function that shards a model, calls the methods of these objects at fixed points.

    Args:
        options: the arguments that were passed to `auto_wrap`.
    """
    return [
        TensorParallel(options), Experts(), Lora(), Packed(options), Float8(options), Memory(options),
        SequenceParallel(options), OffloadActivations(options), MlpChunks(options), CudaGraphs(options), Masks(),
        FirstOptions(options),
    ]  # fmt: skip


class LayerFeatures:
    """Gives `engine` the parts of a block that are implemented in `features`, such as compilation.

    `engine` must not import `features`. Instead, it calls the methods of this object, which is stored as
    `World.layer_features`. The interface is documented in `engine.blocks.recompute.LayerFeatures`:

    * `check` raises ValueError if the user has passed a `use_checkpoint` that `auto_wrap` does not document.
    * `recompute` returns the object that decides which forwards of a block are recomputed in backward.
    * `replay` returns the object that restores a layer's state (buffers, random generators, attributes) for a
      recomputation.
    * `compile` compiles a block's forward with torch.compile, also with CUDA graphs if the given options request them.
    * `inputs` returns a new store that keeps the inputs of one model's blocks in host memory, or None on the CPU.
    """

    def check(self, use_checkpoint: object) -> None:
        check_use_checkpoint(use_checkpoint)

    def recompute(self, use_checkpoint: Any, block: BlockState) -> Recompute:
        return choose_recompute(use_checkpoint, block, current_world())

    def replay(self, layer: torch.nn.Module) -> Replay:
        return Replay(layer)

    def compile(self, function: Callable, block: BlockState, options: dict[str, Any]) -> Callable:
        return compile_forward(function, block, options, current_world())

    def inputs(self) -> InputStore | None:
        return input_store(current_world())


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
    sequence_parallel: int = 1,
    offload_activations: bool = False,
    mlp_chunks: int = 1,
    cuda_graphs: bool = False,
) -> torch.nn.Module:
    """Shard a model over all ranks, in place, and return it. Collective: every rank must call it.

    The items of each outermost `nn.ModuleList` of layers become CheckpointBlocks, and the list becomes a
    TransformerBlockList. (If items of a list are themselves lists, these inner lists are used instead. Lists with
    embeddings or None are left out.) Every other module all-gathers its own parameters when it is called, as a
    DistributedModule does. Class names, `state_dict` keys and tied weights are preserved. The model moves to this
    rank's device, and every rank receives rank 0's weights and buffers. Convert the model to another dtype before this
    call. Create the optimizer after it, because `model.parameters()` then yields local parameters, which hold this
    rank's elements.

    After adding parameters such as adapters, call `auto_wrap(model)` again. It shards each new parameter with the block
    or module that contains it. Leave out the other arguments: those of the first call still apply. If you pass an
    argument that differs from the first call's, ValueError is raised; an argument that has its default value counts as
    left out. `weights` is only for the first call.

    Args:
        model: the model with its weights, on any device; or, if `weights` is passed, on the meta device.
        zero_level: 3 frees a block's full parameters after its forward, and all-gathers them again for its backward. 2
            keeps them in memory from forward to backward. None uses the value given to `init_distributed`.
        use_checkpoint: whether to recompute each block in backward instead of keeping its activations. "attention"
            keeps the outputs of attention, and recomputes everything else. "auto" on a GPU measures the first step,
            then recomputes only as much as memory requires. If no block needs recomputation, the remaining memory is
            used to keep blocks unsharded between forward and backward. On the CPU, "auto" does not measure memory and
            recomputes no block.
        compile: whether to compile the blocks with torch.compile. A str names the backend; True takes the default one.
        blocks: the modules that become blocks, in execution order, instead of the items of the outermost lists. A
            ModuleList or Sequential among them is replaced by its items.
        weights: the folder or file, as for `load`, with the weights of a model that is on the meta device. Each rank
            keeps only its shards, and reads only these if the format of the files allows it. None: the model has its
            weights already.
        keep_frozen: whether frozen parameters stay unsharded between steps. True: all. False: none. "auto": as many as
            fit on the GPU, which is measured in the first steps; none on the CPU.
        quantize_frozen: "nf4" or "fp8" quantizes the frozen weight matrices of blocks to 4 or 8 bits, which makes them
            read-only. None quantizes none.
        float8: whether the linear layers in blocks compute in float8. The log lists the layers that cannot, with the
            reason. "rows" is a synonym of True.
        keep: names of modules to exclude from `float8`, with all layers in them. A name matches whole dot-separated
            parts of a full name: "down_proj" and "layers.0.mlp" both match "model.layers.0.mlp.down_proj"; "proj" does
            not.
        sequence_parallel: the number of consecutive ranks that share each sequence (row of the batch). In blocks, each
            of these ranks computes a part of the sequence's tokens. Pass full rows to the model, and the same batch on
            all ranks that share them.
        offload_activations: whether to keep the inputs of recomputed blocks in host memory until backward. They are
            copied while the GPU computes. This has no effect on the CPU.
        mlp_chunks: the number of chunks of tokens that the MLP of each block computes one after another. N chunks
            reduce the memory for its intermediate activations to 1/N.
        cuda_graphs: whether compiled blocks are replayed as CUDA graphs. This helps if the host takes longer to launch
            a block's kernels than the GPU takes to run them: in small models, with adapters, with experts, or with
            float8 and few tokens. Needs `compile=True`. The full parameters and activations of blocks then keep their
            memory from step to step, so frozen blocks stay unsharded even with keep_frozen=False, and
            keep_frozen="auto" means True. Inputs should have the same shapes in each step, because a graph is recorded
            for each shape. On the CPU no graphs are recorded, but parameters keep their memory there too.

    Returns:
        `model`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the model cannot be sharded. The message says why.
        ValueError: an argument is out of range, or cannot be combined with another argument.
        RuntimeError: the ranks' models or arguments differ.
        RuntimeError: `weights` cannot be read, or do not fit the model.
        RuntimeError: this version of torch does not support the value of an argument.

    Example::

        model = bmt.auto_wrap(AutoModelForCausalLM.from_pretrained(name))
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4)
    """
    world = current_world()
    expect_module("model", model)
    if blocks is not None and not isinstance(blocks, torch.nn.Module):  # if it is a single module, `wrap` checks it
        expect_kind("blocks", blocks, Iterable, "a list of modules of the model, or None")
    if weights is not None:
        expect_path("weights", weights)
    options = Options(
        zero_level=world.zero_level if zero_level is None else zero_level,
        use_checkpoint=use_checkpoint,
        compile=compile,
        keep_frozen=keep_frozen,
        quantize_frozen=quantize_frozen,
        float8=float8,
        keep=keep,
        sequence_parallel=sequence_parallel,
        offload_activations=offload_activations,
        mlp_chunks=mlp_chunks,
        cuda_graphs=cuda_graphs,
    )
    world.check_same_on_all_ranks("auto_wrap", options.facts())
    if weights is not None:
        fill_from(model, weights, world)
    wrap(model, world, options.zero_level, use_checkpoint, options.compile_options, blocks, extensions_of(options))
    return model


@functools.wraps(auto_wrap, assigned=("__annotations__",))
def BMTrainModelWrapper(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Shard a model as `auto_wrap` does, unless it is sharded already. Collective: every rank must call it.

    This is the function for programs that were written for BMTrain. New programs can call `auto_wrap`.

    A model is returned unchanged if it has no parameters, if it is a TransformerBlockList (a list of sharded layers),
    or if it contains CheckpointBlocks or DistributedModules (sharded layers or modules) and all its parameters are
    sharded. The other arguments have no effect then.

    Args:
        model: the model.
        *args: the other arguments of `auto_wrap`, by position: `zero_level`, `use_checkpoint` and so on.
        **kwargs: the other arguments of `auto_wrap`, by name.

    Returns:
        `model`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the model cannot be sharded. The message says why.
        ValueError: an argument is out of range, or cannot be combined with another argument.
        RuntimeError: the ranks' models or arguments differ.
        RuntimeError: `weights` cannot be read, or do not fit the model.
        RuntimeError: this version of torch does not support the value of an argument.
    """
    expect_module("model", model)
    parameters = list(model.parameters())  # empty if the model is, for example, an activation function
    if not parameters or isinstance(model, TransformerBlockList):
        return model
    if all(isinstance(parameter, DistributedParameter) for parameter in parameters) and any(
        isinstance(module, (CheckpointBlock, DistributedModule)) for module in model.modules()
    ):
        return model
    return auto_wrap(model, *args, **kwargs)
