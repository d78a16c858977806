"""The base class of extensions, which change how a model is wrapped. `wrap` calls their methods at fixed points."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime.world import World
from ..sharding.storage import StorageKind
from .find import Chain


class WrapPlan(NamedTuple):
    """A model that is being wrapped, and its division into blocks and other modules.

    Attributes:
        model: the outermost module.
        world: the ranks that share the parameters.
        layers: the modules that are or become blocks, which are sharded one by one.
        root: all modules that are neither in `layers` nor inside one of them.
        shared: ids of parameters that are used by several of `layers`, or by one of them and by a module of `root`.
            They are not sharded with a block, but together with the parameters of `root`.
        compiled: whether the blocks are compiled.
        late: whether the model was wrapped before. If so, only the parameters that were added since are sharded.
    """

    model: torch.nn.Module
    world: World
    layers: Chain
    root: Chain
    shared: set[int]
    compiled: bool
    late: bool


class Extension:
    """Base class of extensions, which change how a model is wrapped. The methods do nothing by default.

    `wrap` calls the methods in the order of their definition here: the first method of every extension, then the second
    method of every extension, and so on. If the model was wrapped before, so that `wrap` shards only new parameters, it
    does not call `choose`, `prepare`, `separate` and `kind`.
    """

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        """Check whether the model can be wrapped with this extension. If not, raise ValueError with the reason.

        `wrap` calls this first, before it chooses the blocks or changes the model. All ranks must come to the same
        result.

        Args:
            model: the model to check.
            late: whether the model was wrapped before, so that only parameters that were added since are sharded.
        """

    def recognizes(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this extension can shard `parameter`, whose class is not torch's own Parameter.

        If no extension can shard it, `wrap` raises ValueError.
        """
        return False

    def facts(self, model: torch.nn.Module) -> dict[str, str]:
        """Return facts about the model that must be equal on all ranks, as {name: description}.

        `wrap` compares them between the ranks before it changes the model, and raises RuntimeError if they differ.
        """
        return {}

    def choose(self, plan: WrapPlan) -> None:
        """Decide what to change in `plan.model`, for example which parameters to quantize, but do not change it yet.

        Raise ValueError if this extension cannot be applied to the model. `admit` raises errors that do not depend on
        the division into blocks; it is called earlier, when there is no `plan` yet.
        """

    def prepare(self, plan: WrapPlan) -> None:
        """Change modules and parameters of `plan.model`, as `choose` has decided, before they are sharded.

        For example, change how linear layers compute.
        """

    def separate(self, plan: WrapPlan) -> set[int]:
        """Return the ids of parameters that must not share a flat buffer with the other parameters of their block.

        `wrap` forms the union of the sets that all extensions return. A parameter in the union shares flat buffers only
        with parameters of the same block that are in the union, too. As always, they must also have the same dtype,
        `requires_grad` and storage kind.

        plan: the model that is being wrapped, and its division into blocks and other modules.
        """
        return set()

    def kind(self, parameter: torch.nn.Parameter) -> StorageKind | None:
        """Return how to store a parameter of a block (quantized, for example), or None to let other extensions decide.

        `wrap` calls this for each parameter of a block when it shards the block, after `prepare`.
        """

    def connect(self, plan: WrapPlan) -> None:
        """Make changes that need the sharded model, after the parameters of `plan.model` were sharded.

        For example, replace the forwards of modules, or add observers (objects whose methods are called during each
        step).
        """


def kind_of(extensions: list[Extension]) -> Any:
    """Combine the methods `kind` of all extensions into one function, which `shard_places` calls for each parameter.

    A StorageKind determines how a parameter is stored, for example quantized.

    Args:
        extensions: the extensions, in the order in which they are asked.

    Returns:
        A function that takes a parameter and returns its StorageKind: the first result of an extension that is not
        None, or None if there is no such result.
    """

    def ask(parameter: torch.nn.Parameter) -> StorageKind | None:
        return next((kind for each in extensions if (kind := each.kind(parameter)) is not None), None)

    return ask
