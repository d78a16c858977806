"""Compile .cu files at run time and launch their kernels on torch's current stream. Needs no nvcc and no CUDA headers.

    variant = Variant("grad_norm", (("ELEMENT", "bf16"),))     # a source file and its macros
    launch = kernel(variant, "squared_norm_partials", device)  # compiled if not in the cache, loaded once per process
    launch(grid, block, x, n, partials)                        # arguments are checked against the source's signature

NVRTC, CUDA's run-time compiler, compiles a variant to a cubin (machine code for one GPU architecture). The cubin is
cached in a file whose name contains a hash of the sources, the compiler's options and its version. While one process of
a host compiles a variant, a file lock makes the host's other processes wait.
"""

import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch

from .files import atomic_file
from .torch_internals import current_raw_stream

log = logging.getLogger(__name__)

_POINTED = {
    "float": torch.float32, "double": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn, "unsigned char": torch.uint8, "short": torch.int16, "int": torch.int32,
    "long long": torch.int64, "none": None,
}  # fmt: skip
_INTEGERS = int, numpy.integer
_SCALARS = {
    "int": (_INTEGERS, numpy.int32), "long long": (_INTEGERS, int),
    "float": ((float, *_INTEGERS, numpy.floating), numpy.float32),
}  # fmt: skip
C_NAMES = {torch.float32: "float", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""The dtypes of weights and gradients that the kernels support, each with its name in the CUDA sources."""


def source_folder() -> Path:
    """Return the folder of the .cu files: `kernels` in the installed package, or next to the package in a clone.

    Raises RuntimeError if neither folder exists.
    """
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "device.cuh").is_file():
            return folder
    raise RuntimeError(
        f"CUDA sources were found neither in {package / 'kernels'} nor in {package.parent / 'kernels'}, so "
        "the installation is incomplete. Install hf_bmtrain again."
    )


def import_cupy() -> Any:
    """Import and return CuPy. If this fails, raise a RuntimeError that names the extra of hf_bmtrain to install."""
    try:
        import cupy
        from cupy.cuda import nvrtc  # noqa: F401  (fails if CuPy was built for a different CUDA version)
    except ImportError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        raise RuntimeError(
            f"CUDA kernels need CuPy, which could not be imported ({error}). This torch is built for CUDA "
            f"{torch.version.cuda}. Run pip install 'hf_bmtrain[cuda{major}]' (the extras are cuda12 and cuda13)."
        ) from error
    return cupy


class Argument(NamedTuple):
    """One parameter of a kernel, as its source declares it.

    Attributes:
        name: the parameter's name.
        c_type: its C type or, for a pointer, the type of the elements.
        pointer: whether it is a pointer.
        written: whether the kernel may write to the memory: true for a pointer that is not declared const.
    """

    name: str
    c_type: str
    pointer: bool
    written: bool


@dataclass(frozen=True)
class Variant:
    """A CUDA source file and the macros with which it is compiled.

    Attributes:
        file: the name of the file in `kernels/`, without `.cu`.
        macros: (name, value) pairs, sorted, so that equal variants compare equal.
    """

    file: str
    macros: tuple[tuple[str, str], ...]

    @cached_property
    def source(self) -> str:
        return (source_folder() / f"{self.file}.cu").read_text()

    @cached_property
    def headers(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(source_folder().glob("*.cuh"))}

    def signature(self, name: str) -> tuple[Argument, ...]:
        """Return the parameters of kernel `name`, parsed from the CUDA source. Macros in their types are expanded.

        Raises RuntimeError if the source has no such kernel, or if a parameter has an unsupported type.
        """
        found = re.search(r'extern "C" __global__[^;{]*?\bvoid\s+' + name + r"\s*\(([^)]*)\)", self.source)
        if found is None:
            raise RuntimeError(
                f"the CUDA source {self.file}.cu has no kernel named {name}. Declare it in that file as "
                f'extern "C" __global__ void {name}(...).'
            )
        text = re.sub(r"//[^\n]*", "", found.group(1))
        return tuple(self._argument(part.split()) for part in text.replace("*", " * ").split(","))

    def _argument(self, words: list[str]) -> Argument:
        macros = dict(self.macros)
        c_type = " ".join(macros.get(w, w) for w in words[:-1] if w not in ("*", "const", "__restrict__"))
        pointer = "*" in words
        if c_type not in (_POINTED if pointer else _SCALARS):
            raise RuntimeError(
                f"the CUDA source {self.file}.cu declares the kernel parameter '{' '.join(words)}', of a type that "
                "hf_bmtrain cannot pass to a kernel. Use one of these types: "
                f"{', '.join(c + ' *' * pointer for c in (_POINTED if pointer else _SCALARS) if c != 'none')}."
            )
        return Argument(words[-1], c_type, pointer, pointer and "const" not in words)

    def options(self, arch: int) -> tuple[str, ...]:
        """Return the compiler's options for compute capability `arch` (90 means 9.0).

        Subnormals, division and square roots follow IEEE 754, so that results match torch's.
        """
        ieee = ("--ftz=false", "--prec-div=true", "--prec-sqrt=true")
        macros = (f"-D{key}={value}" for key, value in self.macros)
        return (f"--gpu-architecture=sm_{arch}", "--std=c++17", *ieee, *macros)

    def digest(self, arch: int, compiler: tuple[int, int]) -> str:
        """Return a hash of everything on which the compiled code depends. The disk cache uses this hash as its key.

        Args:
            arch: the compute capability as an integer; 90 means 9.0.
            compiler: NVRTC's version, (major, minor).
        """
        content = repr((self.source, self.headers, self.options(arch), compiler))
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def compile_cubin(variant: Variant, arch: int, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Compile a CUDA source file to machine code (a cubin). This needs neither a GPU nor a driver.

    Args:
        variant: the source file and its macros.
        arch: the compute capability as an integer; 90 means 9.0.
        options: options for the compiler in addition to those of the variant.

    Returns:
        The cubin, and the compiler's log as text.

    Raises:
        RuntimeError: the source does not compile. The message contains the compiler's log.
        RuntimeError: CuPy cannot be imported.
    """
    nvrtc = import_cupy().cuda.nvrtc
    program = nvrtc.createProgram(
        variant.source,
        f"{variant.file}.cu",
        [text.encode() for text in variant.headers.values()],
        [name.encode() for name in variant.headers],
    )
    try:
        nvrtc.compileProgram(program, (*variant.options(arch), *options))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program).strip("\0\n")
    except nvrtc.NVRTCError as error:
        raise RuntimeError(
            f"the CUDA source {variant.file}.cu with the macros {dict(variant.macros)} does not compile for sm_{arch} "
            f"({error}). This is a bug in hf_bmtrain or in the installed NVRTC, not in your program. The log of the "
            "compiler:\n"
            f"{nvrtc.getProgramLog(program)}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def supported_arch(capability: tuple[int, int], known: Sequence[int]) -> int:
    """Return the newest architecture in `known` whose compiled kernels run on a GPU of compute capability `capability`.

    A kernel that was compiled for one compute capability runs on GPUs whose compute capability has the same major
    version, and the same or a higher minor version.

    Args:
        capability: the GPU's compute capability, (major, minor).
        known: the architectures for which the compiler can compile; 90 means compute capability 9.0.

    Raises:
        RuntimeError: there is no such architecture in `known`.
    """
    wanted = 10 * capability[0] + capability[1]
    fitting = [arch for arch in known if arch // 10 == capability[0] and arch <= wanted]
    if not fitting:
        raise RuntimeError(
            "CUDA's run-time compiler (NVRTC), as installed here, compiles for "
            f"{', '.join(f'sm_{a}' for a in sorted(known))}, but the GPU is sm_{wanted}. Install CuPy and NVRTC of a "
            "CUDA version that supports the GPU."
        )
    return max(fitting)


@cache
def shared_memory_limit(device: torch.device) -> int:
    """Return the maximum number of bytes of shared memory that a thread block can use on a CUDA device."""
    runtime = import_cupy().cuda.runtime
    return runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index)


def cache_folder() -> Path:
    """Return the folder in which compiled kernels are cached.

    It is $HF_BMTRAIN_KERNEL_CACHE if that is set, otherwise hf_bmtrain/kernels in $XDG_CACHE_HOME or ~/.cache.
    """
    chosen = os.environ.get("HF_BMTRAIN_KERNEL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_bmtrain" / "kernels"


def cached_cubin(variant: Variant, arch: int) -> Path:
    """Return the path of the file with a variant's compiled kernels. Compile them first if they are not in the cache.

    If several processes of a host call this at once, one compiles and the others wait.

    Args:
        variant: the source file and its macros.
        arch: the compute capability as an integer; 90 means 9.0.

    Raises:
        RuntimeError: the source does not compile.
        RuntimeError: the cache folder is not writable.
        RuntimeError: CuPy cannot be imported.
    """
    compiler = import_cupy().cuda.nvrtc.getVersion()
    folder = cache_folder()
    entry = folder / f"{variant.file}-sm_{arch}-{variant.digest(arch, compiler)}.cubin"
    if entry.exists():
        return entry
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(entry.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not entry.exists():
                _compile_into(entry, variant, arch)
    except OSError as error:
        raise RuntimeError(
            f"compiled CUDA kernels cannot be stored in {folder} ({error}). Set HF_BMTRAIN_KERNEL_CACHE to the path "
            "of a writable folder."
        ) from error
    return entry


def _compile_into(entry: Path, variant: Variant, arch: int) -> None:
    start = time.monotonic()
    cubin, _ = compile_cubin(variant, arch)
    with atomic_file(entry) as temporary:
        temporary.write_bytes(cubin)
    seconds = time.monotonic() - start
    log.info(
        "compiled %s.cu with the macros %s for sm_%d in %.1f s, and cached it as %s",
        variant.file, dict(variant.macros), arch, seconds, entry,
    )  # fmt: skip


def pack(name: str, signature: Sequence[Argument], values: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    """Check the arguments of a kernel, and convert them to types that CuPy passes to the kernel unchanged.

    Args:
        name: the kernel's name, for errors.
        signature: the kernel's parameters.
        values: one argument for each parameter: a tensor for a pointer, otherwise a number. Pass None for a pointer
            that this variant of the kernel does not use.
        device: the device on which the tensors must be.

    Returns:
        The converted arguments: addresses and `long long` numbers as int, other numbers as NumPy scalars.

    Raises:
        TypeError: the number of arguments is wrong, or an argument has a wrong type.
        ValueError: a tensor has a wrong dtype, or is on a wrong device.
    """
    if len(values) != len(signature):
        raise TypeError(
            f"the CUDA kernel {name} takes {len(signature)} arguments ({', '.join(a.name for a in signature)}), but "
            f"the code that launches it passes {len(values)}. This is a bug in hf_bmtrain, not in your program."
        )
    packed = []
    # Every launch runs this loop. To save time, error messages are formatted only when an error is found (`_wrong`).
    for argument, value in zip(signature, values):
        if not argument.pointer:
            kinds, convert = _SCALARS[argument.c_type]
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise _wrong(name, argument, value, device)
            packed.append(convert(value.item() if isinstance(value, numpy.generic) else value))
        elif value is None and argument.c_type == "none":
            packed.append(0)
        elif isinstance(value, torch.Tensor) and value.dtype is _POINTED[argument.c_type] and value.device == device:
            packed.append(value.data_ptr())
        else:
            raise _wrong(name, argument, value, device)
    return tuple(packed)


def _wrong(name: str, argument: Argument, value: Any, device: torch.device) -> Exception:
    """Return the exception to raise because `value`, an argument of a kernel, has a wrong type, dtype or device.

    name: the kernel's name.
    argument: the kernel's parameter for which `value` was passed.
    device: the device on which a tensor must be.
    """
    where = f"CUDA kernel {name}: {argument.name}"
    if not argument.pointer:
        return TypeError(f"{where} must be of type {argument.c_type}, got {type(value).__name__} {value!r}")
    if argument.c_type == "none":
        return TypeError(
            f"{where} must be None, got {type(value).__name__}: the kernel was compiled without this argument"
        )
    if not isinstance(value, torch.Tensor):
        return TypeError(f"{where} must be a tensor of {argument.c_type}, got {type(value).__name__}")
    if value.dtype != _POINTED[argument.c_type]:
        return ValueError(f"{where} must be {_POINTED[argument.c_type]}, got {value.dtype}")
    return ValueError(f"{where} must be on {device}, got {value.device}")


class Kernel:
    """A CUDA kernel that is loaded on one device. Calling it checks the arguments and launches the kernel.

    Call the function `kernel` instead of this constructor: it returns the same Kernel for equal arguments. The
    constructor loads the kernel, and first compiles it if it is not in the disk cache.

    Args:
        variant: the source file and its macros.
        name: the kernel's name in the source file.
        index: the index of the CUDA device, as in cuda:0.
    """

    def __init__(self, variant: Variant, name: str, index: int):
        self.cupy = import_cupy()
        arch = supported_arch(torch.cuda.get_device_capability(index), self.cupy.cuda.nvrtc.getSupportedArchs())
        self.name = name
        self.device = torch.device("cuda", index)
        self.signature = variant.signature(name)
        self._written = [place for place, argument in enumerate(self.signature) if argument.written]
        self.function = self.cupy.RawModule(path=str(cached_cubin(variant, arch))).get_function(name)
        # The maximum number of bytes of dynamic shared memory per thread block. CUDA's default is 48 KiB. `__call__`
        # raises the limit when a launch needs more.
        self.shared_limit = 48 << 10

    def __call__(self, grid: int, block: int, *values: Any, shared_memory: int = 0) -> None:
        """Launch the kernel on torch's current stream, without waiting for the device.

        Like torch's in-place operations, this increments the version counter of each tensor that the kernel writes.
        (Inference tensors have no version counter.)

        Args:
            grid: the number of thread blocks.
            block: the number of threads per block.
            *values: the kernel's arguments; see `pack`.
            shared_memory: bytes of dynamic shared memory per block.

        Raises:
            RuntimeError: torch's current device is not the device of this kernel.
            TypeError, ValueError: an argument does not match the kernel's signature; see `pack`.
        """
        index, current = self.device.index, torch.cuda.current_device()
        if current != index:
            raise RuntimeError(
                f"the CUDA kernel {self.name} runs on {self.device}, but torch's current device is cuda:{current}. "
                f"Call torch.cuda.set_device({index}) first."
            )
        runtime = self.cupy.cuda.runtime
        if runtime.getDevice() != index:  # CuPy has its own current device in each thread
            runtime.setDevice(index)
        arguments = pack(self.name, self.signature, values, self.device)
        if shared_memory > self.shared_limit:
            self.function.max_dynamic_shared_size_bytes = shared_memory
            self.shared_limit = shared_memory
        # Pass torch's current stream, because CuPy's may be a different one, for example in autograd's threads.
        stream = SimpleNamespace(ptr=current_raw_stream(index))
        self.function((grid,), (block,), arguments, shared_mem=shared_memory, stream=stream)
        written = [values[place] for place in self._written if values[place] is not None]
        torch.autograd.graph.increment_version([each for each in written if not each.is_inference()])


@cache
def kernel(variant: Variant, name: str, device: torch.device) -> Kernel:
    """Return a kernel that is ready to launch. The first call compiles and loads it. Later calls return it at once.

    Make the first call before capturing a CUDA graph, because kernels cannot be loaded during a capture.

    Args:
        variant: the source file and its macros.
        name: the kernel's name in the source file.
        device: the CUDA device on which the kernel is loaded.
    """
    assert device.type == "cuda" and device.index is not None, device
    return Kernel(variant, name, device.index)
