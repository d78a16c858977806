"""Save, load and verify the part of Trainer's checkpoints that all ranks write: weights and optimizer state."""

from __future__ import annotations

import contextlib
import functools
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
from ..checkpoint.folder import ADDED, add_checksums, delete_oldest, deleting_older, find_damage_of_added, lock, remove
from ..checkpoint.folder import find_damage as find_damage_in
from ..checkpoint.load_state import load_parts
from ..checkpoint.manifest import NAME as MANIFEST
from ..checkpoint.manifest import Manifest
from ..checkpoint.save_state import let_others_save, save_state
from ..engine.optim import compat as checks
from ..engine.runtime.world import current_world
from ..engine.sharding.parameter import is_part
from ..engine.wrap.accelerator import ranks_per_row

_log = logging.getLogger("hf_bmtrain")
_REFERENCE = "hf_bmtrain"
_EARLIER = "earlier-"  # prefixed to the name of a checkpoint while a new checkpoint of its step is saved


def optimizer_state_needs_BMTrainCallback(identity: str, folder: str) -> dict[str, str]:
    """Return a reference to the checkpoint that has the optimizer state, as a dict. `torch.load` calls this function.

    `TrainerCheckpoints.save` writes the optimizer state to separate files of the checkpoint. Trainer's `optimizer.pt`
    contains, in place of the state, a pickled call of this function. BMTrainCallback allows `torch.load` to make this
    call (see `allow_references`).

    In a program without BMTrainCallback, `torch.load` (with weights_only=True, as in Trainer) refuses the call. Its
    error contains the name of this function, which tells the user what is missing. Without the error, Trainer would
    load the parameter groups, and train on with an empty optimizer state.

    Args:
        identity: the id that `TrainerCheckpoints.save` gave the checkpoint.
        folder: the path of the checkpoint's folder when it was saved.

    Returns:
        A dict with the keys "id" and "folder".
    """
    return {"id": identity, "folder": folder}


def allow_references() -> None:
    """Allow `torch.load` to read the `optimizer.pt` of a sharded model, from now on in this process.

    Such a file contains no optimizer state, but a reference to the state in a checkpoint, pickled as a call of
    `optimizer_state_needs_BMTrainCallback`. This function allows `torch.load(weights_only=True)` to make that call.
    BMTrainCallback, which loads the state itself, calls this function. (torch's context manager `safe_globals` is not
    used, because leaving such a context also ends permissions that were given elsewhere.)
    """
    torch.serialization.add_safe_globals([optimizer_state_needs_BMTrainCallback])


class _Reference(dict):
    """The dict that `optimizer.pt` contains in place of the optimizer state: the "id" and "folder" of a checkpoint.

    It is pickled as a call of `optimizer_state_needs_BMTrainCallback`. In a program without BMTrainCallback,
    `torch.load` refuses to make this call, and its error contains the name of the function.
    """

    def __reduce__(self):
        return optimizer_state_needs_BMTrainCallback, (self["id"], self["folder"])


