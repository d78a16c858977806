"""The command line of the BoolQ recipes, and their constants."""

import argparse
from pathlib import Path

from common.command_line import add_engine_options, at_least, positive, probability, seed

WARMUP_SHARE = 0.1  # of all steps
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
FIRST_LOSS_SCALE = 2.0**15  # fp16 only


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `lr`, `epochs`, `batch_size`, `dtype`, `model` and `data` are None if not given.

    arguments: the words of the command line; None reads those of this process.
    """
    parser = argparse.ArgumentParser(
        description="Fine-tune a BERT to answer the yes/no questions of BoolQ. With no arguments: "
        "bert-base-uncased on super_glue/boolq where there is a GPU and a hub, else a small BERT on "
        "generated questions.",
    )
    add = parser.add_argument_group("model and data").add_argument
    add("--model", help="hub name or folder (bert-base-uncased)")
    add("--data", help="hub name, or folder with train.jsonl and val.jsonl or dev.jsonl (super_glue/boolq)")
    add("--max-length", type=at_least(8), default=256, help="tokens of a pair (%(default)s)")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=at_least(1), help="passes over the training rows (5; small BERT: 3)")
    add("--batch-size", type=at_least(1), help="rows per process and step (32 / number of processes)")
    add("--lr", type=positive, help="highest learning rate (2e-5; small BERT: 1e-3)")
    add("--dropout", type=probability, help="replaces every dropout of the model (the model's own)")
    add("--seed", type=seed, default=0, help="of data order, new weights and dropout (%(default)s)")
    add_engine_options(parser, float8=True)
    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, default=Path("outputs/boolq"), help="folder for the results (%(default)s)")
    return parser.parse_args(arguments)
