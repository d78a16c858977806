"""Cases of transformers' tests/trainer/test_trainer_callback.py around a sharded model."""

from unittest.mock import patch

import transformers
from transformers import DefaultFlowCallback, EarlyStoppingCallback, TrainerCallback

import hf_bmtrain as bmt
import regression
from regression import checkpoints

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Recorder(TrainerCallback):
    """Notes every event."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name in EVENTS:
            return lambda *args, **kwargs: self.events.append(name)
        return super().__getattribute__(name)


def make(folder, callbacks=(), **given):
    """Trainer's defaults, of which the helper leaves out the printer."""
    with patch.object(transformers.Trainer, "remove_callback"):
        return regression.make(folder, callbacks=list(callbacks), **{"disable_tqdm": False, **given})


def found(trainer, kind):
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


def remove_callback_by_class(folder):
    """Ours too: what is left trains, and neither saves nor reports."""
    trainer = make(folder, save_strategy="no", max_steps=2)
    for kind in (bmt.hf.BMTrainCallback, DefaultFlowCallback):
        assert found(trainer, kind)
        trainer.remove_callback(kind)
        assert not found(trainer, kind)
        if kind is bmt.hf.BMTrainCallback:
            assert trainer.train().global_step == 2


def expected_events(trainer):
    """What a run of `trainer` must have told, in order."""
    args, steps = trainer.args, len(trainer.get_train_dataloader())
    evaluation = ["on_prediction_step"] * len(trainer.get_eval_dataloader()) + ["on_log", "on_evaluate"]
    events = ["on_init_end", "on_train_begin"]
    for step in range(1, 3 * steps + 1):
        last = step == 3 * steps
        events += ["on_epoch_begin"] if step % steps == 1 else []
        events += ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
        events += ["on_log"] if step % args.logging_steps == 0 else []
        events += evaluation if args.eval_strategy == "steps" and (step % args.eval_steps == 0 or last) else []
        events += ["on_save"] if step % args.save_steps == 0 or last else []
        events += ["on_epoch_end"] if step % steps == 0 else []
        events += evaluation if step % steps == 0 and args.eval_strategy == "epoch" else []
    return [*events, "on_log", "on_train_end"]


def event_flow(folder):
    everything = {"logging_steps": 3, "save_steps": 10, "eval_steps": 5, "eval_strategy": "steps"}
    by_steps = [{"logging_steps": 5}, {"save_steps": 5}, {"eval_steps": 5, "eval_strategy": "steps"}]
    for given in [{}, *by_steps, {"eval_strategy": "epoch"}, everything]:
        trainer = make(folder, [Recorder], **given)
        trainer.train()
        assert found(trainer, Recorder)[0].events == expected_events(trainer), given


class SaveCounter(TrainerCallback):
    count = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += control.should_save

    on_epoch_end = on_step_end


def no_duplicate_save_on_epoch_strategy(folder):
    trainer = make(folder, [SaveCounter()], max_steps=2, save_strategy="epoch")
    trainer.train()
    assert found(trainer, SaveCounter)[0].count == 1
    assert checkpoints(folder) == [2]


TWO_STEPS = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 2}
RESTORED = {**TWO_STEPS, "restore_callback_states_from_checkpoint": True}


def restored(folder, before, after):
    """A trainer with callbacks `after`, resumed from what one with `before` has saved."""
    make(folder, before, load_best_model_at_end=True, **TWO_STEPS).train()
    trainer = make(folder, after, load_best_model_at_end=True, **RESTORED)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return trainer


def early_stopping_state_persists(folder):
    trainer = restored(folder, [EarlyStoppingCallback(5, 0.2)], [EarlyStoppingCallback()])
    (callback,) = found(trainer, EarlyStoppingCallback)
    assert (callback.early_stopping_patience, callback.early_stopping_threshold) == (5, 0.2)
