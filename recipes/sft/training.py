"""Train on prompts with completions by Hugging Face's Trainer, and compare the model's answers before and after."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import DataCollatorForSeq2Seq, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import hf_bmtrain as bmt
from common.curve import Curve
from sft.data import Example, Rows

EVALUATIONS = 5
ROWS_A_STEP = 16  # of all processes together, so that the default does not depend on their number
NEW_TOKENS = 64


def train(
    model: Any,
    tokenizer: Any,
    training: Sequence[Example],
    held_out: Sequence[Example],
    options: argparse.Namespace,
    record: "Record",
    trainer_class: type[Trainer] = Trainer,
) -> float:
    """Train the parameters that require a gradient. Return how many seconds the training took.

    Collective: every rank must call it.

    Args:
        model: the sharded model.
        tokenizer: the model's tokenizer.
        training: the examples to train on.
        held_out: the examples to evaluate on.
        options: the options of the command line, all of them set.
        record: receives the curve of the training, and the loss on held-out rows after some of the steps.
        trainer_class: transformers.Trainer, or a subclass such as bmt.hf.Trainer.
    """
    trainer = trainer_class(
        model=model,
        args=training_arguments(options),
        train_dataset=Rows(training, tokenizer, options.max_length),
        eval_dataset=Rows(held_out, tokenizer, options.max_length),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        optimizers=(bmt.optim.AdamOptimizer([p for p in model.parameters() if p.requires_grad], lr=options.lr), None),
        callbacks=[record, bmt.hf.BMTrainCallback()],
    )
    trainer.remove_callback(PrinterCallback)  # would print a line for every step
    trainer.evaluate()
    started = time.perf_counter()
    trainer.train()
    record.curve.read()
    return time.perf_counter() - started


def training_arguments(options: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        dataloader_drop_last=False,  # True would leave out held-out rows, too
        learning_rate=options.lr,
        lr_scheduler_type="linear",
        warmup_steps=options.steps // 10,
        max_grad_norm=1.0,
        use_cpu=bmt.current_world().device.type == "cpu",
        seed=options.seed,
        eval_strategy="steps",
        eval_steps=max(1, options.steps // EVALUATIONS),
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,  # Record shows a bar; Trainer's would also print a line for every step
    )


class Record(TrainerCallback):
    """Callback that records the losses of training and evaluation, and shows a progress bar.

    Attributes:
        curve: the loss, learning rate and gradient norm of every step.
        points: a dict with the keys step and loss for every evaluation on held-out rows.
    """

    def __init__(self) -> None:
        self.curve = Curve()
        self.points: list[dict] = []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.bar = tqdm(total=state.max_steps, desc="training", disable=None if bmt.rank() == 0 else True)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.bar.close()

    def on_log(self, args, state, control, logs: dict | None = None, **kwargs) -> None:
        if logs and "loss" in logs:
            loss, norm = torch.tensor(logs["loss"]), torch.tensor(logs["grad_norm"])
            self.curve.add(1, loss, norm, logs["learning_rate"])
            self.bar.set_postfix(loss=logs["loss"], refresh=False)
            self.bar.update()

    def on_evaluate(self, args, state, control, metrics: dict, **kwargs) -> None:
        self.points.append({"step": state.global_step, "loss": metrics["eval_loss"]})
        bmt.print_rank(f"step {state.global_step}: held-out loss {metrics['eval_loss']:.4f}")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, examples: Sequence[Example]) -> list[str]:
    """Return the completion that the model generates for each prompt, by greedy decoding.

    Collective: every rank must call it.

    Args:
        model: the sharded model.
        tokenizer: the model's tokenizer.
        examples: the prompts; their completions are not used.
    """
    model.eval()
    batch = tokenizer([x.prompt for x in examples], padding=True, padding_side="left", return_tensors="pt")
    inputs = {name: batch[name].to(bmt.current_world().device) for name in ("input_ids", "attention_mask")}
    made = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def right(examples: Sequence[Example], answers: Sequence[str]) -> float:
    """Return the fraction, from 0 to 1, of the answers that equal the completion of their example.

    Args:
        examples: the examples, whose completions are the correct answers.
        answers: the answers of the model, one for each example. Spaces around them are ignored.
    """
    pairs = zip(examples, answers, strict=True)
    return sum(example.completion.strip() == said.strip() for example, said in pairs) / len(examples)


def show(examples: Sequence[Example], before: Sequence[str], after: Sequence[str]) -> None:
    print(f"a held-out prompt: {examples[0].prompt}\n  before: {before[0].strip()}\n  after: {after[0].strip()}")
    print(f"right answers: {right(examples, before):.0%} before, {right(examples, after):.0%} after")
