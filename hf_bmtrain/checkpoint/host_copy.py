"""Copy a checkpoint's values to host memory, so that a thread can write them while training continues."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..engine.base.pinned import pinned_bytes
from ..engine.comm.streams import work_stream
from ..engine.runtime.world import World
from .manifest import Checked
from .ranges import Part, write_parts

_log = logging.getLogger("hf_bmtrain")
_ALIGNMENT = 64
_TURN_BYTES = 256 << 20
"""Maximum size of one copy to the host, in bytes. Larger tensors are copied in pieces. If training copies a small value
to the host at the same time (as transformers does to create masks), that copy waits only for the current piece."""


class HostMemory:
    """Host memory for a copy of a checkpoint's values. Later checkpoints in the same folder reuse it.

    Each rank has one HostMemory for each folder of checkpoints, because allocating the memory anew would be slow.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a uint8 tensor of shape (nbytes,) in host memory. The next call may return the same memory.

        Args:
            nbytes: the number of bytes.
            device: the device from which values will be copied. If it is a GPU, the memory is page-locked.

        Raises:
            RuntimeError: the memory cannot be allocated or page-locked.
        """
        if len(self._memory) < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old memory before allocating more
            self._memory = pinned_bytes(nbytes, device, "copies of the values to save")
        return self._memory[:nbytes]


class Snapshot:
    """Lets a background thread write the present values of tensors to files, while training continues.

    The thread calls `write`. Because an optimizer step would change the tensors, optimizer steps after the construction
    of this object wait until the thread has copied the values to host memory. If host memory for the copies cannot be
    allocated, optimizer steps wait until the thread has written the values to the files.

    Forward and backward do not wait. So for a tensor that a forward may change, such as a module's buffer, pass a copy.
    If torch's version counters show that other code has changed a tensor, `write` raises an error.

    Before constructing this object, synchronize the device, because the thread does not wait for kernels that still
    write the tensors.

    Args:
        parts: the 1-D tensors, each with the file and the offset at which it is written.
        world: the ranks that train together, with this process's rank, device and communicators.
    """

    def __init__(self, parts: Sequence[Part], world: World) -> None:
        self._parts, self._device, self._copying = parts, world.device, world.copying
        self._versions = [part.values._version for part in parts]
        self._taken = threading.Event()
        self._copying.add(self._taken)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        self._taken.wait()

    def close(self) -> None:
        """Remove the hook that makes optimizer steps wait. Call this on the training thread after `write` has ended."""
        self._hook.remove()
        self._copying.discard(self._taken)

    def write(self, folder: Path, memory: HostMemory) -> dict[str, list[Checked]]:
        """Copy the tensors of this object to host memory, and write the copies into files.

        If host memory for the copies cannot be allocated, the tensors themselves are written, and optimizer steps wait
        until all are written.

        Args:
            folder: the folder of the files, which must exist with their final sizes.
            memory: the host memory for the copies.

        Returns:
            The offset, size and checksum of each written chunk (at most 4 MiB of a file), by file name.

        Raises:
            RuntimeError: a tensor was changed since this object was constructed.
            OSError: a file cannot be written.
        """
        try:
            copies = self._copy(memory)
            if copies is not None:
                self._end()
            written = write_parts(folder, self._parts if copies is None else copies)
            if copies is None:
                self._end()
            return written
        finally:
            self._taken.set()

    def _copy(self, memory: HostMemory) -> list[Part] | None:
        """Copy the tensors that were passed to the constructor to `memory`, and return these copies.

        Returns None, and logs a warning, if the memory cannot be allocated.
        """
        starts, end = [], 0
        for part in self._parts:
            starts.append(end)
            end += -(-part.values.nbytes // _ALIGNMENT) * _ALIGNMENT
        try:
            host = memory.reserve(end, self._device)
        except RuntimeError as error:
            _log.warning(
                "save_state: host memory for a copy of the values to save cannot be allocated, so the next optimizer "
                "step waits until the checkpoint is written. The error was: %s",
                error,
            )
            return None
        targets = [
            host[start : start + part.values.nbytes].view(part.values.dtype) for start, part in zip(starts, self._parts)
        ]
        stream = work_stream(self._device)
        for target, part in zip(targets, self._parts):
            for to, values in zip(_in_turns(target), _in_turns(part.values)):
                # Copy one piece after the other: queue the next only when this one is complete. If the training thread
                # queues a copy to the host meanwhile, it then waits for one piece at most, not for all of them.
                stream.run(functools.partial(to.copy_, values, non_blocking=True))
                stream.record_event().synchronize()
        return [part._replace(values=target) for target, part in zip(targets, self._parts)]

    def _end(self) -> None:
        """Let waiting optimizer steps continue. Called when all tensors have been copied or written.

        Raises RuntimeError if torch's version counters show that a tensor was changed since the construction of this
        object. Waiting optimizer steps then continue only when `write` ends.
        """
        changed = [part.values._version for part in self._parts] != self._versions
        self._parts = []
        if changed:
            raise RuntimeError(
                "something other than an optimizer step changed weights or optimizer state before they were saved. "
                "Before you change them, call wait() of the SavingState that save_state returned, or save without "
                "non_blocking."
            )
        self._taken.set()


def _in_turns(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split 1-D `values` into views of at most `_TURN_BYTES` (256 MiB) each, which are copied one after the other."""
    return values.split(max(1, _TURN_BYTES // values.itemsize))
