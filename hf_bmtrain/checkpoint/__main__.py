"""Look at checkpoints without a GPU or a process group.

    python -m hf_bmtrain.checkpoint verify FOLDER     read every byte and compare it with its checksum
    python -m hf_bmtrain.checkpoint inspect FOLDER    print what a checkpoint contains

FOLDER is one checkpoint, or holds several. The exit status of `verify` is 1 if one is damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from .folder import Found, find
from .header import read_header
from .ranges import check_file


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_bmtrain.checkpoint", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["verify", "inspect"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    found, damaged = find(given.folder)
    for folder, reason in damaged:
        print(f"{folder}: damaged: {reason}")
    if not found and not damaged:
        sys.exit(f"{given.folder}: no checkpoint of save_state, and no folder that holds one")
    good = [verify(each) if given.command == "verify" else describe(each) for each in found]
    if given.command == "verify" and (damaged or not all(good)):
        sys.exit(1)


def verify(checkpoint: Found) -> bool:
    """Compare every byte with its checksum, print what is wrong, and return whether nothing is."""
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
    for problem in problems:
        print(f"{checkpoint.folder}: damaged: {problem}")
    if not problems:
        print(f"{checkpoint.folder}: whole, {len(files)} files, {total:,} bytes, step {checkpoint.manifest.step}")
    return not problems


def describe(checkpoint: Found) -> bool:
    """Print step, ranks, versions, files and tensors."""
    manifest = checkpoint.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    print(f"{checkpoint.folder}: step {manifest.step}, saved by {manifest.world_size} ranks with {versions}")
    for name in manifest.files:
        print(f"  {name}  {manifest.size(name):,} bytes")
        if name.endswith(".safetensors"):
            for key, tensor in sorted(read_header(checkpoint.folder / name).items()):
                print(f"    {key}  {tuple(tensor.shape)}  {str(tensor.dtype).removeprefix('torch.')}")
    return True


if __name__ == "__main__":
    main()
