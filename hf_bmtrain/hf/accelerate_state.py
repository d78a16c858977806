"""Save and load Accelerate's checkpoints of a sharded model; each rank writes only its own elements."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint import small_state
from ..checkpoint.folder import find
from ..checkpoint.load_state import load_state
from ..checkpoint.save_state import let_others_save, save_state
from ..engine.base.arguments import expect_kind
from ..engine.base.files import delete_abandoned, staged_folder
from ..engine.runtime.world import World, current_world
from ..engine.wrap.accelerator import check_accelerator


def shard_checkpoints(accelerator: Accelerator) -> Accelerator:
    """Make `accelerator.save_state` and `accelerator.load_state` work with a sharded model.

    Call this function once, before either method is called. Both methods become collective: every rank must call them.

    Each rank writes its own elements of weights and optimizer state, so nothing is gathered, and any number of ranks
    can load the checkpoint. Accelerate writes everything else: schedulers, scaler, samplers, registered objects and
    random states. All files are first written to a temporary folder, which is checksummed and then renamed into place.

    There are two ways to name checkpoints. In both, older checkpoints are deleted only when the new one is complete.

    * By default, `save_state(folder)` saves each checkpoint as a new subfolder of `folder` (checkpoint-1, checkpoint-2
      and so on), and then deletes the older subfolders. `load_state(folder)` loads the newest intact checkpoint in
      `folder`.
    * With `ProjectConfiguration(automatic_checkpoint_naming=True)`, `save_state()` saves each checkpoint as a new
      folder `project_dir`/checkpoints/checkpoint_N. It keeps the newest `total_limit` checkpoints, or all checkpoints
      if `total_limit` is None. `load_state()` loads the newest intact checkpoint.

    Args:
        accelerator: the Accelerator whose two methods are replaced.

    Returns:
        `accelerator`.

    Example::

        accelerator = bmt.hf.shard_checkpoints(Accelerator())
        model, optimizer = accelerator.prepare(model, optimizer)  # after auto_wrap
        accelerator.save_state("checkpoint")
        accelerator.load_state("checkpoint")
    """
    expect_kind("accelerator", accelerator, Accelerator, "an accelerate.Accelerator")
    states = _AcceleratorStates(accelerator)
    accelerator.save_state, accelerator.load_state = states.save, states.load
    return accelerator


class _AcceleratorStates:
    """Contains the methods with which `shard_checkpoints` replaces `save_state` and `load_state` of an Accelerator.

    With automatic naming (`ProjectConfiguration(automatic_checkpoint_naming=True)`), a checkpoint is the folder
    `project_dir`/checkpoints/checkpoint_`iteration`. Without automatic naming, the caller passes a folder. Each save
    creates a new subfolder in it (checkpoint-1, checkpoint-2 and so on), and then deletes the older checkpoints.

    Args:
        accelerator: the Accelerator.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._save_state, self._load_state = accelerator.save_state, accelerator.load_state

    def save(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Path:
        """Save models, optimizers and the rest of Accelerate's state as a checkpoint.

        Collective: every rank must call it. If it raises an error, earlier checkpoints do not change.

        Args:
            output_dir: the folder in which a subfolder is created for the checkpoint. It is ignored if Accelerate
                names checkpoints (`automatic_checkpoint_naming`), and required otherwise.
            safe_serialization: has no effect on the weights, which are always saved as safetensors.
            **options: passed to Accelerate's `save_state`.

        Returns:
            The new checkpoint's folder with automatic naming, otherwise `output_dir` as an absolute path.

        Raises:
            ValueError: `output_dir` is None without automatic naming.
            RuntimeError: on every rank, if a rank cannot write.
            RuntimeError: on every rank, if the folder that automatic naming chose already exists.
        """
        world, configuration = self._begin("accelerator.save_state"), self._accelerator.project_configuration
        automatic, limit, iteration = (
            configuration.automatic_checkpoint_naming, configuration.total_limit, configuration.iteration
        )  # fmt: skip
        if not automatic and output_dir is None:
            raise ValueError(
                "accelerator.save_state: pass output_dir, or set ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        root = self._automatic_root() if automatic else Path(output_dir or "").resolve()
        name = f"checkpoint_{iteration}" if automatic else None

        def add(folder: Path) -> None:
            with self._left_to_accelerate():
                self._save_state(str(folder), safe_serialization, **options)

        keep: int | None = 1
        if automatic:
            keep = None if limit is None else max(1, limit)  # as in Accelerate, a limit of 0 keeps the new checkpoint
        # If `_fresh` creates a temporary folder, the end of this context renames that folder to `root`.
        with ExitStack() as stack:
            fresh = _on_first_rank(world, lambda: _refuse_existing(root / name) if name else _fresh(root, stack))
            try:
                saved = save_state(
                    fresh or root, self._model(), self._optimizers(), extra={"step": self._accelerator.step},
                    step=iteration if automatic else None, keep=keep, name=name, add=add,
                )  # fmt: skip
                if fresh is not None:
                    let_others_save(fresh)
                    _on_first_rank(world, stack.close)
            except BaseException:
                configuration.iteration = iteration
                raise
        return saved.folder if automatic else root

    def load(self, input_dir: str | None = None, load_kwargs: dict | None = None, **options: Any) -> None:
        """Load the newest intact checkpoint in `input_dir`.

        Collective: every rank must call it. Damaged checkpoints are skipped, and the log says why. A folder in
        Accelerate's own format is loaded by Accelerate.

        Args:
            input_dir: the folder that was passed to `save_state`, or the folder of one checkpoint. If Accelerate names
                checkpoints (`automatic_checkpoint_naming`), None means the folder `project_dir`/checkpoints.
            load_kwargs: passed to Accelerate's `load_state`.
            **options: passed to Accelerate's `load_state`.

        Raises:
            ValueError: `input_dir` is None, and either automatic naming is off or there is no checkpoint yet.
            RuntimeError: on every rank, if no checkpoint is intact, or if a rank cannot load it.
        """
        world, configuration = self._begin("accelerator.load_state"), self._accelerator.project_configuration
        automatic = input_dir is None and configuration.automatic_checkpoint_naming
        if not automatic and input_dir is None:
            return self._load_state()  # raises an error that asks for input_dir
        root = self._automatic_root() if automatic else Path(input_dir or "").expanduser().resolve()
        if not _on_first_rank(world, lambda: any(find(root))):
            if automatic:
                raise ValueError(
                    f"accelerator.load_state: there is no checkpoint in {root}. Pass input_dir, or start without "
                    "load_state."
                )
            return self._load_state(input_dir, load_kwargs, **options)
        resumed = load_state(root, self._model(), self._optimizers(), random=False)
        assert resumed is not None, root
        with world.raising_everywhere(f"accelerator.load_state: {resumed.folder} cannot be loaded"):
            with self._left_to_accelerate():
                self._load_state(str(resumed.folder), load_kwargs, **options)
            # Accelerate itself reads the step from the file with this rank's random state. A rank that did not exist
            # when the checkpoint was saved has no such file. So take the step that was saved as `extra`.
            if isinstance(resumed.extra, dict):
                self._accelerator.step = resumed.extra.get("step", self._accelerator.step)
            small_state.restore_random(world, small_state.read(resumed.folder), resumed.step)
        if automatic:
            used = _on_first_rank(world, lambda: re.findall(r"checkpoint_(\d+)\b", "\n".join(os.listdir(root))))
            configuration.iteration = max(configuration.iteration, 1 + max(map(int, used), default=-1))
        return None

    def _begin(self, occasion: str) -> World:
        world = current_world()
        check_accelerator(self._accelerator.state, world.size)
        world.barrier(occasion)
        return world

    def _automatic_root(self) -> Path:
        return Path(self._accelerator.project_dir, "checkpoints").resolve()

    def _model(self) -> torch.nn.Module:
        models = [
            model.module if isinstance(model, DistributedDataParallel) else model for model in self._accelerator._models
        ]
        return models[0] if len(models) == 1 else torch.nn.ModuleList(models)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self._accelerator._optimizers]

    @contextmanager
    def _left_to_accelerate(self) -> Iterator[None]:
        """Context manager inside which Accelerate's own `save_state` and `load_state` leave out models and optimizers.

        This class saves and loads the models and optimizers. Hooks that the user has registered for saving or loading
        still get the models. Hooks for saving also get the full weights.
        """
        accelerator, configuration = self._accelerator, self._accelerator.project_configuration
        models, optimizers, automatic = (
            accelerator._models, accelerator._optimizers, configuration.automatic_checkpoint_naming
        )  # fmt: skip
        if not (accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook):
            accelerator._models = []  # no hook needs models; without them, Accelerate does not gather weights
        accelerator._optimizers, configuration.automatic_checkpoint_naming = [], False
        # Accelerate passes a list of the weights to save, or of the models to load, to each hook, and afterwards saves
        # or loads what is still in the list. Two more hooks empty the lists. They are registered last, so that the
        # user's hooks run first and get the full lists.
        handles = [
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear()),
            accelerator.register_load_state_pre_hook(lambda models, folder: models.clear()),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            accelerator._models, accelerator._optimizers = models, optimizers
            configuration.automatic_checkpoint_naming = automatic


def _on_first_rank(world: World, call: Any) -> Any:
    """Call `call` on rank 0 only, and return its result on all ranks. Collective: every rank must call it.

    Raises RuntimeError on all ranks if `call` raises OSError or ValueError.
    """
    found = problem = None
    if world.rank == 0:
        try:
            found = call()
        except (OSError, ValueError) as error:
            problem = str(error)
    world.raise_everywhere("accelerator.save_state or load_state failed", problem)
    return world.control.broadcast_object(found)


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise ValueError(
            f"{folder} already exists. To continue the numbering of the existing checkpoints, call load_state() before "
            "the first save_state(), or pass the next free number as ProjectConfiguration(iteration=...)."
        )


def _fresh(folder: Path, stack: ExitStack) -> Path | None:
    """Create a temporary folder that is renamed to `folder` when `stack` is closed, so `folder` is never incomplete.

    If `folder` already has contents, they are kept, and no temporary folder is created. Instead, temporary folders that
    killed processes have left beside `folder` are deleted. The caller then saves a checkpoint inside `folder`. Returns
    the temporary folder, or None if none was created.
    """
    if folder.exists() and os.listdir(folder):
        delete_abandoned(folder)
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    return stack.enter_context(staged_folder(folder))
