"""List the files of the package that one training step passes through, in the order in which it first enters them.

    python tests/parity/step_path.py [--limit N]

Two processes on the CPU wrap a tiny Llama (ZeRO-3, recomputation) and train it with OptimManager, gradient clipping
and AdamOptimizer. Rank 0 records every function of the package that is entered while the model is wrapped, during the
first step, which also runs what is done once, and during the third. To read the library, open the files of the third
step from top to bottom, each at the function named; those marked * tell most of it. What runs at import is not
counted. --limit: exit with 1 if a later step passes through more files.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

LANDMARKS = (
    "features/auto_wrap.py", "engine/blocks/block_state.py", "engine/blocks/schedule.py",
    "engine/sharding/buffer.py", "engine/sharding/gradient.py", "engine/optim/manager.py",
)  # fmt: skip
"""The files that tell how a model is wrapped and how a step runs."""


class Visit(NamedTuple):
    """A file of the package, relative to it, the first of its functions that was entered, and how many were."""

    file: str
    first: str
    functions: int


class Tracer:
    """Records which functions of a package are entered, on the calling thread and on threads started meanwhile.

    On the CPU, autograd runs a backward on the thread that asks for it. Comprehensions are parts of functions; bodies
    of modules and of classes run at import and are not recorded.
    """

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}{os.sep}"
        self._entered: dict[tuple[str, CodeType], None] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record inside this context, and forget what was recorded before."""
        self._entered = {}
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._prefix):
            return
        if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.endswith(("comp>", "<genexpr>")):
            self._entered.setdefault((code.co_filename, code))  # equal functions of two files are equal codes

    def visits(self) -> list[Visit]:
        """The files of the functions recorded, in the order in which they were first entered."""
        files: dict[str, list[str]] = {}
        for _, code in self._entered:
            name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
            files.setdefault(code.co_filename.removeprefix(self._prefix), []).append(name)
        return [Visit(file, names[0], len(names)) for file, names in files.items()]


def train(rank: int, port_file: str, results: Any) -> None:
    """Wrap and train on one of two ranks; rank 0 puts its visits per phase into `results`."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    import torch
    import torch.distributed as dist
    import transformers

    import hf_bmtrain as bmt

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    bmt.init_distributed(seed=0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    tracer, phases = Tracer(Path(bmt.__file__).parent), {}

    def recorded(name: str, function: Callable[[], object]) -> None:
        with tracer.record():
            function()
        phases[name] = tracer.visits()

    def step() -> None:
        ids = torch.randint(61, (2, 8))
        manager.zero_grad()
        manager.backward(model(input_ids=ids, labels=ids).loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()

    recorded("wrap", lambda: bmt.auto_wrap(model))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    recorded("first", step)
    step()
    recorded("step", step)
    bmt.synchronize()
    if rank == 0:
        results.put(phases)
    dist.destroy_process_group()


def trace() -> dict[str, list[Visit]]:
    """Visits of rank 0: "wrap", "first" (the first step) and "step" (the third)."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"{folder}/store", results) for rank in range(2)]
        ranks = [context.Process(target=train, args=each, daemon=True) for each in arguments]
        for process in ranks:
            process.start()
        try:
            return results.get(timeout=300)
        finally:
            for process in ranks:
                process.join(30)
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="the largest number of files that a step may pass through")
    options = parser.parse_args()
    phases = trace()
    titles = {"wrap": "auto_wrap(model)", "first": "the first step", "step": "a later step"}
    for phase, title in titles.items():
        print(f"\n{title}: {len(phases[phase])} files")
        for number, visit in enumerate(phases[phase], 1):
            mark = "*" if visit.file in LANDMARKS else " "
            print(f"{number:3} {mark} {visit.file:28} {visit.functions:3} functions, first {visit.first}")
    missing = {*LANDMARKS} - {visit.file for phase in phases.values() for visit in phase}
    for file in sorted(missing):
        print(f"\nneither passes through the landmark {file}")
    steps, wraps = len(phases["step"]), len(phases["wrap"])
    print(f"\nstep: {steps} files, wrap: {wraps} files")
    return int(options.limit is not None and steps > options.limit)


if __name__ == "__main__":
    sys.exit(main())
