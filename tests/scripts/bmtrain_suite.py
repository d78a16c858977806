"""BMTrain's own test files over hf_bmtrain: `python tests bmtrain_suite CHECKOUT [NAME ...]` prints a table.

CHECKOUT is a folder with BMTrain's source, which this repository does not contain. Each file runs on the CPU, as it
stands but for its sizes, which are cut, and for the device's name.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path

from processes import environment

SIZES = {
    32768: 2048,
    10240: 320,
    8192: 64,
    4096: 32,
    3072: 96,
    2560: 40,
    1024: 64,
    768: 48,
    512: 32,
    256: 16,
    128: 8,
    80: 8,
}
"""Sizes of models and batches, and a loss scale, and what they become; the files use these numbers for nothing else."""
LARGEST = 20000
"""Ranges over sizes end here."""
SECONDS = 400
PARALLEL = "tensor or pipeline parallelism, which is not offered"
REASONS = {
    "column_parallel_linear": PARALLEL,
    "different_output_shape": "a block returns its layer's list as a list, where BMTrain makes it a tuple",
    "grad_accu": "imports CheckpointBlockContext, which BMTrain 1.0.1 does not have",
    "init_parameters_multi_gpu": PARALLEL,
    "inspector_hidden": PARALLEL,
    "nccl_backward": "all_reduce's gradient is that of the sum of the ranks' losses, where BMTrain gives this rank's",
    "no_grad": "a block is its layer, so a list that holds a layer twice holds one block",
    "optim": "asks for torch.optim.Adam's bits; a float32 weight differs in its last one",
    "optim_state": "deep-copies the slices of a sharded model, which is refused",
    "other_hidden": "multiplies a parameter, whole under autograd, by a tensor of its slice's shape",
    "parallel_projection": PARALLEL,
    "row_parallel_linear": PARALLEL,
    "send_recv": PARALLEL,
    "store": "imports allgather_object, which BMTrain 1.0.1 does not have",
    "training": "sums norms over ranks through bmt.nccl; the norm of a sharded gradient is global already",
}
"""Why a file fails, by its name without `test_`."""


class Cut(ast.NodeTransformer):
    """Cut sizes, and name the CPU in place of the GPU."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if type(node.value) is int:
            return ast.copy_location(ast.Constant(min(SIZES.get(node.value, node.value), LARGEST)), node)
        return node


def run_file(path: Path) -> None:
    """Run one test file in this process, as `python FILE` would."""
    import torch

    import hf_bmtrain

    hf_bmtrain.install_as_bmtrain()
    torch.set_num_threads(1)
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    stay = {"cuda": lambda self, *args, **kwargs: self}
    for owner, names in (
        (torch.Tensor, stay),
        (torch.nn.Module, stay),
        (torch.cuda, {"FloatTensor": torch.FloatTensor, "current_stream": lambda: stream, "synchronize": lambda: None}),
    ):
        for name, value in names.items():
            setattr(owner, name, value)
    sys.argv[:], sys.path[0] = [str(path)], str(path.parent)
    tree = ast.fix_missing_locations(Cut().visit(ast.parse(path.read_text("utf-8"))))
    exec(compile(tree, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})


def ranks_of(folder: Path) -> dict[str, int]:
    """The number of ranks of each file, from BMTrain's list of them."""
    listing = (folder / "test_all.py").read_text("utf-8")
    return {name: int(count) for name, count in re.findall(r'\("(\w+)", (\d+)\)', listing)}


def judge(path: Path, ranks: int) -> tuple[str, str]:
    """pass or fail, and the last line that tells why."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, __file__, "--file", str(path)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment(ACCELERATE_USE_CPU="true"), capture_output=True, text=True,
                timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "fail", f"not done after {SECONDS} s"
    if done.returncode == 0:
        return "pass", ""
    Path(tempfile.gettempdir(), f"{path.stem}.log").write_text(done.stdout + done.stderr)
    errors = re.findall(r"^(?:\[rank\d\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", done.stderr, re.M)
    return "fail", errors[0] if errors else f"exit code {done.returncode}"


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--file"]:
        run_file(Path(arguments[1]))
        return 0
    if not arguments:
        raise SystemExit("usage: python tests bmtrain_suite CHECKOUT [NAME ...]")
    folder = Path(arguments[0]).resolve() / "tests"
    ranks, unexplained = ranks_of(folder), 0
    for path in sorted(folder.glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        if name == "all" or (arguments[1:] and name not in arguments[1:]):
            continue
        result, why = judge(path, ranks.get(name, 1))
        reason = "" if result == "pass" else REASONS.get(name, "")
        unexplained += result == "fail" and not reason
        print(f"{name:28} {ranks.get(name, 1)} {result:5} {reason}{f' [{why}]' if why else ''}", flush=True)
    return unexplained


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        raise SystemExit(main())
