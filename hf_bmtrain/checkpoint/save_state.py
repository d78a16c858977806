"""`save_state`: save everything needed to resume training. Each rank writes its own elements into shared files."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..engine.base.arguments import expect_callable, expect_flag, expect_kind, expect_number
from ..engine.base.files import flush
from ..engine.runtime.world import World, current_world, wait_loader
from ..faults.watch import Watch
from . import small_state
from .entries import (
    MODEL,
    TRAINED,
    Entry,
    check_arguments,
    file_base,
    listed,
    model_entries,
    optimizer_entries,
    optimizers_of,
    was_trained,
)
from .folder import ADDED, find, is_reserved, lock, prune, publish, stage, write_manifest
from .header import FilePlan, plan_files
from .host_copy import HostMemory, Snapshot
from .manifest import NAME as MANIFEST
from .manifest import Checked, Manifest
from .ranges import Part, checksums, write_file, write_parts

_log = logging.getLogger("hf_bmtrain")
_PACKAGES = ("hf_bmtrain", "torch", "transformers", "accelerate")
_SECONDS = 1800  # how long, in seconds, the thread that writes a checkpoint waits for a message of another rank
# The interval, in seconds, at which a waiting thread checks whether the other rank's process has ended. It need not be
# short, because most launchers end all processes as soon as one has failed.
_GONE_SECONDS = 5.0


@torch.inference_mode(False)  # copies made in inference mode would have no version counters, which `Snapshot` reads
def save_state(
    folder: str | os.PathLike,
    model: torch.nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    trained_only: bool = False,
    non_blocking: bool = False,
    name: str | None = None,
    add: Callable[[Path], None] | None = None,
) -> SavingState:
    """Save a checkpoint to `folder`/checkpoint-`step`, from which `load_state` resumes training.

    Collective: every rank must call it. Only `extra`, and the files that `add` writes, may differ between ranks. The
    checkpoint contains the weights, buffers, optimizer state, schedulers, loss scale, the random generators of every
    rank, and the choice of the layers that compute in float8. Sharded tensors are not gathered: each rank writes its
    own elements into the files, so `folder` must be on a file system that all ranks share.

    Hugging Face's `from_pretrained` can load a transformers model from the checkpoint's folder (`model*.safetensors`
    and `config.json`), except in these cases:

    * The model is a PEFT model.
    * The checkpoint was saved with `trained_only`.
    * `tp_size` has split a weight on its columns (dimension 1, as in RowParallelLinear). Such a weight is stored as
      (tp_size, rows, columns / tp_size), which only `load_state` with the same `tp_size` can load.

    `optimizer*.safetensors` contain the optimizer state in the parameters' shapes.

    The files are written to a temporary folder, flushed to disk, checksummed, and renamed into place; only then are
    older checkpoints deleted. If the job is killed, earlier checkpoints are intact. If an older checkpoint cannot be
    deleted, the new one is saved all the same, and rank 0 logs a warning that names both. No other job may save to
    `folder` while this process runs.

    Args:
        folder: the folder of the checkpoints.
        model: the model.
        optimizer: an OptimManager, an optimizer, or a sequence of optimizers, with parameters of `model`. None saves no
            optimizer state.
        scheduler: one or several objects with a `state_dict`, or None. Schedulers of an OptimManager are always saved.
        extra: data of this rank, which `load_state` returns as `extra` of its result: tensors, numbers, strings, lists
            and dicts.
        step: the training step, which is stored in the checkpoint and is part of its default name. None uses one more
            than the step of the newest intact checkpoint in `folder`, or 1 if there is none.
        keep: the number of checkpoints to keep in `folder`, including this one, whatever their names. The
            checkpoints saved first are deleted first. Damaged checkpoints are neither counted nor deleted. None keeps
            all. The next save tries again to delete checkpoints that could not be deleted.
        trained_only: whether to leave out the weights that are not trained, such as the base model under PEFT adapters.
            Of the model, True saves only the persistent buffers, the parameters that require a gradient now, and
            sharded parameters that were trained earlier but are frozen now. They are written to `trained*.safetensors`
            instead of `model*.safetensors`. The optimizer state is saved as usual. `load_state` does not change the
            parameters that were left out, so load their values into the model before you call `load_state`.
        non_blocking: whether to return before the values are saved, and to let a thread copy them to host memory and
            write them. The next optimizer step waits for the copies. Before you change weights other than by an
            optimizer step, call `SavingState.wait`. The first call for a folder allocates host memory for this rank's
            values (page-locked if there is a GPU); later calls reuse it. Errors of the thread are raised on all ranks
            by `wait`, or by the next `save_state` or `load_state` for the folder.
        name: the name of the checkpoint's folder, without a slash. It must not begin with "tmp-" or a dot, contain
            ".replaced-", or be "manifest.json". None uses checkpoint-`step`. An older checkpoint with the same name is
            replaced. `load_state` finds checkpoints of any name; the newest is the one saved last, whatever its name
            and step.
        add: a function that writes additional files of the checkpoint. It is called on every rank, with the path of an
            empty folder of that rank's own, before `save_state` returns (even with `non_blocking`). The files of all
            ranks become part of the checkpoint. If several ranks write files with the same name, only the file of the
            lowest rank is saved. A file is not saved if `save_state` itself writes a file with the same name, such as
            config.json. The exceptions are manifest.json and complete.json: saving fails if `add` writes a file with
            one of these names.

    Returns:
        A `SavingState`, whose `folder` is the checkpoint's folder.

    Raises:
        RuntimeError: on every rank, if saving fails on one rank.
        RuntimeError: on every rank, if `step`, `keep`, `trained_only`, `non_blocking`, `name`, or the number of
            optimizers or schedulers differs between ranks, or if only some ranks pass `add`.
        RuntimeError: on every rank, if the previous save to `folder`, with `non_blocking`, failed. Earlier checkpoints
            are not changed in any of these cases.
        TypeError, ValueError: an argument has the wrong type or value.

    Example::

        bmt.save_state("checkpoints", model, manager, step=step, keep=3, non_blocking=True)
    """
    optimizer, scheduler = listed(optimizer, scheduler)
    check_arguments(folder, model, optimizer, scheduler)
    step, keep = _check_options(step, keep, trained_only, non_blocking, name, add)
    world, root = current_world(), Path(folder).resolve()
    world.barrier("save_state")
    keeper = world.kept.setdefault(root, _Keeper())
    facts = {
        "checkpoint still being saved to the folder": keeper.saving and keeper.saving.folder.name,
        "number of optimizers": len(optimizers_of(optimizer)),
        "number of schedulers": len(scheduler),
        "step": step,
        "keep": keep,
        "trained_only": bool(trained_only),
        "non_blocking": bool(non_blocking),
        "name": repr(name),
        "add": "no function" if add is None else "a function",
    }
    world.check_same_on_all_ranks("save_state", facts, {"folder": os.fspath(folder)})
    keeper.finish()
    bases, others = _entries(world, model, optimizer, trained_only)
    files, small = _plan(bases)
    job = _Job(world.rank, world.size, root, files, keep, step, name, adds=add is not None)
    collect_own = functools.partial(small_state.collect_own, world, model, optimizer, others, scheduler, extra)
    state = small_state.collect(world, model, _on_every_rank(world, job, collect_own))
    _begin(world, job, lambda: job.begin(keeper, small, state, model))
    if add is not None:
        _on_every_rank(world, job, lambda: job.add(add), "the function passed as add raised ")
    parts = _parts(bases if not non_blocking else _copy_full_params(bases), files, world)
    wait_loader()
    if non_blocking:
        keeper.saving = SavingState(world, job, Snapshot(parts, world), keeper.memory)
        return keeper.saving
    _raise(job, job.finish(lambda: write_parts(job.staging, parts), _Collectives(world)))
    return SavingState(world, job)


def _check_options(step: Any, keep: Any, trained_only: Any, non_blocking: Any, name: Any, add: Any) -> Any:
    """Raise TypeError or ValueError if an option of `save_state` has the wrong type or value.

    Returns (step, keep), each as an int or None.
    """
    if step is not None:
        step = expect_number("step", step, "at least 0, or None", lambda number: number >= 0, integer=True)
    if keep is not None:
        wanted = "at least 1, or None (the checkpoint being saved counts, and is always kept)"
        keep = expect_number("keep", keep, wanted, lambda number: number >= 1, integer=True)
    expect_flag("trained_only", trained_only)
    expect_flag("non_blocking", non_blocking)
    if name is not None:
        expect_kind("name", name, str, "the name of a folder (str), or None")
        if Path(name).name != name or name == "..":
            raise ValueError(f"name must be the name of a folder inside `folder`, without a slash, not {name!r}")
        if is_reserved(name):
            raise ValueError(
                f"name must not begin with 'tmp-' or a dot, or contain '.replaced-', got {name!r}. Folders with such "
                "names are temporary, and are ignored or deleted"
            )
        if name == MANIFEST:
            raise ValueError(
                f"name must not be {MANIFEST!r}. load_state takes a folder that contains {MANIFEST} for a checkpoint, "
                "so it would find no checkpoint in `folder` any more. Pass another name, or None"
            )
    if add is not None:
        expect_callable("add", add, "a function that takes the empty folder (a Path), or None")
    return step, keep


def _on_every_rank(world: World, job: _Job, function: Callable[[], Any], told: str = "") -> Any:
    """Call `function` on every rank and return its result. If the call fails on one rank, all ranks raise RuntimeError.

    Collective: every rank must call it.

    job: the checkpoint being saved. If a rank fails, the checkpoint's temporary folder is deleted.
    function: a function without arguments. Its result may differ between ranks.
    told: text that is put before an exception of `function` in the error message.
    """
    result = problem = None
    try:
        result = function()
    except Exception as error:
        problem = told + _describe(error)
    _raise(job, _report(world.gather_objects(problem)))
    return result


def _begin(world: World, job: _Job, begin: Callable[[], None]) -> None:
    """Create the checkpoint's temporary folder on rank 0, by calling `begin`, and broadcast its name to all ranks.

    Collective: every rank must call it. The checkpoint's step and number (its place in the order of saving) are
    broadcast too, and all three are stored in `job`. Raises RuntimeError on all ranks if `begin` fails, if a rank does
    not see the folder, or if the ranks' tensors differ in names, dtypes or shapes.

    job: the checkpoint being saved.
    begin: a function without arguments that creates the folder. It is called on rank 0 only.
    """
    problem = None
    if world.rank == 0:
        try:
            begin()
        except Exception as error:
            problem = _describe(error)
    digest = zlib.crc32(b"".join(file.head for file in job.files))
    first, begun, root = world.control.broadcast_object((digest, (job.step, job.number, job.staged), str(job.root)))
    job.step, job.number, job.staged = begun
    if first != digest:
        problem = problem or (
            "the tensors to save differ from rank 0's in names, dtypes or shapes. All ranks must pass the same model "
            "and optimizers"
        )
    elif job.staged and not os.path.isdir(job.staging):
        problem = problem or (
            f"{job.root} lacks the folder {job.staged}, which rank 0 has created in {root}. All ranks must pass the "
            "same folder, on a file system that they share"
        )
    _raise(job, _report(world.gather_objects(problem)))


def let_others_save(folder: str | os.PathLike) -> None:
    """Wait until this job's last checkpoint in `folder` is complete, and unlock the folder for other jobs.

    `save_state` locks the folder until this process ends. Call this function if other jobs are to save to the folder
    while this process still runs. Also call it before you rename the folder, because a call with the new path does
    nothing.

    Collective: every rank must call it. Raises RuntimeError on every rank if saving the last checkpoint failed. Does
    nothing if this job has saved nothing to `folder`.

    folder: the folder that was passed to `save_state`.
    """
    keeper = current_world().kept.pop(Path(folder).resolve(), None)
    if keeper is not None:
        keeper.finish()
        if keeper.lock is not None:
            keeper.lock.close()


class SavingState:
    """The result of `save_state`: a complete checkpoint or, with `non_blocking`, one that a thread is still writing.

    Call `wait` to block until the checkpoint is complete.

    Args:
        world: the ranks that save the checkpoint.
        job: the checkpoint's folders and files.
        snapshot: the values that a thread writes to the files; None if the checkpoint is already complete.
        memory: the host memory to which the thread copies the values; None without `snapshot`.

    Attributes:
        folder: the checkpoint's folder, which exists once the checkpoint is complete.
    """

    def __init__(
        self, world: World, job: _Job, snapshot: Snapshot | None = None, memory: HostMemory | None = None
    ) -> None:
        self.folder = job.final
        self._job, self._world, self._snapshot, self._problem = job, world, snapshot, None
        self._thread = None
        if snapshot is not None:
            self._thread = threading.Thread(target=self._run, args=(snapshot, memory), name=f"save {job.final}")
            try:
                self._thread.start()  # not a daemon thread, so the interpreter does not exit before it ends
            except BaseException:
                snapshot.close()  # otherwise optimizer steps would wait for a copy that no thread makes
                raise

    def _run(self, snapshot: Snapshot, memory: HostMemory) -> None:
        outcome = "was not saved"
        try:
            write = functools.partial(snapshot.write, self._job.staging, memory)
            exchange = _Collectives(self._world) if self._world.size == 1 else _Posts(self._world, self._job)
            self._problem = self._job.finish(write, exchange)
        except Exception as error:  # for example because the launcher's key-value store no longer exists
            self._problem = _describe(error)
            if self._job.rank != 0:  # rank 0 may have completed the checkpoint without this rank
                outcome = "may not have been saved: this rank did not learn from rank 0 whether it was"
        if self._job.published:
            self._problem = None
        if self._problem is not None:  # log the problem now, because the script may end before `wait` raises it
            _log.error("save_state: %s %s. The error was: %s", self._job.final, outcome, self._problem)

    def wait(self) -> None:
        """Block until the checkpoint is complete. Collective: every rank must call it.

        Raises:
            RuntimeError: on every rank, if saving failed on one rank.
        """
        if self._thread is not None and self._snapshot is not None:
            self._thread.join()
            self._snapshot.close()
            self._thread = None
            # The threads have exchanged their errors, so `_problem` is usually the same on every rank. But if the
            # exchange itself failed on one rank, perhaps only that rank has an error. So gather the errors of all
            # ranks, and raise the first one. Raise none if rank 0 has renamed the checkpoint into place: it is then
            # complete, and an error only says that a rank did not learn this.
            reports = self._world.gather_objects((self._job.published, self._problem))
            published, _ = reports[0]
            _raise(self._job, None if published else next((text for _, text in reports if text), None))


class _Keeper:
    """Objects that a process keeps from one `save_state` to the next, for one folder of checkpoints.

    Attributes:
        lock: on rank 0, the open file whose lock keeps other jobs from saving to the folder. None before the first
            save, if the file system does not support locks, and on other ranks.
        saving: the last checkpoint, if a thread may still be writing it; None otherwise.
        memory: host memory into which values are copied before a thread writes them.
    """

    def __init__(self) -> None:
        self.lock: Any = None
        self.saving: SavingState | None = None
        self.memory = HostMemory()

    def finish(self) -> None:
        """Wait until the checkpoint that a thread is writing, if any, is complete. Collective: every rank must call it.

        Raises RuntimeError on every rank if saving this checkpoint failed.
        """
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait()


@dataclass
class _Job:
    """Saves one checkpoint. Rank 0 calls `begin`, and then every rank calls `add`, if needed, and `finish`.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        root: the folder of the checkpoints.
        files: the safetensors files to write.
        keep: the number of checkpoints to keep, including this one. None keeps all.
        step: the step of the checkpoint. `begin` replaces None by one more than the step of the newest intact
            checkpoint, or by 1 if there is none.
        name: the name of the checkpoint's folder, or None for checkpoint-`step`.
        adds: whether every rank calls a user's function that writes additional files (`add` of `save_state`).
        number: the checkpoint's place in the order of saving: one more than the number of the newest intact checkpoint,
            or 1 if there is none. 0 before `begin`.
        staged: the unique name of the temporary folder; "" before rank 0 has created the folder.
        published: on rank 0, whether the checkpoint has its final name, and so is complete; False on other ranks.
    """

    rank: int
    size: int
    root: Path
    files: list[FilePlan]
    keep: int | None
    step: int | None
    name: str | None
    adds: bool
    number: int = 0
    staged: str = ""
    published: bool = False

    @property
    def staging(self) -> Path:
        return self.root / self.staged

    @property
    def final(self) -> Path:
        return self.root / (self.name or f"checkpoint-{self.step}")

    def begin(self, keeper: _Keeper, small: dict[str, bytes], state: dict[str, Any], model: torch.nn.Module) -> None:
        """Create the temporary folder and the files that `save_state` itself writes, except the list of files.

        Safetensors files get their headers and final sizes, but not yet the values of tensors: each rank later writes
        its own elements at the right place. This method also locks `root`, the folder of the checkpoints, and sets the
        attributes `number`, `staged` and, if it is None, `step`. Only rank 0 calls this method.

        Args:
            keeper: the `_Keeper` of `root`. Its attribute `lock` is the lock that an earlier save has taken, or None;
                this method sets it to the lock that is held now.
            small: the contents of the index files, by file name.
            state: the state to write to `state.pt`, from `small_state.collect`.
            model: the model, whose configuration is written too.
        """
        if os.path.exists(self.root / MANIFEST):
            raise ValueError(
                f"{self.root} is itself a checkpoint (it has a file {MANIFEST}), so load_state would not find "
                f"checkpoints inside it. Pass another folder, such as the one that contains it, {self.root.parent}"
            )
        small = {**small, small_state.NAME: small_state.encode(state)}
        keeper.lock = lock(self.root, keeper.lock)
        found, _ = find(self.root)
        self.number = 1 + (found[0].manifest.number if found else 0)
        if self.step is None:
            self.step = 1 + (found[0].manifest.step if found else 0)
        nbytes = sum(file.size for file in self.files) + sum(map(len, small.values()))
        self.staged = stage(self.root, self.step, nbytes).name
        written = {name: write_file(self.staging / name, data) for name, data in small.items()}
        for file in self.files:
            written[file.name] = write_file(self.staging / file.name, file.head, file.size)
        if any(file.name.startswith(MODEL) for file in self.files):
            written |= _write_config(self.staging, model)
        self._note("begin", written)

    def add(self, write: Callable[[Path], None]) -> None:
        """Call a user's function that writes additional files of the checkpoint, and record the checksums of the files.

        write: the argument `add` of `save_state`, a function that takes the path of an empty folder.
        """
        folder = self._added(self.rank)
        folder.mkdir()
        write(folder)
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self._note(f"added-{self.rank}", {str(path.relative_to(folder)): checksums(path) for path in paths})

    def finish(self, write: Callable[[], dict[str, list[Checked]]], exchange: _Collectives | _Posts) -> str | None:
        """Write this rank's elements, and complete the checkpoint: rank 0 renames the temporary folder into place.

        Collective: every rank must call it. Returns a message with the errors of all ranks, or None if the checkpoint
        is complete. Rank 0 then deletes older checkpoints; if this fails, it only logs a warning.

        write: a function without arguments that writes the elements, and returns the offset, size and checksum of each
            written chunk (at most 4 MiB of a file), by file name.
        exchange: the object by which the ranks tell each other their errors.
        """
        problem = None
        try:
            self._note(str(self.rank), write())
        except Exception as error:
            problem = _describe(error)
        problem = exchange.collect("parts", problem)
        if problem is None:
            if self.rank == 0:
                try:
                    self._publish()
                except Exception as error:
                    problem = _report([_describe(error)])
                else:
                    prune(self.final, self.keep)
            problem = exchange.from_first("publication", problem)
        return problem

    def _note(self, name: str, written: dict[str, list[Checked]]) -> None:
        """Record which chunks of files this rank has written, in a JSON file in the temporary folder.

        From these JSON files, rank 0 later creates the manifest, which lists the files and checksums of all ranks.

        name: the variable part of the JSON file's name, pieces-`name`.json: "begin", the number of this rank, or
            "added-" followed by the number of this rank.
        written: the offset, size and checksum of each written chunk, by file name.
        """
        with open(self.staging / f"pieces-{name}.json", "x") as file:
            json.dump(written, file)

    def _publish(self) -> None:
        chunks: dict[str, list[Any]] = {}
        for name in ("begin", *range(self.size)):
            path = self.staging / f"pieces-{name}.json"
            for file, some in json.loads(path.read_text()).items():
                chunks.setdefault(file, []).extend(some)
            path.unlink()
        for rank in range(self.size) if self.adds else ():
            self._move_added(rank, chunks)
        assert self.step is not None
        manifest = Manifest(self.step, self.number, self.size, _versions())
        write_manifest(self.staging, manifest, chunks)
        publish(self.staging, self.final)
        self.published = True

    def _added(self, rank: int) -> Path:
        return self.staging / f"added-{rank}"

    def _move_added(self, rank: int, chunks: dict[str, list[Any]]) -> None:
        """Move the additional files that the user's function has written on one rank into the checkpoint.

        A file is deleted instead if the checkpoint already has a file with the same name. Raises ValueError if a file
        is named manifest.json or complete.json. Checksums are read from files with these names, so the checkpoint would
        seem damaged.

        rank: the rank that has written the files.
        chunks: the chunks of the checkpoint's files with their checksums, by file name. This method adds the chunks of
            the moved files, except for files in subfolders, which get no checksums.
        """
        path = self.staging / f"pieces-added-{rank}.json"
        for name, some in json.loads(path.read_text()).items():
            target = self.staging / name
            if name in (MANIFEST, ADDED):
                raise ValueError(
                    f"the function passed as add has written {name} on rank {rank}. The checksums of a checkpoint are "
                    "read from a file of this name. Give the file another name"
                )
            if not target.exists():
                if target.parent != self.staging:
                    target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(self._added(rank) / name, target)
                if target.parent == self.staging:
                    chunks[name] = some
                else:
                    flush(target.parent)
        path.unlink()
        shutil.rmtree(self._added(rank))

    def withdraw(self) -> None:
        """Delete the temporary folder on rank 0, because saving has failed. On other ranks, do nothing."""
        if self.rank == 0 and self.staged:
            shutil.rmtree(self.staging, ignore_errors=True)


def _entries(
    world: World, model: torch.nn.Module, optimizer: Any, trained_only: bool
) -> tuple[dict[str, list[Entry]], list[Any]]:
    """Return the tensors to save, and the remaining state of each optimizer, such as step counts.

    Collective: every rank must call it. Each tensor is an `Entry` (name, shape, this rank's elements). The entries are
    grouped by the base name of the files into which they are written, such as "model" or "optimizer".

    optimizer: an OptimManager, or one or several optimizers; None if no optimizer state is saved.
    trained_only: whether to leave out the parameters that are frozen and were never trained.
    """
    name, chosen = (TRAINED, was_trained) if trained_only else (MODEL, None)
    bases, others = {name: model_entries(model, chosen)}, []
    for number, each in enumerate(optimizers_of(optimizer)):
        bases[file_base(number)], rest = optimizer_entries(each, model, world)
        others.append(rest)
    return bases, others


def _plan(bases: dict[str, list[Entry]]) -> tuple[list[FilePlan], dict[str, bytes]]:
    """Decide which tensors are written to which safetensors files. Return these files, and the contents of index files.

    The contents are returned as {name of the index file: contents}. An index file lists the file of each tensor. It is
    needed only if the tensors with one base name are divided into several files.

    bases: the tensors to write, by the base name of their files, such as "model".
    """
    files, indices = [], {}
    for base, entries in bases.items():
        plans, index = plan_files(base, [entry.spec for entry in entries])
        files += plans
        indices |= index
    return files, indices


def _copy_full_params(bases: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
    """Return the given entries, but with copies of the tensors that are not sharded.

    Without copies, a forward could change a module's buffers (such as running means) before a thread has written them.

    bases: the tensors to write, by the base name of their files, such as "model".
    """
    return {
        base: [entry if entry.sharded else replace(entry, part=entry.part.clone()) for entry in entries]
        for base, entries in bases.items()
    }


def _parts(bases: dict[str, list[Entry]], files: list[FilePlan], world: World) -> list[Part]:
    """Return the values that this rank writes: its elements of sharded tensors and, on rank 0, all other tensors.

    If several ranks store the same shard, only one of them writes its elements.

    bases: the tensors to write, by the base name of their files, such as "model".
    files: the files, with the place of each tensor.
    """
    stored = {name: (file.name, tensor.start) for file in files for name, tensor in file.tensors.items()}
    parts = []
    for entry in (entry for entries in bases.values() for entry in entries):
        if len(entry.part) and (world.saves_shards if entry.sharded else world.rank == 0):
            file, start = stored[entry.spec.name]
            parts.append(Part(file, start + entry.first * entry.spec.dtype.itemsize, entry.part))
    return parts


def _write_config(folder: Path, model: Any) -> dict[str, list[Checked]]:
    """Write the configuration of a Hugging Face model, so that `from_pretrained` can open the folder.

    Returns the offset, size and checksum of each written chunk (at most 4 MiB of a file), by file name. Nothing is
    written for a PEFT model, because the names of its tensors do not match the base model's configuration.
    """
    if hasattr(model, "peft_config"):
        _log.info(
            "save_state: training can be resumed from this checkpoint of a PEFT model with load_state, but "
            "from_pretrained cannot open it: it has no config.json, because PEFT's tensor names do not match the base "
            "model's. To save the adapters for PeftModel.from_pretrained, call model.save_pretrained(folder) on all "
            "ranks."
        )
        return {}
    before = set(os.listdir(folder))
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "save_pretrained"):
            if name == "config":  # config.save_pretrained does not set these two, but model.save_pretrained does
                config.architectures = [type(model).__name__]
                config.dtype = getattr(model, "dtype", None)
            config.save_pretrained(folder)
    written = {}
    for name in set(os.listdir(folder)) - before:
        data = (folder / name).read_bytes()
        os.unlink(folder / name)
        written[name] = write_file(folder / name, data)
    return written


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# -- exchange of problems between ranks -----------------------------------------------------------------------------


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _raise(job: _Job, problem: str | None) -> None:
    if problem is not None:
        job.withdraw()
        raise RuntimeError(
            f"save_state: nothing was saved to {job.root}, and earlier checkpoints were not changed. {problem}"
        )


def _report(problems: list[str | None]) -> str | None:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text) or None


class _Collectives:
    """Exchanges the errors of all ranks after each stage of saving, by collectives on the training thread.

    Only one thread at a time may run collectives. So if there are several ranks, the background threads of
    `non_blocking` use `_Posts` instead, which has the same methods.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def collect(self, point: str, problem: str | None) -> str | None:
        """Return one message with the errors of all ranks, or None if no rank has an error.

        All ranks get the same result. Collective: every rank must call it.

        Args:
            point: the name of the stage, such as "parts": the same on every rank, and used only once per checkpoint.
            problem: the description of this rank's error, or None if it has none.
        """
        return _report(self._world.gather_objects(problem))

    def from_first(self, point: str, problem: str | None) -> str | None:
        """Return the description of rank 0's error, or None, on every rank.

        Collective: every rank must call it.

        Args:
            point: the name of the stage, such as "publication": the same on every rank, and used only once per
                checkpoint.
            problem: on rank 0, the description of its error, or None. Ignored on other ranks.
        """
        return self._world.control.broadcast_object(problem)


class _Posts:
    """Tells every rank the errors of the others while background threads write a checkpoint.

    It has the methods of `_Collectives`, but uses the launcher's key-value store instead of collectives, because the
    thread that trains may run a collective at the same time. Every key contains the name of the checkpoint's temporary
    folder, which is unique, so that messages about different checkpoints are not confused.
    """

    def __init__(self, world: World, job: _Job) -> None:
        self._world, self._prefix = world, f"hf_bmtrain save {job.staged}"

    def collect(self, point: str, problem: str | None) -> str | None:
        key = f"{self._prefix} {point}"
        self._world.control.show(f"{key} {self._world.rank}", problem or "")
        if self._world.rank == 0:
            problem = _report([self._look_or_describe(f"{key} {rank}", rank) for rank in range(self._world.size)])
        return self.from_first(f"{point} all", problem)

    def from_first(self, point: str, problem: str | None) -> str | None:
        key = f"{self._prefix} {point}"
        if self._world.rank == 0:
            self._world.control.show(key, problem or "")
            return problem
        return self._look(key, 0) or None

    def _look_or_describe(self, key: str, rank: int) -> str:
        try:
            return self._look(key, rank)
        except TimeoutError as error:
            return str(error)

    def _look(self, key: str, rank: int) -> str:
        """Wait for the message that a rank stores under `key` in the launcher's key-value store, and return it.

        Raises TimeoutError if there is no message after `_SECONDS` (half an hour), or if `rank` is on this host and its
        process has ended without storing a message.

        key: the full key under which `rank` stores its message.
        rank: the rank that stores the message, for the error.
        """
        end, watch, gone = time.monotonic() + _SECONDS, self._world.monitor, ""
        look_again = time.monotonic() + _GONE_SECONDS
        while time.monotonic() < end:
            shown = self._world.control.look(key)
            if shown is not None:
                return shown
            if gone:  # the process of `rank` had ended before the last call of `look`, which found nothing
                raise TimeoutError(gone)
            if time.monotonic() > look_again and isinstance(watch, Watch):
                gone, look_again = watch.why_gone(rank), time.monotonic() + _GONE_SECONDS
            time.sleep(0.05)
        raise TimeoutError(
            f"rank {rank} did not report within {_SECONDS} s whether saving succeeded. Look for an error in its log"
        )
