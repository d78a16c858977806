"""The base class of extensions, which change how a model is wrapped. `wrap` calls their methods at fixed points."""

from __future__ import annotations

from typing import NamedTuple

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
        compiled: whether `wrap` compiles the blocks. Not meaningful if `late` is True.
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
    method of every extension, and so on. If the model was wrapped before, `wrap` shards only new parameters, and calls
    neither `choose`, `prepare`, `separate` nor `kind`.
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
        """Return whether this extension can shard `parameter` although it is not an ordinary torch.nn.Parameter.

        An example is a quantized weight. `wrap` calls this for ordinary parameters, too, and ignores the result. For
        any other parameter that is not sharded yet, `wrap` raises ValueError unless an extension returns True. (A
        SourcedParameter, whose values are read when it is sharded, counts as ordinary.)
        """
        return False

    def facts(self, model: torch.nn.Module) -> dict[str, str]:
        """Return properties of the model that must be equal on all ranks, as {name: description}.

        For example, an extension for quantized weights returns the format of each weight. `wrap` calls this on every
        rank before it changes the model, and raises RuntimeError if the results differ between ranks.
        """
        return {}

    def choose(self, plan: WrapPlan) -> None:
        """Decide what to change in `plan.model`, for example which parameters to quantize, but do not change it yet.

        Raise ValueError if this extension cannot be applied to the model, for example if no block has a layer that it
        could change. Make checks that need no `plan` in `admit`, which is called before the blocks are chosen.
        """

    def prepare(self, plan: WrapPlan) -> None:
        """Change modules and parameters of `plan.model`, as `choose` has decided, before they are sharded.

        For example, change how linear layers compute.
        """

    def separate(self, plan: WrapPlan) -> set[int]:
        """Return the ids of parameters that must not share a flat buffer with the other parameters of their block.

        An extension for adapters returns the ids of the adapters' parameters, for example. In each block, these are
        then stored in other flat buffers than the base weights, even if both have the same dtype and `requires_grad`.

        `wrap` joins the sets that all extensions return into one. Parameters of a block that are in the joined set may
        share a buffer with each other, even if different extensions returned them. As for all parameters, dtype,
        `requires_grad` and storage kind must fit (see `shard_places`).

        plan: the model that is being wrapped, and its division into blocks and other modules.
        """
        return set()

    def kind(self, parameter: torch.nn.Parameter) -> StorageKind | None:
        """Return how to store a parameter of a block, for example quantized. Return None to leave this undecided.

        `wrap` calls this for each parameter of a block when it shards the block, after `prepare`. It asks the
        extensions in order, and uses the first StorageKind that one returns. If all return None, it uses the attribute
        `storage_kind` of the parameter or, without this attribute, PLAIN (elements are stored as they are).
        """

    def connect(self, plan: WrapPlan) -> None:
        """Make changes that need the sharded model, after the parameters of `plan.model` were sharded.

        For example, replace the forwards of modules, or add observers (objects whose methods are called during each
        step). If `plan.late` is True, `connect` was already called for this model, when the model was first wrapped.
        """
