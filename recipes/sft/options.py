"""The command lines of the LoRA recipe and of the one for mixtures of experts."""

import argparse
from pathlib import Path

from common.command_line import add_engine_options, at_least, positive, seed


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of `lora.py`. Some options, such as `batch_size`, `lr` and `dtype`, are None if not given.

    arguments: the words of the command line; None reads those of this process.
    """
    parser = argparse.ArgumentParser(
        description="Fine-tune a causal model by LoRA. With no arguments: a small one, made on the spot, learns to "
        "answer questions about stories.",
    )
    _add_options(parser, "outputs/lora", "2e-4, small new model: 5e-3")
    add_engine_options(parser, float8=True)
    return parser.parse_args(arguments)


def parse_moe_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of `moe.py`. Some options, such as `batch_size`, `lr` and `dtype`, are None if not given.

    arguments: the words of the command line; None reads those of this process.
    """
    parser = argparse.ArgumentParser(
        description="Fine-tune a mixture of experts. With no arguments: a small one, made on the spot, learns to "
        "answer questions about stories.",
    )
    parser.add_argument("--lora", action="store_true", help="train adapters on experts and linear layers alone")
    rates = "1e-5, small new model: 2e-3; with --lora 2e-4, small new model: 5e-3"
    _add_options(parser, "outputs/moe", rates, "adapters, with --lora")
    add_engine_options(parser)
    return parser.parse_args(arguments)


def _add_options(parser: argparse.ArgumentParser, output: str, rates: str, adapters: str = "adapters") -> None:
    """Add the options that both recipes have.

    Args:
        parser: the parser to add them to.
        output: the default of --output.
        rates: what --help says of the default of --lr.
        adapters: the title of the options of adapters in --help.
    """
    add = parser.add_argument_group("model and data").add_argument
    add("--model", help="folder or Hub name of a causal model (a small new one, trained on stories)")
    add("--data", type=Path, help="a file of JSON lines, each with `prompt` and `completion` (generated questions)")
    add("--max-length", type=at_least(8), default=512, help="tokens of a row; the prompt is cut (%(default)s)")
    add("--base-steps", type=at_least(1), default=400, help="steps that train the small new model first (%(default)s)")
    add = parser.add_argument_group(adapters).add_argument
    add("--quantize", choices=("nf4", "fp8"), help="store the frozen weights in 4 or 8 bits")
    add("--rank", type=at_least(1), default=16, help="rank of the adapters (%(default)s)")
    add("--alpha", type=positive, default=32, help="the product is multiplied by alpha / rank (%(default)s)")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=at_least(1), default=150, help="optimizer steps (%(default)s)")
    add("--batch-size", type=at_least(1), help="rows per process and step (16 / number of processes)")
    add("--lr", type=positive, help=f"peak learning rate ({rates})")
    add("--seed", type=seed, default=0, help="of data order, new weights and stories (%(default)s)")
    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, default=Path(output), help="folder for the results (%(default)s)")
