"""Trainer around a sharded model against stock Trainer: `python tests trainer_matrix` prints it.

A cell is a row of trainer_rows.py, an optimizer and a number of ranks. The truth is an unmodified Trainer around an
unmodified model: in one process for one rank, under its own DistributedDataParallel for two. Errors are in units of
what is allowed. A final weight may differ by 1e-6 of its tensor's largest with SGD and by 1e-5 with other optimizers;
a logged number, or a prediction, by 5e-5, its fourth digit; what a run that goes on from its first checkpoint logs and
ends with, by nothing. The files that lie in the checkpoints are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from trainer_rows import PAIRS, ROWS, Row

import jobs
from tiny_models import build

STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
LOGGED = 5e-5
SPEED = ("_runtime", "_per_second", "_per_device", "memory_gib")
FROM_THE_START = ("train_loss", "mlp_calls", "compiled")  # of a run, so that a resumed one logs others


@dataclass(frozen=True)
class Cell:
    row: str
    optimizer: str
    size: int

    def label(self) -> str:
        return f"{self.row.replace(' ', '_')}-{self.optimizer}-{self.size}"


def cells() -> list[Cell]:
    """Arguments with SGD and with AdamW; the optimizers that are rows themselves, once."""
    return [
        Cell(name, optimizer, size)
        for name, row in ROWS.items()
        for optimizer in (row.optimizers if row.pair is None else ["own"])
        for size in row.sizes
    ]


@dataclass(frozen=True)
class Errors:
    """1 is what is allowed. effect: how far the plain run is from one without the row's arguments, or, where those
    change nothing, from an untrained model; below 10 the cell would show nothing."""

    weights: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    other: float = 0.0
    resume: float = 0.0
    effect: float = math.inf

    @property
    def worst(self) -> float:
        return max(self.weights, self.loss, self.grad_norm, self.other, self.resume, 10 / max(self.effect, 1e-9))


# -- one run, on every rank ---------------------------------------------------------------------------------------


def train(cell: Cell, row: Row, folder: str, wrapped: bool) -> dict[str, Any]:
    """The run of a cell; of a sharded model also the one that goes on from its first checkpoint."""
    pair = row.pair or PAIRS[cell.optimizer]
    options = {**row.options, **pair[0 if wrapped else 1]}
    with _settings_forgotten():
        try:
            result = _run(row, folder, wrapped, cell.size, options)
        except (ValueError, TypeError) as error:
            return {"refused": str(error)}
        if wrapped and row.resumes:
            result["resumed"] = _run(row, folder, wrapped, cell.size, options, resume=True)
    return result


OWN_FILES = ("manifest.json", "optimizer.safetensors", "trained.safetensors", "state.pt", "complete.json")
"""What a checkpoint of a sharded model holds besides Trainer's files."""


def _run(row: Row, folder: str, wrapped: bool, size: int, options: dict[str, Any], resume: bool = False):
    trainer = jobs.make_trainer(folder, wrapped, {**STEPS, **row.given}, size=size, **options)
    first = min(Path(folder).glob("checkpoint-*"), key=_step) if resume else None
    trainer.train(resume_from_checkpoint=str(first) if first else None)
    state = trainer.state
    assert first is None or _step(first) < state.global_step, f"{first} is from the end"
    best = Path(state.best_model_checkpoint).name if state.best_model_checkpoint else None
    logged = [_timeless(entry) for entry in state.log_history]
    if "eval_dataset" in options and not isinstance(options["eval_dataset"], dict):
        predicted = trainer.predict(options["eval_dataset"])
        logged.append({**_timeless(predicted.metrics), "predictions": predicted.predictions})
    weights = jobs.weights(trainer.model)
    if size > 1:
        torch.distributed.barrier()
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("checkpoint-*/*"))
    files = [name for name in files if Path(name).name not in OWN_FILES]
    if size > 1:
        torch.distributed.barrier()
    return {"weights": weights, "logged": logged, "state": (state.global_step, best, files)}


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _timeless(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(SPEED)}


@contextlib.contextmanager
def _settings_forgotten() -> Iterator[None]:
    """What TrainingArguments and Accelerate leave in the process would reach the next cell."""
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
            del os.environ[name]
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


# -- comparison ---------------------------------------------------------------------------------------------------


