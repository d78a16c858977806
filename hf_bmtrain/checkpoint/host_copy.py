"""Copies of a checkpoint's values in host memory, written while training continues."""

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
"""Of one copy at a time: a flag that training sends to the host (transformers' masks do) waits for no more."""


class HostMemory:
    """Host memory for the copies, reused by later checkpoints: reserving it takes longer than copying."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return uint8 (nbytes,), which `device` can write. Raises RuntimeError if there is not as much memory."""
        if len(self._memory) < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old one first
            self._memory = pinned_bytes(nbytes, device, "copies of what is being saved")
        return self._memory[:nbytes]


class Snapshot:
    """The values of `parts` at the time of the call, for a thread that writes them.

    Forward and backward only read them, and the next optimizer step waits until they are copied. Other writes in the
    meantime are found by the tensors' versions. The world's device must have finished its queued work.
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
        """Let optimizers step without checking this snapshot. Called after `write` by the thread that steps them."""
        self._hook.remove()
        self._copying.discard(self._taken)

    def write(self, folder: Path, memory: HostMemory) -> dict[str, list[Checked]]:
        """Copy the values to `memory` and write them into files that exist. Returns the pieces by file.

        Without enough memory they are written where they are, and optimizers wait for that. Raises RuntimeError if
        something wrote them in the meantime.
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
        """Return the parts with copies of their values, None without enough memory."""
        starts, end = [], 0
        for part in self._parts:
            starts.append(end)
            end += -(-part.values.nbytes // _ALIGNMENT) * _ALIGNMENT
        try:
            host = memory.reserve(end, self._device)
        except RuntimeError as error:
            _log.warning("save_state: the next optimizer step waits until the checkpoint is written. %s", error)
            return None
        targets = [
            host[start : start + part.values.nbytes].view(part.values.dtype) for start, part in zip(starts, self._parts)
        ]
        stream = work_stream(self._device)
        for target, part in zip(targets, self._parts):
            for to, values in zip(_in_turns(target), _in_turns(part.values)):
                stream.run(functools.partial(to.copy_, values, non_blocking=True))
                stream.record_event().synchronize()  # a copy engine lets others in when its queue is empty
        return [part._replace(values=target) for target, part in zip(targets, self._parts)]

    def _end(self) -> None:
        """Let optimizers step. Raises RuntimeError if the values were written."""
        changed = [part.values._version for part in self._parts] != self._versions
        self._parts = []
        if changed:
            raise RuntimeError(
                "Weights or optimizer state were written before they were copied, and not by an optimizer's step: call "
                "`wait()` of what save_state returned before you write them, or save without non_blocking."
            )
        self._taken.set()


def _in_turns(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return 1-D `values` in views of at most `_TURN_BYTES`."""
    return values.split(max(1, _TURN_BYTES // values.itemsize))
