"""The sharded part of Trainer's checkpoints: weights and optimizer, written by all ranks before Trainer's files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint import small_state
from ..checkpoint.folder import ADDED, add_checksums, delete_oldest, find_damage_of_added, remove
from ..checkpoint.folder import find_damage as find_damage_in
from ..checkpoint.load_state import load_state
from ..checkpoint.manifest import NAME as MANIFEST
from ..checkpoint.manifest import Manifest
from ..checkpoint.save_state import let_others_save, save_state
from ..engine.optim import compat as checks
from ..engine.runtime.world import current_world

_log = logging.getLogger("hf_bmtrain")
_REFERENCE = "hf_bmtrain"


class TrainerCheckpoints:
    """Saves and loads weights and an element-wise `optimizer` of a sharded model in Trainer's folders.

    `save` publishes `checkpoint-N` with everything that is sharded, flushed to disk and checksummed, before Trainer
    adds its own files; Trainer's `optimizer.pt` has the parameter groups and a reference. `complete` adds checksums of
    Trainer's files, and deletes older checkpoints: Trainer would on rank 0, while others still write. On resuming,
    Trainer loads `optimizer.pt`, and then `load` the rest, for any number of ranks.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, args: Any) -> None:
        if checks.check(optimizer) is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds no parameter of a sharded model: make it from model.parameters() "
                "after auto_wrap."
            )
        self._model, self._optimizer, self._args = model, optimizer, args
        self._run = current_world().control.broadcast_object(uuid.uuid4().hex)
        self._reference: dict[str, Any] | None = None
        self._limit: int | None = None  # save_total_limit, while Trainer must not see it

    @property
    def staged(self) -> Path | None:
        """The checkpoint that Trainer is about to complete."""
        return None if self._reference is None else Path(self._reference["folder"])

    def save(self, step: int) -> None:
        """Publish the sharded part of `checkpoint-step`, which Trainer is about to write. Collective.

        Until `complete` or `withdraw`, the optimizer's state_dict() contains the reference and no state. Raises
        RuntimeError on every rank if one cannot write.
        """
        if self._reference is not None:
            return
        folder = Path(self._args.output_dir).absolute() / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        identity = f"{self._run}-{folder.name}"
        optimizer = None if self._args.save_only_model else self._optimizer
        save_state(
            folder.parent, self._model, optimizer, extra={"id": identity}, step=step,
            trained_only=not writes_own_weights(self._model),
        )  # fmt: skip
        self._refer({"id": identity, "folder": str(folder)})

    def complete(self, best: str | None) -> None:
        """Add checksums of Trainer's files to the checkpoint, then delete older ones. Collective.

        Args:
            best: the checkpoint that is not deleted in any case, or None.
        """
        limit = self._limit
        folder = self._forget()
        if folder is None:
            return
        world, problem = current_world(), None
        world.gather_objects(None)  # every rank has written its random state
        if world.rank == 0:
            try:
                add_checksums(folder)
                if limit is not None and limit > 0:
                    kept = {folder, *([Path(best).absolute()] if best else [])}
                    delete_oldest(_by_step(folder.parent)[::-1], limit, kept)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        world.raise_everywhere(f"The checkpoint {folder} could not be completed", problem)

    def withdraw(self) -> None:
        """Delete the files of `save` if Trainer did not complete the checkpoint (on rank 0)."""
        folder = self._forget()
        if folder is not None and current_world().rank == 0 and folder.is_dir() and _missing(folder):
            remove(folder)

    def close(self) -> None:
        """Let other jobs save to the folder."""
        self.withdraw()
        let_others_save(self._args.output_dir)

    def _refer(self, reference: dict[str, Any]) -> None:
        """Make the optimizer's state_dict() what Trainer is to write: parameter groups and a reference."""

        def state_dict() -> dict[str, Any]:
            groups, count = [], 0
            for group in self._optimizer.param_groups:
                numbers = list(range(count, count + len(group["params"])))
                groups.append({**group, "params": numbers})
                count += len(numbers)
            groups[0][_REFERENCE] = dict(reference)
            if self._args.save_total_limit is not None:  # Trainer has written its arguments, and deletes soon
                self._limit, self._args.save_total_limit = self._args.save_total_limit, None
            return {"state": {}, "param_groups": groups}

        instance: Any = self._optimizer
        instance.state_dict = state_dict
        self._reference = reference

    def _forget(self) -> Path | None:
        """Make the optimizer's state_dict() its own again. Returns the checkpoint that was staged."""
        reference, self._reference = self._reference, None
        if self._limit is not None:
            self._args.save_total_limit, self._limit = self._limit, None
        if reference is None:
            return None
        del self._optimizer.state_dict  # that of the instance
        return Path(reference["folder"])

    def load(self, *folders: str | os.PathLike | None, resumed: bool) -> None:
        """Load the checkpoint that Trainer's reference names, if it has loaded one. Collective.

        Weights are loaded too, even if Trainer has loaded them: it verifies nothing. The checksums of Trainer's own
        files are compared, of those as well that it loads later.

        Args:
            *folders: where to look, before the place where it was saved.
            resumed: whether Trainer has resumed from a checkpoint.

        Raises:
            RuntimeError: the checkpoint is missing, or damaged.
        """
        reference = self._optimizer.param_groups[0].pop(_REFERENCE, None)
        if reference is None:
            if resumed:
                self._verify_without_reference([Path(folder) for folder in folders if folder])
            return
        places = [Path(folder) for folder in (*folders, reference["folder"]) if folder]
        same = next((place for place in places if _identity(place) == reference["id"]), None)
        place = current_world().control.broadcast_object(same)
        if place is None:
            raise RuntimeError(
                f"The sharded part of checkpoint {reference['folder']} is missing; looked in "
                f"{', '.join(map(str, places))}. Where the checkpoint was moved, resume with bmt.hf.Trainer, or set "
                "args.resume_from_checkpoint to it."
            )
        _raise_if_damaged(place, _damage_of_added)
        # Trainer's are later: a schedule may change the groups between `save` and Trainer's own writing.
        groups = [{**group} for group in self._optimizer.param_groups]
        load_state(place, self._model, self._optimizer, weights=writes_own_weights(self._model), random=False)
        for group, loaded in zip(self._optimizer.param_groups, groups):
            group.update(loaded)

    def _verify_without_reference(self, places: list[Path]) -> None:
        """Verify a checkpoint from which Trainer has loaded all that it needs, or whose reference is damaged."""
        found = next((place for place in places if (place / MANIFEST).exists()), None)
        place = current_world().control.broadcast_object(found)
        if place is None:
            return  # Trainer's own
        _raise_if_damaged(place, _damage)
        if any(name.startswith("optimizer") for name in Manifest.read(place).files):
            raise RuntimeError(
                f"The checkpoint {place} has the state of an optimizer, which was not loaded: optimizer.pt or "
                "scheduler.pt is missing, or not the one that was saved."
            )


