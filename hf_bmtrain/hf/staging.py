"""Weights that all ranks gather before a save that rank 0 performs alone."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..engine.runtime.world import current_world
from ..engine.sharding.parameter import DistributedParameter
from ..engine.sharding.state_dict import gather_state_dict
from ..features.parity.plain import shown_plain


class StagedWeights:
    """The full weights of `model` at the time of `gather`, for `model.save_pretrained` on rank 0.

    Trainer saves on rank 0 alone, where a collective would hang. While the staged weights are the present ones,
    `save_pretrained` (or `state_dict`, for a model without it) uses them on rank 0, and `save_pretrained` does nothing
    on other ranks. Otherwise both are the model's own, and collective.
    """

    def __init__(self, model: Any) -> None:
        self.model, self._state, self._versions = model, None, None
        self._in_checkpoint = False
        self.written: Path | None = None  # a folder that has the present weights and the config already
        if hasattr(model, "save_pretrained"):
            self._save_pretrained = type(model).save_pretrained
            model.save_pretrained = self.save_pretrained
        else:
            model.state_dict = self.state_dict

    def gather(self, checkpoint: bool) -> None:
        """Stage the present weights. Collective.

        Args:
            checkpoint: whether they are for a checkpoint of Trainer, not for publication.
        """
        world = current_world()
        if world.size > 1 and not self.fresh:
            self.drop()
            world.barrier("gather_state")
            state = gather_state_dict(self.model, keep=world.rank == 0)
            self._state = state if world.rank == 0 else None
            self._versions = self._present()
        self._in_checkpoint = checkpoint

    def drop(self) -> None:
        self._state, self._versions, self._in_checkpoint, self.written = None, None, False, None

    @property
    def fresh(self) -> bool:
        """True if the staged weights are the present ones; the same on every rank."""
        return self._versions is not None and self._versions == self._present()

    def _present(self) -> list[int]:
        return [buffer.version for buffer in dict.fromkeys(p.buffer for p in self.model.parameters())]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `save_pretrained`, with the staged weights if they are fresh.

        Does nothing for the folder `written`.
        """
        if self.written is not None and Path(save_directory).absolute() == self.written:
            return None
        given = inspect.signature(self._save_pretrained).bind(self.model, save_directory, *args, **kwargs)
        options = given.arguments.pop("kwargs", {})
        options.update(given.arguments)
        options.pop("self", None)
        if self._in_checkpoint and "save_original_format" in inspect.signature(self._save_pretrained).parameters:
            # Trainer loads a checkpoint without converting keys; older layouts of the hub would leave weights unread.
            options.setdefault("save_original_format", False)
        if self.fresh and options.get("state_dict") is None:
            if self._state is None:
                return None
            options["state_dict"] = OrderedDict(self._state)  # save_pretrained empties what it is given
            with shown_plain(
                self.model, self._full_params(self._state)
            ):  # PEFT asks modules for their state dicts as well
                return self._save_pretrained(self.model, **options)
        return self._save_pretrained(self.model, **options)

    def _full_params(self, state: Mapping[str, torch.Tensor]) -> dict[DistributedParameter, torch.nn.Parameter]:
        """Return the full parameters, over the memory of `state`; the shard of one that a hook has removed from it."""
        return {
            piece: torch.nn.Parameter(state[name], requires_grad=False) if name in state else piece
            for name, piece in self.model.named_parameters()
            if isinstance(piece, DistributedParameter)
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Replace `state_dict` of a model without `save_pretrained`, which Trainer calls on rank 0 alone."""
        if args or kwargs or not self.fresh:
            return type(self.model).state_dict(self.model, *args, **kwargs)
        if self._state is None:
            raise RuntimeError(
                "The weights were gathered to rank 0 for Trainer to save. For a state_dict on every rank call "
                f"`{type(self.model).__name__}.state_dict(model)` on all of them."
            )
        return OrderedDict(self._state)
