"""Damage every file of every kind of checkpoint in many ways, load it, and compare what training makes of it.

    python tests damage [--each 40] [--only NAME] [--seed 0]

One process trains a tiny Llama with dropout and saves. Of a copy, one file at a time is damaged: a bit flipped, 512
bytes zeroed, the end cut off, bytes added, or all of it emptied or taken from another training. New objects load the
copy and train for a step. refused: an error was raised. harmless: weights, optimizer state and random numbers have
the bits that they have after a load without damage. silent: they have others; the script then exits with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

import hf_bmtrain as bmt
from resumable import Training
from tiny_models import batch, build


def digest(*values: Any) -> str:
    """A hash of tensors, numbers and containers of them."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                add(str(name))
                add(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()


class Own:
    """`save_state` and `load_state`."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.training = Training(seed=seed)

    def train(self) -> None:
        self.training.train(self.training.step + 1)

    def save(self, folder: Path) -> None:
        self.training.save(folder / "run")

    def load(self, folder: Path) -> None:
        if self.training.load(folder / "run") is None:
            raise RuntimeError("no checkpoint")

    def state(self) -> str:
        return digest(self.training.whole(), self.training.scheduler.state_dict(), torch.get_rng_state())


class Files(Own):
    """`bmt.save` of the model and `torch.save` of `manager.state_dict()` and `optimizer.state_dict()`."""

    def save(self, folder: Path) -> None:
        bmt.save(self.training.model, str(folder / "model.pt"))
        bmt.save(self.training.model, str(folder / "model.safetensors"))
        torch.save(self.training.manager.state_dict(), folder / "manager.pt")

    def load(self, folder: Path) -> None:
        found = []
        for name in ("model.pt", "model.safetensors"):
            bmt.load(self.training.model, str(folder / name))
            found.append(digest(self.training.whole()))
        self.training.manager.load_state_dict(torch.load(folder / "manager.pt"))
        self.loaded = digest(found)
        torch.manual_seed(0)

    def state(self) -> str:
        return self.loaded + super().state()


class Stock:
    """Stock Trainer with BMTrainCallback."""

    make = transformers.Trainer

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.steps, self.folder = seed, 1, tempfile.mkdtemp(dir=tempfile.gettempdir())
        self.resume: str | None = None

    def train(self) -> None:
        args = transformers.TrainingArguments(
            self.folder, max_steps=self.steps, save_steps=1, seed=self.seed, report_to="none", learning_rate=1e-2,
            per_device_train_batch_size=2, disable_tqdm=True, use_cpu=True, logging_strategy="no",
        )  # fmt: skip
        model = bmt.auto_wrap(build("llama", dropout=0.1, seed=self.seed))
        rows = [{name: tensor[0] for name, tensor in batch("llama", i, 1).items()} for i in range(16)]
        self.trainer = self.make(model, args, train_dataset=rows, callbacks=[bmt.hf.BMTrainCallback()])
        self.trainer.remove_callback(transformers.PrinterCallback)
        self.trainer.train(resume_from_checkpoint=self.resume)

    def save(self, folder: Path) -> None:
        shutil.copytree(Path(self.folder, "checkpoint-1"), folder / "checkpoint-1")

    def load(self, folder: Path) -> None:
        self.resume, self.steps = str(folder / "checkpoint-1"), 2

    def state(self) -> str:
        trainer = self.trainer
        found = digest(
            trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.state.global_step,
            trainer.lr_scheduler.state_dict(), torch.get_rng_state(),
        )  # fmt: skip
        shutil.rmtree(self.folder, ignore_errors=True)
        return found


class Ours(Stock):
    """`bmt.hf.Trainer`."""

    make = bmt.hf.Trainer


class Prepared:
    """`save_state` and `load_state` of an Accelerator after `shard_checkpoints`."""

    def __init__(self, seed: int = 0) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        torch.manual_seed(seed)
        self.accelerator = bmt.hf.shard_checkpoints(accelerate.Accelerator(cpu=True))
        model = bmt.auto_wrap(build("llama", dropout=0.1, seed=seed))
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def train(self) -> None:
        self.accelerator.backward(self.model(**batch("llama", 1)).loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder / "state"))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder / "state"))

    def state(self) -> str:
        return digest(
            self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict(), torch.get_rng_state()
        )  # fmt: skip


KINDS = {"save_state": Own, "files": Files, "stock Trainer": Stock, "bmt.hf.Trainer": Ours, "Accelerate": Prepared}

OUTCOMES = ("refused", "harmless", "silent")


def damages(data: bytes, draw: random.Random, each: int) -> Iterator[tuple[str, bytes]]:
    """Yield (what was done, the damaged contents) for the contents of a file."""
    size = len(data)
    for _ in range(each):
        at, bit = draw.randrange(size), draw.randrange(8)
        yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    for _ in range(each // 4):
        at = draw.randrange(size)
        yield f"sector at {at} zeroed", data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]
        yield f"cut at {at}", data[:at]
    yield "emptied", b""
    yield "64 bytes added", data + bytes(64)


def outcome(kind: type, folder: Path) -> str:
    """The state after loading the folder and a step, or "refused: the error"."""
    try:
        job = kind()
        job.load(folder)
        job.train()
        return job.state()
    except Exception as error:  # what a reader raises on damaged bytes is its own choice
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=40, metavar="N", help="flipped bits of each file; others are fewer")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    bmt.init_distributed()
    draw, total = random.Random(options.seed), Counter()
    print(f"{'':16} {'file':28}", *(f"{how:>9}" for how in OUTCOMES))
    for name in options.only:
        kind = KINDS[name]
        with tempfile.TemporaryDirectory() as place:
            whole, other, copy = (Path(place, part) for part in ("whole", "other", "copy"))
            for folder, seed in ((whole, 0), (other, 1)):
                folder.mkdir()
                job = kind(seed)
                job.train()
                job.save(folder)
            expected = outcome(kind, whole)
            if expected.startswith("refused") or outcome(kind, whole) != expected:
                raise SystemExit(f"{name}: two loads without damage differ: {expected}")
            for path in sorted(path for path in whole.rglob("*") if path.is_file() and path.stat().st_size):
                file, counts = path.relative_to(whole), Counter()
                data = path.read_bytes()
                changed = list(damages(data, draw, options.each))
                if name != "files":  # a file that is a checkpoint by itself may be exchanged
                    changed.append(("of another training", (other / file).read_bytes()))
                for what, contents in changed:
                    if contents == data:
                        continue
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.copytree(whole, copy)
                    (copy / file).write_bytes(contents)
                    found = outcome(kind, copy)
                    how = "refused" if found.startswith("refused") else "harmless" if found == expected else "silent"
                    counts[how] += 1
                    if how == "silent":
                        print(f"  silent: {name}, {file}: {what}", flush=True)
                total += counts
                print(f"{name:16} {file.name:28}", *(f"{counts[how]:9}" for how in OUTCOMES), flush=True)
    print(f"{total.total()} damages:", ", ".join(f"{total[how]} {how}" for how in OUTCOMES))
    return int(total["silent"] > 0)


if __name__ == "__main__":
    sys.exit(main())
