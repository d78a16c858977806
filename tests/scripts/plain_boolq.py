"""The job of recipes/finetune_bert_boolq.py in plain torch in one process: the reference for that recipe.

Options, rows, order, new weights, schedule, clipping and results are the same; nothing of hf_bmtrain is used. One
process here with `--batch-size N*b` gives the curve of N processes there with `--batch-size b`. `--zero-level` and
`--no-checkpoint` have no effect here.
"""

import argparse
import sys

import torch

from boolq.batches import training_batches, validation_batches
from boolq.job import DEFAULT_MODEL, Job, prepare
from boolq.model import quiet_transformers
from boolq.options import FIRST_LOSS_SCALE, MAX_GRAD_NORM, WARMUP_SHARE, WEIGHT_DECAY, parse_options
from boolq.report import Report, score
from common.command_line import choose_dtype, one_line_errors
from common.hub import why_unavailable


def main() -> None:
    options = parse_options()
    quiet_transformers(terminal=sys.stderr.isatty())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with one_line_errors():
        asked = options.model or options.data
        embedded = not asked and (device.type == "cpu" or why_unavailable(DEFAULT_MODEL) is not None)
        job = prepare(options, 1, embedded=embedded)
    if embedded:
        torch.set_num_threads(1)
    choose_dtype(options, device)
    print(f"plain torch: {job.describe()}, {options.dtype}, {device.type}")
    report = train(job, options, device)
    job.model.save_pretrained(options.output)
    job.tokenizer.save_pretrained(options.output)
    print(report.write(options.output))


def train(job: Job, options: argparse.Namespace, device: torch.device) -> Report:
    batches, sampler = training_batches(
        job.train_rows, job.tokenizer, options.batch_size, rank=0, world_size=1, seed=options.seed
    )
    model = job.model.to(device, getattr(torch, options.dtype))
    update = Update(model, options.lr, steps=options.epochs * len(batches))
    report = Report(options, job.describe(), device, world_size=1)
    torch.manual_seed(options.seed)
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for batch in batches:
            batch = batch.to(device)
            labels = batch.pop("labels")
            loss = torch.nn.functional.cross_entropy(model(**batch).logits.float(), labels)
            lr = update.lr
            report.curve.add(epoch, loss, update(loss), lr)
        report.curve.read()
        training_seconds = report.seconds()
        scores = evaluate(model, job, options.batch_size, device)
        print(report.add_epoch(epoch, scores, training_seconds, report.seconds()))
    return report


class Update:
    """One step of torch.optim.AdamW with clipping and a linear schedule.

    Half-precision weights are updated through float32 masters. float16 uses a loss scale that is halved when a gradient
    overflows, which skips the step, and never raised: runs here are short.
    """

    def __init__(self, model: torch.nn.Module, lr: float, steps: int) -> None:
        self.weights = list(model.parameters())
        half = self.weights[0].dtype != torch.float32
        self.masters = [w.detach().float().requires_grad_() for w in self.weights] if half else self.weights
        self.scale = FIRST_LOSS_SCALE if self.weights[0].dtype == torch.float16 else 1.0
        self.adam = torch.optim.AdamW(self.masters, lr=lr, weight_decay=WEIGHT_DECAY)
        warmup = round(WARMUP_SHARE * steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.adam,
            lambda step: step / warmup if step < warmup else max(0.0, (steps - step) / (steps - warmup)),
        )

    @property
    def lr(self) -> float:
        return self.schedule.get_last_lr()[0]

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Run the backward of `loss` and one step. Return the norm of the gradients before clipping."""
        (loss * self.scale).backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is not None:
                master.grad = weight.grad.float() / self.scale
        norm = torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        if norm.isfinite():
            self.adam.step()
            self.schedule.step()
            with torch.no_grad():
                for weight, master in zip(self.weights, self.masters, strict=True):
                    weight.copy_(master)
        else:
            self.scale /= 2
        for parameter in (*self.weights, *self.masters):
            parameter.grad = None
        return norm


@torch.no_grad()
def evaluate(model: torch.nn.Module, job: Job, batch_size: int, device: torch.device) -> dict[str, float]:
    batches = validation_batches(job.validation_rows, job.tokenizer, batch_size, rank=0, world_size=1)
    model.eval()
    predictions, labels = [], []
    for batch in batches:
        labels.append(batch.pop("labels"))
        predictions.append(model(**batch.to(device)).logits.argmax(-1).cpu())
    return score(torch.cat(predictions), torch.cat(labels))


if __name__ == "__main__":
    main()
