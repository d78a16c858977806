"""A training with nothing wrong: ranks that are slow at random places, and differ where they may."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_points as fault
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_bmtrain as bmt

STEPS, VOCABULARY = 8, 61
FOLDER = fault.FOLDER / "checkpoints"
SEED = int(os.environ.get("NOISE_SEED", "0"))
LONGEST = float(os.environ.get("NOISE_SECONDS", "4"))
"""The longest that a rank lags behind, in seconds; 0 for none of the noise."""


def hold_the_lock(seconds: float) -> None:
    """Stay in a function of C that does not give the interpreter's lock away."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def pause(seconds: float) -> None:
    """Stop this process for a while, as a debugger or a virtual machine that moves does."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


class Noise:
    """Sleeps at some of the places that it is told of, differently on every rank."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(1000 * SEED + rank)
        self.rank = rank

    def at(self, place: str, chance: float = 0.05) -> None:
        if LONGEST and self._random.random() < chance:
            seconds = self._random.uniform(0.3, 1.0) * LONGEST
            how = self._random.choice([time.sleep, time.sleep, hold_the_lock, pause])
            print(f"# rank {self.rank}: {how.__name__} for {seconds:.1f} s at {place}", flush=True)
            how(seconds)


class Schedule:
    """A function of the user's, an object of its own on every rank."""

    def __call__(self, step: int) -> float:
        return 1 / (1 + step / 10)


class Job:
    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        torch.manual_seed(noise.rank)  # all get rank 0's weights
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )  # fmt: skip
        noise.at("auto_wrap")
        self.model = bmt.auto_wrap(LlamaForCausalLM(config))
        groups = [{"params": list(self.model.parameters())}]
        cls = random.Random(SEED).choice([bmt.optim.AdamOptimizer, torch.optim.AdamW, bmt.optim.AdamOffloadOptimizer])
        self.optimizer = cls(groups, lr=1e-3)
        self.manager = bmt.optim.OptimManager()
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, Schedule())
        self.manager.add_optimizer(self.optimizer, schedule)
        self.model.model.layers[1].mlp.register_forward_hook(self._in_layer)
        self._saving: Any = None

    def _in_layer(self, module: torch.nn.Module, given: tuple, output: torch.Tensor) -> None:
        self._noise.at("a forward")
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(lambda gradient: self._noise.at("a backward"))

    def rows(self) -> Iterator[torch.Tensor]:
        """Batches of other sizes on every rank, from loaders of other speeds."""
        slow = random.Random(SEED + self._noise.rank).uniform(0, LONGEST / 4)
        for step in range(2 * STEPS):
            self._noise.at("the loader")
            time.sleep(slow)
            generator = torch.Generator().manual_seed(100 * step + self._noise.rank)
            yield torch.randint(1, VOCABULARY, (1 + self._noise.rank, 5 + step % 3), generator=generator)

    def load(self) -> None:
        """The same weights on all ranks, from files of their own with other names."""
        state = {name: torch.full(value.shape, 0.01) for name, value in self.model.state_dict().items()}
        path = fault.FOLDER / f"weights-{self._noise.rank}.pt"
        torch.save(state, path)
        self._noise.at("load")
        bmt.load(self.model, str(path))

    def train_step(self, step: int, rows: Iterator[torch.Tensor]) -> None:
        self.manager.zero_grad()
        for _ in range(2):
            ids = next(rows)
            self._noise.at("the step")
            loss = self.model(input_ids=ids, labels=ids).loss
            self._noise.at("before backward")
            self.manager.backward(loss)
        self._noise.at("clip_grad_norm")
        self.manager.clip_grad_norm(self.optimizer.param_groups, 1.0)
        self._noise.at("the update")
        self.manager.step()
        if self._noise.rank == 0:
            self._noise.at("what rank 0 alone computes and writes", 0.3)

    def evaluate(self, peer: bool) -> None:
        """As many batches as the rank has, which differ where weights are pulled."""
        self.model.eval()
        with torch.no_grad():
            for _ in range(2 + (self._noise.rank if peer else 0)):
                ids = torch.ones(2, 7, dtype=torch.long)
                self.model(input_ids=ids, labels=ids)
                self._noise.at("an evaluation", 0.2)
        self.model.train()

    def save(self, step: int) -> None:
        def add(folder: Path) -> None:
            self._noise.at("what is added to a checkpoint", 0.4)

        self._noise.at("save_state")
        bmt.save_state(FOLDER, self.model, self.manager, step=step, keep=2, add=add, non_blocking=step % 4 == 0)


def train() -> None:
    noise = Noise(int(os.environ["RANK"]))
    noise.at("the start", 0.3)
    bmt.init_distributed(seed=0, timeout=fault.TIMEOUT, gather=fault.GATHER)
    job = Job(noise)
    job.load()
    rows = job.rows()
    for step in range(1, STEPS + 1):
        job.train_step(step, rows)
        if step % 3 == 0:
            job.evaluate(fault.GATHER == "peer")
        if step % 2 == 0:
            job.save(step)
    noise.at("the end", 0.3)
    weights = job.model.state_dict()
    noise.at("after the end", 0.3)
    fault.report("done", zlib.crc32(b"".join(value.numpy().tobytes() for value in weights.values())))


if __name__ == "__main__":
    train()
    sys.stdout.flush()
