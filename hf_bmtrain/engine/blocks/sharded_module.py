"""ShardedModule, the base class of modules with sharded parameters, and a function that extends a module's class."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from ..base.torch_internals import disable_compiler
from ..runtime.world import current_world
from ..sharding.gathered import clone_full_params
from ..sharding.parameter import DistributedParameter
from ..sharding.slots import Slot, hidden
from ..sharding.state_dict import StateDict, check_full_tensors, copy_full_params
from ..tensors.tensor import barrier_outside


class RefuseDataParallel:
    """Raises RuntimeError if DistributedDataParallel is applied to a sharded module.

    An instance is the value of the module's attribute `_ddp_params_and_buffers_to_ignore`. The constructor of
    DistributedDataParallel iterates over this value, and the iteration raises the error.
    """

    def __iter__(self) -> Iterator[NoReturn]:
        raise RuntimeError(
            "DistributedDataParallel was applied to a model that hf_bmtrain has sharded. It would overwrite every "
            "rank's shards with rank 0's. Remove it, because the model averages its gradients itself. If your script "
            "does not apply it, the installed accelerate does, and is too old: pip install 'accelerate>=1.14'."
        )


class ShardedModule(torch.nn.Module):
    """A module with sharded parameters, whose gradients are reduced without DistributedDataParallel.

    The attribute `_is_accelerate_prepared` prevents Accelerate from wrapping the module in DistributedDataParallel. If
    other code wraps it, the constructor of DistributedDataParallel reads the attribute
    `_ddp_params_and_buffers_to_ignore`. Its value is a RefuseDataParallel, which then raises RuntimeError.
    """

    _extends: ClassVar[Any]  # set on each class that `extend_class` creates: the user's class that was extended
    _is_accelerate_prepared = True
    _ddp_params_and_buffers_to_ignore = RefuseDataParallel()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Do not call the user's __init_subclass__ for a class that `extend_class` has created: the user's method may
        # register or count subclasses, and the created class is not one of the user's.
        if "_extends" not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if isinstance(param, DistributedParameter) and name.endswith("_orig"):
            raise moved(name, self)
        super().register_parameter(name, param)

    def _slots(self) -> Sequence[Slot]:
        """Return the slots of the sharded parameters that this module manages.

        A slot is the entry of a parameter in the `_parameters` of a module.
        """
        raise NotImplementedError

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False):
        """Return a state dict with copies of all full parameters on the CPU, under the module's usual keys.

        Collective: every rank must call it. Each rank gets all parameters, and needs host memory for them. With tensor
        parallelism (`tp_size`), the parts of each split tensor are joined. Tied weights share one copy. Buffers
        (`register_buffer`) are not copied: the state dict has the module's own tensors.

        Args:
            *args: `destination`, `prefix` and `keep_vars` by position, which torch deprecates: pass them by keyword.
            destination: a dict to be filled and returned; None creates one.
            prefix: added before every key.
            keep_vars: ignored, because the parameters are copied without gradients.

        Returns:
            A dict {key: tensor}, which can be loaded into this model, and into the same model without sharding.
        """
        if args:  # torch's own method gives the same warning
            warnings.warn(
                "Positional args are being deprecated, use kwargs instead: state_dict(destination=..., prefix=..., "
                "keep_vars=...).",
                FutureWarning,
                stacklevel=2,
            )
            destination = args[0] if destination is None else destination
            prefix = args[1] if len(args) > 1 and prefix == "" else prefix
        outermost = destination is None
        if outermost:
            if any(isinstance(parameter, DistributedParameter) for parameter in self.parameters()):
                current_world().barrier("state_dict")
            destination = StateDict()
        collect = functools.partial(super().state_dict, destination=destination, prefix=prefix, keep_vars=True)
        copy_full_params(destination, self._slots(), collect)
        return destination.plain() if outermost else destination

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Load a state dict of full tensors. Each rank copies only its own elements of the parameters.

        Collective: every rank must call it. The parameters in `state_dict` must be equal on all ranks. Only buffers
        (`register_buffer`) may differ.

        Args:
            state_dict: {key: full tensor}, such as the result of `state_dict`, or the state dict of the model without
                sharding.
            *args: `strict` and `assign`, as in torch.nn.Module, except that `assign` must be False.
            **kwargs: the same arguments by keyword.

        Returns:
            The named tuple (missing_keys, unexpected_keys) of torch.nn.Module.

        Raises:
            RuntimeError: parameters in `state_dict` differ between the ranks. Nothing is loaded then.
            RuntimeError: `assign` is True.
            RuntimeError: keys are missing or unexpected, and `strict` is True.
            RuntimeError: the shape of a tensor differs from that of its parameter or buffer.
        """
        check_full_tensors(self, state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn, recurse: bool = True):
        with hidden(self._slots(), fn):
            return super()._apply(fn, recurse)

    def __deepcopy__(self, memo):
        """Return a deep copy that has full parameters and is not sharded. It can be passed to `auto_wrap` again.

        Collective: every rank must call it.
        """
        return _plain_copy(self, memo)

    def __reduce_ex__(self, protocol) -> NoReturn:
        raise RuntimeError(
            f"A sharded {type(self).__name__} cannot be pickled, because torch.save(model) would save only one rank's "
            "shards. Save its weights with bmt.save(model, file) or model.save_pretrained(folder), called on all ranks."
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "torch.nn.DataParallel was applied to a model that hf_bmtrain has sharded. It copies modules, and sharded "
            "parameters cannot be copied. Start one process per GPU (torchrun --nproc-per-node N script.py), or make "
            "only one GPU visible to the process (CUDA_VISIBLE_DEVICES=0)."
        )


