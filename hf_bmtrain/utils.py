"""Helpers for printing, averages and memory under BMTrain's names."""

from .bmtrain.utils import (
    AverageRecorder,
    check_torch_version,
    has_inf_nan,
    print_block,
    print_dict,
    print_rank,
    round_up,
    see_memory,
)

__all__ = [
    "AverageRecorder",
    "check_torch_version",
    "has_inf_nan",
    "print_block",
    "print_dict",
    "print_rank",
    "round_up",
    "see_memory",
]
