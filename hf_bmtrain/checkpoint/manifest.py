"""The manifest, which lists a checkpoint's files and checksums. It is written last and marks a complete checkpoint."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from .header import Damaged

NAME = "manifest.json"
_FORMAT = 1
_ADVICE = (
    "The ranks may have saved different models or optimizers: create the same ones on every rank. If they are the "
    "same, report this error, because it is a bug in hf_bmtrain"
)


class Checked(NamedTuple):
    """A chunk of a file (at most 4 MiB), and its checksum.

    Attributes:
        start: the offset of the chunk's first byte in the file.
        length: the chunk's size in bytes.
        crc: the CRC-32 (zlib's) of the chunk's bytes, or None if it is unknown.
    """

    start: int
    length: int
    crc: int | None


@dataclass
class Manifest:
    """The list of a checkpoint's files with their checksums, and facts such as the step, as saved in `manifest.json`.

    Attributes:
        step: the training step at which the checkpoint was saved.
        number: the checkpoint's place in the order of saving: one more than the `number` of the newest intact
            checkpoint that was in the folder at that time, or 1 if there was none.
        world_size: the number of ranks that saved the checkpoint.
        versions: the versions of the packages that saved the checkpoint, by package name.
        files: {file name: the chunks of the file (at most 4 MiB each), with their checksums}. The chunks are sorted by
            offset, and cover each byte of the file once.
    """

    step: int
    number: int
    world_size: int
    versions: dict[str, str]
    files: dict[str, list[Checked]] = field(default_factory=dict)

    def without(self, bases: tuple[str, ...]) -> Manifest:
        """Return a copy of this manifest (list of files) that lacks some safetensors files and their index files.

        Used to load a checkpoint without these files, such as those of the weights. These files may then be
        missing or damaged.

        bases: prefixes of file names, such as "model". The files whose names begin with one of these prefixes are left
            out.
        """
        left_out = [name for name in self.files if name.startswith(bases) and ".safetensors" in name]
        return replace(self, files={name: chunks for name, chunks in self.files.items() if name not in left_out})

    def size(self, name: str) -> int:
        """Return the size in bytes that the file `name` had when it was saved."""
        chunks = self.files[name]
        return chunks[-1].start + chunks[-1].length if chunks else 0

    def add(self, name: str, chunks: Iterable[Checked], size: int) -> None:
        """Add a file to this list of a checkpoint's files.

        Args:
            name: the file's name, without its folder.
            chunks: the file's chunks (at most 4 MiB each) with their checksums, in any order.
            size: the file's size in bytes.

        Raises:
            Damaged: the chunks do not cover each byte of the file exactly once.
        """
        ordered = sorted(Checked(*chunk) for chunk in chunks)
        end = 0
        for chunk in ordered:
            if chunk.start > end:
                raise Damaged(f"{name}: bytes {end:,} to {chunk.start:,} were not written. {_ADVICE}")
            if chunk.start < end:
                twice = min(end, chunk.start + chunk.length)
                raise Damaged(f"{name}: bytes {chunk.start:,} to {twice:,} were written twice. {_ADVICE}")
            end += chunk.length
        if end != size:
            raise Damaged(f"{name}: {end:,} bytes were written, but the file has {size:,}. {_ADVICE}")
        self.files[name] = ordered

    def to_bytes(self) -> bytes:
        content = json.dumps(asdict(self), separators=(",", ":"))
        return json.dumps({"hf_bmtrain": _FORMAT, "crc": zlib.crc32(content.encode()), "content": content}).encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest (the list of files and checksums) of the checkpoint in `folder`.

        Raises Damaged if the manifest is missing, changed or invalid.
        """
        try:
            outer = json.loads((folder / NAME).read_bytes())
            content = outer["content"]
            if outer["hf_bmtrain"] != _FORMAT:
                raise ValueError(
                    f"the checkpoint has format {outer['hf_bmtrain']}, but this version of hf_bmtrain reads only "
                    f"format {_FORMAT}. Load it with the version that saved it"
                )
            if zlib.crc32(content.encode()) != outer["crc"]:
                raise ValueError("the file does not match the checksum that it contains, so it was damaged or edited")
            fields: dict[str, Any] = json.loads(content)
            files = {name: [Checked(*map(int, chunk)) for chunk in all_] for name, all_ in fields.pop("files").items()}
            manifest = cls(**fields, files=files)
        except FileNotFoundError as error:
            raise Damaged(
                f"{NAME} is missing: either the save was interrupted before the checkpoint was complete, or another "
                "program wrote this folder"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{NAME} cannot be read: {type(error).__name__}: {error}") from error
        outside = [name for name in files if not name.strip(".") or Path(name).name != name or "\0" in name]
        if outside:
            raise Damaged(
                f"{NAME} lists files outside its folder: {', '.join(map(repr, outside[:5]))}. save_state never "
                "writes such names, so another program has edited or written it"
            )
        return manifest

    def check_sizes(self, folder: Path) -> None:
        """Raise Damaged unless `folder` contains every listed file with its saved size. Contents are not read.

        Called before a checkpoint is loaded, and to find the newest complete checkpoint.
        """
        for name in self.files:
            try:
                size = os.path.getsize(folder / name)
            except FileNotFoundError as error:
                raise Damaged(f"{name} is missing") from error
            except OSError as error:
                raise Damaged(f"{name} cannot be read: {error.strerror}") from error
            if size != self.size(name):
                raise Damaged(f"{name} has {size:,} bytes, but {self.size(name):,} were saved")
