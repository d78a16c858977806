"""Members: the modules and parameters of a model, listed again only if they have changed."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterator
from typing import Any

import torch

_TRAINING = operator.itemgetter("training")
_read: Any = weakref.ref.__call__


class _End:
    """The end marker of both lists that `Members.update` compares.

    `map` stops at the end of the shorter list. Without the marker, a list would seem equal to a longer list that begins
    with the same items.
    """


class _Gone:
    """A class whose only instance is freed at once. `_NONE`, a weak reference to this instance, therefore returns None.

    In a list of weak references, `_NONE` is used in place of None, to which there can be no weak reference.
    """


_NONE: Any = weakref.ref(_Gone())


class Members:
    """Keeps lists of a module's submodules and parameters. `update` rebuilds the lists if the module has changed.

    `torch.nn.Module.parameters` and `train` visit every module in Python code. In a model with adapters, which has
    thousands of modules, each of these calls takes milliseconds in every training step. `update` instead compares the
    entries of the modules' `_modules` and `_parameters` with those that it listed last, which takes 0.1 ms for 1,000
    modules.

    The references to parameters are weak, because parameters that are listed inside `bmt.gathered` are full copies,
    which must be freed when that context ends. A Members object has no reference to the module itself. The module can
    therefore store the Members object without a reference cycle.
    """

    def __init__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        """Drop the lists, so that they keep no removed module in memory. The next `update` rebuilds them."""
        # The `values()` of the modules' dicts `_modules` and `_parameters` that were not empty at the last listing.
        self._held: list[Any] = []
        # The dicts `_modules` and `_parameters` that were empty at the last listing. They are in a separate list, so
        # that `any` tells `update` whether one of them has entries now, without a loop in Python.
        self._empty: list[dict[str, Any]] = []
        # Weak references to the items of `_values()` at the last listing. These items always end with `_End`. The
        # initial value does not, so the first call of `update` finds a difference and builds the lists.
        self._seen: list[Any] = [_NONE]
        self._parameters: list[weakref.ref[torch.nn.Parameter]] = []
        self._attributes: list[dict[str, Any]] = []  # the `__dict__` of each submodule
        # Whether `are_in` can rely on the attributes "training": no class of the modules overrides `train`, and each
        # dict in `_attributes` has the key "training".
        self._plain = False

    def update(self, module: torch.nn.Module) -> bool:
        """Rebuild the lists if a module or parameter was added, removed or replaced. Return whether they were rebuilt.

        module: the module, the same one in every call.
        """
        if not any(self._empty) and all(map(operator.is_, self._values(), map(_read, self._seen))):
            return False
        modules = list(module.modules())
        dictionaries = [each for part in modules for each in (part._modules, part._parameters)]
        # When a listed module or parameter is freed, the weak reference to it in `_seen` calls `drop`, which empties
        # the lists. `drop` refers to `self` only weakly, because a strong reference would form a cycle.
        drop = functools.partial(_drop, weakref.ref(self))
        self._drop()
        self._held = [each.values() for each in dictionaries if each]
        self._empty = [each for each in dictionaries if not each]
        self._seen = [_NONE if value is None else weakref.ref(value, drop) for value in self._values()]
        self._parameters = list(map(weakref.ref, torch.nn.Module.parameters(module)))
        self._attributes = [vars(part) for part in modules if part is not module]
        self._plain = not any(overrides(type(part), "train") for part in modules)
        # TorchScript modules store "training" elsewhere.
        self._plain &= all("training" in each for each in self._attributes)
        return True

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, each once, in the order of `torch.nn.Module.parameters`. Call `update` first."""
        return list(map(_read, self._parameters))

    def are_in(self, mode: bool) -> bool:
        """Return whether all submodules of the module are in training mode, or in evaluation mode if `mode` is False.

        The result is also False in these cases:

        * The class of the module or of a submodule overrides `train`. The override may do more than set the mode.
        * `train` was set on a submodule itself, as an attribute. It may do more, too.
        * A submodule is a TorchScript module.

        Call `update` first.
        """
        modes = map(_TRAINING, self._attributes)
        if not self._plain or not (all(modes) if mode else not any(modes)):
            return False
        return not any(map(dict.__contains__, self._attributes, itertools.repeat("train")))

    def _values(self) -> Iterator[Any]:
        return itertools.chain(itertools.chain.from_iterable(self._held), (_End,))


def _drop(members: weakref.ref[Members], dead: Any) -> None:
    listing = members()
    if listing is not None:
        listing._drop()


@functools.cache
def overrides(cls: type[torch.nn.Module], *names: str) -> bool:
    """Return whether `cls`, or a class that it extends, overrides one of the methods `names` of torch.nn.Module.

    The methods of this package's DistributedModule do not count as overrides. Nor does the `train` of transformers'
    PreTrainedModel, which does nothing more than torch's if the mode stays the same.
    """
    known = torch.nn.Module.__module__, f"{__package__}.distributed_module"
    return any(
        name in vars(part) and part.__module__ not in (*known, *(("transformers.modeling_utils",) * (name == "train")))
        for part in cls.__mro__
        for name in names
    )
