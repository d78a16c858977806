"""A rank of kill_points.py: it resumes, trains, saves, and kills itself at a file operation of the save."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import transformers
from accelerate.utils import ProjectConfiguration
from transformers.trainer_utils import get_last_checkpoint

import hf_bmtrain as bmt
from file_operations import counting, die
from jobs import Rows, arguments
from resumable import Training
from tiny_models import batch, build

KINDS = ("first", "steady", "replaced", "again")
LAST = 40  # a step from which training starts over, so that the learning rate has not become 0


@dataclass(frozen=True)
class Case:
    """through: what saves. ranks: of the world. victim: the rank that is killed. kind: one of KINDS."""

    through: str
    ranks: int
    victim: int
    non_blocking: bool
    kind: str

    def label(self) -> str:
        how = "non_blocking" if self.non_blocking else "blocking"
        return f"{self.through}, ranks {self.ranks}, victim {self.victim}, {how}, {self.kind}"


class Rank:
    """What a rank does between a kill and the next. It reports by lines of JSON: [rank, what, ...]."""

    def __init__(self, case: Case, point: int, folder: Path, pipe: int) -> None:
        self.case, self._point, self.folder = case, point, folder
        self._rank, self._pipe, self._write = bmt.rank(), pipe, os.write
        self._killing = contextlib.ExitStack()

    def report(self, *what: Any) -> None:
        self._write(self._pipe, (json.dumps([self._rank, *what]) + "\n").encode())

    def report_warnings(self) -> None:
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.report("warning", record.getMessage())
        logging.getLogger("hf_bmtrain").addHandler(handler)

    def make(self) -> Any:
        return Training(blocks=1)

    def run(self) -> None:
        self.report_warnings()
        self._training = self.make()
        resumed = self._training.load(self.folder)
        self.report("resumed", resumed and resumed.step, resumed and resumed.extra)
        self._train()
        if self.case.kind == "first" or self._training.step >= LAST:
            self.empty()
            self._training = self.make()
            self._train()
        if self.case.kind in ("steady", "replaced"):
            self._save()
        if self.case.kind == "steady":
            self._train()
        self.begin_killing()
        self._save()
        self.end_killing()
        self.report("survived")

    def truth(self) -> None:
        self._training = self.make()
        for _ in range(LAST + 3):
            self._train()

    def _train(self) -> None:
        (loss,) = self._training.train(self._training.step + 1)
        self.report("loss", self._training.step, loss.hex())

    def _save(self) -> None:
        self.report("saving", self._training.step)
        saving = self._training.save(self.folder, keep=1, non_blocking=self.case.non_blocking)
        step = self._training.step
        if self.case.non_blocking:
            self._train()
            saving.wait()
        self.report("saved", step)

    def begin_killing(self) -> None:
        if self._rank == self.case.victim:
            self._killing.enter_context(counting(self._act))

    def end_killing(self) -> None:
        self._killing.close()

    def _act(self, number: int, operation: str, where: Any) -> None:
        if number == self._point:
            self.report("killed", operation, str(where))
            die()

    def empty(self) -> None:
        """Start over with an empty folder."""
        bmt.synchronize()
        if self._rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.report("empty")
        bmt.synchronize()

    @staticmethod
    def left_over(case: Case, folder: Path, saved: int) -> list[str]:
        """Names that should not be there after a save that nobody disturbed, and those that are missing."""
        return sorted({".lock", f"checkpoint-{saved}"} ^ {path.name for path in folder.iterdir()})


# -- Accelerate -------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    step: int
    extra: dict[str, int]


class AcceleratedTraining:
    """A loop of Accelerate's with the methods of `resumable.Training`. own: save to a folder of the caller's."""

    def __init__(self, folder: Path, own: bool) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=not own, total_limit=None if own else 1)
        self._accelerator = bmt.hf.shard_checkpoints(accelerate.Accelerator(cpu=True, project_config=project))
        self._own = folder / "own" if own else None
        model = bmt.auto_wrap(build("llama", dropout=0.1, blocks=1).train())
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        self._model, self._optimizer, self._scheduler = self._accelerator.prepare(model, optimizer, scheduler)
        self._accelerator.register_for_checkpointing(self)
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def train(self, until: int) -> list[float]:
        losses = []
        while self.step < until:
            loss = self._model(**batch("llama", 100 * self.step + bmt.rank())).loss
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._scheduler.step()
            self._optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, **options: Any) -> None:
        self._accelerator.save_state(self._own)

    def load(self, folder: Path) -> Loaded | None:
        try:
            self._accelerator.load_state(self._own)
        except ValueError as error:
            if "there is no checkpoint" in str(error) or "does not exist" in str(error):
                return None
            raise
        return Loaded(self.step, {"rank": bmt.rank(), "position": self.step})


class AccelerateRank(Rank):
    def make(self) -> Any:
        return AcceleratedTraining(self.folder, own=self.case.kind == "replaced")

    @staticmethod
    def left_over(case: Case, folder: Path, saved: int) -> list[str]:
        within = folder / ("own" if case.kind == "replaced" else "checkpoints")
        names = [path.name for path in within.iterdir() if path.name != ".lock"]
        wanted = [name for name in names if (within / name / "manifest.json").exists()][:1] or ["nothing"]
        return sorted([*({path.name for path in folder.iterdir()} ^ {within.name}), *({*wanted} ^ {*names})])


# -- Trainer ----------------------------------------------------------------------------------------------------------


class Plan(transformers.TrainerCallback):
    """Saves after the steps that it is given, with or without being killed, and stops. It comes first of the callbacks.

    saves: for each step, None, "save" or "killed".
    """

    def __init__(self, rank: Rank, saves: list[str | None], first: bool) -> None:
        self._worker, self._saves, self._first, self._done = rank, saves, first, 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self._first:
            step = state.global_step or None
            self._worker.report("resumed", step, step and {"rank": bmt.rank(), "position": step})

        def report(module, given, outputs):
            self._worker.report("loss", state.global_step + 1, outputs.loss.item().hex())

        self._handle = model.register_forward_hook(report)

    def on_step_end(self, args, state, control, **kwargs):
        save = self._saves[self._done]
        self._done += 1
        control.should_save, control.should_training_stop = save is not None, self._done == len(self._saves)
        if save is not None:
            self._worker.report("saving", state.global_step)
        if save == "killed" and self._worker.case.kind != "again":
            self._worker.begin_killing()

    def on_train_end(self, args, state, control, **kwargs):
        self._handle.remove()


class Saved(transformers.TrainerCallback):
    """The last of the callbacks."""

    def __init__(self, rank: Rank) -> None:
        self._worker = rank

    def on_save(self, args, state, control, **kwargs):
        self._worker.end_killing()
        self._worker.report("saved", state.global_step)


class TrainerRank(Rank):
    """With stock Trainer or ours. Processes of kind "again" may also be killed at their start."""

    def run(self) -> None:
        self.report_warnings()
        folder = get_last_checkpoint(str(self.folder)) if self.folder.exists() else None
        beyond = folder is not None and int(folder.rpartition("-")[2]) >= LAST
        if self.case.kind == "first" or beyond:
            self._train([None], True)
            self.empty()
        if self.case.kind == "again":
            self.begin_killing()
        saves = ["save", "killed"] if self.case.kind == "steady" else ["killed"]
        self._train(saves, self.case.kind != "first" and not beyond)
        self.report("survived")

    def truth(self) -> None:
        self._train([None] * (LAST + 3), True)

    def _train(self, saves: list[str | None], first: bool) -> None:
        model = bmt.auto_wrap(build("llama", dropout=0.1, blocks=1).train())
        args = arguments(
            self.folder, per_device_train_batch_size=2, max_steps=2 * LAST, save_strategy="steps", save_steps=3 * LAST,
            save_total_limit=1, learning_rate=1e-2, lr_scheduler_type="linear", logging_steps=100,
        )  # fmt: skip
        ours = self.case.through == "bmt_trainer"
        callbacks = [Plan(self, saves, first), *([] if ours else [bmt.hf.BMTrainCallback()])]
        trainer = (bmt.hf.Trainer if ours else transformers.Trainer)(
            model=model, args=args, train_dataset=Rows(), callbacks=callbacks,
            optimizers=(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2), None),
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(Saved(self))
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(self.folder)) is not None)

    @staticmethod
    def left_over(case: Case, folder: Path, saved: int) -> list[str]:
        names = {path.name for path in folder.iterdir() if not path.name.startswith("incomplete-checkpoint-")}
        return sorted({".lock", f"checkpoint-{saved}"} ^ names)


RANKS = {"save_state": Rank, "accelerate": AccelerateRank, "trainer": TrainerRank, "bmt_trainer": TrainerRank}
"""By what saves."""
