"""The start of the BoolQ recipes: choose, read, check and announce the job on all ranks."""

import argparse
import sys

import torch

import hf_bmtrain as bmt
from boolq.job import DEFAULT_MODEL, Job, prepare
from boolq.model import quiet_transformers
from common.command_line import choose_dtype, one_line_errors
from common.hub import why_unavailable


def prepare_on_all_ranks(options: argparse.Namespace) -> Job:
    """Return the job, the same on every rank, and set the options that were not given.

    Exits with status 2 on wrong input. Collective.
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
    """Return whether to train the embedded default: no model and no data are given, and there is no GPU or no Hub."""
    if options.model or options.data:
        return False
    reason = None
    if bmt.rank() == 0:
        reason = why_unavailable(DEFAULT_MODEL) if device.type == "cuda" else "no GPU"
    # Rank 0 decides for all
    embedded = bool(bmt.gather_result(torch.tensor([reason is not None], dtype=torch.uint8))[0])
    if embedded:
        bmt.print_rank(f"No --model, no --data, and {reason}: a small new BERT learns generated questions.")
    return embedded


def check_equal_on_all_ranks(job: Job) -> None:
    if len(bmt.gather_result(torch.tensor([job.fingerprint()])).unique()) > 1:
        raise ValueError("the ranks have read different rows: give all of them the same --data and --model")
