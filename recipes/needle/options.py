"""The command line of `long_context.py`."""

import argparse
from pathlib import Path

from common.command_line import add_engine_options, at_least, positive, seed
from needle.data import SHORTEST


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `model`, `processes`, `memory`, `steps`, `lr` and `dtype` are None if not given.

    arguments: the words of the command line; None reads those of this process.
    """
    parser = argparse.ArgumentParser(
        description="Train on rows that are too long for one process, which several processes share. With no "
        "arguments: a small new model, in 2 processes on the CPU or on all GPUs, finds needles in a haystack.",
    )
    add = parser.add_argument_group("model and rows").add_argument
    add("--model", help="folder or Hub name of a causal model (a small new one)")
    add("--length", type=at_least(SHORTEST), default=8192, help="tokens of a row (%(default)s)")
    add = parser.add_argument_group("processes and memory").add_argument
    add("--processes", type=at_least(1), help="processes that share each row (the GPUs, or 2)")
    add(
        "--memory",
        type=at_least(1),
        help="MiB that each process may allocate beside the model (small new model on a CPU: 208)",
    )
    add("--offload", action="store_true", help="keep the inputs of layers in host memory until backward")
    add("--mlp-chunks", type=at_least(1), default=1, help="pieces in which an MLP computes its tokens (%(default)s)")
    add("--trial", action="store_true", help="take one step on the longest rows and report whether memory suffices")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=at_least(1), help="optimizer steps (small new model: 300; --model: 20)")
    add("--lr", type=positive, help="learning rate after a warm-up (small new model: 3e-3; --model: 1e-5)")
    add("--seed", type=seed, default=0, help="of weights and rows (%(default)s)")
    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, default=Path("outputs/long_context"), help="folder for the results (%(default)s)")
    add_engine_options(parser)
    return parser.parse_args(arguments)
