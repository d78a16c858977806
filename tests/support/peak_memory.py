"""Peak host memory of a few lines in fresh processes.

Anonymous memory (RssAnon) is counted: pages of mapped files are shared by the ranks of a host, and the system takes
them back. malloc keeps up to 64 MiB of what was freed whatever the model's size; so that this is not counted, the ranks
run with MALLOC_MMAP_THRESHOLD_=1048576.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from processes import environment
from ranks import free_port


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """Under `with`: `bytes` is the most memory beyond `base`, which is that at the beginning."""

    def __enter__(self) -> Peak:
        self.base = self._most = anonymous_bytes()
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._done.is_set():
            self._most = max(self._most, anonymous_bytes())
            time.sleep(0.001)

    @property
    def bytes(self) -> int:
        return self._most - self.base


def on_ranks(count: int, script: Path, function: str, folder: str) -> list[str]:
    """Call `function(folder)` of a script in `count` processes, one world. Returns what each has printed."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import {script.stem} as it; it.{function}({folder!r})"],
            env=environment(
                RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port, MALLOC_MMAP_THRESHOLD_="1048576", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true",
                PYTHONPATH=os.pathsep.join([str(script.parent), *filter(None, sys.path)]),
            ),
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    printed = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert all(process.returncode == 0 for process in processes), printed
    return printed