def writes_own_weights(model: Any) -> bool:
    """Return whether `save_pretrained` of `model` is that of transformers and saves the whole model, not adapters."""
    method = getattr(type(model), "save_pretrained", None)
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    return method is transformers.PreTrainedModel.save_pretrained and not adapted


# -- which checkpoints are whole --------------------------------------------------------------------------------------


def newest_complete(output_dir: str | os.PathLike) -> Path | None:
    """Return the newest checkpoint of Trainer in `output_dir` whose every byte is what was saved. Collective.

    Each rank reads a part of the files. Checkpoints that are passed over are logged.

    Returns:
        The folder, or None if there is none of this library's, the newest has no sharded part, or `output_dir` is
        missing.

    Raises:
        RuntimeError: no checkpoint is intact.
    """
    world = current_world()
    folders = world.control.broadcast_object(_by_step(output_dir) if world.rank == 0 else None)
    for folder in folders:
        if not (folder / MANIFEST).exists() and not _missing(folder):
            return folder  # Trainer's own, of one rank or another library
        problem = find_damage(folder)
        if problem is None:
            return folder
        if world.rank == 0:
            _log.warning("resume passes over %s: %s", folder, problem)
    if folders:
        raise RuntimeError(f"No checkpoint in {output_dir} is whole; the log names what is wrong with each.")
    return None


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if nothing is. Collective; each rank reads a part of the files."""
    return _ask(folder, _damage)


def _ask(folder: Path, look: Callable[[Path, int, int], str | None]) -> str | None:
    """Return what `look` finds wrong with a checkpoint on the first rank that finds anything. Collective.

    look: takes the folder, this rank and the number of ranks.
    """
    world = current_world()
    try:
        problem = look(folder, world.rank, world.size)
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems = [text for text in world.gather_objects(problem) if text is not None]
    return problems[0] if problems else None


def set_aside_incomplete(output_dir: str | os.PathLike) -> None:
    """Rename checkpoints that Trainer did not finish, so that `resume_from_checkpoint=True` finds an earlier one.

    Deletes those that were renamed before. Not collective; for rank 0.
    """
    reasons = {folder: _missing(folder) for folder in _by_step(output_dir) if _identity(folder) is not None}
    incomplete = {folder: missing for folder, missing in reasons.items() if missing is not None}
    for left in Path(output_dir).absolute().glob(f"incomplete-{PREFIX_CHECKPOINT_DIR}-*") if incomplete else ():
        remove(left)
    for folder, missing in incomplete.items():
        aside = folder.with_name(f"incomplete-{folder.name}")
        os.rename(folder, aside)
        _log.warning("%s was not completed (%s): renamed to %s", folder, missing, aside.name)


def _by_step(output_dir: str | os.PathLike) -> list[Path]:
    """Return the folders of Trainer's checkpoints, that of the largest step first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in Path(output_dir).absolute().iterdir():
            prefix, _, step = path.name.rpartition("-")
            if prefix == PREFIX_CHECKPOINT_DIR and step.isdigit() and path.is_dir():
                found.append((int(step), path))
    return [path for _, path in sorted(found, reverse=True)]