class TrainerCheckpoints:
    """Saves and loads the weights and the optimizer state of a sharded model in Trainer's checkpoint folders.

    `save` creates the folder `checkpoint-N` with this state, flushed to disk and checksummed. Then Trainer adds its own
    files; its `optimizer.pt` contains only the parameter groups and a reference to the folder. `complete` adds the
    checksums of Trainer's files and deletes older checkpoints. (Trainer itself would delete them on rank 0 while other
    ranks still write.) `withdraw` ends a save that is not completed.

    If a checkpoint of step N exists already, `save` renames it to `earlier-checkpoint-N`. `complete` deletes the
    renamed checkpoint. `withdraw` gives it the name `checkpoint-N` again if the new checkpoint is incomplete.

    On resuming, with any number of ranks, Trainer loads `optimizer.pt`, and then `load` loads the weights and the
    optimizer state. Creating the object is collective: every rank must do it.

    Args:
        model: the sharded model.
        optimizer: its optimizer, not wrapped by Accelerate. It must have at least one sharded parameter.
        args: the trainer's TrainingArguments.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, args: Any) -> None:
        if checks.check(optimizer) is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} has no parameter of a sharded model: create it from "
                "model.parameters() after auto_wrap."
            )
        self._model, self._optimizer, self._args = model, optimizer, args
        self._run = current_world().control.broadcast_object(uuid.uuid4().hex)
        self._reference: dict[str, Any] | None = None
        # The user's save_total_limit, while it is replaced by None so that Trainer deletes no checkpoints (`_refer`).
        self._limit: int | None = None

    @property
    def staged(self) -> Path | None:
        """The folder of the checkpoint that is being saved: from `save` to `complete` or `withdraw`, otherwise None."""
        return None if self._reference is None else Path(self._reference["folder"])

    def save(self, step: int) -> None:
        """Save weights and optimizer state to the folder checkpoint-`step`, before Trainer writes its own files there.

        The optimizer state is left out if Trainer's `save_only_model` is set. Which weights this method saves depends
        on `writes_own_weights(model)`:

        * True: all weights. Each rank writes its own elements. When Trainer saves the model to the same folder
          afterwards, BMTrainCallback prevents it from writing the weights again.
        * False: only the parameters that are trainable now, and sharded parameters that were trained earlier.
          Afterwards, Trainer saves the model itself, usually with `save_pretrained`.

        Buffers are saved in both cases.

        Collective: every rank must call it. After this call and until `complete` or `withdraw`, the optimizer's
        state_dict() returns only the parameter groups and a reference to the folder, so that Trainer does not write the
        optimizer state a second time, to its `optimizer.pt`. Another `save` before `complete` or `withdraw` does
        nothing.

        Args:
            step: the number of steps that Trainer has made, which is also the number in the folder's name.

        Raises:
            RuntimeError: on every rank, if any rank cannot write.
        """
        if self._reference is not None:
            return
        folder = Path(self._args.output_dir).absolute() / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        identity = f"{self._run}-{folder.name}"
        optimizer = None if self._args.save_only_model else self._optimizer
        world, problem = current_world(), None
        if world.rank == 0:
            try:
                _set_earlier_aside(folder)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        world.raise_everywhere(f"The earlier checkpoint {folder} could not be renamed", problem)
        try:
            save_state(
                folder.parent, self._model, optimizer, extra={"id": identity, "rows": self._rows_per_step()}, step=step,
                trained_only=not writes_own_weights(self._model),
            )  # fmt: skip
        except BaseException:
            if world.rank == 0:
                _settle_earlier(folder)
            raise
        self._refer({"id": identity, "folder": str(folder)})

    def complete(self, best: str | None) -> None:
        """Add checksums of Trainer's files to the new checkpoint, and delete the oldest checkpoints.

        Call it after `save`, when Trainer has written its own files to the checkpoint. Without a `save` before, it does
        nothing. Collective: every rank must call it. Checkpoints are deleted until only `save_total_limit` (Trainer's
        argument) remain. If an older checkpoint cannot be deleted, rank 0 logs a warning.

        Args:
            best: the path of a checkpoint that must not be deleted (the best one, if Trainer tracks it), or None.

        Raises:
            RuntimeError: on every rank, if the checksums cannot be written. No older checkpoint is deleted.
        """
        limit = self._limit
        folder = self._forget()
        if folder is None:
            return
        world, problem = current_world(), None
        world.gather_objects(None)  # wait until every rank has written its random state, which gets a checksum
        if world.rank == 0:
            try:
                add_checksums(folder)
            except (OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                _settle_earlier(folder)
            if problem is None and limit is not None and limit > 0:
                kept = {folder, *([Path(best).absolute()] if best else [])}
                with deleting_older(folder):
                    delete_oldest(_by_step(folder.parent)[::-1], limit, kept, folder)
        world.raise_everywhere(f"The checkpoint {folder} could not be completed", problem)

    def withdraw(self) -> None:
        """End a `save` that is not followed by `complete`, for example because Trainer failed in between.

        Every rank restores the optimizer's own state_dict(), which `save` has replaced. Then rank 0 checks whether
        Trainer has written all of its own files to the checkpoint-N that `save` has created:

        * If some are missing or unreadable, rank 0 deletes checkpoint-N. If `save` had renamed an older checkpoint of
          step N to earlier-checkpoint-N, that checkpoint gets the name checkpoint-N again.
        * Otherwise checkpoint-N is kept, and rank 0 deletes earlier-checkpoint-N if there is one.

        Not collective: ranks do not wait for each other. Without a `save` before, it does nothing.
        """
        folder = self._forget()
        if folder is not None and current_world().rank == 0:
            if folder.is_dir() and _missing(folder):
                remove(folder)
            _settle_earlier(folder)

    def close(self) -> None:
        """Unlock `output_dir`, so that other jobs can save checkpoints to it. Call it when training has ended.

        If `save` was not followed by `complete`, this first calls `withdraw`. Collective: every rank must call it.
        """
        self.withdraw()
        let_others_save(self._args.output_dir)

    def _refer(self, reference: dict[str, Any]) -> None:
        """Replace the optimizer's state_dict() by one that returns only the parameter groups and `reference`.

        Trainer then writes these to its optimizer.pt, instead of the optimizer state.

        reference: the id and the folder of the checkpoint that contains the optimizer state.
        """

        def state_dict() -> dict[str, Any]:
            groups, count = [], 0
            for group in self._optimizer.param_groups:
                numbers = list(range(count, count + len(group["params"])))
                groups.append({**group, "params": numbers})
                count += len(numbers)
            groups[0][_REFERENCE] = _Reference(reference)
            # Trainer must not delete old checkpoints while other ranks still write the new one. It calls state_dict()
            # shortly before it would do so. So remove its save_total_limit here; `_forget` restores the limit.
            if self._args.save_total_limit is not None:
                self._limit, self._args.save_total_limit = self._args.save_total_limit, None
            return {"state": {}, "param_groups": groups}

        instance: Any = self._optimizer
        instance.state_dict = state_dict
        self._reference = reference

    def _forget(self) -> Path | None:
        """End a save: restore the optimizer's own state_dict() and Trainer's `save_total_limit`, which were replaced.

        Returns the folder of the checkpoint that `save` has begun, or None if there is no such checkpoint.
        """
        reference, self._reference = self._reference, None
        if self._limit is not None:
            self._args.save_total_limit, self._limit = self._limit, None
        if reference is None:
            return None
        del self._optimizer.state_dict  # set by `_refer`; without it, the method of the class is used
        return Path(reference["folder"])

    def load(self, folder: str | None) -> None:
        """Load the weights and optimizer state of the checkpoint from which Trainer resumes, if `save` wrote them.

        Called when training begins. Collective: every rank must call it.

        Trainer has by then loaded the checkpoint's `optimizer.pt` into the optimizer. This file contains only the
        parameter groups and a reference, which is the id and the folder of the checkpoint. This method removes the
        reference from the optimizer, and loads the optimizer state from the checkpoint's other files. If the checkpoint
        was saved without optimizer state, it is only verified, because Trainer has already loaded the weights.

        With the optimizer state, the parameters and buffers are loaded too. Trainer may have loaded them already, but
        Trainer does not verify checksums. And for a model with adapters, Trainer loads only what PEFT has saved, which
        does not include trained weights of the base model. There are two cases in which the parameters stay as Trainer
        has loaded them:

        * The user has replaced the weight files of the checkpoint by other files. In this case, the buffers, too, stay
          as Trainer has loaded them. (In the second case, the buffers are loaded from the checkpoint.)
        * `save_pretrained` wrote the weights, not `save` (see `writes_own_weights`), and the checkpoint has no
          complete.json, which contains the checksums of these weights. Either the user has deleted this file in order
          to replace the weights, or training ended before `complete` wrote it. A warning is logged.

        The files that Trainer itself wrote are also verified, even those that Trainer loads only after this call.

        Args:
            folder: the checkpoint from which Trainer resumes, or None if Trainer does not resume. With None, nothing is
                loaded, unless the optimizer has a reference because the user's program itself passed the contents of an
                `optimizer.pt` to `optimizer.load_state_dict`. The checkpoint in the reference is then loaded.

        Raises:
            RuntimeError: on every rank, if the checkpoint is incomplete or damaged.
            RuntimeError: on every rank, if the `optimizer.pt` in the checkpoint refers to a different checkpoint.
            RuntimeError: on every rank, if the checkpoint has optimizer state, but Trainer did not load `optimizer.pt`,
                or not on all ranks.
        """
        reference = self._optimizer.param_groups[0].pop(_REFERENCE, None)
        loaded = current_world().gather_objects(reference is not None)
        if any(loaded) and not all(loaded):  # Trainer looks for the files on each rank
            lack = ", ".join(str(rank) for rank, each in enumerate(loaded) if not each)
            raise RuntimeError(
                f"The optimizer.pt of {folder or 'a checkpoint'} was loaded on {sum(loaded)} of {len(loaded)} ranks, "
                f"but not on rank {lack}. Every rank must be able to read optimizer.pt and scheduler.pt there. If a "
                "network file system shows new files late, start again."
            )
        if reference is None:
            if folder is not None:
                self._verify_without_reference(Path(folder))
            return
        place = Path(folder or reference["folder"])
        if current_world().control.broadcast_object(_identity(place) != reference["id"]):
            _raise_if_damaged(place, _damage)
            raise RuntimeError(
                f"The checkpoint {place} has the optimizer.pt of a different checkpoint, {reference['folder']}. Put "
                f"back the optimizer.pt that was saved with {place.name}, or resume from another checkpoint."
            )
        _raise_if_damaged(place, _damage_of_added)
        saved, rows = _extra(place).get("rows"), self._rows_per_step()
        if saved not in (None, rows) and not self._args.ignore_data_skip and current_world().rank == 0:
            _log.warning(
                "The checkpoint %s was saved by a training run with %d rows per step, but this run has %d rows per "
                "step. Trainer finds its place in the epoch by counting steps, so it will skip some rows or train on "
                "some twice. Set per_device_train_batch_size or gradient_accumulation_steps so that a step has %d "
                "rows.",
                place, saved, rows, saved,
            )  # fmt: skip
        # `load_parts` replaces the parameter groups by those that `save` has stored. Trainer has already loaded newer
        # groups from optimizer.pt, which it wrote after `save`: a scheduler may have changed the groups in between. So
        # put the newer groups back afterwards.
        groups = [{**group} for group in self._optimizer.param_groups]
        # If the user has replaced the checkpoint's weight files, the parameters stay as Trainer has loaded them from
        # the user's files. If `own` is True, these files contain the buffers, too, so the buffers also stay. In all
        # other cases, load the buffers here, because Trainer does not load each rank's own buffers: it loads none for a
        # model with adapters, and those of rank 0 on all ranks for other models.
        own = writes_own_weights(self._model)
        replaced = _weights_were_replaced(place) if own else _weights_may_be_replaced(place)
        load_parts(
            place, self._model, self._optimizer, parameters=not replaced, buffers=not (own and replaced), random=False
        )
        for group, loaded in zip(self._optimizer.param_groups, groups):
            group.update(loaded)

    def load_best(self, folder: str) -> None:
        """Load the weights and buffers that Trainer itself does not load from the best checkpoint.

        At the end of training, Trainer loads the best checkpoint. For a model with adapters, it loads only the
        adapters, which `save_pretrained` has written. This method loads what `save` has written to the checkpoint: the
        buffers and all trained weights, such as weights of the base model that the user has unfrozen. If
        `writes_own_weights(model)` is True, nothing is loaded here, because Trainer has loaded all weights.

        With `save_only_model`, `save` has not written such weights. They then keep their last values, as in a program
        without BMTrainCallback. Collective: every rank must call it.

        Args:
            folder: the best checkpoint.

        Raises:
            RuntimeError: on every rank, if the checkpoint is damaged.
        """
        if writes_own_weights(self._model):
            return
        if has_file(folder, MANIFEST):
            load_parts(folder, self._model, parameters=True, buffers=True, random=False)

    def _rows_per_step(self) -> int:
        """Return the number of rows (sequences) that all ranks together process for one step of the optimizer."""
        groups = current_world().size // ranks_per_row(self._model)
        batches = 1 if self._args.accelerator_config.split_batches else groups
        return self._args.train_batch_size * self._args.gradient_accumulation_steps * batches

    def _verify_without_reference(self, place: Path) -> None:
        """Verify a checkpoint if Trainer has loaded no reference to optimizer state from the `optimizer.pt` in it.

        Collective: every rank must call it. Raises RuntimeError if the checkpoint is damaged, or if `save` has written
        optimizer state to it: Trainer should then have loaded the reference. Checkpoints without checksums, which
        Trainer alone has saved, are not verified.

        place: the folder of the checkpoint.
        """
        if not has_file(place, MANIFEST):
            return
        _raise_if_damaged(place, _damage)
        if _on_first_rank(place, lambda: any(name.startswith("optimizer") for name in Manifest.read(place).files)):
            raise RuntimeError(
                f"The checkpoint {place} contains optimizer state that was not loaded, because optimizer.pt or "
                "scheduler.pt is missing, or is not the file that was saved. Restore the file, or resume from another "
                "checkpoint."
            )


def writes_own_weights(model: Any) -> bool:
    """Return whether the ranks can write the weights of `model` to a checkpoint without calling `save_pretrained`.

    They can if three conditions are met: `save_pretrained` is transformers' own method, it would save the full model
    and not only adapters, and `tp_size` has split no weight over ranks. Each rank then writes its own elements.
    """
    method = getattr(type(model), "save_pretrained", None)
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    parted = any(map(is_part, model.parameters()))  # ranks save such parts in a form that from_pretrained cannot load
    return method is transformers.PreTrainedModel.save_pretrained and not adapted and not parted


# -- which checkpoints are intact -----------------------------------------------------------------------------------


def newest_complete(output_dir: str | os.PathLike) -> Path | None:
    """Return the newest intact checkpoint of Trainer in `output_dir`, after verifying its checksums.

    Collective: every rank must call it. Each rank verifies a part of the bytes. Damaged and incomplete checkpoints are
    skipped and logged. A checkpoint of the stock Trainer has no checksums. It counts as intact if its
    trainer_state.json, which Trainer writes last, can be read.

    Returns:
        The folder; None if `output_dir` does not exist or has no checkpoint.

    Raises:
        RuntimeError: there are checkpoints, but none is intact.
    """
    world = current_world()
    folders = world.on_first_rank(f"The folder {output_dir} could not be read", lambda: _by_step(output_dir))
    for folder in folders:
        if not has_file(folder, MANIFEST) and _on_first_rank(folder, functools.partial(_missing, folder)) is None:
            return folder  # a complete checkpoint that Trainer has written without this package
        problem = find_damage(folder)
        if problem is None:
            return folder
        if world.rank == 0:
            _log.warning("the checkpoint %s is skipped when resuming, because it is not intact: %s", folder, problem)
    if folders:
        raise RuntimeError(
            f"No checkpoint in {output_dir} is intact; the log says what is wrong with each. Restore one from a copy, "
            "or train without resume_from_checkpoint."
        )
    return None


def has_file(folder: str | os.PathLike, name: str) -> bool:
    """Return on every rank whether rank 0 finds a file in a checkpoint, so that all ranks take the same decision.

    A rank must not decide by itself whether it calls a collective: on a network file system, some ranks may see a new
    file later than others. Collective: every rank must call it.

    Args:
        folder: the checkpoint.
        name: the file's name. Only checkpoints that Trainer has written without this package lack "manifest.json".

    Raises:
        RuntimeError: on every rank, if rank 0 cannot read the folder.
    """
    return _on_first_rank(folder, lambda: (Path(folder) / name).exists())


def _on_first_rank(folder: str | os.PathLike, look: Callable[[], Any]) -> Any:
    return current_world().on_first_rank(f"The checkpoint {folder} could not be read", look)


def find_damage(folder: Path) -> str | None:
    """Verify a checkpoint from which Trainer is to resume. Return a description of its damage, or None if it is intact.

    Collective: every rank must call it. Each rank verifies a part of the files, and all ranks return the same
    description: that of the lowest rank that has found damage.

    folder: the checkpoint.
    """
    return _ask(folder, _damage)


def _ask(folder: Path, look: Callable[[Path, int, int], str | None]) -> str | None:
    """Search a checkpoint for damage on every rank. Return a description of the damage, or None if no rank finds any.

    The result is the same on every rank: the description from the lowest rank that finds damage. Collective: every rank
    must call it.

    folder: the checkpoint.
    look: a function that searches for damage. It gets the folder, this rank and the number of ranks, and returns a
        description of the damage, or None if there is none.
    """
    world = current_world()
    try:
        problem = look(folder, world.rank, world.size)
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems = [text for text in world.gather_objects(problem) if text is not None]
    return problems[0] if problems else None


def set_aside_incomplete(output_dir: str | os.PathLike) -> None:
    """Rename incomplete checkpoints in `output_dir`, so that `resume_from_checkpoint=True` does not find them.

    Rank 0 alone calls this, when a Trainer is created. A checkpoint that `TrainerCheckpoints.save` has written is
    incomplete if a file that Trainer adds is missing or cannot be read, for example because the job was killed.

    * An incomplete checkpoint-N is renamed to incomplete-checkpoint-N. Folders with such names that earlier calls have
      left are deleted first.
    * An earlier-checkpoint-N is the previous checkpoint of step N, which `save` renamed when it saved step N again. It
      is deleted if the new checkpoint-N is complete. Otherwise it gets the name checkpoint-N again.

    If another job has locked `output_dir`, nothing is changed, because that job may still be writing the incomplete
    checkpoint. A warning says so.

    output_dir: the folder that contains Trainer's checkpoints.
    """
    reasons = {folder: _missing(folder) for folder in _by_step(output_dir) if _identity(folder) is not None}
    incomplete = {folder: missing for folder, missing in reasons.items() if missing is not None}
    earlier = [*Path(output_dir).absolute().glob(f"{_EARLIER}{PREFIX_CHECKPOINT_DIR}-*")]
    if not incomplete and not earlier:
        return
    root = Path(output_dir).resolve()
    keeper = current_world().kept.get(root)
    held = None
    # If this process holds the folder's lock already, do not lock the folder a second time: a process loses all its
    # locks on a file when it closes any descriptor of that file.
    if keeper is None or keeper.lock is None:
        try:
            held = lock(root)
        except RuntimeError as error:
            _log.warning(
                "Some checkpoints in %s are incomplete, or still have a temporary name (earlier-checkpoint-N). Usually "
                "they are renamed at this point, so that resume_from_checkpoint=True finds only complete checkpoints. "
                "They keep their names now, because another job has locked the folder and may be writing them. Until "
                "that job has ended, resume only from the path of a complete checkpoint. The error was: %s",
                root, error,
            )  # fmt: skip
            return
    try:
        _set_aside(output_dir, incomplete, earlier)
    finally:
        if held is not None:
            held.close()


def _set_aside(output_dir: str | os.PathLike, incomplete: dict[Path, str], earlier: list[Path]) -> None:
    """Rename and delete checkpoints, as described in the docstring of `set_aside_incomplete`.

    Called by `set_aside_incomplete`, after it has locked the folder.

    output_dir: the folder that contains Trainer's checkpoints.
    incomplete: {incomplete checkpoint: why it cannot be used, for the log}.
    earlier: the folders that `_set_earlier_aside` has renamed to earlier-checkpoint-N.
    """
    for left in Path(output_dir).absolute().glob(f"incomplete-{PREFIX_CHECKPOINT_DIR}-*") if incomplete else ():
        remove(left)
    for folder, missing in incomplete.items():
        aside = folder.with_name(f"incomplete-{folder.name}")
        os.rename(folder, aside)
        _log.warning(
            "Trainer did not finish saving the checkpoint %s (%s). It was renamed to %s, so that "
            "resume_from_checkpoint=True uses the newest of the others. The renamed folder will be deleted when "
            "another incomplete checkpoint is found",
            folder, missing, aside.name,
        )  # fmt: skip
    for each in earlier:
        _settle_earlier(each.with_name(each.name.removeprefix(_EARLIER)))


def _set_earlier_aside(folder: Path) -> None:
    """Rename the checkpoint `folder`, if it exists, from checkpoint-N to earlier-checkpoint-N.

    Called before a new checkpoint of step N is saved. `_settle_earlier` later deletes the renamed checkpoint, or
    renames it back. Symbolic links are not renamed: `save_state` replaces the link, and does not change the checkpoint
    behind it.
    """
    _settle_earlier(folder)  # an earlier save of this step may not have been completed
    earlier = folder.with_name(_EARLIER + folder.name)
    if folder.is_dir() and not folder.is_symlink() and not earlier.exists():
        os.rename(folder, earlier)


def _settle_earlier(folder: Path) -> None:
    """Delete the earlier checkpoint that `_set_earlier_aside` has renamed, or rename it back.

    The earlier checkpoint is deleted if `folder`, the new checkpoint of the same step, is complete. If `folder` does
    not exist, the earlier checkpoint is renamed to `folder`. If `folder` is incomplete, or no earlier checkpoint was
    renamed, nothing is changed. Errors are logged.
    """
    earlier = folder.with_name(_EARLIER + folder.name)
    if not earlier.exists():
        return
    if not folder.exists():
        try:
            os.rename(earlier, folder)
        except OSError as error:
            _log.warning(
                "the new checkpoint %s was not saved completely. The earlier checkpoint of the same step, which had "
                "been renamed to %s, could not be renamed back. To use it, rename it to %s by hand. The error was: %s",
                folder, earlier.name, folder.name, error,
            )  # fmt: skip
    elif _missing(folder) is None:
        remove(earlier, folder)


def _by_step(output_dir: str | os.PathLike) -> list[Path]:
    """Return the folders of Trainer's checkpoints in `output_dir`, in descending order of their steps."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in Path(output_dir).absolute().iterdir():
            prefix, _, step = path.name.rpartition("-")
            if prefix == PREFIX_CHECKPOINT_DIR and step.isdecimal() and path.is_dir():
                found.append((int(step), path))
    return [path for _, path in sorted(found, reverse=True)]


