"""Fine-tune a BERT on BoolQ with an unmodified Hugging Face Trainer.

Options, rows, their order and results are those of finetune_bert_boolq.py.

    python recipes/trainer_boolq.py
    torchrun --nproc-per-node 2 recipes/trainer_boolq.py --model MODEL_FOLDER --data DATA_FOLDER

`--fp16` keeps float32 weights and computes under Trainer's fp16 autocast and gradient scaler.
"""

import argparse
import sys
from typing import Any

import torch
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import hf_bmtrain as bmt
from boolq.job import Job
from boolq.options import MAX_GRAD_NORM, WARMUP_SHARE, WEIGHT_DECAY, parse_options
from boolq.report import Report, score
from boolq.start import prepare_on_all_ranks


def main() -> None:
    options = parse_options()
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level, shard_over=options.shard_over)
    job = prepare_on_all_ranks(options)
    device = bmt.current_world().device
    report = Report(options, job.describe(), device, bmt.world_size())
    trainer = make_trainer(job, options, report)
    trainer.train()
    trainer.save_model(str(options.output))
    bmt.print_rank(report.write(options.output) if bmt.rank() == 0 else "")
    bmt.synchronize()


def make_trainer(job: Job, options: argparse.Namespace, report: Report) -> Trainer:
    """Shard the job's model in place, and return a Trainer for it. Collective: every rank must call it.

    Args:
        job: the model, its tokenizer, and the training and validation rows.
        options: the options of the command line, all of them set.
        report: receives the measurements of every step and epoch.
    """
    weights: Any = torch.float32 if options.dtype == "float16" else getattr(torch, options.dtype)
    model = bmt.auto_wrap(
        job.model.to(weights),
        zero_level=options.zero_level,
        use_checkpoint=not options.no_checkpoint,
        float8=options.float8,
    )
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=options.lr, weight_decay=WEIGHT_DECAY)
    steps = options.epochs * (len(job.train_rows) // (options.batch_size * bmt.world_size()))
    return Trainer(
        model=model,
        args=training_arguments(options, warmup=round(WARMUP_SHARE * steps)),
        train_dataset=job.train_rows,
        eval_dataset=job.validation_rows,
        data_collator=DataCollatorWithPadding(job.tokenizer),
        processing_class=job.tokenizer,
        compute_metrics=compute_scores,
        optimizers=(optimizer, None),
        callbacks=[Record(report), bmt.hf.BMTrainCallback()],
    )


def training_arguments(options: argparse.Namespace, warmup: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(options.output),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        dataloader_drop_last=True,  # of training rows, see Record.on_train_begin
        learning_rate=options.lr,
        lr_scheduler_type="linear",
        warmup_steps=warmup,
        max_grad_norm=MAX_GRAD_NORM,
        # BERT's loss is a mean over this rank's rows. By default Trainer multiplies the loss by the number of ranks,
        # which is wrong for a mean. BMTrainCallback would correct that; here the multiplication is turned off.
        average_tokens_across_devices=False,
        fp16=options.dtype == "float16",
        use_cpu=bmt.current_world().device.type == "cpu",
        seed=options.seed,
        data_seed=options.seed + 1,  # + epoch: Trainer counts epochs from 0, the other recipes from 1
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=bmt.rank() != 0 or not sys.stderr.isatty(),
    )


def compute_scores(prediction: EvalPrediction) -> dict[str, float]:
    return score(torch.as_tensor(prediction.predictions).argmax(-1), torch.as_tensor(prediction.label_ids))


class Record(TrainerCallback):
    """Callback that adds the measurements of every step and epoch to `report`."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.training_seconds = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # The loader of training rows exists by now. Those made from here on are for evaluation, of all validation rows.
        args.dataloader_drop_last = False

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **kwargs
    ) -> None:
        if logs and "loss" in logs:
            loss, norm = torch.tensor(logs["loss"]), torch.tensor(logs["grad_norm"])
            epoch = int(-(-(state.epoch or 0) // 1))
            self.report.curve.add(epoch, loss, norm, logs["learning_rate"])

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.training_seconds = self.report.seconds()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict, **kwargs
    ) -> None:
        self.report.curve.read()
        names = ("accuracy", "balanced_accuracy", "majority_share")
        scores = {name: metrics[f"eval_{name}"] for name in names}
        line = self.report.add_epoch(round(state.epoch or 0), scores, self.training_seconds, self.report.seconds())
        bmt.print_rank(line)


if __name__ == "__main__":
    main()
