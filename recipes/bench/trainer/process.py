"""One process of one cell: trains and writes what it measured. The command starts it, by torchrun if there are several.

    python -m bench.trainer.process JSON FOLDER SECONDS

JSON: the cell and the job. FOLDER: where `rank<N>.json` is written. After SECONDS the process prints where it is and
ends.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from bench.trainer.rows import Cell, Job


def main() -> None:
    told, folder, seconds = json.loads(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    faulthandler.dump_traceback_later(seconds, exit=True)
    file = folder / f"rank{os.environ.get('RANK', '0')}.json"
    try:
        report = measure(Cell(**told["cell"]), Job(**told["job"]), folder)
    except Exception as error:  # of many types
        traceback.print_exc()
        report = {"problem": problem_of(error)}
    file.write_text(json.dumps(report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit("problem" in report)  # the clean-up of some libraries hangs when another rank has failed


def measure(cell: Cell, job: Job, folder: Path) -> dict:
    """Train, and return the report of this rank."""
    from bench.trainer.build import make_trainer
    from common.curve import versions

    begin = time.perf_counter()
    trainer, clock, described = make_trainer(cell, job, folder / "trainer")
    built = time.perf_counter()
    trainer.train()
    report = clock.report() | {
        "described": described,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions(),
        "seconds": {"build": round(built - begin, 1), "train": round(time.perf_counter() - built, 1)},
    }
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if cell.column == "ours":
        import hf_bmtrain as bmt

        bmt.synchronize()
    return report


def problem_of(error: BaseException) -> str:
    line = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in line.lower():
        return "out of memory"
    if isinstance(error, ImportError):
        return f"{error.name} is not installed" if error.name and error.path is None else line[:300]
    return f"{type(error).__name__}: {line[:300]}"


if __name__ == "__main__":
    main()
