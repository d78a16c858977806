"""Train a GPT from scratch, with layers built from bmt.DistributedModule.

    python recipes/train_gpt2.py
    torchrun --nproc-per-node 2 recipes/train_gpt2.py --data BOOK.txt --fp16 --num-layers 8 --vocab-size 10240 \
        --dim-model 2560 --dim-head 80 --num-heads 32 --dim-ff 8192 --length 512

This is BMTrain's GPT example with data, evaluation and a report. The modules in `gpt2/` contain layers, model and data.
"""

import argparse
import time

import torch
from tqdm import tqdm

import hf_bmtrain as bmt
from boolq.job import check_output
from common.command_line import choose_dtype, one_line_errors
from common.curve import Curve, versions
from gpt2.data import Rows, cut, endless_batches, generate_text, read_text, train_tokenizer
from gpt2.model import GPT
from gpt2.options import parse_options
from gpt2.report import write_report

EVALUATIONS = 5
ROWS_A_STEP = 16  # of all processes together, so that the default does not depend on their number


def main() -> None:
    options = parse_options()
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level, shard_over=options.shard_over)
    device = bmt.current_world().device
    if device.type == "cpu" and options.dim_model <= 256:
        torch.set_num_threads(1)  # for steps this small, waiting for a busy core costs more than a second core gains
    choose_dtype(options, device)
    options.batch_size = options.batch_size or max(1, ROWS_A_STEP // bmt.world_size())
    with one_line_errors():
        check_output(options.output)
        text = read_text(options.data) if options.data else generate_text(options.seed)
        tokenizer = train_tokenizer(text, options.vocab_size)
        training, held_out = cut(text, tokenizer, options.length)
        if len(bmt.gather_result(torch.tensor([training.fingerprint()])).unique()) > 1:
            raise ValueError("the ranks have read different text: give all of them the same --data")
        batches = endless_batches(training, options.batch_size, bmt.rank(), bmt.world_size(), options.seed)
        first = next(batches)
    model = make_model(options)
    report(model, training, held_out, options)
    started = time.perf_counter()
    curve, points = train(model, training, held_out, first, batches, options)
    run = {
        "arguments": vars(options), "versions": versions(), "world_size": bmt.world_size(), "device": device,
        "parameters": count(model), "seconds": time.perf_counter() - started,
    }  # fmt: skip
    bmt.save(model, options.output / "model.pt")
    start = text[: text.index(" ", 20)] if " " in text[20:] else text[:20]
    continued = tokenizer.decode(continue_text(model, tokenizer.encode(start).ids, options.length))
    if bmt.rank() == 0:
        tokenizer.save(str(options.output / "tokenizer.json"))
        print(f"a continuation: {' '.join(continued.split())}")
        print(write_report(options.output, run, curve, points))
    bmt.synchronize()


def make_model(options: argparse.Namespace) -> GPT:
    """Create the sharded model, with random weights or those of the file `options.load`.

    Collective: every rank must call it. If the file does not match the model, print one line and exit with status 2.
    """
    model = GPT(
        num_layers=options.num_layers,
        vocab_size=options.vocab_size,
        dim_model=options.dim_model,
        dim_head=options.dim_head,
        num_heads=options.num_heads,
        dim_ff=options.dim_ff,
        max_distance=options.length,
        bias=True,
        dtype=getattr(torch, options.dtype),
        use_checkpoint=not options.no_checkpoint,
    )
    bmt.init_parameters(model)
    if options.load:
        with one_line_errors():
            try:
                bmt.load(model, options.load)
            except RuntimeError as error:
                raise ValueError(error) from error
    return model


def count(model: GPT) -> int:
    """Return the number of elements of the model's full parameters: the sum over the shards of all ranks.

    Collective: every rank must call it.
    """
    everyone = bmt.gather_result(torch.tensor([sum(parameter.numel() for parameter in model.parameters())]))
    return int(everyone.sum())


def report(model: GPT, training: Rows, held_out: Rows, options: argparse.Namespace) -> None:
    where = f"{bmt.world_size()} x {bmt.current_world().device.type}"
    rows = f"{len(training)} rows of {options.length} tokens, {len(held_out)} held out"
    bmt.print_rank(f"GPT of {count(model) / 1e6:.2f} M parameters in {options.dtype} on {rows}, {where}")


def train(
    model: GPT,
    training: Rows,
    held_out: Rows,
    chosen: torch.Tensor,
    batches,
    options: argparse.Namespace,
) -> tuple[Curve, list[dict]]:
    """Train for `options.steps` steps. Return the curve, and the loss on held-out rows after some of the steps.

    Collective: every rank must call it.

    Args:
        model: the model.
        training: the training rows.
        held_out: the held-out rows.
        chosen: (batch_size,), the indices of this rank's rows of the first step.
        batches: an iterator of such indices for the following steps.
        options: the options of the command line, all of them set.

    Returns:
        The curve, and a list of dicts with the keys step and loss.
    """
    device = bmt.current_world().device
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), weight_decay=options.weight_decay)
    scheduler = bmt.lr_scheduler.Noam(optimizer, options.lr, warmup_iter=options.warmup, end_iter=options.steps)
    manager = bmt.optim.OptimManager(loss_scale=options.loss_scale if options.dtype == "float16" else None)
    manager.add_optimizer(optimizer, scheduler)
    curve, points = Curve(), [{"step": 0, "loss": evaluate(model, held_out, options)}]
    bar = tqdm(range(1, options.steps + 1), "training", disable=None if bmt.rank() == 0 else True)
    for step in bar:
        manager.zero_grad()
        loss = loss_of(model, *training.batch(chosen, device))
        manager.backward(loss)
        grad_norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=options.max_grad_norm)
        if curve.add(1, bmt.sum_loss(loss), grad_norm, scheduler.current_lr):
            bar.set_postfix(loss=curve.steps[-1]["loss"], lr=curve.steps[-1]["lr"], refresh=False)
        manager.step()
        if step * EVALUATIONS // options.steps != (step - 1) * EVALUATIONS // options.steps:
            points.append({"step": step, "loss": evaluate(model, held_out, options)})
            bmt.print_rank(f"step {step}: held-out loss {points[-1]['loss']:.4f}")
        chosen = next(batches)
    curve.read()
    return curve, points


