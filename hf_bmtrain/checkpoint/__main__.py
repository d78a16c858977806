"""Verify, inspect and merge checkpoints, without a GPU or a process group.

    python -m hf_bmtrain.checkpoint verify FOLDER     read every byte and compare it with its checksum
    python -m hf_bmtrain.checkpoint inspect FOLDER    print the step, files and tensors of a checkpoint
    python -m hf_bmtrain.checkpoint merge FOLDER      write the model to a new folder that from_pretrained can open

FOLDER is a checkpoint or a folder of checkpoints. In a folder of checkpoints, `merge` uses the newest checkpoint that
is intact, and the other commands handle all checkpoints. The exit status is 1 if FOLDER has no checkpoint, if `verify`
finds damage, if `inspect` finds an invalid header, or if `merge` writes nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from .folder import ADDED, Found, added_checksums, check_added, find
from .header import FILE_BYTES, Damaged, read_header
from .manifest import NAME as MANIFEST
from .merge import check_arguments, merge
from .ranges import check_file

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def main() -> None:
    given = _arguments()
    found, damaged = find(given.folder)
    for folder, reason in damaged:
        print(f"{folder}: damaged: {reason}")
    if not found and not damaged:
        sys.exit(
            f"{given.folder} is neither a checkpoint of save_state, nor a folder that contains one. Check the path"
        )
    if given.command == "merge":
        sys.exit(_merge_newest(found, given))
    good = [verify(each) if given.command == "verify" else describe(each) for each in found]
    if not all(good) or (given.command == "verify" and damaged):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hf_bmtrain.checkpoint", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in (
        ("verify", "read every byte and compare it with its checksum"),
        ("inspect", "print the step, files and tensors of a checkpoint"),
        ("merge", "write the model of a checkpoint to a new folder that from_pretrained can open"),
    ):
        command = commands.add_parser(name, help=purpose, description=purpose)
        command.add_argument("folder", type=Path, help="a checkpoint, or a folder of checkpoints")
    command.add_argument("--output", type=Path, help="the new folder; default: merged-NAME next to the checkpoint NAME")
    command.add_argument(
        "--max-shard-size", type=_bytes, default=FILE_BYTES, metavar="SIZE",
        help="maximum size of a file, such as 5GB (the default)",
    )  # fmt: skip
    command.add_argument(
        "--optimizer", action="store_true",
        help="also write the optimizer state and everything else that bmt.load_state needs to resume training",
    )  # fmt: skip
    command.add_argument(
        "--base", type=Path, nargs="+", default=[], metavar="PATH",
        help="required for a checkpoint saved with trained_only: the folder or the safetensors files of the base model",
    )  # fmt: skip
    return parser.parse_args()


def _bytes(text: str) -> int:
    """Convert a size from the command line, such as "500MB" or "2GiB", to a number of bytes.

    Raises argparse.ArgumentTypeError if `text` is not a size, or is less than one byte.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MB or 2GiB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one byte; pass a size such as 5GB")
    return size


def _merge_newest(found: list[Found], given: argparse.Namespace) -> str | None:
    """Run the command `merge`, which writes the model of the newest intact checkpoint to a new folder.

    If damage is found in a checkpoint while it is read, the damage is printed and the next older checkpoint is used.
    Returns an error message, or None on success.

    found: the checkpoints whose manifests (file lists) and file sizes are correct, newest first.
    given: the arguments of the command line.
    """
    for checkpoint in found:
        output = given.output or checkpoint.folder.with_name(f"merged-{checkpoint.folder.name}")
        try:
            check_arguments(checkpoint, output, given.optimizer, given.base)
            notes = merge(checkpoint, output, given.max_shard_size, given.optimizer, given.base)
        except Damaged as error:
            print(f"{checkpoint.folder}: damaged: {error}")
        except (ValueError, OSError) as error:
            return f"merge: nothing was written. {error}"
        else:
            for note in notes:
                print(f"note: {note}")
            print(f"{output}: written from {checkpoint.folder}, step {checkpoint.manifest.step}")
            return None
    return f"merge: nothing was written: no checkpoint in {given.folder} is intact. Restore a checkpoint from a copy"


def verify(checkpoint: Found) -> bool:
    """Read a checkpoint's files, compare them with their checksums, and print the result, for the command `verify`.

    Two files contain the checksums. The manifest has the checksums of the files that were in the checkpoint when
    `save_state` completed it. "complete.json" has the checksums of files that were added later, for example by Trainer.
    Files without a checksum are not checked. If no damage is found, the names of these files are printed.

    Returns True if no damage was found.
    """
    files = checkpoint.manifest.files
    total = sum(map(checkpoint.manifest.size, files))
    problems: list[str] = []
    with tqdm(total=total, unit="B", unit_scale=True, desc=checkpoint.folder.name) as bar, ThreadPoolExecutor() as pool:

        def check(name: str) -> Iterator[str]:
            for count, problem in check_file(checkpoint.folder, name, files[name]):
                bar.update(count)
                if problem is not None:
                    yield problem

        for some in pool.map(lambda name: list(check(name)), files):
            problems += some
    added: dict[str, int] = {}
    try:
        added = added_checksums(checkpoint.folder)
    except Damaged as error:
        problems.append(str(error))
    problems += filter(None, (check_added(checkpoint.folder, name, crc) for name, crc in added.items()))
    for problem in problems:
        print(f"{checkpoint.folder}: damaged: {problem}")
    if not problems:
        total += sum((checkpoint.folder / name).stat().st_size for name in added)
        unchecked = sorted(
            str(path.relative_to(checkpoint.folder))
            for path in checkpoint.folder.rglob("*")
            if path.is_file() and str(path.relative_to(checkpoint.folder)) not in {*files, *added, MANIFEST, ADDED}
        )
        without = f"; not checked, because they have no checksums: {', '.join(unchecked)}" if unchecked else ""
        number = len(files) + len(added)
        print(f"{checkpoint.folder}: intact, {number} files, {total:,} bytes, step {checkpoint.manifest.step}{without}")
    return not problems


def describe(checkpoint: Found) -> bool:
    """Print a checkpoint's step, number of ranks, package versions, files and tensors, for the command `inspect`.

    Only the headers of the safetensors files are read. Returns whether these headers are valid.
    """
    intact = True
    manifest = checkpoint.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    print(f"{checkpoint.folder}: step {manifest.step}, saved by {manifest.world_size} ranks with {versions}")
    for name in manifest.files:
        print(f"  {name}  {manifest.size(name):,} bytes")
        if name.endswith(".safetensors"):
            try:
                header = read_header(checkpoint.folder / name)
            except Damaged as error:
                print(f"    damaged: {error}")
                intact = False
                continue
            for key, tensor in sorted(header.items()):
                print(f"    {key}  {tuple(tensor.shape)}  {str(tensor.dtype).removeprefix('torch.')}")
    return intact


if __name__ == "__main__":
    main()
