"""Autocast inside sharded layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_UNCHANGED = nullcontext()


def uncached_autocast() -> AbstractContextManager:
    """Return the caller's autocast without its cache of casts.

    The cache is keyed by the whole parameter, which is the same object every step: a refilled block would compute
    with the casts of old weights, and the casts of all blocks would stay alive.
    """
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
    return _UNCHANGED
