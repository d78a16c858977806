"""Split a model from transformers over a tensor-parallel group, by the model's own tensor-parallel plan.

A plan (`model.tp_plan`) maps names of modules to styles. In a "colwise" layer, each rank computes a part of the output
features. In a "rowwise" layer, each rank uses a part of the input features, and the ranks' outputs are summed. All
other modules compute the same rows on all ranks of a group. The modules keep their classes; forward hooks communicate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...engine.base.checksums import digest
from ...engine.base.torch_internals import pytree
from ...engine.blocks.sharded_module import STAYS
from ...engine.runtime.world import current_world
from ...engine.sharding.sourced import SourcedParameter
from ...engine.wrap.accelerator import share_batches, share_rows
from ...engine.wrap.extension import Extension, WrapPlan
from ..options import Options
from .functions import add, share
from .groups import Part

_SPLIT = {"colwise": 0, "rowwise": 1}  # {style: the dimension on which the weight is split}
_WHOLE = {"colwise_gather_output", "rowwise_split_input", "embedding_rowwise"}
"""Styles of layers whose inputs and outputs are whole tensors. Such a layer is not split: each rank computes all of
it."""
_PART_OF_ROWS = "replicated_with_grad_allreduce"
"""The style of unsplit parameters that each rank uses for its own features, such as the weight of a norm that is
applied to each attention head."""


def _has_parts(model: torch.nn.Module) -> bool:
    """Return whether layers of the model are already split over a tensor-parallel group.

    True for a model with layers such as bmt.nn.ColumnParallelLinear, for a model that `auto_wrap` has split, and for a
    copy of such a model. These models are not split again by a tensor-parallel plan.
    """
    # Check the attribute `storage_kind`, not the parameter's class: a deep copy of a split parameter is a plain
    # Parameter, but it has the attribute.
    return any(isinstance(getattr(each, "storage_kind", None), Part) for each in model.parameters())


def _has_plan(model: torch.nn.Module) -> bool:
    """Return whether the model has a tensor-parallel plan of transformers (`model.tp_plan`) that splits layers."""
    return any(style in _SPLIT for style in _plan_of(model).values())


def _plan_of(model: Any) -> dict[str, str]:
    plan = getattr(model, "tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


class TensorParallel(Extension):
    """Splits linear layers over a tensor-parallel group, as the model's tensor-parallel plan (`model.tp_plan`) says.

    This extension does nothing unless `init_distributed` got a `tp_size` above 1. It splits no layers of a model in
    which layers are already split, such as a model with bmt.nn.ColumnParallelLinear.

    `admit`, `choose` and `connect` raise ValueError if a model or an argument of `auto_wrap` does not work with
    `tp_size`. For example, the model has neither a plan nor layers that are already split, its number of attention
    heads is not a multiple of `tp_size`, `sequence_parallel` is above 1, or adapters were added to a model that has a
    plan.

    `connect` sets `Schedule.collective_layers` to True, because split layers issue collectives in their forwards. A
    forward that is recomputed in backward issues them again. The flag tells the engine that all ranks must therefore
    recompute the same forwards.

    Args:
        options: the arguments that were passed to `auto_wrap`.
    """

    def __init__(self, options: Options) -> None:
        # Two options do not work with tp_size. sequence_parallel divides the tokens of a row between consecutive ranks,
        # but with tp_size, consecutive ranks compute the same tokens with different parts of the weights.
        # quantize_frozen shards rank 0's weights over all ranks, but rank 0 has only its own part of each split weight.
        unfit = {"sequence_parallel": options.sequence_parallel > 1, "quantize_frozen": options.quantize_frozen}
        self._unfit = [name for name, asked in unfit.items() if asked]
        self._float8, self._plans = bool(options.float8), options.use_checkpoint == "auto"
        self._modules: list[tuple[torch.nn.Module, str]] = []

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        grid = current_world().grid
        if grid is None:
            return
        if self._unfit:
            raise ValueError(
                f"auto_wrap: {self._unfit[0]} cannot be combined with the argument tp_size of init_distributed. Leave "
                "one of them out."
            )
        if late and _has_plan(model):
            raise ValueError(
                "auto_wrap: with tp_size, parameters such as LoRA adapters cannot be added to a model that is split by "
                "its tensor-parallel plan. Call init_distributed without tp_size."
            )
        if not _has_parts(model) and not _has_plan(model):
            raise ValueError(
                f"auto_wrap: init_distributed(tp_size={grid.size}) splits layers over {grid.size} ranks, but "
                f"{type(model).__name__} has no layers that can be split (bmt.nn.ColumnParallelLinear, "
                "RowParallelLinear, VPEmbedding), and no tensor-parallel plan of transformers. Call init_distributed "
                "without tp_size."
            )

    def choose(self, plan: WrapPlan) -> None:
        grid = plan.world.grid
        if grid is None or _has_parts(plan.model):
            return
        if self._float8:
            raise ValueError(
                "auto_wrap: float8 cannot be combined with the argument tp_size of init_distributed. Leave one of them "
                "out."
            )
        styles = _plan_of(plan.model)
        unknown = {style: name for name, style in styles.items() if style not in {*_SPLIT, *_WHOLE, _PART_OF_ROWS}}
        if unknown:
            style, name = next(iter(unknown.items()))
            raise ValueError(
                f"auto_wrap: the tensor-parallel plan of {type(plan.model).__name__} has the style '{style}' for "
                f"{name}, but only {' and '.join(_SPLIT)} layers can be split. Call "
                "init_distributed without tp_size."
            )
        config: Any = getattr(plan.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        for heads in ("num_attention_heads", "num_key_value_heads"):
            if (count := getattr(config, heads, None)) is not None and count % grid.size:
                raise ValueError(
                    f"auto_wrap: {heads}={count} must be a multiple of tp_size={grid.size}, the argument of "
                    f"init_distributed. Choose a tp_size that divides {count}."
                )
        found = [*_matching(plan.model, styles)]
        if not any(style in _SPLIT for _, _, style in found):
            raise ValueError(
                f"auto_wrap: {type(plan.model).__name__} has none of the layers that its tensor-parallel plan splits "
                f"({', '.join(name for name, style in styles.items() if style in _SPLIT)}). Call "
                "init_distributed without tp_size."
            )
        for name, module, style in found:
            if style in _SPLIT:
                _check(name, module, _SPLIT[style], grid.size)
        if unnamed := _beside_parts(plan, found):
            raise ValueError(
                f"auto_wrap: the parameter {unnamed} belongs to a module whose layers are split over {grid.size} "
                f"ranks, but the tensor-parallel plan of {type(plan.model).__name__} does not name this parameter. If "
                "each rank applies it only to its own part of the features, its gradient would be wrong. Call "
                "init_distributed without tp_size."
            )
        self._modules = [(module, style) for _, module, style in found]

    def prepare(self, plan: WrapPlan) -> None:
        split_kind = plan.world.split_kind
        if not self._modules or split_kind is None:
            return
        used_by_parts = set()
        for module, style in self._modules:
            if style in _SPLIT:
                _split(module, _SPLIT[style])
            elif style == _PART_OF_ROWS:
                used_by_parts.update(module.parameters())
        for parameter in plan.model.parameters():
            if parameter not in used_by_parts and not hasattr(parameter, "storage_kind"):
                marked: Any = parameter
                marked.storage_kind = split_kind(-1)

    def connect(self, plan: WrapPlan) -> None:
        grid = plan.world.grid
        if grid is None:
            return
        # Split layers issue collectives, so all ranks must recompute the same blocks. use_checkpoint='auto' (`_plans`)
        # cannot ensure this for an uneven model, because each rank then chooses by itself.
        if self._plans and getattr(plan.model, "_uneven", False):
            raise ValueError(
                f"auto_wrap: with tp_size, use_checkpoint='auto' does not support {type(plan.model).__name__}, because "
                "the ranks may run different parts of this model. Pass use_checkpoint=True or use_checkpoint=False."
            )
        plan.world.schedule.collective_layers = True
        # Look for the hooks of split layers. `self._modules` is not enough: for a copy of a split model, whose layers
        # are split already, it is empty.
        split = any(
            _share_input in each._forward_pre_hooks.values() or _add_outputs in each._forward_hooks.values()
            for each in plan.model.modules()
        )
        if split and not plan.late and plan.world.device.type != "meta":
            if _check_same_inputs not in plan.model._forward_pre_hooks.values():
                plan.model.register_forward_pre_hook(_check_same_inputs, with_kwargs=True)
            share_rows(plan.model, grid.size)
            share_batches(plan.model, plan.world)


def _check_same_inputs(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if the ranks of a tensor-parallel group called the model with different batches.

    The ranks of a group compute the same rows together, so they must get the same batch. Only integer and bool tensors
    in the arguments, such as token ids, are compared, by a checksum. Collective: every rank of the group must call it.
    """
    world = current_world()
    grid = world.grid
    given = args, dict(sorted(kwargs.items()))  # sorted, because the ranks may pass them in different orders
    values = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
    integers = [each for each in values if not each.is_floating_point() and not each.is_complex()]
    if grid is None:
        return
    # A rank without integer or bool tensors must join the all-gather below, too, because other ranks of its group may
    # have such tensors, and would wait for it.
    digests = torch.cat([digest(each) for each in integers] or [torch.empty(0, dtype=torch.int64, device=world.device)])
    total = (digests * torch.arange(1, len(digests) + 1, device=digests.device)).sum()
    mine = torch.stack([total, total.new_tensor(len(digests))])
    everyone = mine.new_empty(grid.size * len(mine))
    grid.together.all_gather(everyone, mine).wait()
    if len({*map(tuple, everyone.view(grid.size, -1).tolist())}) > 1:
        raise RuntimeError(
            f"{type(model).__name__}: the {grid.size} ranks of a tensor-parallel group must get the same batch, "
            "but their inputs differ. With Trainer, pass callbacks=[bmt.hf.BMTrainCallback()], and for an "
            "IterableDataset accelerator_config={'dispatch_batches': False}. With Accelerate, create the Accelerator "
            "before auto_wrap. "
            f"In your own training loop, let rank r read the same data as rank r - r % {grid.size}. In generate with "
            "do_sample=True, give these ranks the same seed."
        )


