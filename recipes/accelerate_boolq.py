"""Fine-tune a BERT on BoolQ in a loop of Hugging Face Accelerate.

Options, rows, their order and results are those of finetune_bert_boolq.py.

    python recipes/accelerate_boolq.py
    accelerate launch --multi_gpu --num_processes 2 recipes/accelerate_boolq.py --model MODEL_FOLDER --data DATA_FOLDER

`--fp16` keeps float32 weights and computes under Accelerate's fp16 autocast and gradient scaler.
"""

import argparse
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from tqdm import tqdm

import hf_bmtrain as bmt
from boolq.batches import training_batches, validation_batches
from boolq.job import Job
from boolq.options import MAX_GRAD_NORM, WARMUP_SHARE, WEIGHT_DECAY, parse_options
from boolq.report import Report, score
from boolq.start import prepare_on_all_ranks


def main() -> None:
    options = parse_options()
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level, shard_over=options.shard_over)
    job = prepare_on_all_ranks(options)
    device = bmt.current_world().device
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="fp16" if options.dtype == "float16" else "no",
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # Accelerate splits batches over the processes
        step_scheduler_with_optimizer=True,
    )
    report = train(job, options, accelerator)
    save(job, report, options, accelerator)
    accelerator.end_training()


def train(job: Job, options: argparse.Namespace, accelerator: Accelerator) -> Report:
    """Shard the job's model in place, train it, and evaluate it after each epoch. Return the measurements.

    Collective: every rank must call it.

    Args:
        job: the model, its tokenizer, and the training and validation rows.
        options: the options of the command line, all of them set.
        accelerator: the Accelerator, created with `split_batches=True`.
    """
    rows_a_step = options.batch_size * accelerator.num_processes
    batches, _ = training_batches(job.train_rows, job.tokenizer, rows_a_step, rank=0, world_size=1, seed=options.seed)
    evaluated = validation_batches(job.validation_rows, job.tokenizer, rows_a_step, rank=0, world_size=1)
    weights: Any = torch.float32 if options.dtype == "float16" else getattr(torch, options.dtype)
    model = bmt.auto_wrap(
        job.model.to(weights),
        zero_level=options.zero_level,
        use_checkpoint=not options.no_checkpoint,
        float8=options.float8,
    )
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=options.lr, weight_decay=WEIGHT_DECAY)
    steps = options.epochs * len(batches)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Linear(round(WARMUP_SHARE * steps), steps))
    model, optimizer, scheduler, batches, evaluated = accelerator.prepare(
        model, optimizer, scheduler, batches, evaluated
    )
    report = Report(options, job.describe(), accelerator.device, accelerator.num_processes)
    torch.manual_seed(options.seed + accelerator.process_index)  # dropout differs between ranks
    for epoch in range(1, options.epochs + 1):
        batches.set_epoch(epoch)
        model.train()
        bar = tqdm(batches, f"epoch {epoch}", disable=None if accelerator.is_main_process else True)
        for batch in bar:
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm: Any = accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            mean: Any = accelerator.reduce(loss.detach().float(), reduction="mean")
            report.curve.add(epoch, mean, norm, scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        report.curve.read()
        training_seconds = report.seconds()
        scores = evaluate(model, evaluated, accelerator)
        accelerator.print(report.add_epoch(epoch, scores, training_seconds, report.seconds()))
    return report


class Linear:
    """The factor by which LambdaLR multiplies the learning rate: rises from 0 to 1, then falls to 0, both linearly.

    Args:
        warmup: the step at which the factor is 1.
        end: the step from which on the factor is 0.
    """

    def __init__(self, warmup: int, end: int) -> None:
        self.warmup, self.end = warmup, end

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        return max(0.0, (self.end - step) / max(1, self.end - self.warmup))


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: DataLoader, accelerator: Accelerator) -> dict[str, float]:
    """Return the scores (see `boolq.report.score`) of the model on all validation rows, each counted once.

    Collective: every rank must call it.

    Args:
        model: the sharded model.
        batches: the loader of the validation rows, prepared by `accelerator`.
        accelerator: the Accelerator.
    """
    model.eval()
    predictions, labels = [], []
    for batch in batches:
        batch_labels = batch.pop("labels")
        found = accelerator.gather_for_metrics((model(**batch).logits.argmax(-1), batch_labels))
        predictions.append(found[0].cpu())
        labels.append(found[1].cpu())
    return score(torch.cat(predictions), torch.cat(labels))


def save(job: Job, report: Report, options: argparse.Namespace, accelerator: Accelerator) -> None:
    """Write the model, its tokenizer and the report to `options.output`, which `from_pretrained` can load.

    Collective: every rank must call it. Only rank 0 writes.
    """
    state = accelerator.get_state_dict(job.model)  # full tensors, gathered from all ranks
    if accelerator.is_main_process:
        job.model.save_pretrained(options.output, state_dict=state)
        job.tokenizer.save_pretrained(options.output)
        print(report.write(options.output))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