def _missing(folder: Path) -> str | None:
    """Return what Trainer has not finished writing, None if everything that it needs to resume can be read."""
    try:
        json.loads((folder / "trainer_state.json").read_bytes())
        manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
        if manifest is not None and any(name.startswith("optimizer") for name in manifest.files):
            for path in (folder / "optimizer.pt", folder / "scheduler.pt"):
                torch.load(path, map_location="cpu", weights_only=True)
            if not (folder / ADDED).exists():  # ranks write their random states when they like
                ranks = [f"_{rank}" for rank in range(manifest.world_size)] if manifest.world_size > 1 else [""]
                for rank in ranks:
                    zipfile.ZipFile(folder / f"rng_state{rank}.pth").close()
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _damage(folder: Path, rank: int, size: int) -> str | None:
    missing = _missing(folder)
    if missing is not None:
        return f"Trainer did not finish writing it ({missing})"
    return find_damage_in(folder, rank, size)


def _damage_of_added(folder: Path, rank: int, size: int) -> str | None:
    return find_damage_of_added(folder) if rank == 0 else None


def _raise_if_damaged(folder: Path, look: Callable[[Path, int, int], str | None]) -> None:
    """Raise RuntimeError on every rank if `look` finds anything wrong. Collective."""
    problem = _ask(folder, look)
    if problem is not None:
        raise RuntimeError(f"The checkpoint {folder} is damaged: {problem}")


def _identity(folder: Path) -> str | None:
    """Return the id that a checkpoint was saved with."""
    try:
        return small_state.read(folder)["ranks"][0]["extra"]["id"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
