"""`DCPState`: save and load sharded models and optimizers with torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..engine.base.arguments import expect_kind, expect_module
from ..engine.base.torch_internals import unwrapped
from ..engine.optim.adam import AdamOptimizer
from ..engine.optim.compat import keeps_state
from ..engine.optim.state import divide_state, save_state
from ..engine.runtime.world import current_world
from ..engine.sharding.parameter import DistributedParameter
from .entries import (
    LoadedState,
    added_entries,
    check_groups,
    groups_of,
    named,
    optimizers_of,
    refuse_parts,
    refuse_quantized,
)
from .small_state import encode

_ADAMW = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
}  # fmt: skip
"""Settings that torch.optim.AdamW has and AdamOptimizer lacks. With these values, both optimizers compute the same."""
_ADDED = "added_entries"
"""The entry of "optim" with all ranks' entries of `optimizer.state_dict()` beside "state" and "param_groups". It is
present only if there are such entries, because `dcp.load` raises an error for an entry that a checkpoint lacks."""
_SETTINGS = ("lr", "betas", "eps", "weight_decay")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangular region of a tensor: (offsets, sizes), each with one integer for every dimension of the tensor."""


class DCPState:
    """An object with which torch.distributed.checkpoint (DCP) saves and loads a model and its optimizer.

    Needs torch 2.15. Pass this object to `dcp.save` and `dcp.load` as in the example, on every rank. These functions
    call `state_dict` and `load_state_dict`. So after `dcp.load`, the model and the optimizer have the loaded values.
    Each rank saves and loads its own elements of sharded tensors, through a copy in host memory; the tensors are not
    gathered. Names and shapes are those of `get_state_dict` in torch.distributed.checkpoint.state_dict, under the keys
    "model" and "optim". So checkpoints can be exchanged with FSDP2 and with plain models, in both directions.

    The state of an AdamOptimizer is saved in the format of torch.optim.AdamW. Of the parameter groups' settings in a
    checkpoint, only lr, betas, eps and weight_decay are loaded into an AdamOptimizer. The state of an AdamOptimizer for
    half-precision weights includes float32 master weights. So if a checkpoint of half-precision weights lacks master
    weights, for example because torch.optim.AdamW was used, it cannot be loaded into an AdamOptimizer.

    Entries that the optimizer's `state_dict()` has beside "state" and "param_groups" are saved for each rank. If a
    different number of ranks loads the checkpoint, every rank gets the entries of rank 0. If the optimizer has such
    entries but the checkpoint has none, for example because FSDP2 has saved it, load the checkpoint with
    `dcp.load(..., planner=DefaultLoadPlanner(allow_partial_load=True))`. The optimizer then keeps its present entries.

    Args:
        model: the model; its complete state dict is saved.
        optimizer: an AdamOptimizer, another optimizer after its first step, or a wrapper of such an optimizer. An
            optimizer that never has state, such as SGD without momentum, needs no step before. None saves and loads
            only the model.

    Raises:
        RuntimeError: torch is older than 2.15.
        NotImplementedError: weights are split over ranks by `tp_size`.
        ValueError: the optimizer is a MuonOptimizer, whose state other programs cannot load.
        TypeError: `model` is not a torch.nn.Module, or `optimizer` is not a torch.optim.Optimizer.

    Example::

        import torch.distributed.checkpoint as dcp

        dcp.save({"app": bmt.DCPState(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"app": bmt.DCPState(model, optimizer)}, checkpoint_id=folder)
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        from torch.distributed import checkpoint  # imported only if needed, because the import takes a second

        expect_module("model", model)
        refuse_parts(model)
        inner = unwrapped(optimizer)
        if optimizer is not None:
            expect_kind("optimizer", inner, torch.optim.Optimizer, "a torch.optim.Optimizer or None")
            (optimizer,) = optimizers_of(optimizer)
        if not hasattr(checkpoint, "CheckpointableTensor"):
            raise RuntimeError(
                "DCPState needs torch.distributed.checkpoint.CheckpointableTensor, which torch 2.15 introduces, but "
                f"this is torch {torch.__version__}. bmt.save_state works with any version, and other programs can "
                "read its safetensors files."
            )
        if isinstance(inner, AdamOptimizer) and not inner.adamw_state:
            raise ValueError(
                f"DCPState saves the state of an optimizer in the format of AdamW, but {type(inner).__name__} has "
                "other state for some parameters. Save it with bmt.save_state, or pass no optimizer."
            )
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's elements of the model's and the optimizer's tensors, in host memory.

        Called by `dcp.save`, which writes these copies to files, and by `dcp.load`, which overwrites them and passes
        them to `load_state_dict`. Collective: every rank must call it.

        Returns:
            {"model": {name: tensor}} and, with an optimizer, "optim": {"state": {parameter name: {state name: value}},
            "param_groups": [...]}. If the optimizer's own `state_dict()` has more entries, "optim" has "added_entries",
            bytes that are the same on every rank. For a sharded tensor, the value is a CPU tensor of the rows in which
            this rank has elements, with attributes that tell DCP which elements these are. For any other tensor, it is
            a full copy.

        Raises:
            ValueError: the model has quantized weights.
            RuntimeError: the optimizer is not an AdamOptimizer, and has no state because it has not made a step yet.
            RuntimeError: on every rank, if an entry that the optimizer's `state_dict()` adds has an object that
                torch.load(weights_only=True) would refuse or, with several ranks, a sharded tensor.
        """
        current_world().barrier("DCPState.state_dict")
        state: dict[str, Any] = {"model": {name: _pack(t, t) for name, t in _model_tensors(self._model).items()}}
        if self._optimizer is not None:
            state["optim"] = self._optimizer_state(self._optimizer)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy loaded values into the model and the optimizer. `dcp.load` calls this method.

        Collective: every rank must call it.

        Args:
            state_dict: the result of this object's `state_dict` (with the keys "model" and, with an optimizer,
                "optim"), after DCP has loaded values into its tensors.
        """
        current_world().barrier("DCPState.load_state_dict")
        targets = _model_tensors(self._model)
        buffers = {p.buffer for p in targets.values() if isinstance(p, DistributedParameter)}
        for buffer in sorted(buffers, key=lambda buffer: buffer.number):
            buffer.update.wait()
            buffer.prepare_write()
        for name, target in targets.items():
            part = target.part if isinstance(target, DistributedParameter) else target
            part.copy_(_unpack(target, state_dict["model"][name]).view(part.shape))
        # Mark the flat buffers (which contain the sharded parameters) as changed, so that they are all-gathered again.
        # Do so even if this rank has no elements of them, because all ranks must join the all-gather.
        torch.autograd.graph.increment_version([buffer.shard for buffer in buffers])
        if self._optimizer is not None:
            self._load_optimizer(self._optimizer, state_dict["optim"])

    # -- the optimizer ------------------------------------------------------------------------------------------

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state by parameter name.

        Collective: every rank must call it. The result has the format of the function `get_optimizer_state_dict` in
        torch.distributed.checkpoint.state_dict. Raises RuntimeError if there is no state yet, unless `optimizer` is an
        AdamOptimizer, or never has state.
        """
        world, inner = current_world(), unwrapped(optimizer)
        with world.raising_everywhere("DCPState.state_dict"):
            added = added_entries(optimizer, world)
            entries = encode(added, f"the state_dict() of {type(optimizer).__name__}") if added else b""
        parameters = named(optimizer, self._model)
        own = save_state(optimizer, world, gather=False)
        names = list(parameters)
        held = {names[number]: values for number, values in own["state"].items()}
        if isinstance(inner, AdamOptimizer):
            for name, parameter in parameters.items():
                if parameter.requires_grad and name not in held:  # no step yet: make tensors to load into
                    held[name] = _before_first_step(parameter)
        elif not held and keeps_state(inner):
            raise RuntimeError(
                f"{type(optimizer).__name__} has no state before its first step, so DCP can neither save nor load it. "
                "To make it, run a forward and a backward, and call step() with lr=0. bmt.optim.AdamOptimizer does not "
                "need this."
            )
        sharded, state = divide_state(parameters, held, world)
        for what, name in sharded:
            state[name][what] = _pack(parameters[name], held[name][what])
        numbers = iter(names)
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in own["param_groups"]]
        if isinstance(inner, AdamOptimizer):
            groups = [
                {**{key: group[key] for key in ("params", *_SETTINGS)}, **_ADAMW,
                 "decoupled_weight_decay": group["decoupled"]}
                for group in groups
            ]  # fmt: skip
        everyone = world.gather_objects(entries)
        return {"state": state, "param_groups": groups, **({_ADDED: encode(everyone)} if any(everyone) else {})}

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        world, inner, parameters = current_world(), unwrapped(optimizer), named(optimizer, self._model)
        check_groups(type(optimizer).__name__, saved["param_groups"], groups_of(optimizer, self._model))
        state = {
            name: {what: _unpack(parameters[name], value) for what, value in values.items()}
            for name, values in saved["state"].items()
        }
        groups = []
        for mine, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            loaded = {key: theirs[key] for key in _SETTINGS} if isinstance(inner, AdamOptimizer) else {**theirs}
            groups.append({**mine, **loaded, "params": theirs["params"]})
        ranks = _decode(saved[_ADDED]) if _ADDED in saved else [b""]
        added = ranks[world.rank if len(ranks) == world.size else 0]
        LoadedState(optimizer, parameters, [], state, groups, _decode(added) if added else {}).load()


