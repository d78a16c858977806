"""BMTrain's own test files over hf_bmtrain: `python tests bmtrain_suite CHECKOUT [NAME ...]` prints a table.

CHECKOUT is a folder with BMTrain's source, which this repository does not contain. Each file runs on the CPU, as it
stands but for its sizes, which are cut, and for the device's name.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from processes import environment, kill_all

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
SECONDS, LATE = 400, "not done after"
LONG = {"loss_func": 1200, "training": 1200}
"""Seconds for files that are slow beside other work: one with 30,000 columns, one with 12 trainings on four ranks."""
REFUSED = "is not supported"
"""Words of the error that names pipeline parallelism."""


class Reason(NamedTuple):
    """Why a file fails. It holds if the file passes with `edits` alone, or if its error has the words `refused`.

    edits: (regular expression, replacement) for the file's text.
    """

    text: str
    edits: tuple[tuple[str, str], ...] = ()
    refused: str = ""


PIPELINE = "pipeline parallelism, which is not supported"
REASONS = {
    "init_parameters_multi_gpu": Reason(PIPELINE, ((r"pipe_size=2", "pipe_size=1"),)),
    "inspector_hidden": Reason(
        "pipeline parallelism, and a loss on activations that were recorded inside recomputed blocks, which is refused",
        ((r"pipe_size=\d", "pipe_size=1"), (r'.*Model_PIPE\)\n', ""), (r"loss = loss \+ .*", "pass"),
         (r"loss = 0\n", "loss = logits.sum()\n")),
    ),
    "nccl_backward": Reason(
        "all_reduce's gradient is that of the sum of the ranks' losses, where BMTrain gives this rank's",
        ((r"    test_main\(torch\.\w+\)\n", ""),),
    ),
    "no_grad": Reason(
        "a layer's counter is put back after a recomputation, and a list that holds a layer twice holds one block",
        ((r"    assert layer\w*(\[i\])?\.count == .*\n", "    pass\n"),
         (r"    test_(same_layer|no_grad_error|no_grad_error2)\(\)\n", "")),
    ),
    "parallel_projection": Reason(
        "uses layers that BMTrain 1.0.1 does not have",
        ((r"bmt\.nn\.Projection\(100, 64, ", "bmt.nn.Linear(64, 100, bias=False, "),
         (r"bmt\.nn\.VPProjection\(100, 64, ",
          "bmt.nn.ColumnParallelLinear(64, 100, bias=False, gather_input=False, ")),
    ),
    "send_recv": Reason(PIPELINE, refused=REFUSED),
    "synchronize": Reason("imports bmtrain.nccl, which is refused", ((r"import nccl, ", "import "),)),
    "training": Reason(
        "sums norms over ranks through bmt.nccl; the norm of a sharded gradient is global already",
        ((r"    bmt\.nccl\.allReduce\(.*\)", "    pass"),),
    ),
}  # fmt: skip
"""By the file's name without `test_`."""


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
    """pass or fail, and the line that tells why. No rank is left running."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, __file__, "--file", str(path)]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(ACCELERATE_USE_CPU="true"), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        seconds = LONG.get(path.stem.removeprefix("test_"), SECONDS)
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return "fail", f"{LATE} {seconds} s"
        finally:
            kill_all(process)
    if process.returncode == 0:
        return "pass", ""
    Path(tempfile.gettempdir(), f"{path.stem}.log").write_text(output + errors)
    lines = re.findall(r"^(?:\[rank\d\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", errors, re.M)
    return "fail", lines[0] if lines else f"exit code {process.returncode}"


def holds(reason: Reason, path: Path, ranks: int, why: str) -> bool:
    """Whether a file fails for this reason alone. One that was not done in time may have hung for another reason."""
    if why.startswith(LATE):
        return False
    if not reason.edits:
        return reason.refused in why
    text = path.read_text("utf-8")
    for pattern, replacement in reason.edits:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            return False
    with tempfile.TemporaryDirectory() as folder:
        edited = Path(folder, path.name)
        edited.write_text(text, "utf-8")
        shutil.copy(path.with_name("utils.py"), folder)
        return judge(edited, ranks)[0] == "pass"


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--file"]:
        run_file(Path(arguments[1]))
        return 0
    folder = Path(*arguments[:1]).resolve() / "tests"
    if not arguments or not (folder / "test_all.py").is_file():
        raise SystemExit("usage: python tests bmtrain_suite CHECKOUT [NAME ...]; CHECKOUT has BMTrain's tests")
    ranks, unexplained = ranks_of(folder), 0
    for path in sorted(folder.glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        if name == "all" or (arguments[1:] and name not in arguments[1:]):
            continue
        result, why = judge(path, ranks.get(name, 1))
        reason = None if result == "pass" else REASONS.get(name)
        explained = reason is not None and holds(reason, path, ranks.get(name, 1), why)
        unexplained += result == "fail" and not explained
        told = "" if reason is None else reason.text if explained else f"NOT because of: {reason.text}"
        print(f"{name:28} {ranks.get(name, 1)} {result:5} {told}{f' [{why}]' if why else ''}", flush=True)
    return unexplained


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        raise SystemExit(main())
