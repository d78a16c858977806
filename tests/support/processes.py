"""The environment of processes that tests start."""

from __future__ import annotations

import os
import sys


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment for a process without GPUs that finds the same modules, and `variables`."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
