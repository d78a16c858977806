"""Parts of the recipes' command lines: engine options, checks of values, one-line errors."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def add_engine_options(parser: argparse.ArgumentParser, float8: bool = False) -> None:
    """Add the options for sharding and precision to `parser`.

    These are --zero-level, --shard-over, --no-checkpoint, and at most one of --fp16, --bf16 and --fp32, which sets
    `dtype` to "float16", "bfloat16" or "float32". Without them, `dtype` is None.

    float8: whether to add --float8 too.
    """
    group = parser.add_argument_group("sharding and precision")
    group.add_argument(
        "--zero-level",
        type=int,
        choices=(2, 3),
        default=3,
        help="2 keeps a layer whole until its backward (%(default)s)",
    )
    group.add_argument(
        "--shard-over",
        choices=("world", "host", "host+world", "auto"),
        default="world",
        help="with several hosts: the ranks that share weights and optimizer state, see the guide (%(default)s)",
    )
    group.add_argument("--no-checkpoint", action="store_true", help="keep activations instead of recomputing them")
    precision = group.add_mutually_exclusive_group()
    for flag, dtype in (("--fp16", "float16"), ("--bf16", "bfloat16"), ("--fp32", "float32")):
        precision.add_argument(flag, action="store_const", const=dtype, dest="dtype", help=f"weights in {dtype}")
    if float8:
        group.add_argument("--float8", action="store_true", help="products of linear layers in blocks in float8")


def choose_dtype(options: argparse.Namespace, device: torch.device) -> None:
    """Set `options.dtype` to "bfloat16" on a GPU or "float32" on a CPU, if it was not given on the command line."""
    options.dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Under `with`, print ValueError and OSError as one line on stderr, and exit with status 2.

    Put only code under it that raises these errors for wrong input, because they are printed without a traceback.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"error: {line}\n")  # one write, so that lines of several ranks do not mix
        sys.exit(2)


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a function for the argument `type` of argparse: it converts a text to an integer of at least `lowest`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is below {lowest}, the smallest value allowed")
        return value

    return integer


def seed(text: str) -> int:
    """Convert a text to a seed of random generators, for the argument `type` of argparse."""
    value = at_least(0)(text)
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{value} is not below 2**63")
    return value


def not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a number from 0 on")
    return value


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def chart(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png or .svg")
    return path


def probability(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value