def _missing(folder: Path) -> str | None:
    """Return why a checkpoint is incomplete, or None if Trainer has finished writing its own files to it.

    The result describes the first error in reading these files. trainer_state.json, which Trainer writes last, is
    always read. optimizer.pt and scheduler.pt are read only if `TrainerCheckpoints.save` wrote optimizer state to the
    checkpoint. In this case, the ranks' random states (rng_state*.pth) are also checked, unless complete.json exists.
    """
    try:
        json.loads((folder / "trainer_state.json").read_bytes())
        manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
        if manifest is not None and any(name.startswith("optimizer") for name in manifest.files):
            allow_references()
            for path in (folder / "optimizer.pt", folder / "scheduler.pt"):
                try:
                    torch.load(path, map_location="cpu", weights_only=True)
                except pickle.UnpicklingError:  # a scheduler's state may have objects that torch.load refuses
                    if path.name != "scheduler.pt":
                        raise
                    zipfile.ZipFile(path).close()  # raises an error if the file is incomplete
            if not (folder / ADDED).exists():  # `complete` did not run, so a rank's random state may be missing
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


def _weights_were_replaced(checkpoint: Path) -> bool:
    """Return whether the user has replaced a checkpoint's weights by files that a model.safetensors.index.json lists.

    In this case, rank 0 logs a warning that Trainer has loaded these files, which have no checksums and cannot be
    verified. Collective: every rank must call it.
    """
    index = checkpoint / "model.safetensors.index.json"

    def look() -> bool:
        saved = [name for name in Manifest.read(checkpoint).files if name.startswith("model")]
        return index.name not in saved and index.exists() and not all((checkpoint / name).exists() for name in saved)

    replaced = _on_first_rank(checkpoint, look)
    if replaced and current_world().rank == 0:
        _log.warning(
            "The weights in the checkpoint %s are not those that were saved: weight files are missing, and the index "
            "%s lists other files instead. Trainer has loaded these other files, but they cannot be verified, because "
            "they have no checksums. If you did not replace the weights, resume from another checkpoint",
            checkpoint, index.name,
        )  # fmt: skip
    return replaced


