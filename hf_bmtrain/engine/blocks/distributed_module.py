"""DistributedModule: a module whose parameters outside blocks are all-gathered when a forward reads them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..base.arguments import expect_callable, expect_module
from ..base.torch_internals import (
    disable_compiler,
    inside_hooks,
    inside_reentrant_checkpoint,
    top_saved_tensors_hooks,
)
from ..runtime.world import current_world
from ..sharding.on_demand import OnDemandGather, watch
from ..sharding.parameter import DistributedParameter
from ..sharding.slots import Slot, find_slots
from ..sharding.state_dict import shard_on_load
from .autograd import anchor_backward, uncached_autocast, watch_backward
from .containers import copy_views, filled_in, tensors_in
from .members import Members, overrides
from .schedule import Schedule
from .sharded_module import ShardedModule, extend_class

_PARTS = re.compile(r"forward_.+|get_.+_features|generate")
"""The names of methods that users call instead of the model itself, to run a part of its forward. Such calls count as
forwards, in which parameters are all-gathered when they are read."""
_INSTEAD = {
    "no_sync": (  # Accelerate's LocalSGD calls it
        "A sharded model reduces gradients in every backward, also during accumulation, so remove the call of no_sync. "
        "Accelerate's LocalSGD, which also calls no_sync, cannot be used, because it needs all weights on each rank"
    ),
    "join_hook": (  # Accelerate's join_uneven_inputs calls it
        "Every rank of a sharded model takes part in each forward and backward, so ranks cannot join with fewer "
        "batches: leave out join_uneven_inputs, and let the data loader give every rank the same number of batches "
        "(even_batches=True, or drop_last=True)"
    ),
}
"""{method of DistributedDataParallel that sharded models lack: what to do instead, for the error}."""


def _let_out(module: DistributedModule, group: Sequence[OnDemandGather], inputs: Iterable[Any], outputs: Any) -> None:
    """Keep the full parameters of `module` until backward is over if other code may have got views of them.

    Usually, full parameters are freed as soon as autograd keeps no view of them. But other code may later read a view
    that has left the module. This function therefore searches the outputs, the lists and dicts among the arguments, and
    the module's attributes and buffers (`register_buffer`) for views of the parameters. If it finds one, it sets the
    attribute `unwatched` of the OnDemandGather, which keeps the parameters. (If no backward follows, they are freed at
    the end of the outermost forward.)

    Args:
        module: the module, whose forward has ended.
        group: the OnDemandGathers of the module's parameters. Each OnDemandGather unshards and frees one flat buffer.
            Flat buffers that the forward did not read are skipped, because no views of them exist.
        inputs: the arguments of the forward.
        outputs: the return value of the forward. If it contains objects that cannot be searched, the parameters are
            kept.
    """
    group = [gather for gather in group if gather.read_inside]
    if not group:
        return
    seen: set[int] = set()
    strange: list[Any] = []
    found = [outputs] if type(outputs) is torch.Tensor else [*tensors_in((outputs,), seen, strange, constants=True)]
    filled = filled_in(inputs, set())
    if filled:
        found += tensors_in(filled, seen, [], constants=True)
    found += [value for value in (*vars(module).values(), *module._buffers.values()) if type(value) is torch.Tensor]
    for gather in group:
        if strange or any(map(gather.holds, found)):
            gather.unwatched = True


_let_out_untraced = disable_compiler(_let_out)  # torch.compile cannot trace its comparison of memory addresses


_LISTING = frozenset({"parameters", "named_parameters", "named_modules", "_named_members"})
"""The methods of torch.nn.Module by which `parameters` finds parameters. If a class or module overrides one of them,
`DistributedModule.parameters` searches in every call, instead of using the list in `Members`."""


class DistributedModule(ShardedModule):
    """A module whose sharded parameters are all-gathered when they are read inside a forward.

    Derive your own layers from it instead of torch.nn.Module, and create their parameters as `DistributedParameter`. An
    ordinary torch.nn.Parameter in such a module is not sharded, and its gradient is not averaged over the ranks. For an
    existing model, call `auto_wrap` instead.

    Inside a forward, `self.weight` is the full parameter. The first read in a forward pass all-gathers the flat buffer
    that contains the parameter. This is collective: every rank must read it. The full buffer is freed when backward no
    longer needs it, or after the forward if no output requires a gradient. Outside a forward, `self.weight` is the
    sharded parameter (DistributedParameter), and reading it does not communicate. To get the full values there, call
    `parameter.gather()` on all ranks.

    The forward may return views of parameters. The outputs of the outermost module contain copies of them. Views that
    are kept elsewhere, for example in an attribute, must not be read after the forward and its backward.

    A forward is a call of this module or of a DistributedModule that contains it, or a recomputation of such a call.
    After `auto_wrap`, calls of methods named `forward_...` or `get_..._features` also count as forwards, and so do
    calls of the model's own `generate`, if it defines one. (The `generate` that models inherit from transformers does
    not count, because it only calls the model, and each of these calls is a forward.)

    Args:
        *args: passed to the next base class, usually torch.nn.Module.
        **kwargs: passed to the next base class.

    Example::

        class Scale(bmt.DistributedModule):
            def __init__(self, size: int) -> None:
                super().__init__()
                self.weight = bmt.DistributedParameter(torch.ones(size))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.weight
    """

    _schedule: Schedule
    _uneven = False  # whether ranks may enter different blocks of the model

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        world = current_world()
        self.__dict__["_schedule"] = world.schedule
        if world.size > 1:
            self.__dict__["_is_fsdp_managed_module"] = True  # generate() in transformers then waits for all ranks

    def __getattr__(self, name: str) -> Any:
        try:
            value = super().__getattr__(name)
        except AttributeError as error:
            if name not in _INSTEAD:
                raise
            raise AttributeError(f"{error}. {_INSTEAD[name]}") from None
        if type(value) is DistributedParameter:
            gather = value.on_demand or OnDemandGather.of(value, self._schedule)
            return gather.read(value, self)
        return value

    def __call__(self, *args, **kwargs) -> Any:
        return self._run(super().__call__, args, kwargs)

    def _run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Return `function(*args, **kwargs)`. When the function reads parameters of the module, they are all-gathered.

        At the end of the outermost forward, hooks are registered on the outputs. At the beginning of backward, these
        hooks start the all-gathers of the parameters that backward needs. If no backward can follow, the parameters are
        resharded instead.

        function: this module's forward, or a method that runs a part of it, such as `get_image_features`.
        args, kwargs: the arguments of `function`.
        """
        schedule = self._schedule
        if schedule.in_forward:
            return self._watched(function, args, kwargs)
        if schedule.in_backward:
            # In a backward, this call should be a recomputation, by activation checkpointing around this module. Raise
            # an error if it is a new forward, whose gradients would be lost.
            self._refuse_new_forward()
            with uncached_autocast() or nullcontext(), schedule.inside:
                return self._watched(function, args, kwargs)
        with uncached_autocast() or nullcontext(), schedule.forward(self._uneven, self) as forward_pass:
            try:
                outputs = self._watched(function, args, kwargs)
                if any(reader.unwatched for reader in forward_pass.readers):
                    # Views of full parameters in the outputs would become invalid when the parameters are freed.
                    outputs = copy_views(outputs, (*args, *kwargs.values()), forward_pass.holds)
                forward_pass.check_unwritten()
            except BaseException as error:
                schedule.explain_shortage(error)
                forward_pass.reshard()
                raise
        if torch.is_grad_enabled():
            token = forward_pass.end()
            outputs, differentiable = watch_backward(forward_pass.before_backward, token, outputs)
            if differentiable:
                return outputs
            if self._uneven and any(parameter.requires_grad for parameter in self.parameters()):
                # In this step, no output of this rank requires a gradient, but outputs of other ranks
                # may. Their backward is collective, so this rank must run a backward too.
                return anchor_backward(forward_pass.before_backward, token, outputs)
        forward_pass.reshard()
        return outputs

    def _refuse_new_forward(self) -> None:
        """Raise RuntimeError if this call, during a backward of the same model, is a new forward with gradients.

        The blocks would treat a new forward as a recomputation, so its gradients would be lost. Two kinds of calls are
        allowed during a backward:

        * A recomputation by torch's checkpoint. It is recognized by the checkpoint's saved-tensor hooks.
        * The second forward of a checkpoint with use_reentrant=True. It runs without such hooks, but blocks recognize
          it by `inside_reentrant_checkpoint`.

        With torch 2.6, which cannot report whether hooks are active, this method raises no error.
        """
        if not torch.is_grad_enabled() or inside_reentrant_checkpoint():
            return
        if top_saved_tensors_hooks is not None and not inside_hooks():
            if self._schedule.in_backward_of(self):
                raise RuntimeError(
                    f"A forward of a sharded {type(self).__name__} was called with gradients enabled during a backward "
                    "of the same model, for example by a hook. Its gradients would be lost. Call it when the backward "
                    "is over, or under torch.no_grad()."
                )

    def _watched(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Return `function(*args, **kwargs)`, and reshard the parameters of this module as early as possible.

        During the call, `on_demand.watch` tracks which views of the full parameters autograd saves. The parameters are
        resharded once backward needs none of these views, unless code outside the module may have views too.

        If the module has children, its parameters are not tracked, because a child might read parameters of the same
        flat buffers during the call. Such parameters stay unsharded until backward is over. If gradients are disabled,
        nothing is tracked, because autograd saves nothing.

        A backward may begin at a tensor that the module keeps in an attribute, or gives to a hook. `Schedule.watch`
        therefore registers hooks on such tensors, like those on the outputs of the model.

        function: this module's forward, or a method that runs a part of it.
        args, kwargs: the arguments of `function`.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        parameters = () if self._modules else self._parameters.values()
        slices = [p for p in parameters if type(p) is DistributedParameter and p.buffer.sharded]
        compiling = torch.compiler.is_compiling()
        if slices:
            own = list(dict.fromkeys(OnDemandGather.of(p, self._schedule) for p in slices))
            with watch(own):
                outputs = function(*args, **kwargs)
                let_out = _let_out_untraced if compiling else _let_out
                let_out(self, own, (*args, *kwargs.values()), outputs)
        else:
            outputs = function(*args, **kwargs)
        if not compiling:
            self._schedule.watch(self, outputs)
        return outputs

    # -- weights in and out -------------------------------------------------------------------------------------

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        listed = super().parameters(recurse)
        own = overrides(type(self), *_LISTING) or not _LISTING.isdisjoint(vars(self))
        return listed if not recurse or own or torch.compiler.is_compiling() else self._remembered(listed)

    def _remembered(self, listed: Iterator[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
        """Yield the module's parameters in torch's order: the first from `listed`, the others from `Members`.

        Many callers want only the first one, for example to read its dtype. For them, `Members` is not updated.

        listed: torch's own iterator over the parameters. If the first parameter in `Members` is not the first of this
            iterator, all parameters come from this iterator.
        """
        first = next(listed, None)
        if first is None:
            return
        yield first
        parameters = self._members_now().parameters()
        yield from parameters[1:] if parameters[0] is first else listed

    def train(self, mode: bool = True):
        if isinstance(mode, bool) and self.training is mode and self._members_now().are_in(mode):
            return self
        return super().train(mode)

    def _members_now(self) -> Members:
        members = self.__dict__.setdefault("_bmt_members", Members())
        members.update(self)
        return members

    def named_parameters(self, *args, **kwargs) -> Iterator[tuple[str, torch.nn.Parameter]]:
        self._schedule.discard_failed_backward()  # a failed backward may have left full parameters in modules
        return super().named_parameters(*args, **kwargs)

    def _slots(self) -> list[Slot]:
        return find_slots([self])

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        # Register the hook only now, so that it runs after the user's hooks, which may rename keys.
        slicing = self.register_load_state_dict_pre_hook(shard_on_load)
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        finally:
            slicing.remove()


def distribute(module: torch.nn.Module, schedule: Schedule) -> None:
    """Make `module` a DistributedModule, whose forward all-gathers sharded parameters when it reads them.

    Called when a model is wrapped, for the modules outside blocks, and for those inside blocks that have root
    parameters (such as those that several blocks share). The module is changed in place: its new class extends
    DistributedModule and its old class. If the module already is a DistributedModule, this function does nothing.

    Args:
        module: the module.
        schedule: the object that decides, for all models, when parameters are resharded. The module stores it.
    """
    if not isinstance(module, DistributedModule):
        module.__class__ = _distributed_class(type(module))
        module.__dict__["_schedule"] = schedule


@functools.cache
def _distributed_class(cls: Any) -> type[torch.nn.Module]:
    # Static methods are left out, because they have no `self` from which they could read parameters. `getattr` cannot
    # distinguish them from methods, because it returns a function for both.
    static = inspect.getattr_static
    parts = [name for name in dir(cls) if _PARTS.fullmatch(name) and inspect.isfunction(static(cls, name))]
    # Wrap `generate` only if the model defines it, because it may then read parameters. The `generate` that models
    # inherit from transformers (it has the argument synced_gpus) only calls the model.
    if "generate" in parts and "synced_gpus" in inspect.signature(cls.generate).parameters:
        parts.remove("generate")
    return extend_class(DistributedModule, cls, {name: _part(getattr(cls, name)) for name in parts})


def _part(method: Callable) -> Callable:
    @functools.wraps(method)
    def part(self, *args, **kwargs):
        return self._run(functools.partial(method, self), args, kwargs)

    return part


class ParameterInitializer:
    """A function together with its arguments, for use as the `init_method` of a DistributedParameter.

    `init_parameters` calls `function(tensor, *args, **kwargs)` to get the initial values of the parameter. `tensor` is
    new and uninitialized. It has the full shape (the shape before the split, if tensor parallelism splits the tensor).

    Args:
        function: a function that fills a tensor in place, such as torch.nn.init.normal_.
        *args: passed to `function` after the tensor.
        **kwargs: passed to `function`.

    Example::

        normal = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.02)
        weight = bmt.DistributedParameter(torch.empty(16, 32), init_method=normal)
    """

    def __init__(self, function: Callable, *args, **kwargs) -> None:
        expect_callable("function", function, "a function that fills a tensor, such as torch.nn.init.normal_")
        self.function, self.args, self.kwargs = function, args, kwargs

    def __call__(self, tensor: torch.Tensor) -> None:
        self.function(tensor, *self.args, **self.kwargs)


@torch.no_grad()
def init_parameters(model: torch.nn.Module) -> None:
    """Initialize every DistributedParameter that has an `init_method`. All ranks get rank 0's values.

    Collective: every rank must call it. Call it once, after creating a model whose parameters have an `init_method`,
    and before loading a checkpoint, because it overwrites their values. Parameters without `init_method` keep their
    values. Hugging Face models do not need this call, because they initialize themselves.

    Args:
        model: the model whose parameters are initialized.
    """
    world = current_world()
    expect_module("model", model)
    world.schedule.wait_for_readers()
    for parameter in model.parameters():
        if isinstance(parameter, DistributedParameter) and parameter.init_method is not None:
            shape = parameter.buffer.storage.whole_shape(parameter.index)
            whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            parameter.init_method(whole)
            world.gather.broadcast(whole, 0).wait()
            parameter.copy_(parameter.take_whole(whole))


def grouped_parameters(model: torch.nn.Module) -> Iterator[tuple[str | None, list[torch.nn.Parameter]]]:
    """Yield the parameters of a model, grouped by their attribute `group`, for an optimizer's parameter groups.

    `DistributedParameter(..., group=name)` sets the attribute. For other parameters, set `parameter.group = name`
    before `auto_wrap`.

    Args:
        model: the model, sharded or not.

    Returns:
        An iterator over (group, list of parameters), in the order in which the groups first occur. Parameters without
        the attribute have the group None. Each parameter occurs once.

    Example::

        rates = {None: 1e-4, "head": 1e-3}  # the learning rate of each group
        groups = [{"params": parameters, "lr": rates[group]} for group, parameters in bmt.grouped_parameters(model)]
        optimizer = bmt.optim.AdamOptimizer(groups)
    """
    expect_module("model", model)
    groups: dict[str | None, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "group", None), []).append(parameter)
    yield from groups.items()