def _matching(model: torch.nn.Module, styles: dict[str, str]) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield (name, module, style) for each module whose name matches a pattern in `styles`.

    styles: {pattern: style}. A pattern is a full name in which each * stands for a number.
    """
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in styles.items()]
    for name, module in model.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield name, module, style


def _beside_parts(plan: WrapPlan, found: list[tuple[str, torch.nn.Module, str]]) -> str | None:
    """Find a parameter of a split MLP or attention that the model's tensor-parallel plan does not cover.

    An MLP or attention is split if the plan splits one of its layers. A parameter is covered if a module that the plan
    names contains it. Each rank may use any other parameter for a part of the features only, and its gradient would
    then be wrong. So the caller refuses the model.

    plan: the WrapPlan, with the model to wrap and its blocks. (It is not the tensor-parallel plan.)
    found: the (name, module, style) of all modules that the model's tensor-parallel plan names.

    Returns the name of the first such parameter, or None if there is none.
    """
    named = {parameter for _, module, _ in found for parameter in module.parameters()}
    parents = {name.rpartition(".")[0] for name, _, style in found if style in _SPLIT}
    blocks = {name for name, module in plan.model.named_modules() if module in plan.layers}
    for parent in sorted(parents - blocks - {""}):
        for name, parameter in plan.model.get_submodule(parent).named_parameters(parent):
            if parameter not in named:
                return name
    return None


def _check(name: str, module: torch.nn.Module, dim: int, parts: int) -> None:
    """Raise ValueError if a module cannot be split into `parts` equal parts on dimension `dim` of its weight.

    name: the module's name in the model, for the message.
    """
    if type(module) is not torch.nn.Linear:
        raise ValueError(
            f"auto_wrap: with tp_size, {name} must be a torch.nn.Linear, but is a {type(module).__name__}. Call "
            "init_distributed without tp_size."
        )
    if module.weight.is_meta or isinstance(module.weight, SourcedParameter):
        raise ValueError(
            f"auto_wrap: with tp_size, every rank needs all values of {name}, but it is on the meta device, or was "
            "loaded by bmt.hf.from_pretrained, which does not load all values on every rank. Load the model with "
            "from_pretrained of its own class."
        )
    if module.weight.shape[dim] % parts:
        raise ValueError(
            f"auto_wrap: dimension {dim} of {name}.weight, of shape {tuple(module.weight.shape)}, must be a multiple "
            f"of tp_size={parts}, the argument of init_distributed. Choose a tp_size that divides "
            f"{module.weight.shape[dim]}."
        )
    if dim == 1 and module.bias is not None:
        raise ValueError(
            f"auto_wrap: with tp_size, {name} must have no bias, because all {parts} ranks would add it. Call "
            "init_distributed without tp_size."
        )


def _split(module: Any, dim: int) -> None:
    """Split a linear layer: replace its weight and bias by this rank's parts of them, with the values of rank 0.

    Collective: every rank must call it. Also register a hook that communicates with the other ranks of this rank's
    tensor-parallel group: with `dim` 0, it sums the gradients of the input in the backward; with `dim` 1, it sums the
    outputs in the forward.

    module: the layer. With `dim` 1, it must have no bias, because the sum of outputs would contain it several times.
    dim: the dimension of the weight that is split: 0 for output features, 1 for input features.
    """
    world, grid = current_world(), current_world().grid
    assert grid is not None and world.split_kind is not None
    for name, whole in [*module.named_parameters(recurse=False)]:
        values = whole.detach().to(world.device, copy=True).contiguous()
        world.gather.broadcast(values.view(-1), 0).wait()
        part: Any = torch.nn.Parameter(values.chunk(grid.size, dim)[grid.place].clone(), whole.requires_grad)
        part.storage_kind = world.split_kind(dim)
        setattr(module, name, part)
    if dim == 0:
        module.out_features //= grid.size
        module.register_forward_pre_hook(_share_input)
    else:
        module.in_features //= grid.size
        module.register_forward_hook(_add_outputs)


def _share_input(module: torch.nn.Module, args: Any) -> Any:
    grid = current_world().grid
    return args if grid is None else (share(grid, args[0]), *args[1:])


def _add_outputs(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    grid = current_world().grid
    return output if grid is None else add(grid, output)


# Deep copies of a sharded model lose the hooks of this package, except those with the attribute STAYS. A copy of a
# split layer still has only this rank's part of the weight, so it needs the hooks that communicate.
for _hook in (_share_input, _add_outputs, _check_same_inputs):
    setattr(_hook, STAYS, True)