def _weights_may_be_replaced(checkpoint: Path) -> bool:
    """Return whether the user may have replaced weights that `save_pretrained` wrote, such as adapters.

    The result is False if complete.json exists, because its checksums have already been compared with the files.
    Otherwise it is True, and rank 0 logs a warning. Collective: every rank must call it.
    """
    replaced = not has_file(checkpoint, ADDED)
    if replaced and current_world().rank == 0:
        _log.warning(
            "The checkpoint %s has no %s with the checksums of its files, so it is unknown whether its weight files "
            "were replaced. The parameters keep the values that Trainer has loaded from them. Trained parameters that "
            "are only in trained*.safetensors, such as those of the base of a model with adapters, are not loaded. To "
            "load them, call bmt.load_state with this folder",
            checkpoint, ADDED,
        )  # fmt: skip
    return replaced


def _damage_of_added(folder: Path, rank: int, size: int) -> str | None:
    return find_damage_of_added(folder) if rank == 0 else None


def _raise_if_damaged(folder: Path, look: Callable[[Path, int, int], str | None]) -> None:
    """Search a checkpoint for damage on every rank, and raise RuntimeError on every rank if any rank finds some.

    Collective: every rank must call it.

    folder: the checkpoint.
    look: a function that searches for damage. It gets the folder, this rank and the number of ranks, and returns a
        description of the damage, or None if there is none.
    """
    problem = _ask(folder, look)
    if problem is not None:
        raise RuntimeError(f"The checkpoint {folder} is damaged: {problem}. Resume from another checkpoint.")


def _identity(folder: Path) -> str | None:
    """Return the id that `TrainerCheckpoints.save` stored in a checkpoint, or None if something else saved it."""
    return _extra(folder).get("id")


def _extra(folder: Path) -> dict[str, Any]:
    """Return the dict that `TrainerCheckpoints.save` stored as `extra` in a checkpoint, or {} if there is none.

    Its keys are "id", which identifies the checkpoint, and "rows", the number of sequences per optimizer step.
    """
    try:
        extra = small_state.read(folder)["ranks"][0]["extra"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}
    return extra if isinstance(extra, dict) else {}
