"""Starts scripts as processes that have imported already what takes seconds.

`WarmServer` starts this file as a server, which forks a process for every `start`. The process runs its script as the
main program: what it raises, its hooks at exit and its exit status are those of `python SCRIPT`. The server's own
process has imported torch, transformers and hf_bmtrain and runs no thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "accelerate",
    "transformers", "transformers.models.llama.modeling_llama", "transformers.trainer", "hf_bmtrain",
    "hf_bmtrain.hf.callback", "hf_bmtrain.hf.trainer",
)  # fmt: skip
ADDRESS = "WARM_SERVER"
"""The environment variable that says where the server listens."""


def ask(address: str, **request: Any) -> Any:
    """Send a request to the server, and return its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(connection.makefile().readline())


class Started:
    """A process of the server's, with the methods of subprocess.Popen that are needed here."""

    def __init__(self, address: str, command: list[str], variables: dict[str, str], stderr: str) -> None:
        self._address, self.returncode = address, None
        self.pid: int = ask(address, command=command, variables=variables, stderr=stderr)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ask(self._address, poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("", timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill it and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class WarmServer:
    """Under `with`, a server; `start` starts a process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __enter__(self) -> WarmServer:
        self._folder = tempfile.TemporaryDirectory()
        self.address = str(Path(self._folder.name) / "socket")
        command = [sys.executable, __file__, self.address]
        self._process = subprocess.Popen(command, env=self._environment, start_new_session=True)
        while not os.path.exists(self.address):
            assert self._process.poll() is None
            time.sleep(0.05)
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def start(self, command: list[str], variables: dict[str, str], stderr: Path) -> Started:
        """Start `command` (a script and its arguments) with this environment; its output is added to `stderr`."""
        return Started(self.address, command, variables | {ADDRESS: self.address}, str(stderr))


# -- in the server ------------------------------------------------------------------------------------------------


def serve(address: str) -> list[str]:
    """Answer requests. Returns in a process that has been forked, with the command that it is to run."""
    statuses: dict[int, int | None] = {}
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen(64)
        os.rename(f"{address}.new", address)
        waiting = selectors.DefaultSelector()
        waiting.register(listening, selectors.EVENT_READ)
        while True:
            if not waiting.select(0.5):
                if os.getppid() != parent:  # the harness was killed
                    _end(statuses)
                continue
            connection, _ = listening.accept()
            # A process that a test interrupts may end while it asks.
            with connection, contextlib.suppress(ConnectionError):
                line = connection.makefile().readline()
                if not line:
                    continue
                request = json.loads(line)
                while (ended := _ended()) is not None:
                    statuses[ended[0]] = ended[1]
                if "poll" in request:
                    answer = statuses[request["poll"]]
                else:
                    answer = os.fork()
                    if answer == 0:
                        break
                    statuses[answer] = None
                connection.sendall(json.dumps(answer).encode() + b"\n")
    _settle(request)
    return request["command"]


def _end(statuses: dict[int, int | None]) -> None:
    for process in [process for process, status in statuses.items() if status is None]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    os._exit(1)


def _ended() -> tuple[int, int] | None:
    with contextlib.suppress(ChildProcessError):
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            return process, os.waitstatus_to_exitcode(status)
    return None


def _settle(request: dict[str, Any]) -> None:
    """Give a forked process what `python` would have."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    descriptor = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv[:] = request["command"]
    sys.path[0] = os.path.dirname(sys.argv[0])


if __name__ == "__main__":
    for name in IMPORTED:
        __import__(name)
    __import__("torch").set_num_threads(1)
    script = serve(sys.argv[1])[0]
    __file__ = script
    with open(script, encoding="utf-8") as file:
        source = compile(file.read(), script, "exec")
    exec(source)
