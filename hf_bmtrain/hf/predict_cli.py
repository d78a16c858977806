"""Predict the memory of a training step from a configuration, without weights, GPU or process group.

The command is `python -m hf_bmtrain.memory`; `features/prediction/command_line.py` defines its options. The command
prints the memory of each GPU at the peak of a step, by purpose, and the largest number of rows (sequences per GPU) that
fits in `--memory`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.utils.import_utils import is_peft_available

from ..engine.optim.adam import AdamOptimizer
from ..features.muon.optimizer import MuonOptimizer
from ..features.offload.optimizer import AdamOffloadOptimizer
from ..features.prediction.command_line import DTYPES, KEEP_FROZEN, RECOMPUTE
from ..features.prediction.prediction import Prediction, predict, usable_bytes
from .meta_model import meta_model, read_config, text_batch

_OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "adam": AdamOptimizer,
    "adam8": partial(AdamOptimizer, state_bits=8),
    "adamw": partial(torch.optim.AdamW, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}
_MOST_ROWS = 1 << 20


def main(given: argparse.Namespace) -> None:
    """Print the predicted memory of a step. For options that cannot be used, exit with an error message.

    given: the options of the command line.
    """
    try:
        config = read_config(given.config)
        prediction = predicted(given, config, given.rows)
        fitting = most_rows(lambda rows: peak(given, config, rows), usable_bytes(total(given), given.gpus))
    except ValueError as error:
        sys.exit(str(error))
    print(report(given, prediction, fitting))
    if prediction.peak > usable_bytes(total(given), given.gpus):
        print(remedies(given, config))


def total(given: argparse.Namespace) -> int:
    """Return the size of one GPU's memory in bytes.

    given: the options of the command line. `--memory` is the size in GiB, 80 by default.
    """
    return int(given.memory * 2**30)


def peak(given: argparse.Namespace, config: Any, rows: int) -> int:
    """Return the predicted peak memory of a step, in bytes per GPU.

    For an option that is "auto", the value that takes the least memory is used.

    Args:
        given: the options of the command line.
        config: the configuration of the model.
        rows: the number of sequences per GPU.
    """
    least = {"recompute": "true"} if given.recompute == "auto" else {}
    least |= {"keep_frozen": "false"} if given.keep_frozen == "auto" else {}
    return predicted(argparse.Namespace(**(vars(given) | least)), config, rows).peak


def predicted(given: argparse.Namespace, config: Any, rows: int) -> Prediction:
    """Return the predicted memory of a step with the given options, broken down by purpose.

    An option that is "auto" gets the value that it would get in training. (`peak` replaces "auto" by the value that
    needs the least memory before it calls this function.)

    Args:
        given: the options of the command line.
        config: the configuration of the model.
        rows: the number of sequences per GPU.

    Raises:
        ValueError: the options cannot be combined.
    """
    model = meta_model(config, DTYPES[given.dtype], given.lora, given.head == "fused")
    make_optimizer = _OPTIMIZERS.get(given.optimizer, lambda parameters: MuonOptimizer(model))
    if given.offload:
        make_optimizer = AdamOffloadOptimizer
    return predict(
        model, text_batch(model, config, rows, given.length), make_optimizer, ranks=given.gpus, zero_level=given.zero,
        use_checkpoint=RECOMPUTE[given.recompute], total=total(given), micro_batches=given.micro_batches,
        keep_frozen=KEEP_FROZEN[given.keep_frozen], quantize_frozen=given.quantize, float8=given.float8,
        offload_activations=given.offload_activations, mlp_chunks=given.mlp_chunks,
        sequence_parallel=given.sequence_parallel,
    )  # fmt: skip


def most_rows(peak: Callable[[int], int], usable: int) -> int:
    """Return the largest number of rows (sequences per GPU) with which a step needs at most `usable` bytes of memory.

    The result is 0 if not even one row fits.

    Args:
        peak: a slow function that returns the peak memory in bytes for a number of rows. The peak must increase with
            the number of rows, or stay the same. If it is nearly linear, few calls are needed.
        usable: the memory in bytes that tensors may occupy on a GPU.
    """
    known = {0: 0, 1: peak(1)}
    # `low` rows are known to fit. `high` rows are known (or, for _MOST_ROWS, assumed) not to fit.
    low, high = (1, _MOST_ROWS) if known[1] <= usable else (0, 1)
    tried = 1
    while high - low > 1:
        below = max(rows for rows in known if rows < low) if tried > 1 else 0
        ahead = high if high in known else low
        slope = (known[ahead] - known[below]) / (ahead - below)
        if tried == 1:
            guess = low + 1
        elif slope <= 0:  # the peak is the same for `below` and `ahead` rows, so try twice as many
            guess = 2 * low
        else:
            guess = low + int((usable - known[low]) / slope)
        if tried > 6:  # the peak is not linear enough for interpolation, so bisect
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = peak(guess)
        tried += 1
        low, high = (guess, high) if known[guess] <= usable else (low, guess)
    return low


def remedies(given: argparse.Namespace, config: Any) -> str:
    """Return the text to print if a step does not fit: changes to the options, each of which alone makes it fit.

    Only some changes are tried. If none of them makes the step fit, the text says so.

    Args:
        given: the options of the command line.
        config: the configuration of the model.
    """
    ways: list[dict[str, Any]] = [{"recompute": "true"}, {"zero": 3}, {"head": "fused"}]
    if given.optimizer in ("adam", "adamw") and not given.offload:
        ways += [{"optimizer": "adam8"}, {"optimizer": "adam", "offload": True}]
    ways += [{"gpus": given.gpus * 2**power} for power in (1, 2, 3) if given.gpus * 2**power <= 8]
    if is_peft_available():
        ways += [{"lora": given.lora or 16, "quantize": "nf4"}]
    fitting: list[str] = []
    for way in ways:
        changed = {name: value for name, value in way.items() if getattr(given, name) != value}
        if not changed or ("gpus" in way and any("--gpus" in line for line in fitting)):
            continue
        other = argparse.Namespace(**(vars(given) | changed))
        with contextlib.suppress(ValueError):  # raised if the changed options cannot be combined
            least = peak(other, config, given.rows)
            if least <= usable_bytes(total(other), other.gpus):
                words = " ".join(
                    f"--{name}" if value is True else f"--{name} {value}" for name, value in changed.items()
                )
                fitting.append(f"  {words:52} {least / 2**30:9.2f} GiB")
    lines = ["it would fit with one of:", *fitting] if fitting else ["none of the changes that were tried makes it fit"]
    if not is_peft_available():
        lines.append("--lora and --quantize were not tried, because PEFT is not installed (pip install peft)")
    return "\n".join(lines)


def report(given: argparse.Namespace, prediction: Prediction, fitting: int) -> str:
    """Return the text to print: the memory table, whether the step fits, and the largest number of rows that fits.

    Args:
        given: the options of the command line.
        prediction: the predicted memory of the step.
        fitting: the largest number of rows that fits; 0 if not even one row fits.
    """
    usable = usable_bytes(total(given), given.gpus)
    gpu = f"one of {given.gpus} GPUs" if given.gpus > 1 else "one GPU"
    rows = f"{given.rows} rows" if given.rows > 1 else "1 row"
    lines = [f"{gpu}, {rows} of {given.length} tokens:", str(prediction)]
    if prediction.kept:
        lines.append(f"{sum(prediction.kept)} of {len(prediction.kept)} blocks keep their activations")
    verdict = "fits" if prediction.peak <= usable else "does not fit"
    lines.append(f"{verdict} into {given.memory:g} GiB, of which {usable / 2**30:.2f} GiB are available for tensors")
    lines.append(f"largest number of rows that fits: {fitting}" if fitting else "not even one row fits")
    return "\n".join(lines)
