"""The door by which a feature enters the wrapping of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime.world import World
from ..sharding.storage import StorageKind
from .find import Chain


class WrapPlan(NamedTuple):
    """A model that is being wrapped.

    layers: the modules that become blocks. root: the modules outside them. shared: ids of parameters that several
    blocks use, or a block and the root: they are sharded with the root. compiled: whether the blocks are compiled.
    late: the model was wrapped before, and parameters were added since.
    """

    model: torch.nn.Module
    world: World
    layers: Chain
    root: Chain
    shared: set[int]
    compiled: bool
    late: bool


class Extension:
    """One feature of a wrapped model. Every method does nothing by default.

    They are called in the order in which they stand here, each for all extensions before the next.
    """

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        """Raise ValueError, with the reason, if the model cannot be wrapped. late: see `WrapPlan`."""

    def recognizes(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this feature shards a parameter of a foreign class."""
        return False

    def facts(self, model: torch.nn.Module) -> dict[str, str]:
        """Return what must be equal on all ranks."""
        return {}

    def choose(self, plan: WrapPlan) -> None:
        """Decide what this feature does with the model, and change nothing. Raise ValueError if it cannot."""

    def prepare(self, plan: WrapPlan) -> None:
        """Change modules and parameters before they are sharded."""

    def separate(self, plan: WrapPlan) -> set[int]:
        """Return the ids of parameters that share no buffer with others."""
        return set()

    def kind(self, parameter: torch.nn.Parameter) -> StorageKind | None:
        """Return the storage of a parameter of a block, None for plain elements."""

    def connect(self, plan: WrapPlan) -> None:
        """Finish, after everything is sharded."""


def kind_of(extensions: list[Extension]) -> Any:
    """Return the function that asks the extensions, in their order, for the storage of a parameter."""

    def ask(parameter: torch.nn.Parameter) -> StorageKind | None:
        return next((kind for each in extensions if (kind := each.kind(parameter)) is not None), None)

    return ask
