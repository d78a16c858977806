"""Aliases: sharded tensors that share the memory of another sharded tensor, such as `parameter.data`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..base.torch_internals import is_tracing

SET_DATA: Callable[[Any, Any], None] = getattr(torch.Tensor, "data").__set__  # noqa: B009, type checkers take `Tensor.data` for a tensor, but it is a descriptor
"""Sets torch's own `.data`: `SET_DATA(tensor, other)` makes `tensor` use the memory of `other`."""


class Aliases:
    """Keeps track of the aliases of one sharded tensor, the owner.

    Aliases are other sharded tensors that share the owner's memory, such as `parameter.data`.

    In torch, `parameter.data = values` gives the parameter new memory, and tensors that shared its old memory keep the
    old values. A sharded parameter always keeps its memory, which is a part of its flat buffer, and `values` are copied
    into this memory. As in torch, the aliases must keep the old values. So `leave` moves the aliases to separate memory
    first.

    This object has only weak references to the aliases. All methods must be called within `WithoutTorchFunction`.

    Args:
        owner: a sharded tensor, such as a parameter or gradient, that is not itself an alias.

    Attributes:
        owner: a weak reference to the owner.
        memory: (n,), the memory to which `leave` has moved the aliases. None while they share the owner's memory.
    """

    def __init__(self, owner: Any) -> None:
        self.owner: weakref.ref[Any] = weakref.ref(owner)
        self.memory: torch.Tensor | None = None
        self._tensors: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @staticmethod
    def note(tensor: Any, alias: Any) -> None:
        """Register `alias`, a new ShardTensor that shares the memory of `tensor`. `tensor` may be an alias itself."""
        if is_tracing():  # torch.compile cannot trace weak references
            return
        if tensor.aliases is None:
            tensor.aliases = Aliases(tensor)
        tensor.aliases._tensors[id(alias)] = alias
        alias.aliases = tensor.aliases

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._tensors  # False for the owner, which is not in `_tensors`

    def leave(self, old: torch.Tensor) -> bool:
        """Move the aliases to new memory with the same values. Return whether there are any aliases.

        old: (n,), the owner's memory.
        """
        if not len(self):
            return False
        self.memory = old.clone()
        self.move(old, self.memory)
        return True

    def rejoin(self, owned: torch.Tensor) -> None:
        """Make the aliases share the owner's memory again, after `leave` has moved them to other memory.

        Called when an alias is assigned to the owner's `.data` later: `old = p.data; p.data = new; p.data = old`. The
        caller has copied the values of `old` to the owner's memory before this call.

        owned: (n,), the owner's memory.
        """
        assert self.memory is not None
        self.move(self.memory, owned)
        self.memory = None

    def remove(self, alias: Any, memory: torch.Tensor) -> None:
        """Move `alias` to the separate memory `memory`, so that it is no longer an alias of the owner.

        Called when values are assigned to the `.data` of an alias. The caller then writes them to the new memory. The
        owner and the other aliases keep the old values.

        Args:
            alias: one of the registered aliases.
            memory: (n,), the new memory of `alias`, which no other tensor shares. The old values are not copied to it.
        """
        del self._tensors[id(alias)]
        alias.aliases = None
        SET_DATA(alias, memory)

    def move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Make the aliases use the memory `new` (n,) instead of `old` (n,), each at the same position as before."""
        for alias in self._tensors.values():
            # Use the alias's dtype, which differs from the owner's if the alias is the real or imaginary part of a
            # complex owner. If the alias is lazily conjugated or negated, its new view must be, too.
            memory = new.view(alias.dtype)
            start = alias.storage_offset() - old.storage_offset() * old.itemsize // alias.itemsize
            view = memory.as_strided(alias.size(), alias.stride(), memory.storage_offset() + start)
            view = view.conj() if alias.is_conj() else view
            SET_DATA(alias, view._neg_view() if alias.is_neg() else view)
