"""Worker processes that form a world and run a test's function on every rank."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import queue
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from cases import in_full

_SECONDS = 90
PRELOADED = ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "hf_bmtrain"]
"""Modules that take seconds to import, for the server from which ranks on CPU are forked."""


class Ranks:
    """`size` processes, one world (on CPU unless told), started at the first call and again after a failure.

    `ranks(function, *arguments)` runs an importable function on every rank and returns the list of its results.
    Released and unfilled buffers are poisoned with NaN in all of them. Where there are fewer GPUs than ranks, several
    share one.

    hosts: for each rank the name of the host that it pretends to be on; None leaves all on this one. options: more
    arguments of init_distributed.
    """

    def __init__(
        self, size: int, device: str = "cpu", gather: str = "auto", hosts: str | None = None, **options: Any
    ) -> None:
        self.size, self._device, self._options = size, device, {"gather": gather, **options}
        self._hosts = [None] * size if hosts is None else hosts
        self._processes: list = []

    def __call__(self, function, *arguments) -> list[Any]:
        if not self._processes:
            self._start()
        for inbox in self._inboxes:
            inbox.put((function, arguments))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + _SECONDS
        while len(results) < self.size:
            try:
                rank, good, value = self._outbox.get(timeout=1)
            except queue.Empty:
                self._check_alive(function, deadline, set(range(self.size)) - set(results))
                continue
            if not good:
                self.stop()
                raise AssertionError(f"rank {rank} of {self.size} failed in {function.__name__}{arguments}:\n{value}")
            results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def _check_alive(self, function, deadline: float, waiting: set[int]) -> None:
        dead = {rank: process.exitcode for rank, process in enumerate(self._processes) if not process.is_alive()}
        if dead or time.monotonic() > deadline:
            self.stop()
            raise AssertionError(f"{function.__name__}: waiting for ranks {waiting}; died (exit codes): {dead}")

    def _start(self) -> None:
        # On CPU they are forked from a server that has imported what takes seconds; CUDA does not survive a fork.
        context = multiprocessing.get_context("forkserver" if self._device == "cpu" else "spawn")
        context.set_forkserver_preload(PRELOADED)
        self._outbox = context.Queue()
        self._inboxes = [context.Queue() for _ in range(self.size)]
        # As torchrun's, the store is the parent's: a port that is looked for and then given away may be taken.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        for rank in range(self.size):
            place = rank, self.size, self._device, self._hosts[rank]
            arguments = (*place, self._options, port, self._inboxes[rank], self._outbox)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            # HF_HUB_OFFLINE is read when transformers is imported. Something that the server imports initializes CUDA,
            # which its forks could not use then, so they see no GPU. (torch's AdamW asks a GPU even on the CPU.)
            hidden = {"CUDA_VISIBLE_DEVICES": ""} if self._device == "cpu" else {}
            with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1", **hidden):
                process.start()
            self._processes.append(process)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []


def on_ranks(*sizes: int, full: tuple[int, ...] = ()) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Make a test of a function that every rank of worlds of these sizes runs; its parameters are the test's.

    Worlds of the sizes in `full` are not among the default cases.
    """

    def decorate(function: Callable[..., object]) -> Callable[..., None]:
        @pytest.mark.parametrize("size", [*sizes, *in_full(*full)])
        @functools.wraps(function)
        def test(world: Any, size: int, **arguments: Any) -> None:
            world(size)(call_test, function.__module__, function.__name__, arguments)

        parameters = list(inspect.signature(function).parameters.values())
        added = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("world", "size")]
        test.__signature__ = inspect.Signature([*added, *parameters])
        return test

    return decorate


def call_test(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call what `on_ranks` has made a test of."""
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def _serve(
    rank: int, size: int, device: str, host: str | None, options: dict[str, Any], port: int, inbox, outbox
) -> None:
    if host is not None:
        os.environ["HF_BMTRAIN_HOST"] = host
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", HF_BMTRAIN_POISON="1", ACCELERATE_USE_CPU=str(device == "cpu"),
        **place_on_host(rank, size, torch.cuda.device_count() if device == "cuda" else size),
    )  # fmt: skip

    torch.set_num_threads(1)
    import hf_bmtrain as bmt

    bmt.init_distributed(seed=0, timeout=_SECONDS / 2, **options)
    while True:
        function, arguments = inbox.get()
        try:
            outbox.put((rank, True, function(*arguments)))
        except BaseException:
            outbox.put((rank, False, traceback.format_exc()))
        _forget_accelerator()


def place_on_host(rank: int, size: int, devices: int) -> dict[str, str]:
    """The variables of a rank that say which of the host's devices is its own; ranks share one where there are fewer.

    NCCL refuses two ranks on one GPU, unless they say that they are on different hosts; they talk through sockets then.
    """
    if size <= devices:
        return {"LOCAL_RANK": str(rank)}
    return {"LOCAL_RANK": str(rank % devices), "NCCL_HOSTID": f"rank {rank}"}


class BothDevices(TorchFunctionMode):
    """Draws what a generator of the CPU draws on the CPU, and moves it to the GPU; compares tensors of both devices."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        generator = options.get("generator")
        if function in _DRAWING and generator is not None and generator.device.type == "cpu":
            return function(*arguments, **options, device="cpu").cuda()
        if function is torch.equal:
            arguments = [tensor.cpu() for tensor in arguments]
        return function(*arguments, **options)


_DRAWING = (torch.rand, torch.randn, torch.randint, torch.randperm)


def with_tensors_on_gpu(function, *arguments) -> Any:
    """Call a function that names no device for the tensors that it makes, so that they are on the GPU.

    What it compares may be on both devices: a state dict is on the CPU.
    """
    close = functools.partial(torch.testing.assert_close, check_device=False)
    with torch.device("cuda"), BothDevices(), mock.patch.object(torch.testing, "assert_close", close):
        return function(*arguments)


def _forget_accelerator() -> None:
    """An Accelerator's precision would reach the models of the next case."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def free_port() -> int:
    """For launchers that must be told one. The kernel gives none of these ports to connections of other processes."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(min(10_000, ephemeral // 2), ephemeral)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
