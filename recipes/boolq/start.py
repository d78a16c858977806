"""The start of the BoolQ recipes: load model and data on all ranks, check that they are the same, and print them."""

import argparse
import sys

import torch

import hf_bmtrain as bmt
from boolq.job import DEFAULT_MODEL, Job, prepare
from boolq.model import quiet_transformers
from common.command_line import choose_dtype, one_line_errors
from common.hub import why_unavailable


def prepare_on_all_ranks(options: argparse.Namespace) -> Job:
    """Load the model and the data, the same on every rank, and set the options that were not given.

    Collective: every rank must call it. If the input is wrong, print one line and exit with status 2.
    """
    device = bmt.current_world().device
    quiet_transformers(terminal=bmt.rank() == 0 and sys.stderr.isatty())
    with one_line_errors():
        embedded = use_embedded(options, device)
        job = prepare(options, bmt.world_size(), embedded=embedded)
        check_equal_on_all_ranks(job)
    if embedded:
        torch.set_num_threads(1)  # for steps this small, waiting for a busy core costs more than a second core gains
    choose_dtype(options, device)
    bmt.print_rank(f"{job.describe()}, {options.dtype}, {bmt.world_size()} x {device.type}")
    return job


def use_embedded(options: argparse.Namespace, device: torch.device) -> bool:
    """Return whether to train a small new BERT on generated questions, instead of a pretrained model on BoolQ.

    The result is True if neither --model nor --data is given, and there is no GPU or the Hub cannot provide the default
    model. Collective: every rank must call it.

    Args:
        options: the options of the command line.
        device: this rank's device.
    """
    if options.model or options.data:
        return False
    reason = None
    if bmt.rank() == 0:
        reason = why_unavailable(DEFAULT_MODEL) if device.type == "cuda" else "no GPU"
    # Use the decision of rank 0 on all ranks, because the Hub may answer only some of them.
    embedded = bool(bmt.gather_result(torch.tensor([reason is not None], dtype=torch.uint8))[0])
    if embedded:
        bmt.print_rank(f"No --model, no --data, and {reason}: a small new BERT learns generated questions.")
    return embedded


def check_equal_on_all_ranks(job: Job) -> None:
    if len(bmt.gather_result(torch.tensor([job.fingerprint()])).unique()) > 1:
        raise ValueError("the ranks have read different rows: give all of them the same --data and --model")
