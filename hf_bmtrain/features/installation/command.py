"""Print what is installed, what training would use, and what is missing: `python -m hf_bmtrain [--report]`.

    python -m hf_bmtrain            plain text
    python -m hf_bmtrain --report   Markdown for an issue, with environment variables and the GPU topology as well

The exit status is 1 if something that training needs is missing, otherwise 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from typing import Any

from ...engine.base.launch import cache_folder
from ...engine.runtime.backend import SMALLEST_PULLED
from .facts import Facts, find_facts, host, topology, variables

TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.6", "2.11", "2.13", "2.14"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15",),
    "datasets": ("5.2",),
    "cupy": ("14",),
    "peft": ("0.21",),
    "trl": ("1.16",),
}
"""{package: releases of the package with which hf_bmtrain was tested}. Each release of torch was tested with the newest
releases of the other packages."""
PURPOSES = {
    "cupy": "GPUs", "peft": "LoRA and other adapters", "trl": "SFT, DPO, GRPO",
    "bitsandbytes": "base models in its nf4 format, 8-bit optimizers",
}  # fmt: skip
"""The purpose of each optional package."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_bmtrain", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--report", action="store_true", help="print Markdown to paste into an issue")
    given = parser.parse_args()
    package: Any = sys.modules[__name__.partition(".")[0]]
    facts = find_facts()
    text = screen(facts, package.__version__)
    print(report(text) if given.report else text)
    sys.exit(int(bool(obstacles(facts))))


def report(text: str) -> str:
    """Return the Markdown code block that `python -m hf_bmtrain --report` prints, to paste into an issue.

    It contains `text`, the environment variables that influence training (such as NCCL_* and CUDA_VISIBLE_DEVICES, if
    they are set), and the output of `nvidia-smi topo -m`, which shows how the GPUs are connected.

    text: the result of `screen`.
    """
    set_ = [f"{name}={value}" for name, value in variables().items()]
    return "\n".join(["```", text, "", "environment: " + (" ".join(set_) or "nothing set"), topology().rstrip(), "```"])


