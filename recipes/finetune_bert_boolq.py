"""Fine-tune BERT on BoolQ, a data set of passages with yes/no questions about them.

    python recipes/finetune_bert_boolq.py
    torchrun --nproc-per-node 2 recipes/finetune_bert_boolq.py --model MODEL_FOLDER --data DATA_FOLDER

Every call that begins with `bmt.` is one of hf_bmtrain; the rest is a training loop of plain torch. The modules in
`boolq/` read the questions, load the model and write the results.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

import hf_bmtrain as bmt
from boolq.batches import in_order, training_batches, validation_batches
from boolq.job import Job
from boolq.options import FIRST_LOSS_SCALE, MAX_GRAD_NORM, WARMUP_SHARE, WEIGHT_DECAY, parse_options
from boolq.report import Report, score
from boolq.start import prepare_on_all_ranks
from common.curve import Curve


def main() -> None:
    options = parse_options()
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level, shard_over=options.shard_over)
    job = prepare_on_all_ranks(options)
    device = bmt.current_world().device
    report = train(job, options, device)
    save(job, report, options)


def train(job: Job, options: argparse.Namespace, device: torch.device) -> Report:
    """Shard the job's model in place, train it, and evaluate it after each epoch. Return the measurements.

    Collective: every rank must call it.

    Args:
        job: the model, its tokenizer, and the training and validation rows.
        options: the options of the command line, all of them set.
        device: this rank's device.
    """
    rank, world_size = bmt.rank(), bmt.world_size()
    batches, sampler = training_batches(
        job.train_rows, job.tokenizer, options.batch_size, rank=rank, world_size=world_size, seed=options.seed
    )
    model = job.model.to(getattr(torch, options.dtype))
    model = bmt.auto_wrap(
        model, zero_level=options.zero_level, use_checkpoint=not options.no_checkpoint, float8=options.float8
    )
    manager = make_manager(model, options, steps=options.epochs * len(batches))
    report = Report(options, job.describe(), device, world_size)
    torch.manual_seed(options.seed + rank)  # dropout differs between ranks
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        train_epoch(model, manager, batches, report.curve, epoch, device)
        training_seconds = report.seconds()
        scores = evaluate(job, options.batch_size, device)
        bmt.print_rank(report.add_epoch(epoch, scores, training_seconds, report.seconds()))
    return report


def make_manager(model: torch.nn.Module, options: argparse.Namespace, steps: int) -> bmt.optim.OptimManager:
    """Return an OptimManager with AdamW, linear warm-up and decay of the learning rate, and a loss scale for fp16.

    Args:
        model: the sharded model.
        options: the options of the command line, of which `lr` and `dtype` are used.
        steps: the number of steps after which the learning rate is 0.
    """
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=options.lr, weight_decay=WEIGHT_DECAY)
    scheduler = bmt.lr_scheduler.Linear(
        optimizer, start_lr=options.lr, warmup_iter=round(WARMUP_SHARE * steps), end_iter=steps
    )
    manager = bmt.optim.OptimManager(loss_scale=FIRST_LOSS_SCALE if options.dtype == "float16" else None)
    manager.add_optimizer(optimizer, scheduler)
    return manager


def train_epoch(
    model: torch.nn.Module,
    manager: bmt.optim.OptimManager,
    batches: DataLoader,
    curve: Curve,
    epoch: int,
    device: torch.device,
) -> None:
    """Train for one epoch, on all of this rank's batches. Collective: every rank must call it.

    Args:
        model: the sharded model.
        manager: contains one optimizer and its scheduler.
        batches: this rank's batches.
        curve: receives the loss, gradient norm and learning rate of every step.
        epoch: the number of the epoch, from 1.
        device: this rank's device, to which the batches are moved.
    """
    (optimizer,), (scheduler,) = manager.optimizers, manager.schedulers
    loss_function = bmt.loss.FusedCrossEntropy()
    model.train()
    # disable=None shows the bar in a terminal, but not if the output is a log file.
    bar = tqdm(batches, f"epoch {epoch}", disable=None if bmt.rank() == 0 else True)
    for batch in bar:
        batch = batch.to(device)
        labels = batch.pop("labels")
        manager.zero_grad()
        loss = loss_function(model(**batch).logits, labels)
        manager.backward(loss)
        grad_norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=MAX_GRAD_NORM)
        if curve.add(epoch, bmt.sum_loss(loss), grad_norm, scheduler.current_lr):
            bar.set_postfix(loss=curve.steps[-1]["loss"], lr=curve.steps[-1]["lr"], refresh=False)
        manager.step()
    curve.read()


@torch.no_grad()
def evaluate(job: Job, batch_size: int, device: torch.device) -> dict[str, float]:
    """Return the scores (see `boolq.report.score`) of the model on all validation rows, each counted once.

    Collective: every rank must call it.

    Args:
        job: the model and the validation rows.
        batch_size: the number of rows per rank in each forward.
        device: this rank's device.
    """
    model, rows, world_size = job.model, job.validation_rows, bmt.world_size()
    batches = validation_batches(rows, job.tokenizer, batch_size, rank=bmt.rank(), world_size=world_size)
    model.eval()
    predictions = []
    for batch in batches:
        batch = batch.to(device)
        batch.pop("labels")
        predictions.append(model(**batch).logits.argmax(-1))
    everyone = in_order(bmt.gather_result(torch.cat(predictions)), world_size, len(rows))
    return score(everyone.cpu(), rows.labels())


def save(job: Job, report: Report, options: argparse.Namespace) -> None:
    """Write the model, its tokenizer and the report to `options.output`, which `from_pretrained` can load.

    Collective: every rank must call it. Only rank 0 writes.
    """
    state = job.model.state_dict()  # full tensors, gathered from all ranks
    if bmt.rank() == 0:
        job.model.save_pretrained(options.output, state_dict=state)
        job.tokenizer.save_pretrained(options.output)
        print(report.write(options.output))
    bmt.synchronize()


if __name__ == "__main__":
    main()