class OnlyWhileSharded(torch.nn.Module):
    """Base class of classes that replace a module's own class while its model is sharded.

    Features of this package set the `__class__` of a module to such a class to change the module's forward. Deep copies
    and pickles of the module have its original class again. `check_parity` also uses the original class when it
    computes a step with plain torch.
    """

    _extends: ClassVar[Any]  # set on each class that `extend_class` creates: the user's class that was extended

    def __reduce_ex__(self, protocol):
        return object.__new__, (own_class(self),), _own_attributes(self)


def moved(name: str, module: torch.nn.Module) -> RuntimeError:
    """Return the error to raise if a sharded parameter was registered under another name after the model was sharded.

    For example, torch.nn.utils.prune renames "weight" to "weight_orig".

    Args:
        name: the new name, in `module`.
        module: the module with the parameter, or the block that contains this module.
    """
    return RuntimeError(
        f"'{name}' in {type(module).__name__} is a sharded weight under a new name. Functions that rename weights, "
        "such as torch.nn.utils.prune and spectral_norm, would compute with this rank's elements only. Prune and "
        "parametrize the model before auto_wrap."
    )


def extend_class(base: type, cls: Any, methods: dict[str, Any]) -> Any:
    """Return a subclass of `base` and `cls` that looks like `cls`: it has the same name, module and docstring.

    Call this once for each `cls`, not once for each module, because torch.compile compiles once per class. If `base` is
    a subclass of ShardedModule or OnlyWhileSharded, deep copies of a module with the returned class have the class
    `cls` again. With any other `base`, they keep the returned class.

    Args:
        base: the class to add, which comes first in the method resolution order.
        cls: the user's class.
        methods: {name: function}, methods of the new class that override those of `base` and `cls`.
    """
    names = {"_extends": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass = type(cls)
    if _begins_without_dict(cls):
        # Python allows assigning `__class__` only between classes with the same memory layout, and a class takes over
        # the layout of one of its bases. Usually `base` and `cls` have the same layout. Here they do not, because the
        # layout of `cls` begins with that of a class without `__dict__`. To take over the layout of `cls`, the new
        # class must have `cls` as its first base. `mro` is overridden, so that methods are still looked up as with the
        # bases (base, cls).
        order = metaclass(cls.__name__, (base, cls), dict(names)).__mro__[1:]
        ordered: Any = type(metaclass.__name__, (metaclass,), {"mro": lambda extended: [extended, *order]})
        return ordered(cls.__name__, (cls, base), {**names, **methods})
    return metaclass(cls.__name__, (base, cls), {**names, **methods})


def extend_module(module: torch.nn.Module, base: type, **attributes: Any) -> None:
    """Change the class of `module`, in place, to one that extends `base` and the module's present class.

    Modules with the same class and equal arguments get the same new class (see `extend_class` for the reason).

    Args:
        module: the module.
        base: the class to add, which comes first in the method resolution order.
        **attributes: class attributes of the new class. Their values must be hashable.
    """
    module.__class__ = _extended_class(base, type(module), tuple(attributes.items()))


@functools.cache
def _extended_class(base: type, cls: Any, attributes: tuple[tuple[str, Any], ...]) -> Any:
    return extend_class(base, cls, dict(attributes))


def _begins_without_dict(cls: Any) -> bool:
    """Return whether the memory layout of `cls` begins with that of a class without `__dict__`, other than object.

    An example is `class C(ABC, nn.Module)`, because ABC has no `__dict__`. Python allows assigning a new class to the
    `__class__` of an instance only if the old and the new class have the same memory layout. If the result is True, the
    class that `extend_class` creates has the layout of `cls` only if `cls` is its first base.
    """
    while cls.__base__.__dictoffset__:
        cls = cls.__base__
    return cls.__base__ is not object


# -- deep copies ------------------------------------------------------------------------------------------------------

_PACKAGE, _, _ = __name__.partition(".")
_ENGINE = (f"{_PACKAGE}.engine.wrap.", f"{_PACKAGE}.engine.blocks.")
_UNTRACED = disable_compiler(len).__code__  # pyright: ignore[reportFunctionMemberAccess]
"""The code object of the wrappers that `disable_compiler` returns, the same for all wrapped functions. If a function
has this code object, `_is_ours` checks the function that it wraps (`__wrapped__`) instead."""
STAYS = "stays_in_copies"
"""The name of an attribute that a hook of this package has if deep copies of its module must keep the hook.

Without this hook, the copy would compute different results.
"""
_ADDED = ("_schedule", "_uneven", "_is_fsdp_managed_module")
"""Attributes (other than hooks and methods) that sharding adds to modules. Deep copies have neither them nor attributes
whose names begin with "_bmt". The exception is a module whose own class extends DistributedModule: its copy keeps
"_schedule", which the constructor of that class sets."""


def _plain_copy(module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of `module` with full parameters and without anything that sharding has added.

    Collective: every rank must call it.

    memo: the argument of `__deepcopy__`: {id(original): copy} for the objects that are copied already.
    """
    modules = [each for each in module.modules() if id(each) not in memo]
    parameters = dict.fromkeys(p for each in modules for p in each._parameters.values())
    sharded = [p for p in parameters if isinstance(p, DistributedParameter) and id(p) not in memo]
    if sharded:
        barrier_outside(f"copy.deepcopy of a sharded {type(module).__name__}")
        for parameter in sharded:
            parameter.refuse_copy()
        for parameter, full in clone_full_params(sharded).items():
            copied: Any = full
            parameter.mark(copied)
            memo[id(parameter)] = full
    modules, made = [each for each in modules if _is_copied_here(each)], []
    for each in modules:  # create all copies before filling any, because their attributes refer to each other
        cls = own_class(each)
        made.append(cls.__new__(cls))
        memo[id(each)] = made[-1]
    for each, copied in zip(modules, made):
        for name, value in _own_attributes(each).items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        if isinstance(copied, ShardedModule) and "_schedule" in vars(each):
            copied.__dict__["_schedule"] = vars(each)["_schedule"]
    # The loops above have copied the modules whose class has no `__deepcopy__` of its own. If the class of `module` has
    # one, call it with the module as it was before it was sharded.
    if id(module) not in memo:
        cls = own_class(module)
        unsharded = cls.__new__(cls)
        unsharded.__dict__.update(_own_attributes(module))
        memo[id(module)] = cls.__deepcopy__(unsharded, memo)
    return memo[id(module)]


def own_class(module: torch.nn.Module) -> Any:
    """Return the class that a module had before it was sharded, or its present class if it is not sharded.

    To shard a module, this package sets the module's class to a subclass of its original class. Deep copies and pickles
    get the original class again, and so does the module itself while it computes with plain torch for a comparison.
    """
    cls: Any = type(module)
    # Remove only classes that exist because of sharding. Other classes that `extend_class` has created also have
    # `_extends` (the class that was extended), but are not subclasses of ShardedModule or OnlyWhileSharded.
    while "_extends" in vars(cls) and issubclass(cls, (ShardedModule, OnlyWhileSharded)):
        cls = cls._extends
    return cls


def _is_copied_here(module: torch.nn.Module) -> bool:
    """Return whether `_plain_copy`, which copies a sharded model, copies the attributes of `module` one by one.

    If the module's original class defines `__deepcopy__`, the result is False, and that method copies the module. The
    method of torch's parametrizations does not count, because it also copies the attributes one by one.
    """
    copies = getattr(own_class(module), "__deepcopy__", ShardedModule.__deepcopy__)
    return copies is ShardedModule.__deepcopy__ or copies.__module__ == torch.nn.utils.parametrize.__name__


def _own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return {name: value} of the attributes that `module` would have if it had not been sharded.

    Deep copies and pickles get these attributes.
    """
    cls, attributes = own_class(module), {}
    for name, value in vars(module).items():
        if name.endswith(("_hooks", "_pre_hooks")) and isinstance(value, dict):
            hooks = {key: getattr(hook, "hook", hook) for key, hook in value.items()}
            kept = {key: value[key] for key, hook in hooks.items() if not _is_ours(hook) or hasattr(hook, STAYS)}
            attributes[name] = value if len(kept) == len(value) else type(value)(kept)
        elif name not in _ADDED and not name.startswith("_bmt"):
            replaced = value
            while _is_ours(replaced, _ENGINE) or (_is_ours(replaced) and hasattr(cls, name)):
                replaced = _replaced_by(replaced)
            if replaced is not None or value is None:
                attributes[name] = replaced
    state = vars(module).get("_bmt")
    forward = None if state is None else state.eager_forward if state.compiled else state.own_forward
    return attributes if forward is None else {**attributes, "forward": forward}


def _is_ours(value: Any, modules: tuple[str, ...] = (f"{_PACKAGE}.",)) -> bool:
    """Return whether `value` is a function or another callable (such as a hook) that this package defines.

    modules: prefixes of names of Python modules. Only callables that are defined in these modules count. If this is
        `_ENGINE`, only functions and methods count.
    """
    if isinstance(value, functools.partial):
        return _is_ours(value.func, modules)
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        if function.__code__ is _UNTRACED:
            return _is_ours(function.__wrapped__, modules)  # pyright: ignore[reportFunctionMemberAccess]
        return function.__globals__.get("__name__", "").startswith(modules)
    kind = type(value)
    is_value = issubclass(kind, (torch.nn.Module, torch.Tensor)) or not callable(value)
    return not is_value and modules is not _ENGINE and kind.__module__.startswith(modules)


def _replaced_by(method: Any) -> Any:
    """Return the value that an instance attribute had before this package set it to `method`.

    Returns None if the attribute did not exist, because the instance used the method of its class.
    """
    before = getattr(method, "__wrapped__", None)
    owner = getattr(method, "owner", None)
    if owner is None or before is None:
        return before
    bound = types.MethodType(before, owner())
    return None if getattr(type(owner()), before.__name__, None) is before else bound