def screen(facts: Facts, version: str) -> str:
    """Return what `python -m hf_bmtrain` prints: packages, devices, what training would use, and what is missing.

    Args:
        facts: the facts about this machine.
        version: the version of hf_bmtrain.
    """
    missing = obstacles(facts) + advice(facts)
    parts = [
        [f"hf_bmtrain {version}, {host()}"],
        table(facts),
        devices(facts),
        ["Training would use"] + [f"  {line}" for line in choices(facts)],
        (["To do"] + [f"  {line}" for line in missing]) if missing else ["Nothing is missing."],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def table(facts: Facts) -> list[str]:
    """Return the lines of a table of the packages in `facts`.

    The first line is a header. Each package has one line, with its versions (installed, needed, tested) and, if it is
    optional, its purpose.
    """
    lines = [f"{'package':14}{'installed':14}{'needed':10}tested with"]
    for name, version in facts.packages.items():
        oldest = facts.needed.get(name)
        need = (f">= {oldest}" if oldest else "any") if oldest is not None else "optional" if name in PURPOSES else ""
        last = [", ".join(TESTED.get(name, ()))]
        last += ["not with this version"] if version and last[0] and not is_tested(name, version) else []
        last += [f"for {PURPOSES[name]}"] if name in PURPOSES else []
        lines.append(f"{name:14}{version or '-':14}{need:10}{'; '.join(filter(None, last))}".rstrip())
    return lines


def is_tested(name: str, version: str) -> bool:
    return any(version == series or version.startswith(f"{series}.") for series in TESTED[name])


def devices(facts: Facts) -> list[str]:
    """Return the lines that `python -m hf_bmtrain` prints about the GPUs, their links, and the CUDA and NCCL versions.

    facts: the facts about this machine.
    """
    built = f"torch is built for CUDA {facts.cuda}" if facts.cuda else "torch is built without CUDA"
    if not facts.gpus:
        return [f"GPUs: none that torch can use ({built})"]
    lines = [f"GPUs: {len(facts.gpus)} ({built}, NCCL {facts.nccl or 'not usable'})"]
    for gpu, count in Counter(facts.gpus).items():
        capability = ".".join(map(str, gpu.capability))
        lines.append(f"  {count} x {gpu.name}, {gpu.memory / 2**30:.1f} GiB, compute capability {capability}")
    if len(facts.gpus) > 1:
        kind = ", ".join(f"{link}{' (NVLink)' if link.startswith('NV') else ''}" for link in facts.links) or "unknown"
        pairs = ", ".join(f"GPU {b} from GPU {a}" for a, b in facts.blocked)
        reach = f"no access to the memory of {pairs}" if pairs else "each GPU can access the memory of every other"
        lines.append(f"  links: {kind}; {reach}")
    return lines


def choices(facts: Facts) -> list[str]:
    """Return the lines that `python -m hf_bmtrain` prints under "Training would use".

    They say on which devices training would run on this machine and, unless there is only one GPU, how ranks would
    communicate. With GPUs, they also say the precision of training, whether float8 works, and where compiled kernels
    would be stored.

    facts: the facts about this machine.
    """
    if not facts.gpus:
        return [
            "device          CPU, one process, or N under torchrun --nproc-per-node N",
            "communication   gloo between processes",
        ]
    count = len(facts.gpus)
    several = f", or {count}, one for each GPU, under torchrun --nproc-per-node {count}" if count > 1 else ""
    lines = [f"device          GPU, one process{several}"]
    if count > 1 and facts.blocked:
        lines.append("communication   NCCL, because not every GPU can access the others' memory")
    elif count > 1:
        lines.append(
            f"communication   copies between GPUs for shards of {SMALLEST_PULLED >> 20} MiB or more, else NCCL"
        )
    half = min(gpu.capability for gpu in facts.gpus) >= (8, 0)
    lines.append(f"precision       {'bfloat16' if half else 'float16 with a loss scale: these GPUs have no bfloat16'}")
    lines.append(f"float8=True     {'works' if facts.float8 is None else facts.float8}")
    lines.append(f"kernels         compiled at first use into {cache_folder()}")
    return lines


def obstacles(facts: Facts) -> list[str]:
    """Return a line for each problem that prevents training on this machine. The list is empty if training can work.

    All packages that are missing or too old share one line, with the pip command that installs them.
    `python -m hf_bmtrain` prints the lines under "To do", and ends with exit code 1 if there are any.

    facts: the facts about this machine.
    """
    lines = []
    wrong = [name for name, oldest in facts.needed.items() if is_older(facts.packages.get(name), oldest)]
    if wrong:
        names = " ".join(f"'{name}>={facts.needed[name]}'" if facts.needed[name] else name for name in wrong)
        lines.append(f"missing or too old: pip install {names}")
    lines += [f"{name}: {problem}" for name, problem in facts.trouble.items()]
    return lines


def advice(facts: Facts) -> list[str]:
    """Return one line for each optional step, such as installing PEFT. Training works without these steps.

    `python -m hf_bmtrain` prints these lines under "To do", after those of `obstacles`. They do not affect its exit
    code.

    facts: the facts about this machine.
    """
    lines = []
    if not facts.needed:
        lines.append("hf_bmtrain can be imported but is not installed: run pip install -e . in its source folder")
    if facts.unseen and not facts.cuda:
        lines.append("the machine has NVIDIA GPUs: install a torch for CUDA (https://pytorch.org/get-started/locally)")
    elif facts.unseen and "torch" not in facts.trouble:
        lines.append("the machine has NVIDIA GPUs that torch does not see: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    for name in ("peft", "trl", "bitsandbytes"):
        if facts.packages.get(name) is None and (facts.gpus or name != "bitsandbytes"):
            lines.append(f"for {PURPOSES[name]}: pip install {name}")
    return lines


def is_older(version: str | None, oldest: str) -> bool:
    """Return whether `version` is None (not installed) or older than `oldest`.

    Only the first two numbers are compared: "2.6.1" is not older than "2.6.2".
    """
    if version is None:
        return True
    # Append ".0", so that a version with only one number, such as "14", has a second one.
    found, admitted = ([int(number) for number in re.findall(r"\d+", f"{text}.0")[:2]] for text in (version, oldest))
    return found < admitted
