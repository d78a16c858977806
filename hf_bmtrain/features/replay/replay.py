"""Save the state that a layer's forward may change, and restore it, so that the forward can be recomputed correctly.

The state consists of buffers, attributes, random generators, forward hooks, and containers in the forward's arguments.
`Replay` saves and restores the state of a block. `Snapshot` is one saved copy of the state. `check_parity` and the
calibration of float8 also use a Snapshot, to undo the changes of a forward of a whole model.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from _random import Random as _PlainRandom
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from operator import attrgetter, is_, is_not, itemgetter, ne
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from ...engine.base.torch_internals import optimize_scripts, pytree
from ...engine.blocks.containers import ATOMS, containers_of, items_of

_STANDARD = frozenset(vars(torch.nn.Module())) | {
    "_bmt",
    "_bmt_members",
    "_schedule",
    "float8_state",
    "config",
    "forward",
}
"""Names of attributes that `Attributes` does not save. Attributes that every torch.nn.Module has are left out, because
those that a forward may change (buffers, mode and hooks) are saved separately. Attributes of this library, `config` and
`forward` are left out, because a forward does not change them."""
_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
"""The attributes in which a module stores its forward hooks, {id: hook}, and their options, {id: True}."""
_TRAINING = itemgetter("training")
_VERSION = attrgetter("_version")
_SMALL = 2**20
"""Buffers of at most this many bytes count as small. `Replay` keeps the first copy of a small buffer until backward."""
Place = tuple[int, str]
"""Identifies a buffer: (index of its module in the list of the layer's modules, name of the buffer)."""


class Replay:
    """Makes recomputations of a layer's forward correct if the forward changes state, such as running means.

    This class implements the interface `engine.blocks.recompute.Replay`. `record` saves the state before a forward.
    `restore` gives the layer this state again for the recomputation of that forward, and afterwards undoes the changes
    that the recomputation has made.

    The state consists of:

    * Buffers. References to all buffers are saved. If a buffer was replaced, added or removed after the forward began,
      the recomputation runs with the buffers of the forward. The values of a buffer are copied only in the cases below.
    * The mode: the attribute `training` of the layer and of all modules inside it. The recomputation runs in the mode
      of the forward, even if the user has called `eval()` since.
    * Random generators: the global ones of Python and NumPy, and those in attributes and arguments, also inside
      containers. Only those that the forward used are restored. torch's default generators are left out, because
      torch's checkpoint restores them. Generators to which only code refers, such as those in global variables, are not
      found.
    * Attributes, and the items of containers in attributes and arguments. Only references to them are saved. If a
      forward assigns another tensor, `restore` puts the old one back. If a forward writes to a tensor in place, the
      recomputation reads the new values.
    * Forward hooks of the modules inside the layer: the recomputation runs exactly the hooks that were registered when
      the forward began, even if they have been removed since. Hooks of the layer itself are left out, because they run
      outside its forward.

    The values of a buffer are copied before a forward in these cases:

    * No earlier forward in the same mode had this buffer. After the forward, the buffer is compared with the copy, to
      find out whether the forward has written to the buffer. For this comparison, the host waits for the device. If the
      buffer has not changed and is larger than `_SMALL`, the copy is then deleted. Copies of small buffers are kept
      until backward, in case other code writes to the buffer.
    * An earlier forward has written to the buffer in place.
    * Other code has written to the buffer in place, between an earlier forward and its backward.
    * The buffer belongs to a batch or instance norm.

    Args:
        layer: the module whose forward is recomputed. Its state includes that of all modules inside it.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        # The layer refers to this object. A strong reference to the layer would make a cycle, so this one is weak.
        self._layer: torch.nn.Module = weakref.proxy(layer)  # pyright: ignore[reportAttributeAccessIssue]
        self._attributes: Attributes | None = None
        # {mode (result of `Attributes.modes`): {buffer: whether forwards in this mode change it}}, for each buffer that
        # was observed in a forward.
        self._observed: dict[tuple[bool, ...], dict[Place, bool]] = {}
        self._written: set[Place] = set()  # buffers to which forwards write in place
        self._exposed: set[Place] = set()  # buffers to which something writes between a forward and its backward
        # A weak reference to the Buffers of the last forward. They exist until its backward has run, because the
        # snapshot of a forward that waits for its backward refers to them.
        self._last: Callable[[], Buffers | None] = lambda: None

    def changes_buffers(self) -> bool | None:
        """Return whether forwards of the layer change its buffers, in the present mode (its `training` flags).

        A compiled block calls this before a forward that is to be recomputed. If the result is False, the block's
        compiled graph may contain the recomputation. Otherwise torch's checkpoint recomputes the forward inside
        `restore`, because a recomputation in the graph would read the buffers after the forward has changed them.

        Returns:
            False for a layer without buffers. For a layer with buffers, None until its first forward in this mode has
            run inside `record`, which observes whether the forward changes them; from then on, True or False.
        """
        attributes = self._present_attributes()
        places = Buffers(attributes.buffers).places.keys()
        if not places:
            return False
        observed = self._observed.get(attributes.modes(), {})
        if not places <= observed.keys():
            return None
        return not self._exposed.isdisjoint(places) or any(observed[place] for place in places)

    def _present_attributes(self) -> Attributes:
        """Return a saved copy of the layer's present attributes, as an Attributes object.

        If the attributes have not changed since the last call, this is the object that the last call returned.
        """
        last = self._attributes
        if last is None or not last.is_present():
            self._attributes = Attributes(list(self._layer.modules()))
            # If modules were added, removed or exchanged, a Place may now identify a different buffer. So forget what
            # earlier forwards have shown about buffers.
            if last is not None and list(map(id, last.buffers)) != list(map(id, self._attributes.buffers)):
                self._observed, self._written, self._exposed, self._last = {}, set(), set(), lambda: None
            return self._attributes
        return last

    @contextmanager
    def record(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[Snapshot]:
        """Context manager that saves the layer's state before a forward, so that the forward can be recomputed later.

        The forward must run inside the context.

        Args:
            args: the positional arguments of the forward. The forward may change mutable containers in them (lists,
                dicts, caches), so references to the items of these containers are saved. Tensors are not copied.
            kwargs: the keyword arguments of the forward. Containers in them are saved in the same way.

        Returns:
            A context manager that yields the snapshot for `restore`. The snapshot is complete when the context ends.

        Raises:
            RuntimeError: at the end of the context, if the forward wrote in place to a buffer that was not copied.
                The class documentation says which buffers are copied.
        """
        keep_scripts()
        attributes, arguments = self._present_attributes(), Contents((*args, *kwargs.values()))
        observed = self._observed.setdefault(attributes.modes(), {})
        buffers = Buffers(attributes.buffers)
        new = self._copy_buffers(buffers, attributes, observed)
        generators, hooks = Generators.reachable(attributes, arguments), Hooks(attributes.hooks)
        snapshot = Snapshot(buffers, attributes, arguments, generators, hooks)
        yield snapshot
        generators.keep_moved()  # `restore` must not reset unused generators, from which other threads may draw
        if buffers.places:
            self._observe_buffers(buffers, observed, new)
            self._last = weakref.ref(buffers)

    def _copy_buffers(self, buffers: Buffers, attributes: Attributes, observed: dict[Place, bool]) -> set[Place]:
        """Before a forward, copy the buffers to which something may write in place until the backward of this forward.

        The class documentation of `Replay` lists the cases. Returns the new buffers, that is, those that no earlier
        forward in this mode had. They are always copied.

        buffers: the layer's present buffers. Their copies are stored in this object.
        attributes: the layer's present attributes.
        observed: {buffer: whether forwards in the present mode change it}, an entry of `self._observed`.
        """
        new = buffers.places.keys() - observed.keys()
        last = self._last()
        if last is not None:  # the last forward waits for its backward: find the buffers that were written since
            self._exposed |= last.written_since()
        modes = attributes.modes() if attributes.norms else ()
        # Always copy the buffers of batch and instance norms (`norms`), because writes to them may go unnoticed. Such a
        # write does not increment the version (counter of writes), and may leave the values unchanged, for example if
        # the first input is zero.
        # In training mode, these buffers count as written by the forward (`written`). If the norm does not count its
        # batches, they count as written in evaluation mode, too: a later forward in training mode could write them
        # before the backward, and `Buffers.written_since` would not notice this write.
        norms = {place for place in buffers.places if place[0] in attributes.norms} if modes else set()
        written = (self._written & buffers.places.keys()) | {
            place for place in norms if modes[place[0]] or buffers.dicts[place[0]].get("num_batches_tracked") is None
        }
        buffers.copy(new | written | norms | (self._exposed & buffers.places.keys()), written)
        return new

    def _observe_buffers(self, buffers: Buffers, observed: dict[Place, bool], new: set[Place]) -> None:
        """After a forward, find out which buffers it has changed, and delete the copies that backward does not need.

        Raises RuntimeError if the forward wrote in place to a buffer that was not copied.

        buffers: the buffers from before the forward, with the copies that `_copy_buffers` has made.
        observed: {buffer: whether forwards in the mode of this forward change it}, an entry of `self._observed`.
            Updated.
        new: the buffers that no earlier forward in this mode had, as `_copy_buffers` returned them.
        """
        written = buffers.written_since()
        for place in new - written:
            tensor = buffers.places[place]
            if _is_comparable(tensor) and _differ(tensor, buffers.copies[id(tensor)]):
                written.add(place)
        name = self._layer.__class__.__name__
        uncopied = sorted(place[1] for place in written if id(buffers.places[place]) not in buffers.copies)
        if uncopied:
            raise RuntimeError(
                f"{name} changed its buffers {uncopied} in place in this forward, but not in its first forward with "
                "the same `training` flags (of the layer and its submodules). Only buffers that have been written to "
                "before are copied for recomputation, so this forward cannot be recomputed. Assign new tensors to the "
                "buffers instead, or pass use_checkpoint=False to auto_wrap."
            )
        self._written |= written
        changes = buffers.changed(written)
        for place in new | changes:
            tensor, changed = buffers.places[place], place in changes
            observed[place] = changed or observed.get(place, False)
            large = tensor.numel() * tensor.element_size() > _SMALL
            if place in new and large and not changed and place not in self._exposed:
                buffers.copies.pop(id(tensor), None)
        buffers.end_forward(written)

    @contextmanager
    def restore(self, snapshot: Snapshot) -> Iterator[None]:
        """Context manager for a recomputation: inside it, the layer has the state that a snapshot contains.

        The recomputation must run inside the context. The state is the layer's buffers, mode and attributes, the items
        of containers in attributes and arguments, random generators, and forward hooks (see `Replay`). At the end of
        the context, also after an exception, the layer gets back the state that it had when the context began.

        Inside the context, a buffer that was copied, and was written to in place since, is replaced by a new tensor
        with the saved values. Writes to this new tensor have no effect after the context. Tensors in attributes and
        containers are the saved objects, not copies with saved values. If such a tensor was modified in place after the
        forward began, the recomputation reads the modified values. If the recomputation modifies it in place, the
        modification stays.

        torch's checkpoint ends a recomputation early by raising an exception. If this happens inside a TorchScript
        function, torch no longer recognizes the exception, so this context manager suppresses it.

        Args:
            snapshot: the snapshot that `record` yielded for the forward that is recomputed.

        Raises:
            RuntimeError: the recomputation uses a buffer that was not copied, and to which something has written in
                place since the forward.
        """
        keep_scripts()
        self._exposed |= snapshot.buffers.written_since()
        undo = snapshot.show()
        try:
            yield
        except RuntimeError as error:
            if not ends_recomputation(error):
                raise
        finally:
            undo()


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Return whether torch can compare the values of `tensor` with those of another tensor of the same kind."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.dtype != torch.complex32


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have different values, shapes or dtypes. NaN counts as equal to NaN.

    Both tensors must be comparable (see `_is_comparable`).
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if torch.equal(a, b):
        return False
    inexact = a.is_floating_point() or a.is_complex()
    return not (inexact and bool(((a == b) | ((a != a) & (b != b))).all()))


def _clones(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return {key: copy of the tensor} for {key: tensor}. The copies of tensors that share memory share memory, too."""
    owners: dict[int, list[int]] = {}
    for key, tensor in tensors.items():
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
        if plain and tensor.numel() and len(tensors) > 1:
            owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(key)
    copies = {}
    for keys in owners.values():
        if len(keys) > 1:
            memory = tensors[keys[0]].untyped_storage().clone()
            for key in keys:
                tensor = tensors[key]
                copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                copies[key] = copy.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    return {key: copies[key] if key in copies else tensor.clone() for key, tensor in tensors.items()}


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the versions (torch's counters of writes) of tensors, or 0 for an inference tensor, which has none."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


# -- the state: buffers, attributes, containers in the arguments, random generators, forward hooks ---------------------


class Buffers:
    """The buffers of a layer's modules, saved when this object is created, and copies of the values of some of them.

    When the object is created, only references to the buffers are saved. `copy` saves values.

    Args:
        dicts: the attribute `_buffers` of each module.

    Attributes:
        dicts: the argument `dicts`.
        places: {(index in `dicts`, name): buffer} of all buffers that were saved.
        copies: {id of a buffer: copy of its values} of the buffers that were copied.
        written: the ids of the copied buffers to which the forward writes in place, as far as is known.
    """

    def __init__(self, dicts: Sequence[dict[str, torch.Tensor | None]]) -> None:
        self.dicts = dicts
        self._saved = [dict(each) if each else {} for each in dicts]
        self.places: dict[Place, torch.Tensor] = {
            (index, name): tensor
            for index, own in enumerate(self._saved)
            if own
            for name, tensor in own.items()
            if tensor is not None
        }
        self._tensors = list(self.places.values())
        self._versions = _versions(self._tensors)
        self.copies: dict[int, torch.Tensor] = {}
        self.written: set[int] = set()

    def copy(self, places: set[Place], written: set[Place]) -> None:
        """Save copies of the values of some buffers. A buffer that several modules share is copied once.

        places: the buffers to copy.
        written: those of `places` to which the forward is known to write in place.
        """
        self.copies = _clones({id(self.places[place]): self.places[place] for place in places})
        self.written = {id(self.places[place]) for place in written}

    def written_since(self) -> set[Place]:
        """Return the buffers to which something has written in place since the forward ended.

        If the forward has not ended yet (`end_forward` was not called), return those written to since this object was
        created. A write is noticed if it increments the buffer's version, torch's counter of writes.
        """
        versions = _versions(self._tensors)
        if versions == self._versions:
            return set()
        found = set(compress(self.places, map(ne, versions, self._versions)))
        # In training mode, batch norm writes its statistics without incrementing their versions. It counts its batches
        # in another buffer, whose version it does increment.
        counting = {index for index, name in found if name == "num_batches_tracked"}
        return found | {place for place in self.places if place[0] in counting} if counting else found

    def changed(self, written: set[Place]) -> set[Place]:
        """Return all buffers that the forward has changed: those that it has replaced, removed or written to in place.

        written: the buffers to which the forward has just been found to write in place. The result contains them, and
            also the buffers in the attribute `self.written`, of which this was known before the forward.
        """
        found = {
            (index, name)
            for index, (present, saved) in enumerate(zip(self.dicts, self._saved))
            if not _same_items(present, saved)
            for name, tensor in saved.items()
            if tensor is not None and present.get(name) is not tensor
        }
        if self.written:
            found |= {place for place, tensor in self.places.items() if id(tensor) in self.written}
        return found | written

    def end_forward(self, written: set[Place]) -> None:
        """Record that the forward has ended. Afterwards, `written_since` reports only writes after this call.

        written: the buffers to which the forward has written in place.
        """
        self.written |= {id(self.places[place]) for place in written}
        self._versions = _versions(self._tensors)

    def show(self) -> Callable[[], None]:
        """Put the saved buffers into the modules for a recomputation. Return a function that undoes this.

        Three cases are possible for each buffer:

        * It was not written to since it was saved: the modules get the buffer itself.
        * It was written to, and `copy` has saved its values: the modules get a new tensor with these values.
        * It was written to, and its values were not saved: the modules get a tensor that raises an error when it is
          used.

        A buffer is never overwritten, because autograd may have saved it for backward.
        """
        written = self.written_since()
        shown: dict[int, torch.Tensor] = {
            id(self.places[place]): _lost(place[1], self.places[place]) for place in written
        }
        shown |= _clones({key: copy for key, copy in self.copies.items() if key in self.written or key in shown})
        present = [dict(each) if each else {} for each in self.dicts]
        for buffers, saved in zip(self.dicts, self._saved):
            if saved or buffers:
                target = {name: shown.get(id(tensor), tensor) for name, tensor in saved.items()} if shown else saved
                if not _same_items(buffers, target):
                    _fill(buffers, target)

        def undo() -> None:
            for buffers, before in zip(self.dicts, present):
                if not _same_items(buffers, before):
                    _fill(buffers, before)

        return undo

    @torch.no_grad()
    def restore(self) -> None:
        """Put the saved buffers back into the modules, with their saved values. All values must have been saved."""
        for buffers, saved in zip(self.dicts, self._saved):
            if not _same_items(buffers, saved):
                _fill(buffers, saved)
        written = {id(self.places[place]) for place in self.written_since()}
        for tensor in self.places.values():
            copy = self.copies[id(tensor)]
            # Write only buffers that have changed. Autograd may have saved a buffer for a later backward, which raises
            # an error if the buffer has been written since, even with the same values.
            if _differ(tensor, copy) if _is_comparable(tensor) else id(tensor) in written:
                tensor.copy_(copy)


class _Lost(torch.Tensor):
    """Replaces a buffer in a recomputation if its values have changed and were not copied. Using it raises an error.

    Only functions that do not read its values, such as `shape` and `torch.zeros_like`, work as usual.
    """

    reason: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        lost = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, _Lost))
        raise RuntimeError(lost.reason)