def loss_of(model: GPT, inputs: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, a scalar, over those targets of this rank's rows that are not padding.

    Args:
        model: the model.
        inputs: (batch, length), int64, the tokens.
        lengths: (batch,), the number of tokens of each row without padding.
        targets: (batch, length), int64, the next tokens; -100 for padding.
    """
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    logits = model(inputs, positions, positions < lengths[:, None])
    return bmt.loss.FusedCrossEntropy(ignore_index=-100)(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: GPT, rows: Rows, options: argparse.Namespace) -> float:
    """Return the mean loss over the first held-out rows: equally many on each rank, at most 8 batches per rank.

    Collective: every rank must call it.

    Args:
        model: the model.
        rows: the held-out rows, the same on all ranks.
        options: the options of the command line, of which `batch_size` is used.
    """
    rank, size, device = bmt.rank(), bmt.world_size(), bmt.current_world().device
    each = max(1, min(8 * options.batch_size, len(rows) // size))
    losses = []
    for start in range(0, each, options.batch_size):
        numbers = torch.arange(start, min(start + options.batch_size, each)) * size + rank
        inputs, lengths, targets = rows.batch(numbers % len(rows), device)
        losses.append(loss_of(model, inputs, lengths, targets) * len(numbers) / each)
    return bmt.sum_loss(torch.stack(losses).sum()).item()


@torch.no_grad()
def continue_text(model: GPT, tokens: list[int], length: int) -> list[int]:
    """Append the most probable next token to `tokens` until there are `length` tokens, and return all of them.

    Collective: every rank must call it.

    Args:
        model: the model.
        tokens: the first tokens, the same on all ranks.
        length: the number of tokens to return, at most the model's number of positions.
    """
    device = bmt.current_world().device
    while len(tokens) < length:
        inputs = torch.tensor([tokens], device=device)
        positions = torch.arange(len(tokens), device=device)[None]
        logits = model(inputs, positions, torch.ones_like(inputs, dtype=torch.bool))
        tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens


if __name__ == "__main__":
    main()
