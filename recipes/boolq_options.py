"""The command line of the BoolQ recipe, and the constants that are not worth an option."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

WARMUP_SHARE = 0.1  # of all steps
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
FIRST_LOSS_SCALE = 2.0**15  # fp16 only


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `lr`, `epochs`, `batch_size` and `dtype` stay None where nothing was given."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a BERT to answer the yes/no questions of BoolQ. With no arguments: "
        "bert-base-uncased on super_glue/boolq where there is a GPU and a hub, else a small BERT on "
        "generated questions.",
    )
    add = parser.add_argument
    add("--model", help="hub name or folder (bert-base-uncased)")
    add("--data", help="hub name, or folder with train.jsonl and val.jsonl or dev.jsonl (super_glue/boolq)")
    add("--epochs", type=at_least(1), help="passes over the training rows (5; small BERT: 3)")
    add("--batch-size", type=at_least(1), help="rows a process a step (32 / number of processes)")
    add("--lr", type=positive, help="highest learning rate (2e-5; small BERT: 1e-3)")
    add("--max-length", type=at_least(8), default=256, help="tokens of a pair (%(default)s)")
    add("--zero-level", type=int, choices=(2, 3), default=3, help="3 also shards the weights (%(default)s)")
    add("--no-checkpoint", action="store_true", help="keep activations instead of recomputing them")
    precision = parser.add_mutually_exclusive_group()
    for flag, dtype in (("--fp16", "float16"), ("--bf16", "bfloat16"), ("--fp32", "float32")):
        precision.add_argument(
            flag, action="store_const", const=dtype, dest="dtype", help=f"weights in {dtype}"
        )
    add("--dropout", type=probability, help="replaces every dropout of the model (the model's own)")
    add("--seed", type=at_least(0), default=0, help="of data order, new weights and dropout (%(default)s)")
    add("--output", type=Path, default=Path("outputs/boolq"), help="folder for the results (%(default)s)")
    return parser.parse_args(arguments)


def choose_dtype(options: argparse.Namespace, device: torch.device) -> None:
    """Set `options.dtype` where the command line left it open: bfloat16 on a GPU, else float32."""
    options.dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a mistake in what the user has given into one line on stderr and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"error: {line}\n")  # in one piece, or the lines of several ranks run into each other
        sys.exit(2)


def at_least(lowest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is below {lowest}")
        return value

    return integer


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def probability(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value