def _decode(encoded: bytes) -> Any:
    return torch.load(io.BytesIO(encoded), map_location="cpu", weights_only=True)


def _before_first_step(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state that AdamOptimizer would have for a parameter before its first step, such as moments of zero.

    The state contains float32 master weights only if the parameter is not float32. Moments and master weights have this
    rank's elements only. All tensors are on the CPU.
    """
    own = parameter.part if isinstance(parameter, DistributedParameter) else parameter
    values = own.detach().to("cpu", torch.float32, copy=True)
    state = {
        "step": torch.tensor(0.0, dtype=torch.float32, device="cpu"),
        "exp_avg": torch.zeros_like(values),
        "exp_avg_sq": torch.zeros_like(values),
    }
    return state if parameter.dtype == torch.float32 else {**state, "master": values}


def _model_tensors(model: torch.nn.Module) -> dict[str, Any]:
    """Return {name: tensor} for all parameters and persistent buffers. Tied tensors appear under each of their names.

    Raises ValueError if a weight is quantized.
    """
    refuse_quantized(model)
    tensors: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = {n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in {**module._parameters, **buffers}.items():
            if tensor is not None:
                tensors[f"{prefix}.{name}" if prefix else name] = tensor
    return tensors


# -- this rank's elements as boxes ----------------------------------------------------------------------------------


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Divide a range of a tensor's elements into boxes (rectangular regions), and yield them as (offsets, sizes).

    DCP describes the elements that a rank stores by such boxes. Each element of the range is in exactly one box. For a
    matrix there are at most three boxes: the end of a row, complete rows, and the beginning of a row.

    Args:
        shape: the shape of the tensor.
        start: the index of the first element of the range, in the flattened tensor (C order).
        stop: the index after the last element of the range.
    """
    if start == stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the range of complete rows; `last` is not included
    if first > last:  # start and stop are in the same row
        for offsets, sizes in boxes(shape[1:], start - last * row, stop - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    for offsets, sizes in boxes(shape[1:], start - (first - 1) * row, row) if start < first * row else ():
        yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    for offsets, sizes in boxes(shape[1:], 0, stop - last * row):
        yield (last, *offsets), (1, *sizes)


def _pack(like: Any, values: Any) -> Any:
    """Copy this rank's elements of a tensor to the CPU, in the form that torch.distributed.checkpoint (DCP) saves.

    If the tensor is sharded, the result has the rows of the full tensor in which this rank has elements: shape (rows,
    *shape[1:]). Its attributes tell DCP which of its elements belong to this rank. The other elements are not
    initialized. If the tensor is not sharded, the result is a full copy.

    like: the parameter. The tensor is sharded if the parameter is.
    values: the parameter itself, or a tensor of its optimizer state.
    """
    if not isinstance(like, DistributedParameter):
        return values.detach().to("cpu", copy=True)
    if not like.full_shape.numel():
        return torch.empty(like.full_shape, dtype=values.dtype, device="cpu")
    shape, local_range = tuple(like.full_shape), like.placement.range
    row = math.prod(shape[1:])
    first = local_range.tensor_start // row
    rows = -(-local_range.tensor_stop // row) - first if local_range.length else 0
    own = values.part if hasattr(values, "part") else values
    # The rows may have far more elements than this rank stores. But torch.empty writes nothing, and only this rank's
    # elements are ever written or read, so the operating system never allocates the other memory pages.
    packed: Any = torch.empty((rows, *shape[1:]) if shape else (), dtype=own.dtype, device="cpu")
    packed.view(-1)[local_range.tensor_start - first * row :][: local_range.length] = own.detach().cpu()
    mine = list(boxes(shape, local_range.tensor_start, local_range.tensor_stop))
    packed.global_shape = shape
    packed.global_offsets = tuple(offsets for offsets, _ in mine)
    packed.local_offsets = tuple((offsets[0] - first, *offsets[1:]) if shape else () for offsets, _ in mine)
    packed.local_sizes = tuple(sizes for _, sizes in mine)
    return packed


def _unpack(like: Any, packed: Any) -> Any:
    """Return a 1-D view of this rank's elements of `packed`, a sharded tensor that `_pack(like, ...)` returned.

    Any other value, such as a tensor that is not sharded or a number, is returned unchanged.

    like: the parameter whose values, or whose optimizer state, `packed` contains.
    """
    if not hasattr(packed, "global_shape"):
        return packed
    local_range, row = like.placement.range, math.prod(packed.global_shape[1:])
    return packed.view(-1)[local_range.tensor_start - local_range.tensor_start // row * row :][: local_range.length]
