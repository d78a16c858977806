"""The base of modules that hold sharded parameters, and the extension of a module's class in place."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from ..runtime.world import current_world
from ..sharding.parameter import DistributedParameter
from ..sharding.slots import Slot, hidden
from ..sharding.state_dict import StateDict, check_full_tensors, copy_full_params


class RefuseDataParallel:
    """A collection that raises when it is iterated over, so that merely reading the attribute does no harm."""

    def __iter__(self) -> Iterator[NoReturn]:
        raise RuntimeError(
            "DistributedDataParallel around a model that hf_bmtrain has sharded: it would overwrite every rank's "
            "shards with rank 0's. Leave it out, the model averages its gradients itself. Where Trainer or "
            "Accelerator put it there, the installed accelerate is too old: pip install 'accelerate>=1.14'."
        )


class ShardedModule(torch.nn.Module):
    """A module that holds sharded parameters and reduces their gradients itself.

    `_is_accelerate_prepared` prevents Accelerate (and with it Trainer) from adding DistributedDataParallel, which
    reads `_ddp_params_and_buffers_to_ignore` if it is added nevertheless.
    """

    _extends: ClassVar[Any]  # of an extended class: the class of the user's
    _is_accelerate_prepared = True
    _ddp_params_and_buffers_to_ignore = RefuseDataParallel()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # An extended class is none of the user's, whose classes may register or count their subclasses.
        if "_extends" not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if isinstance(param, DistributedParameter) and name.endswith("_orig"):
            raise moved(name, self)
        super().register_parameter(name, param)

    def _slots(self) -> Sequence[Slot]:
        """Return the slots of the sharded parameters that this module gathers."""
        raise NotImplementedError

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False):
        """Return full tensors on the CPU, under the module's own keys; tied weights stay tied. Collective.

        Args:
            *args: as in torch.nn.Module, as are the others.
            destination: a state dict under construction.
            prefix: of the keys.
            keep_vars: ignored: the tensors are copies without gradients.
        """
        outermost = destination is None
        if outermost:
            current_world().barrier("state_dict")
            destination = StateDict()
        collect = functools.partial(super().state_dict, destination=destination, prefix=prefix, keep_vars=True)
        copy_full_params(destination, self._slots(), collect)
        return destination.plain() if outermost else destination

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Load full tensors, of which each rank takes its part. Collective.

        Args:
            state_dict: the full tensors, the same on every rank.
            *args: as in torch.nn.Module.
            **kwargs: as in torch.nn.Module.

        Raises:
            RuntimeError: with nothing changed, if the ranks pass different parameters; or as torch.nn.Module.
        """
        check_full_tensors(self, state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn, recurse: bool = True):
        with hidden(self._slots(), fn):
            return super()._apply(fn, recurse)

    def __deepcopy__(self, memo):
        raise RuntimeError(
            f"A sharded {type(self).__name__} cannot be deep-copied: copy the model before it is wrapped, "
            "AveragedModel(model) included, and wrap both."
        )

    def __reduce_ex__(self, protocol) -> NoReturn:
        raise RuntimeError(
            f"A sharded {type(self).__name__} cannot be pickled: torch.save(model) would save one rank's shards. Save "
            "its weights: bmt.save(model, file) or model.save_pretrained(folder), on all ranks."
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "torch.nn.DataParallel around a model that hf_bmtrain has sharded: it copies modules, and slices cannot "
            "be copied. Start one process a GPU (torchrun --nproc-per-node N script.py), or show the process one GPU "
            "(CUDA_VISIBLE_DEVICES=0)."
        )


def moved(name: str, module: torch.nn.Module) -> RuntimeError:
    """Return the error of a sharded parameter that something renames to `name` in `module`."""
    return RuntimeError(
        f"'{name}' in {type(module).__name__} is a sharded weight under a new name: torch.nn.utils.prune and "
        "spectral_norm rename what they change, and would read this rank's slice of it. Prune and parametrize the "
        "model before auto_wrap."
    )


def extend_class(base: type, cls: Any, methods: dict[str, Any]) -> Any:
    """Return a class that extends `cls` by `base` and `methods` and has its name, module and docstring.

    Create one per `cls`, not one per module: torch.compile compiles once per class.
    """
    names = {"_extends": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass = type(cls)
    if _begins_without_dict(cls):
        # `__class__` can be assigned only if the layout comes from `cls`, that is if `cls` is the first base. Methods
        # are looked up in the same order as for all other classes.
        order = metaclass(cls.__name__, (base, cls), dict(names)).__mro__[1:]
        ordered: Any = type(metaclass.__name__, (metaclass,), {"mro": lambda extended: [extended, *order]})
        return ordered(cls.__name__, (cls, base), {**names, **methods})
    return metaclass(cls.__name__, (base, cls), {**names, **methods})


def _begins_without_dict(cls: Any) -> bool:
    """Return whether the layout of `cls` begins with a class without `__dict__`, as in `class C(ABC, nn.Module)`."""
    while cls.__base__.__dictoffset__:
        cls = cls.__base__
    return cls.__base__ is not object