class Matrix:
    """Measures cells; keeps what rows without arguments give. world: `world(size)` runs functions on as many ranks."""

    def __init__(self, world: Callable[[int], Any]) -> None:
        self._world = world
        self._without: dict[tuple[int, str, int], dict[str, Any]] = {}

    def measure(self, cell: Cell, folder: Path) -> Errors:
        row = ROWS[cell.row]
        ours = self._world(cell.size)(train, cell, row, str(folder / "ours"), True)
        if row.refused:
            assert all(re.search(row.refused, result.get("refused", "")) for result in ours), ours
            return Errors()
        plain = self._train_plain(cell, row, folder / "plain")
        if row.changes:
            contrast = self._train_without(cell, row, folder / "contrast")
        else:
            contrast = {**plain, "weights": build("llama").state_dict()}
        for result in (*ours, plain, contrast):
            assert "refused" not in result, result
        unit = 1e-6 if cell.optimizer == "SGD" else 1e-5
        errors = [difference(result, plain, unit) for result in ours]
        worst = {name: max(error[name] for error in errors) for name in errors[0]}
        resumes = [_unequal(result["resumed"], result) for result in ours if "resumed" in result]
        effect = max(difference(contrast, plain, unit).values())
        return Errors(**worst, resume=max(resumes, default=0.0), effect=effect)

    def _train_plain(self, cell: Cell, row: Row, folder: Path) -> dict[str, Any]:
        if cell.size == 1:
            return train(cell, row, str(folder), False)
        return self._world(cell.size)(train, cell, row, str(folder), False)[0]

    def _train_without(self, cell: Cell, row: Row, folder: Path) -> dict[str, Any]:
        key = (id(row.options) if row.options else 0, cell.optimizer, cell.size)
        if key not in self._without:
            self._without[key] = self._train_plain(cell, replace(row, given={}), folder)
        return self._without[key]


def difference(here: dict[str, Any], there: dict[str, Any], unit: float) -> dict[str, float]:
    """Largest differences of weights, in `unit`, and of what was logged; inf where the two cannot be compared."""
    found = {"weights": _apart(here["weights"], there["weights"], unit), "loss": 0.0, "grad_norm": 0.0, "other": 0.0}
    if here["state"] != there["state"] or len(here["logged"]) != len(there["logged"]):
        return {**found, "other": math.inf}
    for mine, theirs in zip(here["logged"], there["logged"]):
        if mine.keys() != theirs.keys():
            return {**found, "other": math.inf}
        for name, value in theirs.items():
            kind = name if name in found else "other"
            found[kind] = max(found[kind], _apart({name: mine[name]}, {name: value}, LOGGED))
    return found


def _apart(here: dict[str, Any], there: dict[str, Any], unit: float) -> float:
    assert here.keys() == there.keys()
    return max(_relative(torch.as_tensor(here[name]), torch.as_tensor(there[name])) for name in there) / unit


def _relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Difference over the largest of `theirs`; inf where there is a nan on one side."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return math.inf
    error = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-12)
    return error.item() if torch.isfinite(error) else math.inf


def _unequal(resumed: dict[str, Any], run: dict[str, Any]) -> float:
    """0 if the resumed run has logged, saved and reached the same to the last bit, otherwise inf."""
    logged = [
        [{name: value for name, value in entry.items() if name not in FROM_THE_START} for entry in result["logged"]]
        for result in (resumed, run)
    ]
    both = [{**result, "logged": entries} for result, entries in zip((resumed, run), logged)]
    return math.inf if max(difference(*both, unit=1.0).values()) else 0.0


def main() -> int:
    from ranks import Ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose label contains this")
    only = parser.parse_args().only
    worlds = {1: Ranks(1), 2: Ranks(2)}
    matrix, table = Matrix(worlds.__getitem__), {}
    for cell in (cell for cell in cells() if only in cell.label()):
        with tempfile.TemporaryDirectory() as folder:
            table[cell] = matrix.measure(cell, Path(folder))
    for ranks in worlds.values():
        ranks.stop()
    names = list(Errors.__dataclass_fields__)
    print(f"{'error / allowed; effect, at least 10':64}" + "".join(f"{name:>10}" for name in names))
    for cell, errors in table.items():
        refused = "   refused, as it says" if ROWS[cell.row].refused else ""
        values = "".join(f"{getattr(errors, name):10.3g}" for name in names)
        print(f"{cell.label():64}{refused or values}")
    worst = max(errors.worst for errors in table.values())
    print(f"{len(table)} cells, worst {worst:.3f} of what is allowed")
    return int(not worst <= 1)
