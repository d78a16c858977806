"""Fine-tune BERT on BoolQ with Ray Train, which starts the workers, and restarts them after a failure.

    python recipes/ray_train.py --workers 2
    python recipes/ray_train.py --workers 1 8 --address auto --output /shared/boolq

The training and its options are those of finetune_bert_boolq.py. `--workers 1 8` uses as many workers, from 1 to 8, as
the cluster has room for. If a worker or a host fails, the remaining ones continue from the last checkpoint. The output
folder must be on a file system that all workers share.
"""

import argparse
from itertools import islice
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
import torch
from ray.train import (  # pyright: ignore[reportMissingImports]
    Checkpoint,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer  # pyright: ignore[reportMissingImports]

import hf_bmtrain as bmt
from boolq.batches import training_batches
from boolq.options import MAX_GRAD_NORM, parse_options
from boolq.start import prepare_on_all_ranks
from common.command_line import at_least
from finetune_bert_boolq import evaluate, make_manager


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--workers", type=at_least(1), nargs="+", default=[1], help="number, or minimum and maximum")
    parser.add_argument("--address", help="address of a Ray cluster, or auto (starts Ray on this host)")
    parser.add_argument("--save-every", type=at_least(1), default=50, help="steps between checkpoints")
    parser.add_argument("--failures", type=at_least(0), default=10, help="number of failures to tolerate")
    mine, rest = parser.parse_known_args()
    options = parse_options(rest)
    options.output = options.output.resolve()
    ray.init(address=mine.address, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"options": options, "save_every": mine.save_every},
        scaling_config=ScalingConfig(
            num_workers=mine.workers[0] if len(mine.workers) == 1 else (min(mine.workers), max(mine.workers)),
            use_gpu=torch.cuda.is_available(),
        ),
        run_config=RunConfig(
            # Ray does not move a checkpoint if it is inside the folder of the run, which is therefore --output.
            name=options.output.name,
            storage_path=str(options.output.parent),
            failure_config=FailureConfig(max_failures=mine.failures),
        ),
    )
    result = trainer.fit()
    print(f"ended at step {result.metrics['step']} with {result.metrics}, from {result.checkpoint.path}")


def train(config: dict[str, Any]) -> None:
    """Train on one worker. Ray calls this function on every worker, and after a failure again on those that remain.

    config: {"options": the options of the command line, "save_every": the number of steps between checkpoints}.
    """
    options: argparse.Namespace = config["options"]
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level, shard_over=options.shard_over)
    job = prepare_on_all_ranks(options)  # the batch size is 32 divided by the number of workers, unless it is given
    rank, size, device = bmt.rank(), bmt.world_size(), bmt.current_world().device
    batches, sampler = training_batches(
        job.train_rows, job.tokenizer, options.batch_size, rank=rank, world_size=size, seed=options.seed
    )
    model = bmt.auto_wrap(
        job.model.to(getattr(torch, options.dtype)),
        zero_level=options.zero_level, use_checkpoint=not options.no_checkpoint, float8=options.float8,
    )  # fmt: skip
    manager = make_manager(model, options, steps=options.epochs * len(batches))
    loss_function = bmt.loss.FusedCrossEntropy()
    torch.manual_seed(options.seed + rank)  # dropout differs between ranks
    resumed = bmt.load_state(options.output / "checkpoints", model, manager)  # saved by any number of workers
    step = 0 if resumed is None else resumed.step
    bmt.print_rank(f"{size} workers begin at step {step} of {options.epochs * len(batches)}", flush=True)
    while step < options.epochs * len(batches):
        epoch, done = divmod(step, len(batches))
        sampler.set_epoch(epoch + 1)  # the other recipes count from 1
        model.train()
        for batch in islice(batches, done, None):
            batch = batch.to(device)
            labels = batch.pop("labels")
            manager.zero_grad()
            loss = loss_function(model(**batch).logits, labels)
            manager.backward(loss)
            manager.clip_grad_norm(manager.optimizers[0].param_groups, max_norm=MAX_GRAD_NORM)
            manager.step()
            step += 1
            if step % config["save_every"] == 0 or step % len(batches) == 0:
                metrics = {"step": step, "loss": bmt.sum_loss(loss).item(), "workers": size}
                if step % len(batches) == 0:
                    metrics |= evaluate(job, options.batch_size, device)
                    model.train()
                # Keep all checkpoints, because Ray does not resume in this folder if a reported checkpoint is missing.
                report(metrics, bmt.save_state(options.output / "checkpoints", model, manager, step=step))


def report(metrics: dict[str, Any], saved: Any) -> None:
    """Report metrics and a checkpoint to Ray. Only rank 0 reports the checkpoint, and no worker copies it.

    Collective: every rank must call it.

    Args:
        metrics: the values to report.
        saved: the result of `save_state`, whose `folder` is the checkpoint.
    """
    bmt.print_rank(f"saved {saved.folder.name}, {metrics}", flush=True)
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(saved.folder) if bmt.rank() == 0 else None,
        checkpoint_dir_name=saved.folder.name,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


if __name__ == "__main__":
    main()
