"""Find out which packages are installed, which GPUs torch can use, and how the GPUs are linked."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...engine.base.launch import import_cupy, source_folder
from ...engine.comm.nccl import import_nccl
from ..float8.arithmetic import check_device

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "safetensors", "numpy", "tqdm", "cupy", "peft", "trl",
    "bitsandbytes",
)  # fmt: skip
VARIABLES = re.compile(
    r"(HF_BMTRAIN|NCCL|GLOO|OMP|TORCH_NCCL)_\w+|CUDA_VISIBLE_DEVICES|ACCELERATE_USE_CPU|HF_HUB_OFFLINE"
)
"""The names of the environment variables that `python -m hf_bmtrain --report` prints, if they are set."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use.

    name: its model, such as "NVIDIA H100 80GB HBM3".
    memory: its memory in bytes.
    capability: its compute capability, (major, minor).
    """

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """The facts about this machine and Python environment that `python -m hf_bmtrain` prints.

    Attributes:
        packages: {package in PACKAGES: its version, None if it is not installed}.
        needed: {required package: the oldest supported version, such as "2.6", or "" for any}; empty if hf_bmtrain is
            not installed.
        cuda: the CUDA version that torch is built for, None for a build without CUDA.
        gpus: the GPUs that torch can use.
        unseen: whether the machine has NVIDIA GPUs but torch can use none.
        trouble: {problem: error message}; empty if there is none. The keys may be "torch" (torch is built for CUDA, but
            finds no GPU and warns why), "CuPy" (CuPy or NCCL cannot be used) and "CUDA sources" (the files with the
            CUDA kernels of hf_bmtrain are missing).
        nccl: the NCCL version, such as "2.27.5"; None if there is no GPU or NCCL cannot be used.
        links: the kinds of links between GPUs according to nvidia-smi, such as "NV18" or "SYS"; empty if unknown.
        blocked: pairs (a, b) such that GPU a cannot access the memory of GPU b.
        float8: why GPU 0 cannot multiply float8 matrices, or None if it can or there is no GPU.
    """

    packages: dict[str, str | None]
    needed: dict[str, str] = field(default_factory=dict)
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    unseen: bool = False
    trouble: dict[str, str] = field(default_factory=dict)
    nccl: str | None = None
    links: tuple[str, ...] = ()
    blocked: tuple[tuple[int, int], ...] = ()
    float8: str | None = None


def find_facts() -> Facts:
    """Collect the facts about this machine and this Python environment that `python -m hf_bmtrain` prints.

    On a machine with GPUs, this imports CuPy and calls NCCL, to find out whether they can be used.
    """
    trouble = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if torch.version.cuda and not count and caught:
        trouble["torch"] = str(caught[0].message).split(" (Triggered")[0]
    try:
        source_folder()
    except RuntimeError as error:
        trouble["CUDA sources"] = str(error)
    gpus = tuple(map(_gpu, range(count)))
    nccl = None
    if gpus:
        try:
            import_cupy()
            numbers = import_nccl().get_version()
            nccl = f"{numbers // 10000}.{numbers // 100 % 100}.{numbers % 100}"
        except RuntimeError as error:
            trouble["CuPy"] = str(error)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return Facts(
        packages={name: installed(name) for name in PACKAGES},
        needed=needed(),
        cuda=torch.version.cuda,
        gpus=gpus,
        unseen=not gpus and Path("/dev/nvidia0").exists(),
        trouble=trouble,
        nccl=nccl,
        links=links(topology(), count),
        blocked=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
        float8=_float8(count),
    )


def installed(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed.

    CuPy has a package for each CUDA version. For "cupy", the packages cupy-cuda13x, cupy-cuda12x and cupy are tried in
    this order, and the version of the first one that is installed is returned.
    """
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if package == "cupy" else (package,):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def needed() -> dict[str, str]:
    """Return {required package: oldest supported version, or "" for any}; empty if hf_bmtrain is not installed."""
    try:
        lines = importlib.metadata.requires("hf_bmtrain") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = [re.match(r"([\w-]+)(?:>=([\d.]+))?$", line) for line in lines]
    return {match[1]: match[2] or "" for match in found if match}


def topology() -> str:
    """Return the output of `nvidia-smi topo -m`, or "" if the command fails."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def links(topology: str, count: int) -> tuple[str, ...]:
    """Return the kinds of links between GPUs, such as "NV18" or "SYS", each once and sorted.

    topology: the output of `nvidia-smi topo -m`.
    count: how many GPUs torch can use. If the output lists a different number of GPUs, the result is ().
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s+(X|NV|SYS|NODE|PHB|PXB|PIX)", line)]
    if len(rows) != count:
        return ()
    return tuple(
        sorted({row[1 + other] for number, row in enumerate(rows) for other in range(count) if other != number})
    )


def variables() -> dict[str, str]:
    """Return {name: value} of the environment variables that `python -m hf_bmtrain --report` prints.

    These are the variables that are set and whose names match `VARIABLES`.
    """
    return {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)}


def host() -> str:
    """Return a line about this machine: Python's version, the system, CPU cores and memory, but not the host name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"Python {platform.python_version()}, {system}, {os.cpu_count()} cores, {memory:.0f} GiB"


def _gpu(number: int) -> Gpu:
    properties = torch.cuda.get_device_properties(number)
    return Gpu(properties.name, properties.total_memory, (properties.major, properties.minor))


def _float8(count: int) -> str | None:
    """Return why GPU 0 cannot multiply float8 matrices, or None if it can or there is no GPU.

    count: how many GPUs torch can use.
    """
    if not count:
        return None
    try:
        check_device(torch.device("cuda", 0))
    except ValueError as error:
        return str(error)
    return None
