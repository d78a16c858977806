"""The same through transformers' Trainer: a small training as a user writes it, and what goes wrong on one rank.

"# at NAME" marks the lines that a message about a fault may name.
"""

from __future__ import annotations

import sys
from typing import Any

import fault_points as fault
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import hf_bmtrain as bmt

STEPS, SAVED_EVERY, VOCABULARY = 12, 4, 61
FOLDER = fault.FOLDER / "checkpoints"


class Rows(torch.utils.data.Dataset):
    """Random tokens. read: how many rows this rank has read."""

    read = 0

    def __len__(self) -> int:
        return 2 * STEPS * bmt.world_size()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        fault.act("loader", self.read // 2)  # at loader
        self.read += 1
        ids = torch.randint(1, VOCABULARY, (7,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class UsersCallback(TrainerCallback):
    """What users do in callbacks, and what goes wrong there."""

    trainer: Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "--resume" in sys.argv:
            fault.report("resumed", state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        fault.act("step", state.global_step)  # at callback

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step = state.global_step - 1
        fault.act("callback", step)  # at callback
        if fault.strikes("stop_asked_alone", step):
            control.should_training_stop = True
        if fault.strikes("epoch_stop_asked_alone", step):
            control.should_epoch_stop = True
        if fault.strikes("log_asked_alone", step):
            control.should_log = True
        if fault.strikes("save_alone", step):
            bmt.save(model, str(fault.FOLDER / "alone.pt"))  # at alone
        if fault.strikes("evaluation_alone", step):
            with torch.no_grad():
                model(input_ids=torch.ones(2, 7, dtype=torch.long, device=args.device))  # at alone
        if fault.strikes("save_state_alone", step):
            bmt.save_state(fault.FOLDER / "alone", model, step=99)  # at alone
        if fault.strikes("state_dict_alone", step):
            model.state_dict()  # at alone
        if fault.strikes("save_pretrained_alone", step):
            model.save_pretrained(str(fault.FOLDER / "alone"))  # at alone
        if fault.strikes("save_model_alone", step):
            self.trainer.save_model(str(fault.FOLDER / "alone"))  # at alone
        if fault.strikes("evaluate_alone", step):
            self.trainer.evaluate()  # at alone
        if fault.strikes("save_asked_alone", step):
            control.should_save = True
        if fault.strikes("evaluation_asked_alone", step):
            control.should_evaluate = True

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if fault.strikes("stop_asked_in_micro_batch_alone", state.global_step):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if fault.strikes("stop_asked_in_log_alone", state.global_step - 1):
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        fault.act("save", state.global_step - 2)  # at save
        if fault.strikes("stop_asked_in_save_alone", state.global_step - 2):
            control.should_training_stop = True


class CallbackBehind(TrainerCallback):
    """A callback that is called after BMTrainCallback."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if fault.strikes("stop_asked_behind_alone", state.global_step - 1):
            control.should_training_stop = True


class UsersTrainer(Trainer):
    """A Trainer with a loss of the user's."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        fault.act("forward", self.state.global_step)  # at forward
        if fault.strikes("extra_forward_no_grad", self.state.global_step):
            with torch.no_grad():
                model(**inputs)  # at extra
        return super().compute_loss(model, inputs, *given, **options)  # at forward


def make_trainer() -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40,
        num_hidden_layers=fault.other("other_layers", 3, 2), num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    model = bmt.auto_wrap(LlamaForCausalLM(config))  # at wrap
    lr = fault.other("other_lr", 1e-3, 1e-2)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=lr)
    arguments = TrainingArguments(
        output_dir=str(FOLDER), max_steps=STEPS, per_device_train_batch_size=fault.other("other_batch", 1, 2),
        gradient_accumulation_steps=fault.other("other_accumulation", 2, 1), per_device_eval_batch_size=1,
        learning_rate=lr, lr_scheduler_type=fault.other("other_schedule", "linear", "cosine"),
        logging_steps=5 if fault.NAME.startswith("log_asked") else 1,
        max_grad_norm=fault.other("other_clip", 1.0, 0.5), save_strategy="steps",
        save_steps=fault.other("other_save_steps", SAVED_EVERY, 3), save_total_limit=2, report_to="none",
        use_cpu=bmt.current_world().device.type == "cpu", disable_tqdm=True, seed=5,
    )  # fmt: skip
    callbacks = [UsersCallback(), bmt.hf.BMTrainCallback(), CallbackBehind()]
    callbacks[0].trainer = trainer = UsersTrainer(
        model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), optimizers=(optimizer, None),
        callbacks=callbacks,
    )  # fmt: skip
    return trainer


def train() -> None:
    logging.set_verbosity_error()
    bmt.init_distributed(seed=0, timeout=fault.TIMEOUT, gather=fault.GATHER)  # at init
    trainer = make_trainer()  # at wrap
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)  # at train
    if not fault.strikes("left_early"):
        trainer.save_model(str(fault.FOLDER / "model"))  # at end
    fault.report("done", trainer.state.global_step)


if __name__ == "__main__":
    train()
