"""Runs the .cu files on the CPU: compiled by g++ with cuda_shim.h in the place of device.cuh, and called by
the same Python functions as on a GPU. What that can and cannot show stands in cuda_shim.h."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

import torch

from hf_bmtrain.engine.base import launch
from hf_bmtrain.engine.base.launch import Argument, Variant

SHIM = Path(__file__).with_name("cuda_shim.h")
_C_TYPES = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


class OnShim(torch.Tensor):
    """A CPU tensor that says it is on a GPU, so that the CUDA path is taken."""

    @property
    def is_cuda(self) -> bool:
        return True


def place(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnShim)


class Shim:
    """Compiles a variant on first use; `kernel` stands in for `hf_bmtrain.engine.base.launch.kernel`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._compiled = cache(self._compile)
        self.launches: list[str] = []

    def kernel(self, variant: Variant, name: str, device: torch.device):
        self.launches.append(name)
        signature = variant.signature(name)
        run = getattr(self._compiled(variant), f"run_{name}")
        cluster = int(dict(variant.macros).get("CLUSTER", 1))

        def call(grid: int, block: int, *values, shared_memory: int = 0) -> None:
            packed = launch.pack(name, signature, values, torch.device("cpu"))
            typed = [ctypes.c_void_p(p) if a.pointer else _C_TYPES[a.c_type](p) for a, p in zip(signature, packed)]
            error = run(grid, block, cluster, shared_memory, *typed)
            assert error != 1, f"{name}: a barrier is not reached by all"
            assert error == 0, f"{name}: an access is not aligned"

        return call

    def _compile(self, variant: Variant) -> ctypes.CDLL:
        folder = self.folder / variant.digest(0, (0, 0))
        folder.mkdir()
        for name, text in variant.headers.items():
            (folder / name).write_text(SHIM.read_text() if name == "device.cuh" else text)
        names = [
            word.split("(")[0].split()[-1]
            for word in variant.source.split('extern "C" __global__')[1:]
            for word in [word[word.index(" void ") :]]
        ]
        wrappers = "\n".join(_wrapper(name, variant.signature(name)) for name in names)
        (folder / "kernel.cpp").write_text(variant.source + wrappers)
        macros = [f"-D{key}={value}" for key, value in variant.macros]
        subprocess.run(
            ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *macros, "kernel.cpp", "-o", "kernel.so"],
            cwd=folder,
            check=True,
        )
        return ctypes.CDLL(str(folder / "kernel.so"))


def _wrapper(name: str, signature: tuple[Argument, ...]) -> str:
    parameters = ", ".join(f"{a.c_type}{'*' if a.pointer else ''} {a.name}" for a in signature)
    arguments = ", ".join(a.name for a in signature)
    return (
        f'\nextern "C" int run_{name}(int grid, int threads, int cluster_size, int shared, {parameters}) {{ '
        f"return launch(grid, threads, cluster_size, shared, [=] {{ {name}({arguments}); }}); }}"
    )
