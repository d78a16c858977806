"""Gather the full weights on rank 0, the only rank on which Trainer saves them."""

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
    """The full weights of `model`, which `gather` collects on rank 0 before Trainer saves them there.

    Trainer calls `model.save_pretrained` only on rank 0, where a collective would hang. This class therefore replaces
    the model's `save_pretrained` (or `state_dict`, if the model has no `save_pretrained`). While the gathered weights
    are up to date, the replacement uses them on rank 0. On other ranks, `save_pretrained` then does nothing, and
    `state_dict` raises an error. If the gathered weights are out of date, the replacement calls the model's own method,
    which is collective.

    A model has one StagedWeights, which all its Trainers use: `StagedWeights.of` returns it.

    Args:
        model: the sharded model.
    """

    def __init__(self, model: Any) -> None:
        self.model, self._state, self._versions = model, None, None
        self._in_checkpoint = False
        self.written: Path | None = None  # the folder in which the current weights and config are already saved, if any
        if hasattr(model, "save_pretrained"):
            self._save_pretrained = type(model).save_pretrained
            model.save_pretrained = self.save_pretrained
        else:
            model.state_dict = self.state_dict

    @staticmethod
    def of(model: Any) -> StagedWeights | None:
        """Return the StagedWeights that was created for `model`, or None if there is none.

        A model has at most one StagedWeights, which the BMTrainCallback of another Trainer may already have created. So
        BMTrainCallback calls this before it creates one. The StagedWeights is found through the method that it has
        replaced in `model`: `save_pretrained`, or `state_dict` if the model has no `save_pretrained`.

        Args:
            model: the sharded model.
        """
        name = "save_pretrained" if hasattr(model, "save_pretrained") else "state_dict"
        found = getattr(vars(model).get(name), "__self__", None)
        return found if isinstance(found, StagedWeights) and found.model is model else None

    def gather(self, checkpoint: bool) -> None:
        """Gather the full weights on rank 0, unless weights that were gathered earlier are still up to date.

        Called before Trainer saves the model: for a checkpoint, at the end of training, or before `save_model`.
        Collective: every rank must call it. With one rank, nothing is gathered: the model's own `save_pretrained` (or
        `state_dict`) then runs when Trainer saves, and gets the full weights by itself.

        Args:
            checkpoint: whether the weights are for a checkpoint of Trainer. If so, `save_pretrained` does not convert
                their keys to an older format, because Trainer loads checkpoints without converting keys.
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
        """Whether the gathered weights are up to date: no weight has changed since `gather`. Equal on all ranks.

        Buffers (`register_buffer`) may have changed: rank 0 saves their present values.
        """
        return self._versions is not None and self._versions == self._present()

    def _present(self) -> list[int | None]:
        """Return torch's counter of writes (`version`) of each flat buffer of the model, to detect later writes.

        The list also contains None for each parameter that is not sharded, because it was added after `auto_wrap`.
        """
        buffers = dict.fromkeys(getattr(parameter, "buffer", parameter) for parameter in self.model.parameters())
        return [getattr(each, "version", None) for each in buffers]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the weights that `gather` has collected on rank 0. Other ranks do nothing.

        There are two exceptions:

        * If the current weights were already saved to `save_directory`, no rank does anything.
        * If the collected weights are out of date, or a `state_dict` is passed, this calls the model's own
          `save_pretrained`, which is collective.

        Call it on every rank, because of the second exception.
        """
        if self.written is not None and Path(save_directory).absolute() == self.written:
            return None
        given = inspect.signature(self._save_pretrained).bind(self.model, save_directory, *args, **kwargs)
        options = given.arguments.pop("kwargs", {})
        options.update(given.arguments)
        options.pop("self", None)
        if self._in_checkpoint and "save_original_format" in inspect.signature(self._save_pretrained).parameters:
            # Trainer loads checkpoints without converting keys, so weights under keys of an older format would be lost.
            options.setdefault("save_original_format", False)
        if self.fresh and options.get("state_dict") is None:
            if self._state is None:
                return None
            options["state_dict"] = self._current(self._state)  # a new dictionary, because save_pretrained empties it
            # PEFT also calls state_dict() of single modules, so set the full parameters in all modules meanwhile.
            with shown_plain(self.model, self._full_params(self._state)):
                return self._save_pretrained(self.model, **options)
        return self._save_pretrained(self.model, **options)

    def _current(self, state: Mapping[str, torch.Tensor]) -> OrderedDict[str, torch.Tensor]:
        """Return a copy of `state` with the present values of the model's buffers (`register_buffer`).

        A buffer may have changed since `gather`, for example by `torch.optim.swa_utils.update_bn`. It need not be
        gathered again, because every rank has all its elements.

        state: the full weights by name, as `gather` has collected them on this rank.
        """
        current, copies = OrderedDict(state), {}
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if name in state:  # `state` lacks buffers that are not persistent or that a hook has removed
                if buffer not in copies:
                    copies[buffer] = buffer.detach().to("cpu", copy=True)
                current[name] = copies[buffer]
        return current

    def _full_params(self, state: Mapping[str, torch.Tensor]) -> dict[DistributedParameter, torch.nn.Parameter]:
        """Return the parameters to set in the model while `save_pretrained` runs.

        The result is {sharded parameter: parameter with its full values}. The full values share the memory of `state`.
        A sharded parameter that is not in `state`, because a hook has removed it, is mapped to itself.

        state: the full weights by name, as `gather` has collected them on this rank.
        """
        return {
            piece: torch.nn.Parameter(state[name], requires_grad=False) if name in state else piece
            for name, piece in self.model.named_parameters()
            if isinstance(piece, DistributedParameter)
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights that `gather` has collected on rank 0.

        This replaces the `state_dict` of a model without `save_pretrained`, because Trainer calls `state_dict` only on
        rank 0, and the model's own method is collective. If the gathered weights are out of date, or if arguments are
        passed, the model's own method is called.

        Raises RuntimeError if the gathered weights are up to date and this is not rank 0.
        """
        if args or kwargs or not self.fresh:
            return type(self.model).state_dict(self.model, *args, **kwargs)
        if self._state is None:
            raise RuntimeError(
                "The weights were gathered on rank 0, for Trainer to save, and this is not rank 0. To get a "
                f"state_dict on every rank, call `{type(self.model).__name__}.state_dict(model)` on all ranks."
            )
        return self._current(self._state)
