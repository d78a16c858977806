"""The options of `python -m hf_bmtrain.memory`, which predicts the memory of a training step.

This file does not import transformers: the import takes seconds, and `--help` and wrong options are answered before it.
"""

from __future__ import annotations

import argparse

import torch

from ..options import QUANTIZE_FROZEN, KeepFrozen, UseCheckpoint, words_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KEEP_FROZEN, RECOMPUTE = (
    {"true": True, "false": False, **{word: word for word in words_of(choice)}}
    for choice in (KeepFrozen, UseCheckpoint)
)
_DESCRIPTION = "Predict the memory of a training step from a configuration, without weights, GPU or process group."


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the options of `python -m hf_bmtrain.memory`. Return a namespace with one attribute per option.

    If an option is wrong, print a message and exit the process with status 2. With --help, print the help and exit.

    words: the options, without the program's name. None parses the options with which this process was started.
    """
    parser = argparse.ArgumentParser(prog="python -m hf_bmtrain.memory", description=_DESCRIPTION)
    parser.add_argument("config", metavar="CONFIG", help="a config.json of transformers, or its folder")
    parser.add_argument("--gpus", type=_positive, default=1, help="number of ranks, each with one GPU, on one host")
    parser.add_argument(
        "--batch-size", "--rows", dest="rows", type=_positive, default=1, help="sequences in a micro-batch of one GPU"
    )
    parser.add_argument(
        "--seq-len", "--length", dest="length", type=_positive, default=2048, help="tokens in a sequence"
    )
    parser.add_argument("--recompute", choices=tuple(RECOMPUTE), default="true", help="use_checkpoint of auto_wrap")
    parser.add_argument("--zero", type=int, choices=(2, 3), default=3, help="zero_level of auto_wrap")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="dtype of the weights")
    parser.add_argument(
        "--optimizer", choices=("adam", "adam8", "adamw", "sgd", "muon"), default="adam",
        help="adam: bmt.optim.AdamOptimizer; adam8: the same with state_bits=8; muon: bmt.optim.MuonOptimizer",
    )  # fmt: skip
    parser.add_argument(
        "--offload", action="store_true", help="keep Adam's state in host memory (AdamOffloadOptimizer)"
    )
    parser.add_argument(
        "--lora", type=_positive, default=0, metavar="RANK", help="train only LoRA adapters, whose rank (r) is RANK"
    )
    parser.add_argument("--keep-frozen", choices=tuple(KEEP_FROZEN), default="auto", help="keep_frozen of auto_wrap")
    parser.add_argument("--quantize", choices=QUANTIZE_FROZEN, help="quantize_frozen of auto_wrap; needs --lora")
    parser.add_argument("--float8", action="store_true", help="float8 of auto_wrap")
    parser.add_argument("--offload-activations", action="store_true", help="offload_activations of auto_wrap")
    parser.add_argument("--mlp-chunks", type=_positive, default=1, help="mlp_chunks of auto_wrap")
    parser.add_argument(
        "--sequence-parallel", type=_positive, default=1, metavar="P",
        help="sequence_parallel of auto_wrap: P GPUs share each sequence; --batch-size is the batch of all P GPUs",
    )  # fmt: skip
    parser.add_argument("--head", choices=("plain", "fused"), default="plain", help="fused: bmt.hf.fuse_causal_loss")
    parser.add_argument("--micro-batches", type=_positive, default=1, help="micro-batches (backward passes) per step")
    parser.add_argument("--memory", type=_gigabytes, default=80.0, metavar="GIB", help="memory of one GPU, in GiB")
    given = parser.parse_args(words)
    if given.quantize and not given.lora:
        parser.error("--quantize applies to frozen weights, but there are none without adapters. Add --lora RANK.")
    if given.offload and given.optimizer != "adam":
        parser.error(f"--offload works only with --optimizer adam (the default), not {given.optimizer}.")
    return given


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return value


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 4 <= value < 1e6:
        raise argparse.ArgumentTypeError(
            f"the memory of one GPU must be a number of GiB from 4 to below 1,000,000, such as 80, got {text!r}"
        )
    return value
