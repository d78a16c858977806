"""Whole weights, gathered by every rank ahead of a save that only rank 0 takes part in."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

from ..runtime.world import current_world
from ..sharding.state_dict import gather_state_dict


class StagedWeights:
    """The weights of `model` as they were at `gather`, for `model.save_pretrained` on rank 0.

    Trainer saves on rank 0 alone, where no collective may stand. While the staged weights are those of the model,
    `save_pretrained` (of a model without one: `state_dict`) takes them; at other times both are what they were,
    collective. Other ranks' `save_pretrained` has nothing to do then.
    """

    def __init__(self, model: Any) -> None:
        self.model, self._state, self._versions = model, None, None
        self._in_checkpoint = False
        if hasattr(model, "save_pretrained"):
            self._save_pretrained = type(model).save_pretrained
            model.save_pretrained = self.save_pretrained
        else:
            model.state_dict = self.state_dict

    def gather(self, checkpoint: bool) -> None:
        """Stage the present weights. Collective. checkpoint: they are read back by this library, not published."""
        if current_world().size > 1 and not self.fresh:
            self.drop()
            self._state = self._gather()
            self._versions = self._present()
        self._in_checkpoint = checkpoint

    def _gather(self) -> OrderedDict | None:
        world = current_world()
        world.assemble("gather_state")
        state = gather_state_dict(self.model, keep=world.rank == 0)
        return state if world.rank == 0 else None

    def drop(self) -> None:
        self._state, self._versions, self._in_checkpoint = None, None, False

    @property
    def fresh(self) -> bool:
        """Whether what is staged are the present weights; the same on every rank."""
        return self._versions is not None and self._versions == self._present()

    def _present(self) -> list[int]:
        return [buffer.version for buffer in dict.fromkeys(p.buffer for p in self.model.parameters())]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's own `save_pretrained`, with the staged weights where they are fresh."""
        given = inspect.signature(self._save_pretrained).bind(self.model, save_directory, *args, **kwargs)
        options = given.arguments.pop("kwargs", {})
        options.update(given.arguments)
        options.pop("self", None)
        if self._in_checkpoint and "save_original_format" in inspect.signature(self._save_pretrained).parameters:
            # Trainer loads a checkpoint as it lies; the hub's older layouts would leave weights unread.
            options.setdefault("save_original_format", False)
        if self.fresh and options.get("state_dict") is None:
            if self._state is None:
                return None
            options["state_dict"] = OrderedDict(self._state)  # save_pretrained empties what it is given
        return self._save_pretrained(self.model, **options)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """For models without `save_pretrained`, of which Trainer asks the state_dict on rank 0 alone."""
        if args or kwargs or not self.fresh:
            return type(self.model).state_dict(self.model, *args, **kwargs)
        if self._state is None:
            raise RuntimeError(
                "The weights were gathered to rank 0 for Trainer to save. For a state_dict on every rank call "
                f"`{type(self.model).__name__}.state_dict(model)` on all of them."
            )
        return OrderedDict(self._state)
