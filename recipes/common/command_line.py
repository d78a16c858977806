"""What the recipes' command lines have in common: the engine's options, checks of values, mistakes told in a line."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How the model is sharded, and in which precision; `dtype` stays None where nothing is given."""
    parser.add_argument(
        "--zero-level", type=int, choices=(2, 3), default=3, help="3 also shards the weights (%(default)s)"
    )
    parser.add_argument("--no-checkpoint", action="store_true", help="keep activations instead of recomputing them")
    precision = parser.add_mutually_exclusive_group()
    for flag, dtype in (("--fp16", "float16"), ("--bf16", "bfloat16"), ("--fp32", "float32")):
        precision.add_argument(flag, action="store_const", const=dtype, dest="dtype", help=f"weights in {dtype}")


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
