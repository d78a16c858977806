"""Extensions: they take part in wrapping a model, at fixed points."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime.world import World
from ..sharding.storage import StorageKind
from .find import Chain


class WrapPlan(NamedTuple):
    """A model that is being wrapped.

    Attributes:
        model: the outermost module.
        world: the ranks that share the parameters.
        layers: the modules that become blocks.
        root: all modules that are neither in `layers` nor inside one of them.
        shared: ids of parameters that are used by several of `layers`, or by one of them and by `root`. They are root
            parameters.
        compiled: whether the blocks are compiled.
        late: whether the model was wrapped before, so that only parameters that were added since are sharded.
    """

    model: torch.nn.Module
    world: World
    layers: Chain
    root: Chain
    shared: set[int]
    compiled: bool
    late: bool


class Extension:
    """Base class of extensions, whose methods do nothing by default.

    `wrap` calls the methods in the order in which they are defined here: the first method of every extension, then the
    second of every extension, and so on. If the model is wrapped already and only has new parameters, `wrap` does not
    call `choose`, `prepare`, `separate` and `kind`.
    """

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        """Raise ValueError, with the reason, if the model cannot be wrapped. late: see `WrapPlan`."""

    def recognizes(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this extension can shard `parameter`, which is not of torch's own Parameter class."""
        return False

    def facts(self, model: torch.nn.Module) -> dict[str, str]:
        """Return facts about the model, by name, that must be equal on all ranks."""
        return {}

    def choose(self, plan: WrapPlan) -> None:
        """Decide how to treat the model, without changing it. Raise ValueError if this extension cannot be used."""

    def prepare(self, plan: WrapPlan) -> None:
        """Change modules and parameters before they are sharded."""

    def separate(self, plan: WrapPlan) -> set[int]:
        """Return the ids of those parameters in blocks that may share flat buffers only with each other."""
        return set()

    def kind(self, parameter: torch.nn.Parameter) -> StorageKind | None:
        """Return the storage kind that this extension wants for a block's parameter, None if it wants none."""

    def connect(self, plan: WrapPlan) -> None:
        """Called when everything is sharded, for example to add observers."""


def kind_of(extensions: list[Extension]) -> Any:
    """Return a function that returns the first storage kind that an extension gives for a parameter, or None."""

    def ask(parameter: torch.nn.Parameter) -> StorageKind | None:
        return next((kind for each in extensions if (kind := each.kind(parameter)) is not None), None)

    return ask
