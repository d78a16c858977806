"""Write the model in a checkpoint to a new folder: `python -m hf_bmtrain.checkpoint merge`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from ..engine.base.files import staged_folder
from . import small_state
from .entries import MODEL, TRAINED, has_trained_only, may_be_stack
from .folder import PREFIXES, Found, check_space, write_manifest
from .header import Damaged, StoredTensor, TensorSpec, find_tensors, plan_files, read_header
from .manifest import NAME as MANIFEST
from .manifest import Checked, Manifest
from .ranges import Part, Wanted, check_heads, read_parts, write_file, write_parts

_CONFIGS = ("config.json", "generation_config.json")


class _Source(NamedTuple):
    """A tensor to copy into the merged model, and the place where it is stored.

    Attributes:
        folder: the folder of the file that contains the tensor.
        manifest: the manifest (list of files and checksums) of `folder`, or None if the file has no checksums.
        stored: the name of that file, and the tensor's dtype, shape and place in the file.
        in_base: whether the tensor comes from the base model (`--base`) instead of from the checkpoint.
    """

    folder: Path
    manifest: Manifest | None
    stored: StoredTensor
    in_base: bool


def merge(checkpoint: Found, output: Path, limit: int, with_optimizer: bool, base: Sequence[Path]) -> list[str]:
    """Write the model in a checkpoint to a new folder, for Hugging Face's `from_pretrained`.

    In two cases, `from_pretrained` cannot load the folder. First, neither the checkpoint nor `base` has a config.json;
    checkpoints of PEFT models have none. Second, the model was trained with a `tp_size` that has split some weights on
    their columns. `save_state` stores these weights as (tp_size, rows, columns / tp_size), and `merge` keeps this
    shape. With `base`, in which they have another shape, it raises ValueError.

    Only one tensor is in memory at a time. All bytes that are read are compared with their checksums, if they have any.
    The folder is written under a temporary name, flushed to disk and renamed into place. If `merge` is killed, the next
    call with the same `output` deletes the temporary folder.

    Args:
        checkpoint: the checkpoint's folder and manifest, from `find`.
        output: the folder to create.
        limit: maximum size of a safetensors file in bytes, without its header; a larger tensor gets its own file.
        with_optimizer: whether to also write the optimizer state and everything else that `load_state` needs.
        base: for a checkpoint saved with `trained_only`, the folder or the safetensors files of the base model, from
            which training started; otherwise empty.

    Returns:
        Notes to print for the user. If trained tensors have another dtype than in the base model, there is one note for
        each combination of the two dtypes.

    Raises:
        Damaged: a file of the checkpoint is damaged.
        ValueError: `output` exists, or `base` is damaged or does not fit the checkpoint.
        OSError: a file cannot be read or written.
    """
    if output.exists():
        raise ValueError(f"{output} already exists. Choose another --output, or delete it")
    check_heads(checkpoint.folder, checkpoint.manifest)
    own, notes = _sources(checkpoint, TRAINED if has_trained_only(checkpoint.manifest.files) else MODEL), []
    groups, copied = {MODEL: own}, _small_files(checkpoint, with_optimizer)
    if base:
        theirs, configs = _open_base(base)
        tied = small_state.read(checkpoint.folder).get("tied", {})  # checkpoints of older versions have no "tied"
        groups[MODEL], notes = _overlay(own, theirs, tied)
        copied = {**configs, **copied}
    if with_optimizer:
        groups |= {name: _sources(checkpoint, name) for name in _optimizers(checkpoint)}
    output.parent.mkdir(parents=True, exist_ok=True)
    with staged_folder(output) as staging:
        files = _write(staging, groups, copied, limit)
        if with_optimizer:
            old = checkpoint.manifest
            manifest = Manifest(old.step, old.number, old.world_size, old.versions)
            write_manifest(staging, manifest, files)
    return notes


def check_arguments(checkpoint: Found, output: Path, with_optimizer: bool, base: Sequence[Path]) -> None:
    """Raise ValueError if the arguments `base` or `output` of `merge` are not allowed for this checkpoint.

    `base` is required for a checkpoint that was saved with `trained_only`, and otherwise forbidden.

    `load_state` and `save_state` must not mistake `output` for a checkpoint of the training. So if `with_optimizer` is
    set, or the name of `output` begins with "checkpoint-" or "checkpoint_", `output` must not be beside the checkpoint
    (in the folder that contains the checkpoint's folder). In any other folder, every name is allowed.

    Args:
        checkpoint: the checkpoint to merge.
        output: the folder to create.
        with_optimizer: whether the optimizer state is written too, so that `load_state` can load `output`.
        base: the folder or safetensors files of the base model, from which training started; empty if not given.

    Raises:
        ValueError: `base` is missing or forbidden, or `output` could be mistaken for a checkpoint of the training.
    """
    if has_trained_only(checkpoint.manifest.files) and not base:
        raise ValueError(
            f"{checkpoint.folder} contains only the trained tensors (trained_only=True). For the other tensors, pass "
            "--base with the folder of the model from which training started"
        )
    if base and not has_trained_only(checkpoint.manifest.files):
        raise ValueError(f"{checkpoint.folder} contains the full model. Leave out --base")
    beside = output.absolute().parent == checkpoint.folder.absolute().parent
    if beside and (with_optimizer or output.name.startswith(PREFIXES)):
        raise ValueError(
            f"{output} is beside the checkpoint {checkpoint.folder}, so the training that saves there would take it "
            "for one of its own checkpoints. Choose an --output in another folder"
        )


def _optimizers(checkpoint: Found) -> list[str]:
    """Return the base names of the optimizer files in a checkpoint, such as "optimizer" and "optimizer2"."""
    matches = (re.match(r"(optimizer\d*)(-\d+-of-\d+)?\.safetensors$", name) for name in checkpoint.manifest.files)
    return sorted({match[1] for match in matches if match})


def _sources(checkpoint: Found, base: str) -> dict[str, _Source]:
    folder, manifest = checkpoint
    return {name: _Source(folder, manifest, stored, False) for name, stored in find_tensors(folder, base).items()}


def _small_files(checkpoint: Found, with_optimizer: bool) -> dict[str, bytes]:
    """Return the contents of the checkpoint's files that are copied unchanged, such as config.json, by file name.

    If `with_optimizer`, these include `state.pt`, which `load_state` needs. Call `check_heads` first, which verifies
    these files.
    """
    return {
        name: (checkpoint.folder / name).read_bytes()
        for name in checkpoint.manifest.files
        if ".safetensors" not in name and (with_optimizer or name != small_state.NAME)
    }


# -- the other tensors, from --base ---------------------------------------------------------------------------------


def _open_base(base: Sequence[Path]) -> tuple[dict[str, _Source], dict[str, bytes]]:
    """Return the tensors of the base model, and the contents of its configuration files, both by name.

    base: a folder, or one or several safetensors files. Configuration files are read from the folder of the first file.

    Raises ValueError if `base` cannot be read, if it contains a folder beside other paths, or if two of its files
    contain the same tensor.
    """
    folder = base[0] if base[0].is_dir() else base[0].parent
    if folder == base[0] and len(base) > 1:
        raise ValueError(
            f"--base takes one folder, or one or several files; found {folder}, {', '.join(map(str, base[1:]))}"
        )
    tensors: dict[str, _Source] = {}
    try:
        if folder == base[0]:
            manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
            if manifest is not None:
                manifest.check_sizes(folder)
                check_heads(folder, manifest)
            files = [(folder, manifest, find_tensors(folder, MODEL))]
        else:
            files = [(path.parent, None, read_header(path)) for path in base]
    except (Damaged, OSError) as error:
        raise ValueError(
            f"--base {folder} does not contain a model in safetensors files: {error}. Pass the folder, or all "
            "safetensors files, of the model from which training started"
        ) from error
    for place, manifest, found in files:
        for name, stored in found.items():
            if name in tensors:
                raise ValueError(
                    f"--base: {name} is in both {tensors[name].stored.file} and {stored.file}. Pass the files of one "
                    "model only"
                )
            tensors[name] = _Source(place, manifest, stored, True)
    return tensors, {name: (folder / name).read_bytes() for name in _CONFIGS if (folder / name).exists()}


def _overlay(
    trained: dict[str, _Source], base: dict[str, _Source], tied: dict[str, list[str]]
) -> tuple[dict[str, _Source], list[str]]:
    """Return all tensors of the model, by name: those in `trained`, and all other tensors from `base`.

    If a trained tensor is tied, `base` may contain it under its other names too. These names are left out, because
    `base` contains the values from before the training.

    The second result is a list of notes to print for the user. If tensors have different dtypes in `trained` and in
    `base`, there is one note for each pair (dtype in `trained`, dtype in `base`).

    Raises ValueError if a trained tensor is not in `base`, or has a different shape there.

    trained: the tensors of the checkpoint, by name.
    base: the tensors of the base model, by name.
    tied: {name under which a checkpoint contains a tied parameter: the parameter's other names}.
    """
    strange = [name for name in trained if name not in base]
    if strange:
        raise ValueError(
            f"--base lacks {len(strange)} of the {len(trained)} trained tensors: {', '.join(strange[:5])}. Pass the "
            "model from which training started, with all its files. If these tensors are adapters, which are not part "
            "of a base model, load the checkpoint into the model with adapters instead (bmt.load_state). Then call the "
            "model's save_pretrained to save only the adapters, or merge_and_unload() first, to save the merged model"
        )
    shapes = {
        name: (mine.stored.shape, base[name].stored.shape)
        for name, mine in trained.items()
        if mine.stored.shape != base[name].stored.shape
    }
    if shapes:
        told = "; ".join(f"{name} {mine} (in --base {theirs})" for name, (mine, theirs) in [*shapes.items()][:5])
        stacks = [name for name, pair in shapes.items() if may_be_stack(*pair)]
        hint = (
            f". If tp_size has split {stacks[0]} by columns, the checkpoint has it as (tp_size, rows, columns / "
            "tp_size), which merge cannot join: load the checkpoint with bmt.load_state, in a job with the same "
            "tp_size. Then write the whole weights with bmt.save"
            if stacks
            else ""
        )
        raise ValueError(
            f"{len(shapes)} trained tensors do not have the shapes of --base: {told}. Pass the model from which "
            f"training started as --base{hint}"
        )
    notes, kinds = [], {(base[name].stored.dtype, mine.stored.dtype) for name, mine in trained.items()}
    for old, new in sorted((pair for pair in kinds if pair[0] != pair[1]), key=str):
        notes.append(
            f"trained tensors are written in {new}, as they were saved, but --base has them in {old}. To keep their "
            f"values exactly, call from_pretrained with dtype={new}"
        )
    old = {other for name in trained for other in tied.get(name, ())}
    return {name: source for name, source in {**base, **trained}.items() if name in trained or name not in old}, notes


# -- writing --------------------------------------------------------------------------------------------------------


def _write(
    staging: Path, groups: dict[str, dict[str, _Source]], copied: dict[str, bytes], limit: int
) -> dict[str, list[Checked]]:
    """Write all files of the merged model into the folder `staging`.

    Returns the offset, size and checksum of each written chunk (at most 4 MiB of a file), by file name. Raises OSError
    if the disk has too little space.

    groups: {base name of files, such as "model": {name of a tensor: its source}}.
    copied: the contents of the other files, by file name.
    limit: maximum size of a safetensors file in bytes, without its header; a larger tensor gets its own file.
    """
    files, written = [], {}
    for base, sources in groups.items():
        specs = [TensorSpec(name, source.stored.dtype, source.stored.shape) for name, source in sources.items()]
        plans, index = plan_files(base, specs, limit)
        files += [(plan, sources) for plan in plans]
        copied = {**copied, **index}
    total = sum(plan.size for plan, _ in files)
    check_space(staging, total + sum(map(len, copied.values())))
    for name, data in copied.items():
        written[name] = write_file(staging / name, data)
    for plan, _ in files:
        written[plan.name] = write_file(staging / plan.name, plan.head, plan.size)
    with tqdm(total=total, unit="B", unit_scale=True, desc="merge") as bar:
        for plan, sources in files:
            bar.update(len(plan.head))
            for name, target in plan.tensors.items():
                written[plan.name] += _copy(staging, name, sources[name], target)
                bar.update(target.stop - target.start)
    return written


def _copy(staging: Path, name: str, source: _Source, target: StoredTensor) -> list[Checked]:
    """Copy a tensor into a file of the merged model. Return the written chunks (at most 4 MiB) with their checksums.

    Raises ValueError if the base model is damaged, and Damaged if the checkpoint is damaged.

    staging: the temporary folder in which the merged model is written.
    name: the tensor's name.
    source: the place from which the tensor is read.
    target: the tensor's place in a file in `staging`. The file must exist.
    """
    stored = source.stored
    values = torch.empty(torch.Size(stored.shape).numel(), dtype=stored.dtype, device="cpu")
    if not len(values):
        return []
    try:
        read_parts(source.folder, source.manifest, [Wanted(name, stored, 0, values)])
    except Damaged as error:
        if source.in_base:
            raise ValueError(
                f"--base {source.folder} is damaged: {error}. Pass --base with another copy of this model"
            ) from error
        raise
    return write_parts(staging, [Part(target.file, target.start, values)])[target.file]
