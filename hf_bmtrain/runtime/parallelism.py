"""Kinds of parallelism that BMTrain has and this library has not. Every refusal of one is made here."""

from __future__ import annotations

from typing import Any


def refuse(what: str) -> None:
    """NotImplementedError about `what`, which splits a model in another way than ZeRO."""
    raise NotImplementedError(
        f"{what} is not offered: hf_bmtrain splits weights, gradients and optimizer state over all ranks (ZeRO-2/3) "
        "and keeps every layer's computation whole. Leave pipe_size and tp_size at 1, and use bmt.nn.Linear or any "
        "torch layer."
    )


def check_one_way(pipe_size: int, tp_size: int) -> None:
    """NotImplementedError unless both are 1 (or -1, which BMTrain takes for 1)."""
    for name, size in (("pipe_size", pipe_size), ("tp_size", tp_size)):
        if size not in (1, -1):
            refuse(f"{name}={size}")


class Refused:
    """A class of BMTrain's that cannot be made here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(type(self).__name__)


class ColumnParallelLinear(Refused):
    """BMTrain's linear layer whose outputs are split over ranks: raises NotImplementedError."""


class RowParallelLinear(Refused):
    """BMTrain's linear layer whose inputs are split over ranks: raises NotImplementedError."""


class VPEmbedding(Refused):
    """BMTrain's embedding whose vocabulary is split over ranks: raises NotImplementedError."""


class PipelineTransformerBlockList(Refused):
    """BMTrain's list whose blocks are dealt to stages: raises NotImplementedError."""


def parallel_cross_entropy_func(*args: Any, **kwargs: Any) -> None:
    """BMTrain's loss over a split vocabulary: raises NotImplementedError."""
    refuse("parallel_cross_entropy_func")
