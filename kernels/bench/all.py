"""Measure the kernels and torch's equivalents on one GPU, relative to the rate of a device copy in the same run.

    python kernels/bench/all.py [part ...] [--json FILE]

Parts: norm, adam, adam8, step, offload, exposed (a training step of 1.5 B parameters with the update on the GPU,
offloaded, and offloaded during the backward), float8, cross_entropy, and sweep (launch shapes of cross-entropy; runs
only if named). If a part fails, its error is printed and the next part runs. The run takes about two minutes, mostly
for torch.compile. GB/s count the bytes that the operation must move, see kernels/README.md; "of copy" is the share of
the copy's rate.
"""

import argparse
import json
import sys
import time
import traceback

import float8
import loss
import offload
import optimizer
import torch
from measuring import copy_speed, show


def main() -> int:
    parts = {
        "norm": optimizer.bench_norm,
        "adam": optimizer.bench_adam,
        "adam8": optimizer.bench_adam8,
        "step": optimizer.bench_step,
        "offload": offload.bench_offload,
        "exposed": offload.bench_exposed,
        "float8": float8.bench_float8,
        "cross_entropy": loss.bench_cross_entropy,
        "sweep": loss.bench_sweep,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    parser.add_argument("--json", help="write the measurements to this file")
    options = parser.parse_args()
    chosen = options.parts or list(parts)[:-1]
    if unknown := set(chosen) - set(parts):
        parser.error(f"there is no part named {', '.join(sorted(unknown))}; the parts are {', '.join(parts)}")
    name = torch.cuda.get_device_name()
    copy = copy_speed()
    lines, failed = [], []
    for part in chosen:
        start = time.monotonic()
        try:
            lines += parts[part]()
        except Exception:
            failed.append(part)
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"\n{name}, torch {torch.__version__}; device copy {copy:.0f} GB/s")
    show(lines, copy)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {
                    "device": name,
                    "torch": torch.__version__,
                    "copy_gb_s": copy,
                    "lines": [line._asdict() for line in lines],
                },
                file,
                indent=1,
            )
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
