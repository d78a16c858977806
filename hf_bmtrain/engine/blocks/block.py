"""CheckpointBlock, a transformer layer that is sharded in place, and TransformerBlockList, a list of such blocks.

When a layer is sharded, its class is replaced by a subclass of the old class.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..base.arguments import expect_kind, expect_module, expect_number
from ..runtime.world import World, check_zero_level, current_world
from ..sharding.buffer import ShardedBuffer
from ..sharding.slots import Slot, find_places, shard_places, tensor_facts
from ..sharding.state_dict import follow_state_dicts
from .block_state import BlockState
from .recomputed_graph import RecomputedGraphs
from .sharded_module import ShardedModule, extend_class


class CheckpointBlock(ShardedModule):
    """A transformer layer whose parameters are sharded, and are all-gathered for its forward and for its backward.

    `CheckpointBlock(inner_module)` shards the layer in place and returns it. The layer's new class is a subclass of
    CheckpointBlock and of the old class, so names, `isinstance` checks, hooks, attributes and `state_dict` keys remain
    valid. A list that the layer returns is converted to a tuple, as in BMTrain. (`auto_wrap` does not convert lists.)

    Collective: every rank must call it.

    Args:
        inner_module: the layer. Its parameters may already be sharded (DistributedParameters). A CheckpointBlock is
            returned unchanged.
        use_checkpoint: whether to recompute the forward in backward instead of keeping its activations. "attention"
            recomputes all but the outputs of attention, and "auto" recomputes only as much as memory requires (see
            `auto_wrap`).
        zero_level: 3 frees the full parameters between forward and backward, and 2 keeps them. None uses the value
            given to `init_distributed`.
        initialized: ignored. (Scripts for BMTrain pass it.)
        mode: ignored. (BMTrain needs it for its pipelines.)

    Raises:
        ValueError: `use_checkpoint` or `zero_level` has a value that is not listed above.
        RuntimeError: the ranks have different layers or arguments.
    """

    _bmt: BlockState

    def __new__(
        cls,
        inner_module: torch.nn.Module,
        use_checkpoint: bool | str = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: str = "BLOCK",
    ):
        layer = inner_module
        if isinstance(layer, CheckpointBlock):
            return layer
        world = current_world()
        expect_module("inner_module", layer)
        world.layer_features.check(use_checkpoint)
        level = world.zero_level if zero_level is None else zero_level
        check_zero_level(level)
        # If the last backward has failed, the schedule still refers to its blocks, gradients and pending reductions.
        # Drop these references: the user may have deleted that model, and its memory could otherwise not be freed.
        world.schedule.discard_failed_backward()
        facts = {"zero_level": level, "use_checkpoint": use_checkpoint, **tensor_facts(layer)}
        world.check_same_on_all_ranks("CheckpointBlock", facts)
        sharded = shard_places(world, find_places(layer.modules()), world.schedule.blocks)
        extend(layer, sharded, world, use_checkpoint, level)
        layer._bmt.lists_as_tuples = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return layer

    def __init__(self, *args, **kwargs) -> None:
        """Do nothing, because `__new__` returns an existing layer, which is already initialized."""

    def _slots(self) -> list[Slot]:
        return self._bmt.current_slots()

    def compile(self, **kwargs) -> None:
        """Compile the layer's own forward in place with torch.compile, without the collectives around it.

        You need not call it if you pass `compile=True` to `auto_wrap`. Layers of the same class that differ only in
        their parameters share one graph, which gets the parameters as inputs. A forward that was set on the instance is
        compiled for this layer alone.

        With a mode or option of torch.compile that records CUDA graphs, such as `mode="reduce-overhead"`, this method
        does the same as `cuda_graphs=True` of `auto_wrap`.

        Args:
            **kwargs: passed to torch.compile.

        Raises:
            ValueError: CUDA graphs are requested, but do not work with this block. The message says why.
            RuntimeError: CUDA graphs are requested, and torch is older than 2.7.
        """
        state = self._bmt
        if state.compiled:
            state.own_forward = state.eager_forward  # compile the layer's forward again, not the compiled function
        state.eager_forward = state.own_forward
        make = current_world().layer_features.compile
        # The function `recomputed` below has only a weak reference to `state`. `state` refers to `recomputed` (through
        # `graphs`), so a strong reference would form a cycle.
        owner = weakref.ref(state)

        def recomputed(function: Callable) -> Callable:
            block = owner()
            assert block is not None
            # `function` runs the forward inside torch's checkpoint, which must be compiled together with the forward.
            # After a graph break, the checkpoint would run uncompiled. So forbid graph breaks (fullgraph=True).
            return make(function, block, {**kwargs, "fullgraph": True})

        if state.own_forward is not None:
            state.graphs = RecomputedGraphs(state.own_forward, None, recomputed)
            state.own_forward = make(state.own_forward, state, kwargs)
        else:
            forward = type(self)._extends.forward
            state.graphs = RecomputedGraphs(forward, weakref.ref(self), recomputed)
            state.own_forward = weak_method(types.MethodType(make(forward, state, kwargs), self))
        state.compiled = True


@contextmanager
def uncompiled(blocks: Sequence[CheckpointBlock]) -> Iterator[None]:
    """Context manager inside which the compiled blocks among `blocks` run their original, uncompiled forwards.

    It is used for a separate forward, for example one that measures rounding noise before the first step.
    """
    states = [block._bmt for block in blocks]
    compiled = [(state.own_forward, state.graphs) for state in states]
    for state in states:
        state.own_forward, state.graphs = state.eager_forward, None
    try:
        yield
    finally:
        for state, (forward, graphs) in zip(states, compiled):
            state.own_forward, state.graphs = forward, graphs


def extend(
    layer: torch.nn.Module,
    sharded: tuple[list[ShardedBuffer], list[Slot]],
    world: World,
    use_checkpoint: object,
    zero_level: int,
) -> None:
    """Turn `layer` into a CheckpointBlock in place. Its parameters must already be sharded.

    This is the second step of creating a block: the caller, `CheckpointBlock(layer)` or `wrap`, first shards the
    parameters with `shard_places`.

    Args:
        layer: the layer.
        sharded: the return value of `shard_places`: the flat buffers of the layer's parameters, and the slots (entries
            of modules' `_parameters`) that are set to these parameters.
        world: the ranks that share the parameters.
        use_checkpoint: whether to recompute the forward in backward, as in CheckpointBlock.
        zero_level: 3 frees the full parameters between forward and backward, and 2 keeps them.
    """
    buffers, slots = sharded
    state = BlockState(
        weakref.ref(layer), world.schedule, buffers, slots, world.layer_features.replay(layer), zero_level
    )
    state.recompute = world.layer_features.recompute(use_checkpoint, state)
    # A `forward` in the layer's __dict__, set by a patch, would hide the forward of the new class. So move it to
    # `own_forward`, which the new forward calls instead of the old class's forward.
    state.own_forward = layer.__dict__.pop("forward", None)
    layer._bmt = state  # pyright: ignore[reportArgumentType]
    layer.__class__ = _extended_class(type(layer))
    follow_state_dicts(layer, slots)


def enlarge(block: CheckpointBlock, sharded: tuple[list[ShardedBuffer], list[Slot]]) -> None:
    """Make `block` all-gather parameters that were added to it after it was sharded, and reduce their gradients.

    Called if a user has added parameters, such as adapters, to a wrapped model, and wraps the model again. The caller
    first shards the new parameters with `shard_places`.

    sharded: the return value of `shard_places`: the flat buffers of the new parameters, and the slots (entries of
        modules' `_parameters`) that are set to these parameters.
    """
    buffers, slots = sharded
    block._bmt.buffers += buffers
    block._bmt.slots += slots
    block._bmt.replay = current_world().layer_features.replay(block)
    follow_state_dicts(block, slots)


@functools.cache
def _extended_class(cls: Any) -> type[torch.nn.Module]:
    """Return the class of blocks made from layers of class `cls`. It is a subclass of CheckpointBlock and of `cls`."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args, **kwargs):
        return self._bmt.forward(super(extended, self).forward, args, kwargs)

    extended = extend_class(CheckpointBlock, cls, {"forward": forward})
    return extended


def weak_method(method: Callable) -> Callable:
    """Return a function that calls the bound method `method` without keeping its object alive.

    A module that stores one of its own methods should store the returned function. The bound method itself would form a
    reference cycle, which would keep a deleted model in memory until the next garbage collection. A `method` that is
    not a bound method is returned unchanged.
    """
    if not inspect.ismethod(method):
        return method
    function, owner = method.__func__, weakref.ref(method.__self__)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        alive = owner()
        if alive is None:
            raise RuntimeError(
                f"{function.__name__}() was called after its model was deleted. Keep a reference to the model."
            )
        return function(alive, *args, **kwargs)

    call.__signature__ = inspect.signature(method)  # pyright: ignore[reportAttributeAccessIssue]
    call.owner = owner  # pyright: ignore[reportAttributeAccessIssue]
    return call


# -- lists of blocks --------------------------------------------------------------------------------------------------


class TransformerBlockList(torch.nn.ModuleList):
    """A list of CheckpointBlocks in execution order, linked to each other for prefetching.

    Every module becomes a CheckpointBlock. The list can be iterated over, indexed and sliced like any ModuleList. (A
    slice is a plain ModuleList.) Creating the list is collective: every rank must do it.

    The list can be called as in BMTrain. `blocks(x, *args, **kwargs)` passes the hidden state `x` through all blocks:
    each block computes `x = block(x, *args, **kwargs)`, with the same `args` and `kwargs`. The result is the last `x`.
    With num_hidden=2, `blocks(x, y, *args, **kwargs)` does the same with `x, y = block(x, y, *args, **kwargs)`, and the
    result is the tuple of the last x and y.

    Args:
        modules: the layers, in execution order.
        num_hidden: the number of hidden states that are passed from block to block. In a call of the list or of a
            block, the hidden states are the first positional arguments. Each block must return as many new hidden
            states, as a tuple if there are several.
    """

    num_hidden: int = 1  # the value for lists that `wrap` turns into this class without calling __init__

    def __init__(self, modules: Iterable[torch.nn.Module], num_hidden: int = 1) -> None:
        wanted = "at least 1 (the number of hidden states that are passed from block to block)"
        expect_number("num_hidden", num_hidden, wanted, lambda number: number >= 1, integer=True)
        expect_kind("modules", modules, Iterable, "a list of torch.nn.Modules")
        layers = list(modules)
        for layer in layers:
            expect_kind("modules", layer, torch.nn.Module, "a list of torch.nn.Modules only")
        super().__init__([CheckpointBlock(layer) for layer in layers])
        self.num_hidden = num_hidden
        self.link()

    def link(self) -> None:
        """Tell each block its neighbors in the list, so that it can prefetch their parameters.

        A block prefetches the next block in forward, and the previous block in backward. The constructor, `auto_wrap`
        and all methods that change the list call this method.
        """
        blocks: list[Any] = [block for block in dict.fromkeys(self) if isinstance(block, CheckpointBlock)]
        for block, following in zip(blocks, blocks[1:]):
            block._bmt.next, following._bmt.previous = weakref.ref(following._bmt), weakref.ref(block._bmt)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Pass hidden states through all blocks. Collective: every rank must call it, because blocks are all-gathered.

        Args:
            *args: `num_hidden` hidden states, then further arguments, which are passed to every block.
            return_hidden_states: whether to also return the inputs of all blocks, stacked: one tensor of shape
                (number of blocks, ...) for each hidden state.
            **kwargs: passed to every block.

        Returns:
            The hidden state after the last block. If there are several hidden states, or if `return_hidden_states` is
            set, a tuple: all hidden states after the last block, followed by the stacked inputs (if requested).

        Raises:
            ValueError: `args` has fewer than `num_hidden` elements.
            ValueError: a block does not return `num_hidden` values.
        """
        if len(args) < self.num_hidden:
            raise ValueError(
                f"This TransformerBlockList passes on {self.num_hidden} hidden states, but got {len(args)} positional "
                "arguments. Pass every hidden state by position, or create the list with a smaller num_hidden."
            )
        hidden, rest = args[: self.num_hidden], args[self.num_hidden :]
        entered: list[tuple] = []
        for number, block in enumerate(self):
            entered.append(hidden)
            hidden = self._as_hidden(number, block(*hidden, *rest, **kwargs))
        if return_hidden_states:
            return (*hidden, *(torch.stack(states) for states in zip(*entered)))
        return hidden if self.num_hidden > 1 else hidden[0]

    def _as_hidden(self, number: int, outputs: Any) -> tuple:
        hidden = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        if len(hidden) != self.num_hidden:
            raise ValueError(
                f"Block {number} (counted from 0) of a TransformerBlockList returned {len(hidden)} values instead of "
                f"{self.num_hidden}: pass num_hidden={len(hidden)} to TransformerBlockList, or return only the hidden "
                "states that the next block takes."
            )
        return hidden

    def insert(self, index: int, module: torch.nn.Module) -> None:
        """Insert `module` before the item at `index`, and link its neighbors to it.

        Args:
            index: the index that `module` gets.
            module: a CheckpointBlock. (Another module is inserted, too, but neither sharded nor linked.)

        Raises:
            TypeError: `module` is not a torch.nn.Module.
        """
        expect_module("module", module)  # torch's insert does not check it
        with self._changing():
            super().insert(index, module)

    def append(self, module: torch.nn.Module):
        """Append `module`, and link the last block to it.

        Args:
            module: a CheckpointBlock. (A module of any other type is appended, too, but neither sharded nor linked.)

        Returns:
            The list itself.
        """
        return self.extend([module])

    def extend(self, modules: Iterable[torch.nn.Module]):
        """Append several modules, and link the blocks among them.

        Args:
            modules: CheckpointBlocks. (Other modules are appended, too, but neither sharded nor linked.)

        Returns:
            The list itself.

        Raises:
            TypeError: `modules` is not iterable, or contains something that is not a module.
        """
        with self._changing():
            super().extend(modules)
        return self

    def __setitem__(self, index: int, module: torch.nn.Module) -> None:
        with self._changing():
            super().__setitem__(index, module)

    def __delitem__(self, index: int | slice) -> None:
        with self._changing():
            super().__delitem__(index)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Context manager for code that adds, replaces or deletes items of the list. On exit, it links the blocks anew.

        If the code raises an error, the list gets its former items back.

        On entry, the links between the blocks are cleared. Otherwise, the neighbors of a removed block would prefetch
        it as long as it exists. The links are weak references, so they do not keep it alive. But if it is part of a
        reference cycle, the garbage collector frees it earlier on some ranks than on others. Only some ranks would then
        prefetch it.
        """
        present, saved = self._modules, dict(self._modules)
        blocks: list[Any] = [block for block in self if isinstance(block, CheckpointBlock)]
        for block in blocks:
            block._bmt.next = block._bmt.previous = None
        try:
            yield
        except BaseException:
            present.clear()
            present.update(saved)
            raise
        finally:
            self.link()

    def __getitem__(self, index):
        if isinstance(index, slice):
            return torch.nn.ModuleList(list(self._modules.values())[index])
        return super().__getitem__(index)


class PipelineTransformerBlockList(TransformerBlockList):
    """A TransformerBlockList with the name of BMTrain's class for pipeline parallelism. It does not use pipelines.

    It differs from a TransformerBlockList only in that a call accepts the keyword argument `batch_related`, and ignores
    it. In BMTrain, `batch_related` lists the arguments that are split into micro-batches for the pipeline.
    Creating the list is collective: every rank must do it.

    Args:
        modules: the layers, in execution order. Every layer becomes a CheckpointBlock.
        num_hidden: the number of hidden states that are passed from block to block. In a call of the list or of a
            block, the hidden states are the first positional arguments. Each block must return as many new hidden
            states, as a tuple if there are several.
    """

    def forward(
        self, *args: Any, batch_related: Iterable[int] = (), return_hidden_states: bool = False, **kwargs: Any
    ) -> Any:
        """Pass hidden states through all blocks. Collective: every rank must call it, because blocks are all-gathered.

        Args:
            *args: `num_hidden` hidden states, then further arguments, which are passed to every block.
            batch_related: ignored. In BMTrain, it lists which of the further arguments are split into micro-batches.
            return_hidden_states: whether to also return the inputs of all blocks, stacked: one tensor of shape
                (number of blocks, ...) for each hidden state.
            **kwargs: passed to every block.

        Returns:
            The hidden state after the last block. If there are several hidden states, or if `return_hidden_states` is
            set, a tuple: all hidden states after the last block, followed by the stacked inputs (if requested).
        """
        return super().forward(*args, return_hidden_states=return_hidden_states, **kwargs)
