"""The optimizer's state in a Trainer checkpoint: one file per rank, in addition to Trainer's."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import torch

from ..optim import checks
from ..runtime.world import current_world
from ..sharding.store import write_atomically

_REFERENCE = "hf_bmtrain"


class OptimizerFiles:
    """Saves and loads the state of an element-wise `optimizer` over slices, rank by rank.

    Trainer writes `optimizer.pt` on rank 0 alone. With several ranks that file contains the parameter groups and a
    reference to the checkpoint, and `optimizer_rank<r>.pt` the state of rank r. The ranks' files are written before
    Trainer's, because Trainer deletes older checkpoints at the end of a save: one is complete at any time. On resuming,
    Trainer loads `optimizer.pt`, and then `load` the state. With one rank Trainer's file contains everything.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        whole_state = checks.check(optimizer)
        if whole_state is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds no parameter of a sharded model: make it from model.parameters() "
                "after auto_wrap."
            )
        self._optimizer, self._whole_state = optimizer, whole_state
        self._reference: dict[str, Any] | None = None
        self._run = current_world().control.broadcast_object(uuid.uuid4().hex)
        self._handle = optimizer.register_state_dict_post_hook(self._leave_out_state, prepend=True)

    def close(self) -> None:
        self._handle.remove()

    def save(self, folder: str) -> None:
        """Write this rank's file of the checkpoint `folder`, which Trainer is about to write. Collective.

        All ranks' files are complete when this returns. Until `keep` or `withdraw`, the optimizer's state_dict()
        contains the reference and no state. Raises RuntimeError on every rank if one cannot write.
        """
        world = current_world()
        if world.size == 1 or self._reference is not None:
            return
        reference = {"id": f"{self._run}-{Path(folder).name}", "folder": os.path.abspath(folder), "ranks": world.size}
        with self._whole_state.local():
            state = self._optimizer.state_dict()
        problem = None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_atomically({"id": reference["id"], "state_dict": state}, _file(folder))
        except (OSError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._reference = reference
        if problem is not None:
            self.withdraw()
        world.raise_everywhere(f"The optimizer's state of checkpoint {folder} could not be written", problem)

    def keep(self) -> None:
        """Keep the files: Trainer has written the rest of the checkpoint."""
        self._reference = None

    def withdraw(self) -> None:
        """Delete what `save` wrote, if Trainer did not write the checkpoint."""
        if self._reference is None:
            return
        folder, self._reference = self._reference["folder"], None
        _file(folder).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files are there, or the folder is gone
            os.rmdir(folder)

    def _leave_out_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict | None:
        if self._reference is None:
            return None
        groups = [dict(group) for group in state_dict["param_groups"]]
        groups[0][_REFERENCE] = dict(self._reference)
        return {"state": {}, "param_groups": groups}

    def load(self, *folders: str | None) -> None:
        """Load this rank's file, from its original folder or `folders`, if Trainer has loaded a reference.

        Raises RuntimeError for another number of ranks, or if the file is missing.
        """
        reference = self._optimizer.param_groups[0].pop(_REFERENCE, None)
        if reference is None:
            return
        world = current_world()
        if reference["ranks"] != world.size:
            raise RuntimeError(
                f"The checkpoint {reference['folder']} holds the optimizer of {reference['ranks']} ranks, this run has "
                f"{world.size}: resume with {reference['ranks']} processes."
            )
        places = [_file(folder) for folder in (reference["folder"], *folders) if folder]
        for place in filter(Path.is_file, places):
            saved = torch.load(place, map_location="cpu", weights_only=True)
            if saved["id"] == reference["id"]:
                with self._whole_state.local():  # the groups that Trainer has loaded; a schedule may have changed them
                    groups = self._optimizer.state_dict()["param_groups"]
                self._optimizer.load_state_dict({"state": saved["state_dict"]["state"], "param_groups": groups})
                return
        raise RuntimeError(
            f"rank {world.rank}: the optimizer's state of checkpoint {reference['folder']} is missing; looked for "
            f"{', '.join(map(str, places))}. Where the checkpoint was moved, set args.resume_from_checkpoint to it."
        )


def _file(folder: str) -> Path:
    return Path(folder) / f"optimizer_rank{current_world().rank}.pt"
