"""torchrun whose ranks are processes of the warm server."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from warm_server import ADDRESS, Started


def popen(handler: Any, command: tuple[str, ...], environment: dict[str, str]) -> Started:
    script = next(number for number, word in enumerate(command) if word.endswith(".py"))
    stderr = os.path.join(environment["FAULT_LOGS"], f"rank-{environment['RANK']}{environment['FAULT_LOG_NAME']}.log")
    return Started(os.environ[ADDRESS], list(command[script:]), environment, stderr)


def main_of_torchrun() -> None:
    SubprocessHandler._popen = popen
    run.main()


if __name__ == "__main__":
    main_of_torchrun()
