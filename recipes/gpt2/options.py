"""The command line of the GPT recipe."""

import argparse
from pathlib import Path

from common.command_line import add_engine_options, at_least, not_negative, positive, seed


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `data`, `load`, `batch_size` and `dtype` are None if not given.

    arguments: the words of the command line; None reads those of this process.
    """
    parser = argparse.ArgumentParser(
        description="Train a GPT from scratch. With no arguments: a small one on generated stories.",
    )
    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, nargs="+", help="text files, UTF-8 (generated stories)")
    add("--vocab-size", type=at_least(256), default=512, help="tokens of the byte-pair encoding (%(default)s)")
    add("--length", type=at_least(2), default=64, help="tokens of a row (%(default)s)")
    add = parser.add_argument_group("model").add_argument
    add("--num-layers", type=at_least(1), default=2, help="blocks (%(default)s)")
    add("--dim-model", type=at_least(1), default=64, help="width (%(default)s)")
    add("--num-heads", type=at_least(1), default=4, help="attention heads (%(default)s)")
    add("--dim-head", type=at_least(1), default=16, help="width of a head (%(default)s)")
    add("--dim-ff", type=at_least(1), default=256, help="inner width of the feed-forward (%(default)s)")
    add("--load", type=Path, help="start from this checkpoint of the same sizes")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=at_least(1), default=200, help="optimizer steps (%(default)s)")
    add("--batch-size", type=at_least(1), help="rows per process and step (16 / number of processes)")
    add("--lr", type=positive, default=0.02, help="start_lr of Noam: peaks at lr / sqrt(warmup) (%(default)s)")
    add("--warmup", type=at_least(1), default=40, help="steps of warm-up (%(default)s)")
    add("--weight-decay", type=not_negative, default=1e-2, help="decoupled (%(default)s)")
    add("--max-grad-norm", type=positive, default=1.0, help="clip the gradient's norm (%(default)s)")
    add("--loss-scale", type=positive, default=1024.0, help="the first, for fp16 (%(default)s)")
    add("--seed", type=seed, default=0, help="of weights, data order and stories (%(default)s)")
    add_engine_options(parser)
    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, default=Path("outputs/gpt2"), help="folder for the results (%(default)s)")
    return parser.parse_args(arguments)
