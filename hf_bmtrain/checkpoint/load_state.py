"""`load_state`: resume from the newest intact checkpoint, on any number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..engine.base.arguments import expect_flag
from ..engine.runtime.world import World, current_world, wait_loader
from ..engine.sharding.parameter import DistributedParameter, is_read_only
from . import small_state
from .entries import (
    MODEL,
    TRAINED,
    Entry,
    LoadedState,
    check_arguments,
    file_base,
    has_trained_only,
    listed,
    may_be_stack,
    model_entries,
    named,
    named_persistent_buffers,
    optimizers_of,
    saved_as,
    split_key,
    was_trained,
    write_full,
)
from .folder import LISTINGS, Found, find
from .header import Damaged, StoredTensor, find_tensors
from .manifest import Manifest
from .ranges import Wanted, check_heads, read_parts

_log = logging.getLogger("hf_bmtrain")


class Resumed(int):
    """The result of `load_state`: the checkpoint's step as an int, with the attributes `step`, `folder` and `extra`.

    Unlike a plain int, a `Resumed` is true in a condition even if the step is 0. It can be unpacked, as in
    `step, folder, extra = bmt.load_state(...)`. It is equal to its step (a number), and also to the tuple
    (step, folder, extra).

    Attributes:
        step: the step of the checkpoint.
        folder: the checkpoint's folder.
        extra: the `extra` that this rank passed to `save_state`. If the checkpoint was saved by a different number of
            ranks, the `extra` of rank 0.
    """

    step: int
    folder: Path
    extra: Any

    def __new__(cls, step: int, folder: Path, extra: Any = None) -> Resumed:
        resumed = super().__new__(cls, step)
        resumed.step, resumed.folder, resumed.extra = step, folder, extra
        return resumed

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return tuple(self) == other if isinstance(other, tuple) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __iter__(self) -> Iterator[Any]:
        return iter((self.step, self.folder, self.extra))

    def __reduce__(self) -> tuple[type[Resumed], tuple[int, Path, Any]]:
        return type(self), (self.step, self.folder, self.extra)

    def __repr__(self) -> str:
        return f"Resumed(step={self.step}, folder={self.folder!r}, extra={self.extra!r})"


def load_state(
    folder: str | os.PathLike,
    model: torch.nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    weights: bool = True,
    random: bool = True,
) -> Resumed | None:
    """Load the newest intact checkpoint in `folder`, or `folder` itself if it is a checkpoint.

    Collective: every rank must call it. Each rank reads its own elements, regardless of the number of ranks that saved
    the checkpoint, and verifies the checksums of all bytes that it uses. If a checkpoint is incomplete or damaged, the
    next older one is loaded instead, with a warning that describes the damage. On the same number of ranks, the resumed
    training is bitwise identical to an uninterrupted one, with one exception: for 16-bit parameters, torch's
    `Optimizer.load_state_dict` rounds float32 state other than `step`, such as `mu_product` of NAdam. On a different
    number of ranks, the random generators are re-seeded, and buffers whose values differed between the saving ranks get
    the values of rank 0.

    Args:
        folder: a folder of checkpoints, or one checkpoint.
        model: the model, created and wrapped in the same way as the saved model.
        optimizer: an OptimManager, an optimizer, or a sequence of optimizers, as passed to `save_state`. None loads no
            optimizer state.
        scheduler: one scheduler or several, as passed to `save_state`. None loads no scheduler state, except that of an
            OptimManager's schedulers.
        weights: whether to load the model's parameters, buffers, and extra state (`set_extra_state` of modules). False
            leaves all of them unchanged, on any number of ranks. The choice of the layers that compute in float8 is
            loaded in any case.
        random: whether to restore the random generators of Python, NumPy, torch and the device.

    Returns:
        A `Resumed`: the step of the checkpoint as an int, with the attributes `step`, `folder` and `extra` (the object
        that was passed to `save_state`). Unlike a plain int, it is true in a condition even for step 0. None, without
        any change, if `folder` has no checkpoint or does not exist.

    Raises:
        RuntimeError: on every rank, if `folder`, `weights`, `random`, or the number of optimizers or schedulers differs
            between ranks.
        RuntimeError: on every rank, if `folder` is a file, a broken link, or not readable.
        RuntimeError: on every rank, if an earlier `save_state` to this folder with `non_blocking` failed.
        RuntimeError: on every rank, if no checkpoint is intact. Some values may have been loaded before the error.
        RuntimeError: on every rank, if the checkpoint does not fit the model, an optimizer or a scheduler. Some values
            may have been loaded before the error.
        TypeError, ValueError: an argument has the wrong type or value.

    Example::

        for step in range(bmt.load_state("checkpoints", model, manager) or 0, 1000):
            ...
            bmt.save_state("checkpoints", model, manager, step=step + 1)
    """
    optimizer, scheduler = listed(optimizer, scheduler)
    check_arguments(folder, model, optimizer, scheduler)
    expect_flag("weights", weights)
    expect_flag("random", random)
    return load_parts(folder, model, optimizer, scheduler, parameters=weights, buffers=weights, random=random)


@torch.inference_mode(False)  # threads that read files cannot write into tensors that were made in inference mode
def load_parts(
    folder: str | os.PathLike,
    model: torch.nn.Module,
    optimizer: Any = None,
    scheduler: Sequence[Any] = (),
    *,
    parameters: bool,
    buffers: bool,
    random: bool,
) -> Resumed | None:
    """Load a checkpoint like `load_state`, but choose separately whether to load the model's parameters and buffers.

    Collective: every rank must call it. `load_state` calls this function. When Trainer resumes training, this package
    calls it to load what Trainer itself does not load. The types of the arguments are not checked.

    Args:
        folder: a folder of checkpoints, or one checkpoint.
        model: the model.
        optimizer: an OptimManager, an optimizer, or a sequence of optimizers. None loads no optimizer state.
        scheduler: a sequence of the schedulers, except those of an OptimManager, which are always loaded.
        parameters: whether to load the model's parameters.
        buffers: whether to load its persistent buffers, and the extra state of its modules.
        random: whether to restore the random generators of Python, NumPy, torch and the device.

    Returns:
        A `Resumed`, which is the step of the checkpoint. None, without any change, if `folder` has no checkpoint.

    Raises:
        RuntimeError: on every rank, in the cases in which `load_state` raises it. Some values may have been loaded
            before the error.
    """
    world, given = current_world(), Path(folder)
    root = given.resolve()
    facts = {
        "folder": os.fspath(folder),
        "number of optimizers": len(optimizers_of(optimizer)),
        "number of schedulers": len(scheduler),
        "weights": bool(parameters),
        "buffers": bool(buffers),
        "random": bool(random),
    }
    world.check_same_on_all_ranks("load_state", facts)
    for saved in (root, root.parent):
        if saved in world.kept:
            world.kept[saved].finish()
    without = () if parameters or buffers else (MODEL, TRAINED)
    listing, listings = _find(world, given, without), 1
    if not any(listing):
        return None
    left, passed_over = listing[0], [f"{each}: {reason}" for each, reason in listing[1]]
    # `overwritten`: the names of the parameters into which damaged checkpoints may have been read. `source`: the last
    # of these checkpoints, with a description of its damage.
    overwritten: set[str] = set()
    source = ""
    while left:
        each = left[0].folder
        loading = _Loading(world, left[0], model, optimizer, scheduler, parameters, buffers)
        problem = _attempt(world, loading.open)
        if problem is None:
            world.check_same_on_all_ranks("load_state", loading.facts(), {"checkpoint": str(each)})
            if lacking := sorted(overwritten - loading.sharded):
                raise RuntimeError(
                    f"load_state: a checkpoint is damaged: {source}. {len(lacking)} parameters may already have values "
                    f"from it. The next older checkpoint, {each}, cannot replace these values, because it was saved "
                    f"with trained_only=True and does not contain these parameters: {', '.join(lacking[:5])}. Load the "
                    f"original model again, and then pass {each} to load_state"
                )
            problem = _attempt(world, loading.read)
            if problem is not None and loading.sharded:
                overwritten |= loading.sharded
                source = f"{each}: {problem}"
        if problem is None:
            for reason in passed_over if world.rank == 0 else ():
                _log.warning(
                    "load_state skipped the checkpoint %s. It is incomplete or damaged, so another checkpoint is "
                    "loaded", reason,
                )  # fmt: skip
            extra = loading.apply(random)
            if world.rank == 0:
                _log.info("load_state has loaded the checkpoint %s, saved at step %d", each, loading.manifest.step)
            return Resumed(loading.manifest.step, each, extra)
        again = _find(world, given, without)
        if again != listing and again[0] and listings < LISTINGS:
            # The folder's contents have changed, because another job has saved, deleted or replaced checkpoints. So
            # perhaps the checkpoint that could not be loaded is not damaged. Try the checkpoints in the new list.
            listing, listings = again, listings + 1
            left, passed_over = again[0], [f"{each}: {reason}" for each, reason in again[1]]
        else:
            left = left[1:]
            passed_over.append(f"{each}: {problem}")
    told = f"load_state: no checkpoint in {root} is intact. {'; '.join(passed_over)}. "
    if listings == LISTINGS:
        told += (
            f"The folder was listed {listings} times, and each time another job deleted or replaced checkpoints before "
            "they were loaded. Let that job save less often or keep more checkpoints, or load when it has ended"
        )
    else:
        told += "Restore a checkpoint from a copy, or leave load_state out to train from the beginning"
    raise RuntimeError(told)


def _find(world: World, given: Path, without: tuple[str, ...]) -> tuple[list[Found], list[tuple[Path, str]]]:
    """Find the checkpoints in `given` on rank 0, and return them on all ranks. Collective: every rank must call it.

    Returns the intact checkpoints, newest first, and the damaged ones, as (folder, description of the damage). Raises
    RuntimeError on all ranks if rank 0 cannot read the folder.

    given: a folder of checkpoints, or one checkpoint.
    without: prefixes of file names, such as "model". Safetensors files whose names begin with one of these prefixes are
        not checked.
    """
    root = given.resolve()

    def look() -> tuple[list[Found], list[tuple[Path, str]]]:
        if root.is_file():
            raise NotADirectoryError(
                "this path is a file. Pass the folder of a checkpoint, or the folder that contains checkpoints"
            )
        if given.is_symlink() and not root.exists():
            raise FileNotFoundError(
                f"this path is a symbolic link to {root}, which does not exist. If that folder was moved, pass its "
                "new path. If it was deleted, pass another folder"
            )
        return find(root, without)

    return world.on_first_rank(f"load_state: {given} cannot be read", look)


def _attempt(world: World, stage: Any) -> str | None:
    """Call `stage`, a function without arguments that does one step of loading, and exchange errors between the ranks.

    Collective: every rank must call it. If `stage` raises Damaged or OSError on any rank, which means that a file is
    damaged or cannot be read, all ranks return a description of the damage. If `stage` raises any other exception on
    any rank, all ranks raise RuntimeError. Without an exception, all ranks return None.
    """
    damage = problem = None
    try:
        stage()
    except (Damaged, OSError) as error:
        damage = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    everyone = world.gather_objects((damage, problem))
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise RuntimeError(f"load_state: the checkpoint cannot be loaded. Error on rank {rank}: {text}")
    reports = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text is not None]
    return reports[0] if reports else None


class _Loading:
    """Loads one checkpoint into a model and its optimizers. Call `open`, `read` and `apply`, in this order.

    `open` checks that the checkpoint fits, `read` reads the tensors, and `apply` loads everything else. A model or
    optimizer may be incompletely loaded until `apply` has ended.

    Attributes:
        manifest: the checkpoint's manifest, which lists its files and their checksums. `open` sets it.
        sharded: the names of the sharded parameters that `read` overwrites, the same on all ranks. Empty before `open`.
    """

    manifest: Manifest
    _state: dict[str, Any]

    def __init__(
        self,
        world: World,
        found: Found,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Sequence[Any],
        parameters: bool,
        buffers: bool,
    ) -> None:
        self._world, self._folder, self._number, self._model = world, found.folder, found.manifest.number, model
        self._optimizer, self._scheduler = optimizer, scheduler
        self._parameters, self._buffers = parameters, buffers
        self._wanted: list[Wanted] = []
        self._full_params: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[LoadedState] = []
        self._trained: list[DistributedParameter] = []
        self.sharded: set[str] = set()

    def open(self) -> None:
        """Check that the checkpoint fits the model and the optimizers, and list the elements to read into the model.

        Tensors are not read yet, and the model and the optimizers are not changed. The elements to read into the
        optimizers are listed later, by `read`. Raises Damaged or OSError if a file is damaged or cannot be read, and
        ValueError if the checkpoint does not fit.
        """
        of_model = self._parameters or self._buffers
        self.manifest = Manifest.read(self._folder).without(() if of_model else (MODEL, TRAINED))
        if self.manifest.number != self._number:
            raise Damaged(
                f"the manifest that this rank reads has save number {self.manifest.number}, but the one that rank 0 "
                f"has read has save number {self._number}. Another job has replaced the checkpoint, or the ranks see "
                "different folders under this path"
            )
        self.manifest.check_sizes(self._folder)
        check_heads(self._folder, self.manifest)
        self._state = small_state.read(self._folder)
        if of_model:
            self._want_model()
        small_state.check_fit(self._optimizer, self._scheduler, self._model, self._state, self._buffers)
        for number, optimizer in enumerate(optimizers_of(self._optimizer)):
            parameters = named(optimizer, self._model)
            for key, stored in find_tensors(self._folder, file_base(number)).items():
                name, _ = split_key(key, parameters)
                parameter = parameters[name]
                if not isinstance(parameter, DistributedParameter):
                    raise ValueError(
                        f"the checkpoint has the sharded optimizer state {key}, but {name} is not sharded in this "
                        "model. Pass the model that auto_wrap returns, and its optimizer"
                    )
                full, _ = saved_as(parameter)
                if stored.shape != full:
                    raise ValueError(
                        f"the optimizer state {key} has shape {stored.shape} in the checkpoint, but its parameter in "
                        f"the model has shape {full}. Create the model with the configuration of the saved one"
                        f"{_hint([(stored.shape, full)])}"
                    )

    def facts(self) -> dict[str, Any]:
        """Return values that must be equal on all ranks, as {description: value}.

        These are the checkpoint's step and the checksums of its files. The ranks compare them before they read any
        tensor.
        """
        return {
            "step": self.manifest.step,
            **{name: [*map(tuple, chunks)] for name, chunks in self.manifest.files.items()},
        }

    def _want_model(self) -> None:
        trained_only = has_trained_only(self.manifest.files)
        tensors = find_tensors(self._folder, TRAINED if trained_only else MODEL)
        parameters = dict(self._model.named_parameters())
        if trained_only and self._parameters:
            _refuse_packed(parameters, tensors)
            self._note_left(parameters, tensors)
        if not self._parameters:
            entries = model_entries(self._model, lambda name, parameter: False)
            tensors = {entry.spec.name: tensors[entry.spec.name] for entry in entries if entry.spec.name in tensors}
        elif trained_only:
            entries = model_entries(self._model, lambda name, parameter: parameter.requires_grad or name in tensors)
        else:
            entries = model_entries(self._model)
        _check_names(entries, tensors)
        targets = parameters | dict(named_persistent_buffers(self._model))
        self.sharded = {entry.spec.name for entry in entries if entry.sharded}
        for entry in entries:
            part, stored = entry.part, tensors[entry.spec.name]
            target = targets[entry.spec.name]
            if trained_only and isinstance(target, DistributedParameter):
                self._trained.append(target)
            if not entry.sharded:
                part = torch.empty_like(part)
                self._full_params.append((target, part))
            self._wanted.append(Wanted(entry.spec.name, stored, entry.first, part))

    def _note_left(self, parameters: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        left = [name for name, p in parameters.items() if was_trained(name, p) and not p.requires_grad]
        left = [name for name in left if name not in tensors]
        if left and self._world.rank == 0:
            _log.warning(
                "load_state: %d parameters (%s) are frozen now, but were trained earlier: in this process, or in a run "
                "whose checkpoint this process has loaded. The checkpoint %s was saved with trained_only=True and does "
                "not contain them, so they keep their present, trained values. To give them their pretrained values, "
                "create the model again (from_pretrained) before load_state",
                len(left), ", ".join(left[:5]), self._folder,
            )  # fmt: skip

    def _want_optimizers(self) -> None:
        for number, optimizer in enumerate(optimizers_of(self._optimizer)):
            parameters, saved = named(optimizer, self._model), self._state["optimizers"][number]
            tensors = find_tensors(self._folder, file_base(number))
            names = [split_key(key, parameters) for key in tensors]
            added = small_state.added_to(number, self._world, self._state)
            state = LoadedState(optimizer, parameters, names, saved["others"], saved["groups"], added)
            for (name, what), (key, stored) in zip(names, tensors.items()):
                _, first = saved_as(parameters[name])
                self._wanted.append(Wanted(key, stored, first, state.target(name, what, stored.dtype)))
            self._states.append(state)

    def read(self) -> None:
        """Read this rank's elements of the checkpoint's tensors.

        Elements of sharded parameters are read directly into the parameters. Other values may be read into temporary
        tensors, from which `apply` loads them. Raises Damaged or OSError if a file is damaged or cannot be read; some
        elements may then already have been read.
        """
        self._want_optimizers()
        parameters = self._model.parameters() if self._parameters else ()
        buffers = {p.buffer for p in parameters if isinstance(p, DistributedParameter)}
        for buffer in sorted(buffers, key=lambda buffer: buffer.number):
            buffer.prepare_write()
        try:
            read_parts(self._folder, self.manifest, [each for each in self._wanted if len(each.values)])
            wait_loader()  # wait for copies to the device, which reading threads may have queued on other streams
        finally:
            # Mark the flat buffers (which contain the sharded parameters) as changed, so that they are all-gathered
            # again. Do so even if this rank has failed or has no elements to read, because all ranks must join the
            # all-gather.
            torch.autograd.graph.increment_version([buffer.shard for buffer in buffers])

    def apply(self, random: bool) -> Any:
        """Load all values that `read` has not loaded yet, such as optimizer and scheduler state.

        Collective: every rank must call it, when `read` has succeeded on all ranks. Returns the `extra` that this rank
        passed to `save_state` or, if the checkpoint was saved by a different number of ranks, the `extra` of rank 0.
        Raises RuntimeError on every rank if a rank fails, for example because its scheduler rejects the state.

        random: whether to restore the random generators.
        """
        what = f"load_state: the checkpoint {self._folder} was loaded only in part. Load a checkpoint before you train"
        with self._world.raising_everywhere(what):
            extra = self._apply_own()
        small_state.restore_features(self._world, self._model, self._state)
        if random:
            small_state.restore_random(self._world, self._state, self.manifest.step)
        return extra

    def _apply_own(self) -> Any:
        """Do the steps of `apply` that may raise an error on this rank only. Collective: every rank must call it.

        These steps load the values that `read` has put into temporary tensors, the states of the optimizers, and the
        state that `small_state.restore` loads, such as that of schedulers. Returns the `extra` of the checkpoint (see
        `apply`).
        """
        with torch.no_grad():
            for target, values in self._full_params:
                write_full(target, values.view(target.shape))
        for parameter in self._trained:  # so that later saves with `trained_only` include it, even if it is frozen
            parameter.trained = True
        for loaded in self._states:
            loaded.load()
        return small_state.restore(
            self._world, self._model, self._optimizer, self._scheduler, self._state, self._buffers
        )


def _refuse_packed(parameters: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
    """Raise ValueError if the checkpoint has values for quantized weights of the model, which cannot be overwritten.

    parameters: the parameters of the model, by name.
    tensors: the tensors of the checkpoint, by name.
    """
    packed = [name for name in tensors if is_read_only(parameters.get(name))]
    if packed:
        raise ValueError(
            f"the checkpoint has trained values of {len(packed)} weights that are quantized in this model "
            f"({', '.join(packed[:5])}). Load the checkpoint into a model without quantize_frozen or "
            "load_in_4bit"
        )


def _check_names(entries: list[Entry], tensors: dict[str, StoredTensor]) -> None:
    """Raise ValueError unless the tensors in the checkpoint have the names and shapes that the model expects.

    entries: the tensors of the model.
    tensors: the tensors in the checkpoint, by name.
    """
    mine = {entry.spec.name: tuple(entry.spec.shape) for entry in entries}
    missing, unexpected = [name for name in mine if name not in tensors], [name for name in tensors if name not in mine]
    shapes = [
        f"{name} {tensors[name].shape} (in the model {shape})"
        for name, shape in mine.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if missing or unexpected or shapes:
        hint = _hint([(shape, tensors[name].shape) for name, shape in mine.items() if name in tensors])
        raise ValueError(
            "the checkpoint does not fit the model"
            f"{f'. {len(unexpected)} tensors of the checkpoint are not in the model (' if unexpected else ''}"
            f"{', '.join(unexpected[:5])}{')' * bool(unexpected)}"
            f"{f'. {len(missing)} tensors of the model are not in the checkpoint (' if missing else ''}"
            f"{', '.join(missing[:5])}{')' * bool(missing)}"
            f"{f'. {len(shapes)} tensors have different shapes (' if shapes else ''}"
            f"{', '.join(shapes[:5])}{')' * bool(shapes)}"
            f". Create the model, and its adapters, as in the job that saved the checkpoint{hint}"
        )


def _hint(shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Return a sentence for an error about shapes if the size of tensor-parallel groups has probably changed, else "".

    A weight that tensor parallelism splits by columns has a shape in checkpoints that depends on `tp_size`.

    shapes: for each tensor, its shapes in the checkpoint and in the model, in either order.
    """
    stacked = any(may_be_stack(*pair) for pair in shapes)
    return ". If weights are split by columns, tp_size must be the same as in the saving job" if stacked else ""