_GETTERS = ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_sparse")
_METHODS = (
    "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "__len__", "element_size",
    "new_zeros", "new_ones", "new_empty", "new_full",
)  # fmt: skip
_ABOUT = {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like}
_ABOUT |= {getattr(torch.Tensor, name).__get__ for name in _GETTERS}
_ABOUT |= {getattr(torch.Tensor, name) for name in _METHODS}
"""The functions that work with a `_Lost` tensor, because they do not read its values. All others raise an error."""


def _lost(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Return a `_Lost` tensor with the shape, dtype and device of `buffer`. Using it raises an error.

    name: the name of the buffer, for the error.
    """
    lost: Any = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device).as_subclass(_Lost)
    lost.reason = (
        f"The buffer '{name}' of a block was written to in place after a forward of the block and before its backward. "
        "Nothing had done so before, so its values were not copied, and backward cannot recompute this forward, which "
        "uses them. Assign a new tensor to the buffer instead, write to it after backward, or pass "
        "use_checkpoint=False to auto_wrap."
    )
    return lost


def _same_items(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two dicts have the same keys, in the same order, and the same objects as values."""
    return not (a or b) or (list(a) == list(b) and all(map(is_, a.values(), b.values())))


class Snapshot:
    """A saved copy of the state that a forward of a layer or model may change.

    Args:
        buffers: the buffers of modules. Only those that were copied before the forward get their values back.
        attributes: the attributes of modules. Tensors among them are not copied.
        arguments: the items of the mutable containers (lists, dicts, caches) in the forward's arguments. Tensors among
            them are not copied.
        generators: the states of random generators.
        hooks: forward hooks. Empty in a snapshot of `Snapshot.of`: its `restore` leaves all hooks as they are, also
            those that were registered after `Snapshot.of`.
    """

    def __init__(
        self, buffers: Buffers, attributes: Attributes, arguments: Contents, generators: Generators, hooks: Hooks
    ) -> None:
        self.buffers, self.attributes = buffers, attributes
        self.arguments, self.generators, self.hooks = arguments, generators, hooks
        self.modes = attributes.modes()

    @classmethod
    def of(cls, model: torch.nn.Module, device: torch.device, arguments: Iterable[Any] = ()) -> Snapshot:
        """Save the state of a model before a forward whose changes will be undone, for example a measurement.

        The state consists of all buffers, with their values, and of attributes, containers and random generators. After
        the forward, the method `restore` of the returned snapshot undoes what the forward has changed.

        Args:
            model: the model.
            device: the device whose default generator is saved, in addition to the CPU's.
            arguments: the arguments of the model's forward. For mutable containers in them (lists, dicts, caches),
                references to the items are saved. Tensors are not copied.
        """
        defaults = [torch.default_generator]
        if device.type != "cpu":
            defaults.append(torch.get_device_module(device).default_generators[device.index])
        modules = list(model.modules())
        attributes, contents = Attributes(modules), Contents(arguments)
        generators = Generators.reachable(attributes, contents, defaults)
        buffers = Buffers(attributes.buffers)
        buffers.copy(set(buffers.places), set())
        return cls(buffers, attributes, contents, generators, Hooks(()))

    def restore(self) -> None:
        """Restore the state that `Snapshot.of` saved before a forward, to undo the changes that the forward has made.

        Unlike `show`, this cannot be undone. The model gets its original buffer tensors back, with their saved values.
        This object can be used again, after further forwards.
        """
        self.buffers.restore()
        self._restore_others()

    def show(self) -> Callable[[], None]:
        """Put the saved state into the modules for a recomputation, and return a function that undoes this afterwards.

        `Replay.restore` calls this. In place of copied buffers that were written to since, the modules get new tensors
        with the saved values. The present buffers are not overwritten (as `Snapshot.restore` would do), because
        autograd may have saved them for backward. The returned function puts back the buffers, mode, attributes, items
        of containers, states of generators and forward hooks that were present before this call.
        """
        undo_others = self._restore_others()
        try:
            undo_buffers = self.buffers.show()
        except BaseException:
            undo_others()
            raise

        def undo() -> None:
            undo_buffers()
            undo_others()

        return undo

    def _restore_others(self) -> Callable[[], None]:
        """Restore everything that this snapshot contains, except buffers.

        This is the mode, the attributes, the containers in the arguments, the random generators and the forward hooks.
        Returns a function that undoes this: it sets all of them to what they were before this call.
        """
        # Restore hooks before calling `is_present`, which returns False if a module that had no hooks when the
        # attributes were saved has some now.
        hooks = self.hooks.restore()
        # Often no attribute has changed since it was saved, and this is cheap to check. In this case, skip `restore`,
        # which would copy the present attributes for `undo`: they are equal to the saved ones.
        attributes = self.attributes
        undo_attributes = None if attributes.is_present() else attributes.restore()
        modes = attributes.set_modes(self.modes)
        arguments, generators = self.arguments.restore(), self.generators.restore()

        def undo() -> None:
            arguments.restore()
            generators.restore()
            attributes.set_modes(modes)
            if undo_attributes is not None:
                undo_attributes()
            elif not attributes.is_present():
                attributes.restore()
            hooks.restore()

        return undo


class Contents:
    """A saved copy of the items of mutable containers (such as lists, dicts and caches), which a forward may change.

    `restore` puts the saved items back into the containers. Each container is copied shallowly: tensors and other items
    in the copy are the same objects.

    Args:
        values: any objects, such as the arguments of a forward. The mutable containers among them, and those nested in
            them or in tuples, are saved.

    Attributes:
        generators: the random generators among `values`, and in the containers and tuples.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.generators: list[Any] = []
        self._copies: dict[int, tuple[Any, Any]] = {}  # {id: (container, its copy)}
        self._find(values)

    def _find(self, values: Iterable[Any]) -> None:
        """Find the mutable containers and the random generators in `values`, also nested ones, and store them.

        The containers and their copies are stored in `_copies`, the generators in `generators`.
        """
        for value in values:
            kind = type(value)
            if kind in ATOMS or kind is torch.Tensor:
                continue
            if is_generator(value):
                self.generators.append(value)
            if isinstance(value, tuple):
                self._find(value)
            for container in () if kind is tuple else containers_of(value):
                if id(container) not in self._copies:
                    self._copies[id(container)] = container, _copy(container)
                    self._find(items_of(container))

    def __bool__(self) -> bool:
        return bool(self._copies)

    @property
    def containers(self) -> list[Any]:
        """The mutable containers whose items were copied: the containers themselves, not their copies.

        `Attributes` reads their present items, to find out whether any has been replaced since.
        """
        return [container for container, _ in self._copies.values()]

    def restore(self) -> Contents:
        """Put the saved items back into the containers.

        Returns a Contents with the items that the containers had before this call. Its `restore` undoes this call.
        """
        present = Contents(())
        for key, (container, copy) in self._copies.items():
            present._copies[key] = container, _copy(container)
            _fill(container, copy)
        return present


def _copy(container: Any) -> Any:
    """Return the items of a container as a plain dict, set or list."""
    if isinstance(container, dict):
        return dict(container.items())
    return set(container) if isinstance(container, set) else list(container)


def _fill(container: Any, contents: Any) -> None:
    """Replace all items of `container`, which may be a dict, list, set or deque, by `contents`.

    If the class of `container` is a subclass of dict, OrderedDict or list, the methods of that built-in class are
    called directly. So methods with which the subclass overrides them do not run.
    """
    if isinstance(container, dict):
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in contents.items():
            base.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
    elif not isinstance(container, set):
        container.clear()
        container.extend(contents)
    elif container != contents:  # otherwise keep the order of the set, which depends on how it was filled
        container.clear()
        container.update(contents)


class Attributes:
    """A saved copy of the attributes of a layer's modules, and of the items of containers in these attributes.

    The copy is shallow: it refers to the same objects, such as tensors. Modules of torch.nn without hooks are left out,
    because their forwards change no attributes.

    Args:
        modules: the layer, followed by all modules inside it.

    Attributes:
        buffers: the attribute `_buffers` of each module.
        norms: the indices of batch and instance norms among the modules. In training mode, they write their buffers.
        hooks: one list of all dicts in which the modules inside the layer (not the layer itself) store their forward
            hooks and the options of these hooks. This list is the argument of `Hooks`.
        generators: the random generators in the attributes, also inside containers and tuples.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        # The layer refers to this object, so a strong reference to the layer or its `__dict__` would make a cycle.
        self._layer = weakref.ref(modules[0])
        # For each module: its `__dict__` (None for the layer, whose `__dict__` is found through `_layer`), and the
        # attributes that a forward may change.
        self._modules: list[tuple[dict[str, Any] | None, dict[str, Any]]] = []
        # A module that torch.compile returns has no attribute `training` of its own: it uses that of the module inside
        # it. Its entry here is a constant, so that each module has an entry.
        self._inner = [vars(module) if "training" in vars(module) else {"training": True} for module in modules[1:]]
        self.buffers: list[dict[str, torch.Tensor | None]] = [module._buffers for module in modules]
        self.norms = {index for index, module in enumerate(modules) if isinstance(module, _NormBase)}
        self._getters: list[tuple[dict[str, Any] | None, Callable[[dict], Iterable[Any]], int]] = []
        self.hooks: list[dict[int, Any]] = [getattr(module, name) for module in modules[1:] for name in _HOOKS]
        self._without_hooks: list[dict[int, Any]] = []  # hook dicts, empty now, of the modules that are left out
        children = []
        for module in modules:
            if module._modules:
                children.append(module._modules)
            hooked = module._forward_hooks or module._forward_pre_hooks
            if hooked or not type(module).__module__.startswith("torch.nn."):
                own, attributes = _own(vars(module)), None if module is modules[0] else vars(module)
                # itemgetter returns a tuple only for two or more names. So if there are fewer, add names that always
                # exist.
                names = [*own, "_parameters", "_modules"]
                self._modules.append((attributes, own))
                self._getters.append((attributes, itemgetter(*names[: max(2, len(own))]), len(vars(module))))
            else:
                self._without_hooks += (module._forward_hooks, module._forward_pre_hooks)
        self._inside = Contents([*children, *(value for _, own in self._modules for value in own.values())])
        containers, self.generators = self._inside.containers, self._inside.generators
        self._dicts = [each for each in containers if isinstance(each, dict)]
        self._rows = [each for each in containers if not isinstance(each, dict)]
        self._values = self._read()

    def _read(self) -> list[Any] | None:
        """Return one list of all present attributes of the modules, and of all items of containers in these attributes.

        The caller compares the list with an earlier one, object by object. Returns None if a module has got or lost an
        attribute since the attributes were saved, or if a module that was left out because it had no hooks has some
        now.
        """
        if any(self._without_hooks):
            return None
        values: list[Any] = []
        try:
            for attributes, getter, count in self._getters:
                present = vars(self._layer()) if attributes is None else attributes
                if len(present) != count:
                    return None
                values += getter(present)
        except KeyError:
            return None
        if self._dicts:
            values += chain.from_iterable(self._dicts)
            values += chain.from_iterable(map(dict.values, self._dicts))
        if self._rows:
            values += chain.from_iterable(self._rows)
        return values

    def is_present(self) -> bool:
        """Return whether all attributes, and all items of containers in them, are still the objects that were saved.

        Objects are compared by identity, which is faster than copying them. If the result is True, `restore` would
        change nothing, and this object can be used again for the next forward instead of a new copy.
        """
        known, values = self._values, self._read()
        assert known is not None
        return values is not None and len(values) == len(known) and not any(map(is_not, values, known))

    def modes(self) -> tuple[bool, ...]:
        """Return the present values of `training` of all modules, first the layer's.

        For a module that torch.compile has returned, which has no such attribute of its own, the value is always True.
        """
        return self._layer().training, *map(_TRAINING, self._inner)  # pyright: ignore[reportOptionalMemberAccess]

    def set_modes(self, modes: Sequence[bool]) -> Sequence[bool]:
        """Set `training` of all modules to `modes`, an earlier result of `self.modes()`. Return the previous values."""
        present = self.modes()
        if modes != present:
            for attributes, training in zip([vars(self._layer()), *self._inner], modes):
                attributes["training"] = training
        return present

    def restore(self) -> Callable[[], None]:
        """Restore the saved attributes, and the items of containers in them. Return a function that undoes this."""
        present = []
        for attributes, own in self._modules:
            changed = vars(self._layer()) if attributes is None else attributes
            present.append((changed, _own(changed)))
            _replace(changed, own)
        inside = self._inside.restore()

        def undo() -> None:
            inside.restore()
            for attributes, own in present:
                _replace(attributes, own)

        return undo


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the items of `attributes`, the `__dict__` of a module, that a forward may change."""
    return {name: value for name, value in attributes.items() if name not in _STANDARD}


def _replace(attributes: dict[str, Any], own: dict[str, Any]) -> None:
    """Restore the saved attributes of a module, and delete those that were added after saving.

    attributes: the `__dict__` of the module. Changed in place.
    own: the saved attributes, {name: value}, as `_own` returned them.
    """
    for name in _own(attributes).keys() - own.keys():
        del attributes[name]
    attributes.update(own)


class Generators:
    """The states of random generators (of Python, NumPy or torch), saved when this object is created.

    `restore` sets the generators back to these states.

    Args:
        generators: the generators. The modules `random` and `numpy.random` represent their global generators.
    """

    def __init__(self, generators: Iterable[Any]) -> None:
        self._states = [(generator, read_state(generator)) for generator in generators]

    @classmethod
    def reachable(cls, attributes: Attributes, arguments: Contents, others: Iterable[Any] = ()) -> Generators:
        """Save the states of the random generators from which a forward may draw.

        These are the global generators of Python and NumPy, the generators in attributes and arguments, and `others`.
        While torch.compile traces the forward, no states are saved, because it cannot trace code that reads them.

        Args:
            attributes: the attributes of the modules. Generators in them are saved.
            arguments: the arguments of the forward. Generators in them are saved.
            others: more generators to save.
        """
        if torch.compiler.is_compiling():
            return cls(())
        return cls(dict.fromkeys((random, np.random, *attributes.generators, *arguments.generators, *others)))

    def keep_moved(self) -> None:
        """Forget the generators that have not been used since their states were saved.

        Called after a forward, so that `restore` changes only the generators that the forward used.
        """
        self._states = [(each, state) for each, state in self._states if not equal_states(state, read_state(each))]

    def restore(self) -> Generators:
        """Set the generators back to the saved states.

        Returns a Generators object with the states that they had before this call. Its `restore` undoes this call.
        """
        present = Generators(generator for generator, _ in self._states)
        for generator, state in self._states:
            write_state(generator, state)
        return present


class Hooks:
    """The forward hooks of modules, saved when this object is created. `restore` puts them back.

    Args:
        dicts: the dicts in which the modules store their forward hooks and the options of these hooks: the values of
            the attributes that `_HOOKS` names. (A hook's handle refers to these dicts, so `restore` changes them in
            place.)
    """

    def __init__(self, dicts: Sequence[dict[int, Any]]) -> None:
        self._dicts = dicts
        # Most layers have no hooks, so do not copy their empty dicts.
        self._copies = [dict(each) for each in dicts] if any(dicts) else None

    def restore(self) -> Hooks:
        """Give the modules the saved hooks, and no others.

        Returns a Hooks object with the hooks that the modules had before this call. Its `restore` undoes this call.
        """
        present = Hooks(self._dicts)
        if present._copies != self._copies:
            for each, copy in zip(self._dicts, self._copies or [{}] * len(self._dicts)):
                _fill(each, copy)
        return present


# -- states of random generators of Python, NumPy and torch -----------------------------------------------------------

_KINDS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


def is_generator(value: Any) -> bool:
    """Return whether `value` is a random generator object of Python, NumPy or torch, whose state can be saved.

    False for random.SystemRandom, which has no state. Always False while torch.compile traces the caller, because it
    cannot trace code that handles generators.
    """
    if torch.compiler.is_compiling():
        return False
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return (function that gets the state of `generator`, function that sets it)."""
    if generator is random:
        return _read_python, generator.setstate
    if generator is np.random:
        return _read_numpy, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state, generator.set_state


# The states of the global generators are read before and after every forward that is recomputed. `random.getstate`
# takes 10 us, and `np.random.get_state` 50 us. Copying the memory in which a generator stores its state of 624 words,
# and comparing this copy with the last one, takes less than 1 us. So these functions are called only if the memory has
# changed.


_python: Any = random.getstate.__self__  # pyright: ignore[reportFunctionMemberAccess]
# The size in bytes of a Python object's header (reference count and type). The object's data begin after it.
_head = object.__basicsize__
_python_words = (ctypes.c_char * (_PlainRandom.__basicsize__ - _head)).from_address(id(_python) + _head)
_NumpyWords = ctypes.c_char * (4 * (624 + 1))  # the state's 624 words of 4 bytes, and the position of the next word
_numpy: Any = np.random.mtrand._rand  # pyright: ignore[reportAttributeAccessIssue]
_numpy_kept = (ctypes.c_char * (type(_numpy).__basicsize__ - _head)).from_address(id(_numpy) + _head)
"""The memory of NumPy's global generator itself. NumPy draws normal numbers in pairs, and keeps the second one here,
outside the words, until the next call takes it."""
_known_python: tuple[bytes, float | None, Any] = (b"", None, None)  # words, `gauss_next` and state, as last read
_known_numpy: tuple[bytes, bytes, Any] = (b"", b"", None)  # words, `_numpy_kept` and state, as last read


def _read_python() -> Any:
    global _known_python
    words, kept = _python_words.raw, _python.gauss_next
    if words != _known_python[0] or kept != _known_python[1]:
        _known_python = words, kept, random.getstate()
    return _known_python[2]


def _read_numpy() -> Any:
    global _known_numpy
    bits: Any = _numpy._bit_generator
    if type(bits) is not np.random.MT19937:  # np.random.set_bit_generator was called
        return np.random.get_state()
    words, kept = _NumpyWords.from_address(bits.ctypes.state_address).raw, _numpy_kept.raw
    if words != _known_numpy[0] or kept != _known_numpy[1]:
        _known_numpy = words, kept, np.random.get_state()
    return _known_numpy[2]


def read_state(generator: Any) -> Any:
    """Return the present state of a random generator, to be restored later by `write_state`.

    generator: a generator for which `is_generator` is True, or the module `random` or `numpy.random`, which represents
        its global generator.

    Returns:
        The state in the generator's own format: a tensor for torch, nested dicts and tuples for Python and NumPy.
    """
    if generator is random:
        return _read_python()
    return _read_numpy() if generator is np.random else _access(generator)[0]()


def write_state(generator: Any, state: Any) -> None:
    """Set a random generator of Python, NumPy or torch to a state that `read_state` returned for this generator.

    Called before a forward is recomputed, so that the recomputation draws the same random numbers as the forward.
    Called again after the recomputation, so that the generator continues from the state that it had before.
    """
    _access(generator)[1](state)


def equal_states(a: Any, b: Any) -> bool:
    """Return whether `a` and `b`, two states of one random generator as `read_state` returns them, are equal.

    If they are not, the generator was used between the two calls of `read_state`.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(equal_states, a, b))
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())


# -- TorchScript ------------------------------------------------------------------------------------------------------
# TorchScript profiles the first call of a function, and optimizes the function in the second. The optimized function
# makes autograd save different tensors, in a different order. torch's checkpoint matches the saved tensors of the
# forward and the recomputation by their order, so it would mix them up. Therefore, from the first recomputed layer on,
# TorchScript must not optimize any more functions. Each function stays as it is, optimized or not.


def keep_scripts() -> None:
    """Stop TorchScript from optimizing more functions in this thread. Functions that it has optimized stay optimized.

    Otherwise a recomputation could go wrong. TorchScript optimizes a function at its second call, which may be the
    recomputation of the first call. Autograd would then save other tensors in the recomputation than in the forward.
    torch's checkpoint matches the tensors that the two runs save by their order, so it would mix them up.

    The setting holds only for the thread that calls this, and backward may recompute in a thread of autograd. So this
    is called both before each forward that will be recomputed, and before each recomputation.
    """
    optimize_scripts(False)


def ends_recomputation(error: RuntimeError) -> bool:
    """Return whether `error` only means that torch has ended a recomputation early, inside a TorchScript function.

    torch's checkpoint ends a recomputation once all tensors are recomputed: it raises an exception without a message,
    and catches it. A TorchScript function converts this exception into a RuntimeError, which torch does not catch and
    `Replay.restore` therefore suppresses. The RuntimeError contains a stack trace and the original message, which is
    empty. If an unrelated error looked the same and was suppressed, torch would raise an error afterwards, because
    recomputed tensors are missing.
    """
    message = str(error)
    return "TorchScript interpreter" in message and message.rstrip().endswith("RuntimeError:")
