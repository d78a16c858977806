"""Peak host memory of bmt.hf.from_pretrained: `python tests load_memory` loads a model of 0.4 GB on two ranks.

Anonymous memory (RssAnon) is counted: pages of the mapped files are shared by the ranks of a host, and the system takes
them back. malloc keeps up to 64 MiB of what was freed whatever the model's size; so that this is not counted, the ranks
run with MALLOC_MMAP_THRESHOLD_=1048576.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import transformers

import hf_bmtrain as bmt
from processes import environment
from ranks import free_port

LAYERS = 12
RANKS = 2


def build(layers: int) -> transformers.LlamaForCausalLM:
    """0.4 GB in float32 with 12 layers; the largest tensor is 1/20 of it."""
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2304, num_hidden_layers=layers, num_attention_heads=12, vocab_size=6000
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def measure(folder: str) -> None:
    """Print the peak beyond the memory after a first load, of a model of one layer, per byte of the model."""
    bmt.init_distributed(seed=0)
    bmt.hf.from_pretrained(transformers.LlamaForCausalLM, f"{folder}/small")
    base, done = anonymous_bytes(), threading.Event()
    peak = [base]

    def sample() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    model = bmt.hf.from_pretrained(transformers.AutoModelForCausalLM, f"{folder}/large")
    done.set()
    sampler.join()
    whole = sum(p.full_shape.numel() * p.itemsize for p in model.parameters())
    kept = anonymous_bytes() - base
    print(f"share of {whole} bytes: peak {(peak[0] - base) / whole:.3f} kept {kept / whole:.3f}", flush=True)


def run(folder: str) -> list[float]:
    """The peak of each rank, in units of the model."""
    build(LAYERS).save_pretrained(f"{folder}/large")
    build(1).save_pretrained(f"{folder}/small")
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import load_memory; load_memory.measure({folder!r})"],
            env=environment(
                RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port, MALLOC_MMAP_THRESHOLD_="1048576", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true",
                PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
            ),
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    lines = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert all(process.returncode == 0 for process in processes), lines
    print("\n".join(lines))
    return [float(line.split("peak ")[1].split()[0]) for line in lines]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(folder)


if __name__ == "__main__":
    main()
