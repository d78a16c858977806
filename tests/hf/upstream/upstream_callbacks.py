"""Cases of transformers' tests/trainer/test_trainer_callback.py around a sharded model."""

from unittest.mock import patch

import transformers
from transformers import DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS
from transformers.trainer_callback import ExportableState

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


class Named(TrainerCallback, ExportableState):
    """Has something to be saved."""

    def __init__(self, name="nobody"):
        self.name = name

    def state(self):
        return {"args": {"name": self.name}, "attributes": {}}


def make(folder, callbacks=(), **given):
    """Trainer's defaults, of which the helper leaves out the printer."""
    with patch.object(transformers.Trainer, "remove_callback"):
        return regression.make(folder, callbacks=list(callbacks), **{"disable_tqdm": False, **given})


def names(trainer):
    return sorted(type(callback).__name__ for callback in trainer.callback_handler.callbacks)


def expected_names(*callbacks):
    return sorted(c.__name__ for c in (*DEFAULT_CALLBACKS, bmt.hf.BMTrainCallback, *callbacks))


def found(trainer, kind):
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


def default_callbacks_are_present(folder):
    assert names(make(folder)) == expected_names(ProgressCallback)


def custom_callback_added_at_init(folder):
    assert names(make(folder, [Recorder])) == expected_names(ProgressCallback, Recorder)


def printer_callback_when_tqdm_disabled(folder):
    assert names(make(folder, disable_tqdm=True)) == expected_names(PrinterCallback)


def add_callback_by_class(folder):
    trainer = make(folder)
    before = len(trainer.callback_handler.callbacks)
    trainer.add_callback(Recorder)
    assert len(trainer.callback_handler.callbacks) == before + 1 and found(trainer, Recorder)


def add_callback_by_instance(folder):
    trainer, callback = make(folder), Recorder()
    trainer.add_callback(callback)
    assert callback in trainer.callback_handler.callbacks


def remove_callback_by_class(folder):
    """Ours too: what is left trains, and neither saves nor reports."""
    trainer = make(folder, save_strategy="no", max_steps=2)
    for kind in (bmt.hf.BMTrainCallback, DefaultFlowCallback):
        assert found(trainer, kind)
        trainer.remove_callback(kind)
        assert not found(trainer, kind)
        if kind is bmt.hf.BMTrainCallback:
            assert trainer.train().global_step == 2


def remove_callback_by_instance(folder):
    trainer = make(folder)
    callback = trainer.callback_handler.callbacks[0]
    trainer.remove_callback(callback)
    assert callback not in trainer.callback_handler.callbacks


def pop_callback_returns_instance(folder):
    trainer = make(folder)
    (ours,) = found(trainer, bmt.hf.BMTrainCallback)
    assert trainer.pop_callback(bmt.hf.BMTrainCallback) is ours
    assert not found(trainer, bmt.hf.BMTrainCallback)


def duplicate_callback_warning(folder):
    with patch("transformers.trainer_callback.logger.warning") as warning:
        make(folder, [Recorder, Recorder])
    assert "Recorder" in warning.call_args[0][0]


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


def on_push_begin_event(folder):
    trainer = make(folder, [Recorder], max_steps=1)
    trainer.train()
    (recorder,) = found(trainer, Recorder)
    before = list(recorder.events)
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert recorder.events == [*before, "on_push_begin"] and "on_push_begin" not in before


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


class Stopper(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 1


def callback_can_stop_training(folder):
    trainer = make(folder, [Stopper], max_steps=10, logging_steps=1, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 1


class FlagRecorder(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append((state.global_step, control.should_log, control.should_save, control.should_evaluate))


def callback_receives_control_flags(folder):
    trainer = make(folder, [FlagRecorder], max_steps=2, logging_steps=1, save_strategy="no")
    trainer.train()
    assert found(trainer, FlagRecorder)[0].seen == [(1, True, False, False), (2, True, False, False)]


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


def mixed_stateful_and_regular_callbacks(folder):
    trainer = restored(folder, [Recorder(), EarlyStoppingCallback(5, 0.2)], [EarlyStoppingCallback(), Recorder()])
    assert found(trainer, EarlyStoppingCallback)[0].early_stopping_patience == 5


def multiple_instances_of_same_stateful_callback(folder):
    trainer = restored(folder, [Named("first"), Named("second")], [Named(), Named()])
    assert [callback.name for callback in found(trainer, Named)] == ["first", "second"]


def missing_stateful_callback_warning(folder):
    make(folder, [EarlyStoppingCallback()], load_best_model_at_end=True, **TWO_STEPS).train()
    trainer = make(folder, **RESTORED)
    with patch("transformers.trainer.logger.warning") as warning:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert any("EarlyStoppingCallback" in str(call.args[0]) for call in warning.call_args_list)


def trainer_control_state_persists(folder):
    make(folder, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = make(folder, max_steps=2, restore_callback_states_from_checkpoint=True)
    trainer.state = transformers.TrainerState.load_from_json(f"{folder}/checkpoint-2/trainer_state.json")
    trainer._load_callback_state()
    assert trainer.control.should_training_stop
